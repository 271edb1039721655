"""The schema of the custom resource, as the file that is installed has it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[2] / "crds/inferencedeployments.yaml"
CRD: dict[str, Any] = yaml.safe_load(FILE.read_text())
VERSION: dict[str, Any] = CRD["spec"]["versions"][0]
SCHEMA: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]
SPEC: dict[str, Any] = SCHEMA["properties"]["spec"]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema node with its dotted path; ``[]`` is an item, ``{}`` a map's value."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from nodes(schema["items"], path + "[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], path + "{}")
