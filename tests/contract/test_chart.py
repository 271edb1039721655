"""The chart, as far as it can be checked without helm: its resource definition and its values'
schema.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "fairlead"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
# The keys within these are set by the user, not by the chart.
OPEN = {
    "affinity",
    "nodeSelector",
    "podAnnotations",
    "podLabels",
    "resources",
    "serviceAccount.annotations",
    "metrics.podMonitor.labels",
    "metrics.rules.labels",
    "metrics.dashboard.labels",
    "global",
}
OPTIONAL = {"global"}  # set by helm


def test_the_chart_installs_the_resource_definition_of_this_tree() -> None:
    (shipped,) = (CHART / "crds").iterdir()
    assert shipped.read_bytes() == (ROOT / "crds" / shipped.name).read_bytes()
    assert [path.name for path in (ROOT / "crds").iterdir()] == [shipped.name]


def dereference(node: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    if reference is None:
        return node
    found: dict[str, Any] = SCHEMA["definitions"][reference.removeprefix("#/definitions/")]
    return found


def schema_paths(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, bool]]:
    """Every value of the schema, and whether its object refuses values that are not listed."""
    closed = node.get("additionalProperties") is False
    for key, child in node.get("properties", {}).items():
        here = f"{path}.{key}".lstrip(".")
        yield here, closed
        if here not in OPEN:
            yield from schema_paths(dereference(child), here)


def value_paths(values: dict[str, Any], path: str = "") -> Iterator[str]:
    """Every value of values.yaml."""
    for key, value in values.items():
        here = f"{path}.{key}".lstrip(".")
        yield here
        if isinstance(value, dict) and here not in OPEN:
            yield from value_paths(value, here)


def test_the_schema_has_every_value_and_no_other() -> None:
    paths = {path for path, _ in schema_paths(SCHEMA)}
    assert paths - OPTIONAL == set(value_paths(VALUES))
    assert len(paths) > 25


def test_the_schema_refuses_unknown_values_at_every_level() -> None:
    assert all(closed for _, closed in schema_paths(SCHEMA))


def test_the_shipped_values_are_valid() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(VALUES)


@pytest.mark.parametrize("path", sorted(set(value_paths(VALUES))))
def test_every_value_has_a_type(path: str) -> None:
    """The schema refuses an object in place of a value and a number in place of an object."""
    values = json.loads(json.dumps(VALUES))
    node = values
    *parents, last = path.split(".")
    for key in parents:
        node = node[key]
    node[last] = 0.5 if isinstance(node[last], dict) else {"a": 1}
    found = [
        ".".join(map(str, error.path))
        for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(values)
    ]
    assert path in found


def test_every_value_is_used_by_a_template() -> None:
    templates = "".join(
        path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file()
    )
    parts = ("repository", "tag", "digest")  # read by the helper "fairlead.image"
    images = ("image", "runtime.image", "runtime.acceleratorImage")
    used_by_helper = {f"{image}.{part}" for image in images for part in parts}
    leaves = [
        p
        for p in value_paths(VALUES)
        if not any(o.startswith(p + ".") for o in value_paths(VALUES))
    ]
    unused = [
        path for path in leaves if path not in used_by_helper and f".Values.{path}" not in templates
    ]
    assert not unused
    helper = (CHART / "templates" / "_helpers.tpl").read_text()
    assert all(f".Values.{image}" in templates for image in images)
    assert all(f".image.{part}" in helper for part in parts)


def test_the_pages_about_the_chart_name_values_that_exist() -> None:
    """The table of docs/chart.md is generated; the text around it and the other page are not."""
    groups = "|".join(key for key, value in VALUES.items() if isinstance(value, dict) and value)
    seen: set[str] = set()
    for page in ("install.md", "chart.md"):
        text = (ROOT / "docs" / page).read_text()
        seen |= set(re.findall(rf"`((?:{groups})\.[a-zA-Z.]+)`", text))
    assert seen <= set(value_paths(VALUES)) | {"resources.requests", "resources.limits"}
    assert len(seen) >= 15
