"""The CRD against EngineConfig, field for field, and against the API server's rules for a
structural schema.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jsonschema  # type: ignore[import-untyped]  # ships no types
import pytest

from cluster.harness.cel_cases import CASES, Case
from fairlead_operator.resource.fields import camel
from fairlead_operator.resource.resource import NARROWER
from fairlead_operator.resource.spec import Spec
from fairlead_runtime.settings.engine_config import EngineConfig, base_type, choices_of
from fairlead_runtime.settings.supported import IN_RESOURCE, Limit
from support.crd import CRD, FILE, SCHEMA, SPEC, VERSION, nodes

TYPES = {bool: {"boolean"}, int: {"integer"}, float: {"number", "integer"}, str: {"string"}}
ENGINE_SECTIONS = ("engine", "scheduler", "cache")
FIELDS = [f for f in dataclasses.fields(EngineConfig) if f.metadata["cr"]]
# A quantity of the pod, which the operator converts to GiB.
QUANTITIES = {"resources.sharedMemory"}
# Set by the operator, not a setting of the engine.
OPERATOR_ONLY = {"engine.image"}


def at(path: str) -> dict[str, Any]:
    node = SPEC
    for part in path.split("."):
        node = node["properties"][part]
    return node


NODES = list(nodes(SCHEMA))
RULES = [(path, rule) for path, node in NODES for rule in node.get("x-kubernetes-validations", ())]


KEYWORDS = {
    "type", "description", "default", "enum", "pattern", "format", "nullable", "properties",
    "items", "required", "additionalProperties", "minimum", "maximum", "minLength", "maxLength",
    "minItems", "maxItems", "maxProperties", "x-kubernetes-validations", "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys", "x-kubernetes-map-type", "x-kubernetes-int-or-string",
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.metadata["cr"])
def test_a_field_of_the_resource_is_the_setting_of_the_engine(
    field: "dataclasses.Field[Any]",
) -> None:
    path, node = field.metadata["cr"], at(field.metadata["cr"])
    if path in QUANTITIES:
        assert node["x-kubernetes-int-or-string"]
        return
    assert node["type"] in TYPES[base_type(field.name)]
    assert node.get("default") == field.default, "the defaults differ"
    assert tuple(node.get("enum", ())) == choices_of(field.name) or node["type"] == "integer"
    low, high = field.metadata["low"], field.metadata["high"]
    if node["type"] in ("integer", "number"):
        # The bounds of the resource may be narrower (block sizes, integers), never wider.
        assert low is None or node["minimum"] >= low
        assert high is None or node["maximum"] <= high
        EngineConfig(**{field.name: node["minimum"]})
        EngineConfig(**{field.name: node["maximum"]})
        # `fairlead plan` refuses the values that the API server refuses.
        if path.partition(".")[0] in ENGINE_SECTIONS:
            assert NARROWER.get(path, (low, high)) == (node["minimum"], node["maximum"])


def test_every_field_of_the_engines_sections_is_a_setting_of_the_engine() -> None:
    in_crd = {
        path
        for section in ENGINE_SECTIONS
        for path, node in nodes(at(section), section)
        if "properties" not in node
    }
    in_config = {f.metadata["cr"] for f in FIELDS if f.metadata["cr"].startswith(ENGINE_SECTIONS)}
    assert in_crd == in_config | OPERATOR_ONLY
    assert len(FIELDS) == len({f.metadata["cr"] for f in FIELDS}), "one setting per field"


@pytest.mark.parametrize("limit", IN_RESOURCE, ids=lambda limit: limit.path)
def test_a_value_that_is_not_supported_is_refused_by_the_crds_rule(limit: Limit) -> None:
    node = at(limit.path)
    assert node["description"].endswith(f" Supported so far: {limit.fix}.")
    assert node["default"] in limit.works
    if not limit.alone:  # a rule that reads a second field is on spec
        place = {"fieldPath": f".{limit.path}"}
        assert {"rule": limit.rule, "message": limit.message, **place} in SPEC[
            "x-kubernetes-validations"
        ]
    else:
        assert node["x-kubernetes-validations"] == [{"rule": limit.rule, "message": limit.message}]


def test_the_crd_refuses_no_value_that_the_table_does_not_list() -> None:
    ruled = {
        path
        for section in ENGINE_SECTIONS
        for path, node in nodes(at(section), section)
        if "x-kubernetes-validations" in node
    }
    assert ruled == {limit.path for limit in IN_RESOURCE if limit.alone}


def declared(kind: type, path: str) -> Iterator[tuple[str, Any, "dataclasses.Field[Any]"]]:
    """(dotted path, type, field) of every field within a dataclass."""
    hints = get_type_hints(kind)
    for f in dataclasses.fields(kind):
        inner = [
            a
            for a in (get_args(hints[f.name]) or (hints[f.name],))
            if isinstance(a, type) and dataclasses.is_dataclass(a)
        ]
        here = f"{path}.{camel(f.name)}".lstrip(".") + (
            "[]" if get_origin(hints[f.name]) is tuple else ""
        )
        yield here, hints[f.name], f
        for child in inner:
            yield from declared(child, here)


DECLARED = list(declared(Spec, ""))


def test_the_operators_types_have_every_other_field() -> None:
    in_crd = {
        p
        for p, _ in nodes(SPEC)
        if p and not p.endswith("{}") and not p.startswith(ENGINE_SECTIONS)
    }
    assert {path for path, *_ in DECLARED} == {p for p in in_crd if p + "[]" not in in_crd}


@pytest.mark.parametrize(("path", "hint", "field"), DECLARED, ids=[p for p, *_ in DECLARED])
def test_a_field_of_the_operators_types_has_the_crds_bounds(
    path: str, hint: Any, field: "dataclasses.Field[Any]"
) -> None:
    node = dict(NODES)["spec." + path.removesuffix("[]")]
    default = node.get("default")
    if isinstance(default, dict | list):
        assert default in ({}, [])
        assert field.default_factory is not dataclasses.MISSING or field.default == ()
    elif default is None:
        assert field.default in (None, dataclasses.MISSING)
    else:
        assert field.default == default
    words = [w for a in (hint, *get_args(hint)) if get_origin(a) is Literal for w in get_args(a)]
    assert node.get("enum", node.get("items", {}).get("enum", [])) == words
    longest = next((node[k] for k in ("maxLength", "maxItems", "maxProperties") if k in node), None)
    ruled = "x-kubernetes-validations" in node and "pattern" not in node
    wanted = (
        node.get("minimum"),
        node.get("maximum"),
        longest,
        None if ruled else node.get("pattern"),
    )
    found = tuple(field.metadata.get(k) for k in ("low", "high", "longest", "pattern"))
    assert found == wanted or (path.endswith("topologyKey") and node["minLength"] == 1)


def test_the_file_is_small_enough_to_apply() -> None:
    assert len(FILE.read_bytes()) <= 60 * 1024


def test_names_and_subresources_are_as_designed() -> None:
    names = CRD["spec"]["names"]
    assert (CRD["spec"]["group"], names["kind"], names["shortNames"], names["categories"]) == (
        "serving.fairlead.dev",
        "InferenceDeployment",
        ["idep"],
        ["inference"],
    )
    assert CRD["metadata"]["name"] == f"{names['plural']}.{CRD['spec']['group']}"
    assert VERSION["subresources"]["scale"]["specReplicasPath"] == ".spec.replicas"
    columns = [c["name"].upper() for c in VERSION["additionalPrinterColumns"]]
    assert columns[:7] == ["READY", "REPLICAS", "DESIRED", "REASON", "MODEL", "QUEUE", "AGE"]
    assert columns[7:] == ["TOKENS", "ACCEL", "REVISION", "URL"]


def test_printer_columns_and_scale_point_at_fields_that_exist() -> None:
    paths = {"." + path.replace("[]", "") for path, _ in NODES}
    scale = VERSION["subresources"]["scale"].values()
    columns = [c["jsonPath"] for c in VERSION["additionalPrinterColumns"]]
    for path in [*scale, *columns]:
        head, bracket, tail = path.partition("[?")
        plain = head + tail.rpartition("]")[2] if bracket else path
        assert plain in paths or plain == ".metadata.creationTimestamp", path


@pytest.mark.parametrize(("path", "node"), NODES, ids=[path or "root" for path, _ in NODES])
def test_every_node_is_structural_and_bounded(path: str, node: dict[str, Any]) -> None:
    forbidden = {"$ref", "anyOf", "oneOf", "allOf", "not", "x-kubernetes-preserve-unknown-fields"}
    assert not forbidden & set(node)
    assert set(node) <= KEYWORDS, "an unquoted comma ends a description"
    whole_or_text = node.get("x-kubernetes-int-or-string", False)
    assert ("type" in node) != whole_or_text
    kind = node.get("type", "string")
    if kind == "string" and path not in ("apiVersion", "kind"):
        assert {"maxLength", "enum"} & set(node) or node.get("format") == "date-time"
    if kind == "array":
        assert "maxItems" in node
    if "additionalProperties" in node:
        assert "maxProperties" in node
    if kind in ("integer", "number") and path.startswith("spec."):
        assert {"minimum", "maximum"} <= set(node)
    described = path not in ("", "metadata") and not path.endswith(("[]", "{}"))
    assert not described or 0 < len(node["description"]) <= 130
    if node.get("default") == {}:
        assert "x-kubernetes-validations" not in node or "properties" not in node, (
            "put the rule on spec"
        )


def test_defaults_satisfy_their_own_schema() -> None:
    for _, node in NODES:
        if "default" in node:
            plain = {k: v for k, v in node.items() if not k.startswith("x-")}
            jsonschema.Draft202012Validator(plain).validate(node["default"])


@pytest.mark.parametrize(
    ("path", "rule"), RULES, ids=[f"{p}: {r['message'][:40]}" for p, r in RULES]
)
def test_every_rule_names_its_field_and_has_both_kinds_of_case(
    path: str, rule: dict[str, Any]
) -> None:
    message = rule["message"]
    assert ": " in message, "what is wrong, then the fix"
    refusing = [c for c in CASES if c.message is not None and c.message in message]
    assert refusing, "no case tests that this rule refuses"
    touched = {leaf for case in refusing for leaf in leaves(case)}
    accepting = [c for c in CASES if c.message is None and touched & set(leaves(c))]
    assert accepting, "no case tests that this rule accepts"


def leaves(case: Case) -> Iterator[str]:
    """Dotted paths that a case sets, and metadata.name if it differs from the base's."""

    def walk(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict) and value and "podTemplate." not in path:
            for key, child in value.items():
                yield from walk(child, f"{path}.{key}")
        else:
            yield path

    if case.object_name != "demo":
        yield "metadata.name"
    yield from walk(dict(case.change), "")


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
