"""Schemas that the library would accept and not enforce."""

from typing import Any

import pytest

from fairlead_runtime.grammar import schemas
from fairlead_runtime.grammar.schemas import Schema, SchemaError

BIG = 1234567890123456789
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}


def enforceable(schema: Schema) -> Schema:
    return schemas.enforceable(schema, lambda *_: True)


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
