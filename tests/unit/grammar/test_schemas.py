"""Schemas that the library would accept and not enforce."""

import json
from typing import Any

import pytest

from fairlead_runtime.grammar import one_of, schemas
from fairlead_runtime.grammar.one_of import Exclusion
from fairlead_runtime.grammar.references import Schema, schema_roots
from fairlead_runtime.grammar.schemas import SchemaError

BIG = 1234567890123456789
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
EXCLUSIVE = {"oneOf": [{"type": "string"}, {"type": "null"}]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}


def enforceable(schema: Schema) -> Schema:
    """Of a copy: in a schema that was parsed no object lies at two places."""
    return schemas.enforceable(json.loads(json.dumps(schema)), lambda *_: True)


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("const", {"const": BIG}),
        ("enum", {"properties": {"a": {"items": {"enum": ["x", [{"id": 2**53 + 1}]]}}}}),
        ("const", {"const": 10**400}),
        ("const", {"const": -(2**63)}),
        ("minimum", {"type": "integer", "minimum": 2**53 + 1}),
        ("maximum", {"anyOf": [{"type": "integer", "maximum": 2**64 - 1}]}),
        ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 2**60}),
        ("minimum", {"type": "integer", "minimum": -(2**63)}),
    ],
)
def test_integers_that_no_double_holds_are_refused_by_their_keyword(
    keyword: str, schema: dict[str, Any]
) -> None:
    with pytest.raises(SchemaError, match=rf"^{keyword}: .*; (ask|leave)"):
        enforceable(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53, "default": BIG},
        {"const": [2**60, True, 0.1, 1e300]},
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        {"type": "integer", "minimum": -(2**62), "exclusiveMaximum": 2**63},
        # Data: no schema, whatever it looks like.
        {"const": {"oneOf": [{}, {}]}},
        {"properties": {"oneOf": {"type": "string"}, "const": {"type": "null"}}},
        # What is no schema is for the library to refuse.
        {"allOf": 5, "required": 5, "patternProperties": {"a": {}}, "enum": 5, "oneOf": {}},
        {"required": [[]], "patternProperties": {"a": {}}, "properties": {}},
    ],
)
def test_what_is_enforced_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert enforceable(schema) == schema


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string"}, {"type": "null"}, {"type": ["integer", "boolean"]}],
        [{"const": "a", "title": "A"}, {"const": "b"}, {"enum": [1, "c"]}],
        [{"type": "integer", "maximum": 5}, {"type": "number", "minimum": 6}],
        [CAT, DOG],
        [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        [{"allOf": [CAT]}, {"anyOf": [DOG, {"type": "null"}]}],
        [CAT, {"type": "object", "properties": {}, "additionalProperties": False}],
        [False, {}],
    ],
)
def test_branches_that_exclude_each_other_are_alternatives(branches: list[Any]) -> None:
    definitions = {"cat": CAT, "dog": DOG}
    inner = enforceable({"items": {"oneOf": branches}, "$defs": definitions})["items"]
    assert inner == {"anyOf": branches}
    both = enforceable({"oneOf": branches, "anyOf": [{}], "$defs": definitions})
    assert both["allOf"] == [{"anyOf": branches}]


def test_references_begin_at_the_schema_that_has_an_id() -> None:
    branches = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
    tool = {"$id": "urn:tool", "items": {"oneOf": branches}, "$defs": {"cat": CAT, "dog": DOG}}
    changed = enforceable({"$ref": "#/$defs/t", "$defs": {"t": tool}})
    assert changed["$defs"]["t"]["items"] == {"anyOf": branches}


def test_branches_share_the_type_beside_them() -> None:
    branches = [{key: one[key] for key in ("properties", "required")} for one in (CAT, DOG)]
    assert enforceable({"type": "object", "oneOf": branches})["anyOf"] == branches
    with pytest.raises(SchemaError):
        enforceable({"oneOf": branches})  # a text fulfils both


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}],
        [{"type": "integer"}, {"type": "number"}],
        [{"enum": [1, 2]}, {"const": 2.0}],
        [{"enum": [[{"a": 1.0}]]}, {"const": [{"a": 1}]}],
        [{"type": "string", "pattern": "a"}, {"type": "string"}],
        [CAT, {"type": "object"}],
        [{"required": ["a"]}, {"required": ["b"]}],
        [{"$ref": "#"}, {"$ref": "#"}],
    ],
)
def test_branches_that_may_allow_one_value_are_refused(branches: list[Any]) -> None:
    with pytest.raises(SchemaError, match=r"^oneOf: .*use anyOf$"):
        enforceable({"properties": {"a": {"oneOf": branches}}})


@pytest.mark.parametrize(
    ("reference", "place"),
    [
        ("#/components/schemas/A", {"components": {"schemas": {"A": {}}}}),
        ("#/components/const/enum", {"components": {"const": {"enum": {}}}}),
        ("#/definitions2/01", {"definitions2": [{"const": BIG}, {}]}),
        ("#/a%20b/c~1d~0", {"a b": {"c/d~": {}}}),
        ("#/default", {"default": {}}),
        ("urn:tool#/more/a", {"$defs": {"t": {"$id": "urn:tool", "more": {"a": {}}}}}),
        ("#/more/a", {"more": {"a": {"$ref": "#/more/b"}, "b": {}}}),
    ],
)
def test_a_schema_that_only_a_reference_leads_to_is_enforced(
    reference: str, place: dict[str, Any]
) -> None:
    def at_place(schema: Schema, value: Any = place) -> Any:
        if isinstance(value, list):
            return [at_place(schema, item) for item in value]
        if not isinstance(value, dict):
            return value
        return {name: at_place(schema, item) for name, item in value.items()} or schema

    with pytest.raises(SchemaError, match=r"^const: "):
        enforceable({"$ref": reference, **at_place({"const": BIG})})
    with pytest.raises(SchemaError, match=r"^minimum: "):
        enforceable({"$ref": reference, **at_place({"items": {"minimum": 10**16 + 1}})})
    changed = enforceable({"$ref": reference, **at_place(EXCLUSIVE)})
    assert changed == {"$ref": reference, **at_place({"anyOf": EXCLUSIVE["oneOf"]})}
    unused = at_place({"const": BIG}, {"x-data": place})
    assert enforceable(unused) == unused


def test_a_schema_within_data_is_refused_where_a_reference_leads_to_it() -> None:
    assert enforceable({"const": EXCLUSIVE}) == {"const": EXCLUSIVE}
    with pytest.raises(SchemaError, match=r"^\$ref: .*\$defs$"):
        enforceable({"const": EXCLUSIVE, "anyOf": [{"$ref": "#/const"}]})


def test_bounds_that_no_double_holds_are_compared_as_they_are() -> None:
    least = {"type": "integer", "minimum": 10**400}
    branches = [{"$ref": "#/$defs/b"}, {"type": "integer", "maximum": 3}]
    with pytest.raises(SchemaError, match=r"^minimum: "):
        enforceable({"properties": {"a": {"oneOf": branches}}, "$defs": {"b": least}})


def test_references_within_a_schema_with_an_anchor_for_its_id_tell_nothing() -> None:
    branches = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    inner = {"$id": "#inner", "oneOf": branches, "$defs": {"a": CAT, "b": DOG}}
    with pytest.raises(SchemaError, match=r"^oneOf: "):
        enforceable({"items": inner, "$defs": {"a": CAT, "b": CAT}})


@pytest.mark.parametrize("keyword", ["$id", "id"])
def test_a_reference_in_a_resource_of_its_own_tells_nothing(keyword: str) -> None:
    """The inner root allows what the outer one does not."""
    both = {"type": "object", "required": ["kind"]}
    inner = {keyword: "urn:inner", "$ref": "#/$defs/kind", "$defs": {"kind": {"const": "cat"}}}
    dog: dict[str, Any] = {**both, "properties": {"kind": inner}}
    root: dict[str, Any] = {"oneOf": [CAT, dog], "$defs": {"kind": {"const": "dog"}}}
    with pytest.raises(SchemaError, match=r"^oneOf: "):
        enforceable(root)
    dog["properties"]["kind"] = {"allOf": [{"$ref": "#/$defs/t/$defs/kind"}]}
    root["$defs"]["t"] = {keyword: "urn:t", "$defs": {"kind": {"$ref": "#/$defs/kind"}}}
    with pytest.raises(SchemaError, match=r"^oneOf: "):
        enforceable(root)


def comparisons(schema: Schema, *, exclusive: bool = True) -> int:
    """What it costs to judge the root's ``oneOf``."""
    exclusion = Exclusion(schema_roots(schema))
    assert exclusion.excludes(schema, schema["oneOf"]) is exclusive
    return exclusion.comparisons


@pytest.mark.parametrize("first", ["a", "z"])
def test_nodes_of_a_tree_are_told_apart_in_any_order_of_their_properties(first: str) -> None:
    tag, children = f"{first}kind", ["b", "c", "d", "e"]
    nodes = {
        f"node{number}": {
            "type": "object",
            "properties": {**{key: {"$ref": "#"} for key in children}, tag: {"const": number}},
            "required": sorted([tag, *children]),
        }
        for number in range(10)
    }
    tree = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in nodes], "$defs": nodes}
    assert comparisons(tree) < 200
    assert enforceable(tree)["anyOf"] == tree["oneOf"]


def test_many_branches_are_compared_by_one_property_at_once_or_two_by_two() -> None:
    tagged = [
        {"type": "object", "properties": {"k": {"const": number}}, "required": ["k"]}
        for number in range(200)
    ]
    assert comparisons({"oneOf": tagged}) < 2_000
    assert comparisons({"oneOf": [*tagged, {"type": "null"}]}) < 30_000


def test_equal_schemas_are_compared_once() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    branches = [
        {"type": "object", "properties": {name: {"$ref": "#"} for name in names}, "required": names}
        for _ in range(2)
    ]
    assert comparisons({"oneOf": branches}, exclusive=False) < 200


@pytest.mark.parametrize("deep", [False, True])
def test_branches_that_take_too_long_to_be_compared_are_refused(
    deep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_of, "MAX_COMPARISONS", 1_000)
    ranges = [{"type": "integer", "minimum": n, "maximum": n} for n in range(100)]
    nodes = {
        f"n{number}": {
            "type": "object",
            "properties": {
                name: {"anyOf": [{"$ref": f"#/$defs/n{(3 * number + i + j) % 9}"} for j in (0, 1)]}
                for i, name in enumerate("abc")
            },
            "required": ["a", "b", "c"],
        }
        for number in range(9)
    }
    branches = [{"$ref": "#/$defs/n0"}, {"$ref": "#/$defs/n1"}] if deep else ranges
    with pytest.raises(SchemaError, match=r"^oneOf: its branches are too .*use anyOf$"):
        enforceable({"oneOf": branches, "$defs": nodes})
