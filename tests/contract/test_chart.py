"""The chart, as far as it can be judged without helm: its resource definition and the schema of its
values.
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
# Keys of these are the user's, not the chart's.
OPEN = {
    "affinity",
    "nodeSelector",
    "podAnnotations",
    "podLabels",
    "resources",
    "serviceAccount.annotations",
    "global",
}
OPTIONAL = {"global"}  # helm's own


def test_the_chart_installs_the_resource_definition_of_this_tree() -> None:
    (shipped,) = (CHART / "crds").iterdir()
    assert shipped.read_bytes() == (ROOT / "crds" / shipped.name).read_bytes()
    assert [path.name for path in (ROOT / "crds").iterdir()] == [shipped.name]


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    if reference is None:
        return node
    found: dict[str, Any] = SCHEMA["definitions"][reference.removeprefix("#/definitions/")]
    return found


def described(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, bool]]:
    """Every value the schema knows, and whether it refuses others beside it."""
    closed = node.get("additionalProperties") is False
    for key, child in node.get("properties", {}).items():
        here = f"{path}.{key}".lstrip(".")
        yield here, closed
        if here not in OPEN:
            yield from described(resolved(child), here)


def given(values: dict[str, Any], path: str = "") -> Iterator[str]:
    """Every value of values.yaml."""
    for key, value in values.items():
        here = f"{path}.{key}".lstrip(".")
        yield here
        if isinstance(value, dict) and here not in OPEN:
            yield from given(value, here)


def test_every_value_is_in_the_schema_and_the_schema_knows_no_other() -> None:
    known = {path for path, _ in described(SCHEMA)}
    assert known - OPTIONAL == set(given(VALUES))
    assert len(known) > 25


def test_the_schema_refuses_a_value_it_does_not_know_at_every_level() -> None:
    assert all(closed for _, closed in described(SCHEMA))


def test_the_shipped_values_are_valid() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(VALUES)


@pytest.mark.parametrize("path", sorted(set(given(VALUES))))
def test_every_value_has_a_type(path: str) -> None:
    """No value takes anything at all: an object is refused where a value is expected, a number
    where an object is.
    """
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
    parts = ("image.repository", "image.tag", "image.digest")  # read by the helper "fairlead.image"
    through = {f"{prefix}{part}" for prefix in ("", "runtime.") for part in parts}
    leaves = [p for p in given(VALUES) if not any(o.startswith(p + ".") for o in given(VALUES))]
    unused = [path for path in leaves if path not in through and f".Values.{path}" not in templates]
    assert not unused
    helper = (CHART / "templates" / "_helpers.tpl").read_text()
    assert all(f".{part}" in helper for part in parts)


def test_the_installation_page_names_values_that_exist_and_their_defaults() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    rows = re.findall(r"^\| (`[a-zA-Z.`, ]+`) \| (.*?) \|", page, re.MULTILINE)
    named = [(name, default) for names, default in rows for name in re.findall(r"`([^`]+)`", names)]
    assert {name for name, _ in named} <= set(given(VALUES))
    assert len(named) >= 10
    for names, default in rows:
        written = [json.loads(text) for text in re.findall(r"`([^`]+)`", default)]
        if written:
            assert written == [value_of(name) for name in re.findall(r"`([^`]+)`", names)]


def value_of(path: str) -> Any:
    node: Any = VALUES
    for key in path.split("."):
        node = node[key]
    return node
