"""Turns a JSON schema into an equal one that llguidance enforces as it stands, and refuses what it
would accept and not enforce: integers that no double holds, and branches of ``oneOf`` that may
allow one value.

A plain function from schema to schema; imports no library.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Schema = dict[str, Any]
Begins = Callable[[Schema, str], bool]

_SCHEMAS = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_EXACT = 2**53  # up to here every integer is a double
_MAX_DEPTH = 8  # of properties within each other that are compared


class SchemaError(ValueError):
    """The schema asks for what cannot be enforced. The message names the keyword and the way out,
    and repeats no word of the schema.
    """


def enforceable(schema: Schema, begins: Begins) -> Schema:
    """An equal schema. ``begins``: whether an output of a schema can begin with a text. Raises
    SchemaError.
    """
    changed: Schema = _enforceable(schema, schema, begins)
    return changed


def _enforceable(schema: Any, root: Schema, begins: Begins) -> Any:
    """The schema with all schemas in it, inner ones first. Data, such as the value of ``const``,
    stays. ``root``: what references begin at.
    """
    if not isinstance(schema, dict):
        return schema
    if "$id" in schema:
        root = schema
    part = {keyword: _below(keyword, value, root, begins) for keyword, value in schema.items()}
    _check_integers(part)
    return _without_spent_patterns(_without_one_of(part, root), begins)


def _below(keyword: str, value: Any, root: Schema, begins: Begins) -> Any:
    if keyword in _MAPS and isinstance(value, dict):
        return {name: _enforceable(part, root, begins) for name, part in value.items()}
    if keyword in _LISTS and isinstance(value, list):
        return [_enforceable(part, root, begins) for part in value]
    return _enforceable(value, root, begins) if keyword in _SCHEMAS else value


# -- integers: the library reads numbers as doubles, and integers then as 64 bits


def _check_integers(schema: Schema) -> None:
    for keyword in ("const", "enum"):
        if not all(map(_is_exact, _integers(schema.get(keyword)))):
            raise SchemaError(
                f"{keyword}: an integer beyond 2^53 cannot be enforced digit for digit; "
                "ask for a string of these digits"
            )
    for keyword in _BOUNDS:
        bound = schema.get(keyword)
        if type(bound) is int and not _is_exact_bound(keyword, bound):
            raise SchemaError(
                f"{keyword}: this bound beyond 2^53 cannot be enforced exactly; "
                "leave it out, or ask for a string with a pattern"
            )


def _integers(data: Any) -> Iterator[int]:
    """All integers in JSON data."""
    if isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            yield from _integers(value)
    elif type(data) is int:
        yield data


def _is_exact(number: int) -> bool:
    return abs(number) < 2**63 and float(number) == number


def _is_exact_bound(keyword: str, bound: int) -> bool:
    """Whether the library's bound, with one added or taken off where it is exclusive, is this."""
    if abs(bound) <= _EXACT:
        return True
    if keyword.startswith("exclusive"):
        return keyword == "exclusiveMaximum" and bound == 2**63  # it takes what exceeds 64 bits
    if keyword == "maximum" and bound == 2**63 - 1:  # for the largest integer
        return True
    return _is_exact(bound)


# -- patternProperties: where all names that match are listed, the library lets a comma follow the
# last property, and then nothing


def _without_spent_patterns(schema: Schema, begins: Begins) -> Schema:
    """The schema without patterns that match listed names only, whose schemas these names get."""
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    if not patterns or not isinstance(patterns, dict) or not isinstance(properties, dict):
        return schema
    names = [*dict.fromkeys([*properties, *_required(schema)])]
    spent = {pattern for pattern in patterns if _adds_no_name(pattern, names, begins)}
    properties = dict(properties)
    for pattern in spent:
        for name in names:
            if begins(_only_names(pattern), f"{{{_quoted(name)}:null"):
                parts = [properties[name]] if name in properties else []
                properties[name] = {"allOf": [*parts, patterns[pattern]]}
    rest = {pattern: value for pattern, value in patterns.items() if pattern not in spent}
    return {**schema, "properties": properties, "patternProperties": rest} if spent else schema


def _adds_no_name(pattern: str, names: Sequence[str], begins: Begins) -> bool:
    """Whether no name but these matches."""
    listed = {name: {"type": "null"} for name in names}
    schema = {**_only_names(pattern), "properties": listed, "required": names}
    text = "{" + "".join(f"{_quoted(name)}:null," for name in names)
    return bool(names) and begins(schema, text) and not begins(schema, text + '"')


def _only_names(pattern: str) -> Schema:
    only = {"patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    return {"type": "object", **only}


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


# -- oneOf: equal to anyOf where no value fulfils two branches, else not enforced


def _without_one_of(schema: Schema, root: Schema) -> Schema:
    branches = schema.get("oneOf")
    if not isinstance(branches, list):
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
    if not _exclude_each_other(branches, rest, root):
        raise SchemaError(
            "oneOf: two branches may allow the same value, which cannot be enforced; tell them "
            "apart by type, or by a required property with another const in each, or use anyOf"
        )
    if "anyOf" not in rest:
        return {**rest, "anyOf": branches}
    return {**rest, "allOf": [*_list(rest.get("allOf")), {"anyOf": branches}]}


def _exclude_each_other(branches: list[Any], rest: Schema, root: Schema) -> bool:
    parts = [_conjuncts(branch, root) for branch in branches]
    values = [_values(part) for part in parts]
    finite = [constants for constants in values if constants is not None]
    if len(finite) == len(values):  # a long list of constants, at once
        return len(frozenset().union(*finite)) == sum(map(len, finite))
    shared = _types(_conjuncts(rest, root))
    return all(
        _disjoint(first, second, root, shared) for first, second in itertools.combinations(parts, 2)
    )


def _conjuncts(schema: Any, root: Schema) -> list[Any]:
    """The schemas that a value of this one fulfils together: itself, references and ``allOf``."""
    conjuncts: list[Any] = []
    waiting = [schema]
    while waiting and len(conjuncts) < 64:
        part = waiting.pop()
        if any(part is conjunct for conjunct in conjuncts):
            continue
        conjuncts.append(part)
        if isinstance(part, dict):
            waiting += _list(part.get("allOf"))
            if "$ref" in part:
                waiting.append(_target(part["$ref"], root))
    return conjuncts


def _target(reference: Any, root: Schema) -> Any:
    """The schema that a pointer within the document leads to; anything for another reference."""
    part: Any = root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return root if reference == "#" else True
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(part, dict) or name not in part:
            return True
        part = part[name]
    return part


def _disjoint(
    first: list[Any],
    second: list[Any],
    root: Schema,
    types: frozenset[str] = _TYPES,
    depth: int = 0,
) -> bool:
    """Whether no value fulfils both, as far as types, constants, ranges and properties tell."""
    if depth > _MAX_DEPTH:
        return False
    if any(part is False for part in (*first, *second)):
        return True
    types = types & _types(first) & _types(second)
    first_values, second_values = _values(first), _values(second)
    if not types or (
        first_values is not None and second_values is not None and not first_values & second_values
    ):
        return True
    if types == {"number"} and _ranges_part(first, second):
        return True
    if types == {"object"} and _properties_part(first, second, root, depth):
        return True
    return any(
        all(
            _disjoint(_conjuncts(branch, root), opposite, root, types, depth + 1)
            for branch in options
        )
        for branching, opposite in ((first, second), (second, first))
        for options in _alternatives(branching)
    )


def _alternatives(parts: list[Any]) -> Iterator[list[Any]]:
    for part in map(_mapping, parts):
        yield from (part[key] for key in ("anyOf", "oneOf") if isinstance(part.get(key), list))


def _types(parts: list[Any]) -> frozenset[str]:
    types = _TYPES
    for part in parts:
        if isinstance(part, dict) and "type" in part:
            names = part["type"] if isinstance(part["type"], list) else [part["type"]]
            types &= {"number" if name == "integer" else str(name) for name in names}
    values = _values(parts)
    return types if values is None else types & {kind for kind, _ in values}


def _values(parts: list[Any]) -> frozenset[tuple[str, str]] | None:
    """Type and text of each value that ``const`` and ``enum`` leave; None without them."""
    sets = [
        frozenset(map(_value, [part["const"]] if "const" in part else part["enum"]))
        for part in parts
        if isinstance(part, dict) and ("const" in part or isinstance(part.get("enum"), list))
    ]
    return frozenset.intersection(*sets) if sets else None


def _value(data: Any) -> tuple[str, str]:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    kind = names.get(type(data), "null" if data is None else "object")
    return kind, json.dumps(_with_whole_numbers(data), sort_keys=True)


def _with_whole_numbers(data: Any) -> Any:
    """The data with 1 for 1.0, which JSON Schema does not tell apart."""
    if isinstance(data, list):
        return [_with_whole_numbers(value) for value in data]
    if isinstance(data, dict):
        return {name: _with_whole_numbers(value) for name, value in data.items()}
    return int(data) if isinstance(data, float) and data.is_integer() else data


def _ranges_part(first: list[Any], second: list[Any]) -> bool:
    (low, high), (next_low, next_high) = _range(first), _range(second)
    return high < next_low or next_high < low


def _range(parts: list[Any]) -> tuple[float, float]:
    def numbers(*keywords: str) -> list[float]:
        bounds = [_mapping(part).get(keyword) for part in parts for keyword in keywords]
        return [float(b) for b in bounds if isinstance(b, int | float) and type(b) is not bool]

    return (
        max([float("-inf"), *numbers("minimum", "exclusiveMinimum")]),
        min([float("inf"), *numbers("maximum", "exclusiveMaximum")]),
    )


def _properties_part(first: list[Any], second: list[Any], root: Schema, depth: int) -> bool:
    """Whether a property that one of them requires has no value that both allow."""
    names = [name for part in (*first, *second) for name in _required(_mapping(part))]
    return any(
        _disjoint(a, b, root, depth=depth + 1)
        for name in names
        for a, b in [(_property(first, name, root), _property(second, name, root))]
    )


def _property(parts: list[Any], name: str, root: Schema) -> list[Any]:
    """What the schemas say of the property."""
    schemas: list[Any] = []
    for part in map(_mapping, parts):
        properties = _mapping(part.get("properties"))
        if name in properties:
            schemas += _conjuncts(properties[name], root)
        elif not part.get("patternProperties"):
            schemas.append(part.get("additionalProperties", True))
    return schemas


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _required(schema: Mapping[str, Any]) -> list[str]:
    return [name for name in _list(schema.get("required")) if isinstance(name, str)]
