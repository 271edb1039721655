"""Turns a JSON schema into an equal one that llguidance enforces as it stands, and refuses what it
would accept and not enforce: integers that no double holds, and branches of ``oneOf`` that may
allow one value.

A plain function from schema to schema; imports no library.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from fairlead_runtime.grammar.one_of import Exclusion, TooManyComparisonsError, required
from fairlead_runtime.grammar.references import Schema, schema_roots

Begins = Callable[[Schema, str], bool]

_DATA = ("const", "enum")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_EXACT = 2**53  # up to here every integer is a double


class SchemaError(ValueError):
    """The schema asks for what cannot be enforced. The message names the keyword and the way out,
    and repeats no word of the schema.
    """


def enforceable(schema: Schema, begins: Begins) -> Schema:
    """An equal schema. ``begins``: whether an output of a schema can begin with a text. Raises
    SchemaError.
    """
    roots = schema_roots(schema)
    changed: Schema = _Rewriting(roots.keys(), Exclusion(roots), begins).changed(schema)
    return changed


class _Rewriting:
    """``schemas``: the ``id()`` of what is a schema; all else is data, which stays."""

    def __init__(self, schemas: AbstractSet[int], exclusion: Exclusion, begins: Begins) -> None:
        self._schemas = schemas
        self._exclusion = exclusion
        self._begins = begins

    def changed(self, value: Any) -> Any:
        """The value with all schemas in it, inner ones first."""
        if isinstance(value, list):
            return [self.changed(item) for item in value]
        if not isinstance(value, dict):
            return value
        part = {name: self.changed(item) for name, item in value.items()}
        if id(value) not in self._schemas:
            return part
        if any(part.get(keyword) != value.get(keyword) for keyword in _DATA):
            raise SchemaError("$ref: it leads into const or enum; put the schema into $defs")
        _check_integers(part)
        return _without_spent_patterns(self._without_one_of(part, value), self._begins)

    def _without_one_of(self, part: Schema, schema: Schema) -> Schema:
        """``oneOf`` equals ``anyOf`` where no value fulfils two branches, else it is refused."""
        branches = part.get("oneOf")
        if not isinstance(branches, list):
            return part
        try:
            exclusive = self._exclusion.excludes(schema, schema["oneOf"])
        except TooManyComparisonsError:
            raise SchemaError(
                "oneOf: its branches are too many or too deep to be compared; tell them apart by "
                "a required property with another const in each, or use anyOf"
            ) from None
        if not exclusive:
            raise SchemaError(
                "oneOf: two branches may allow the same value, which cannot be enforced; tell them "
                "apart by type, or by a required property with another const in each, or use anyOf"
            )
        rest = {keyword: value for keyword, value in part.items() if keyword != "oneOf"}
        if "anyOf" not in rest:
            return {**rest, "anyOf": branches}
        return _with_conjuncts(rest, [{"anyOf": branches}])


# -- integers: the library reads numbers as doubles, and integers then as 64 bits


def _check_integers(schema: Schema) -> None:
    for keyword in _DATA:
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
    names = [*dict.fromkeys([*properties, *required(schema)])]
    spent = {pattern for pattern in patterns if _adds_no_name(pattern, names, begins)}
    if not spent:
        return schema
    matches = [
        {"properties": {name: patterns[pattern]}}
        for pattern in patterns
        for name in names
        if pattern in spent and begins(_only_names(pattern), f"{{{_quoted(name)}:null")
    ]
    listed = {name: properties.get(name, {}) for part in matches for name in part["properties"]}
    rest = {pattern: value for pattern, value in patterns.items() if pattern not in spent}
    changed = {**schema, "properties": {**properties, **listed}, "patternProperties": rest}
    return _with_conjuncts(changed, matches)  # references may lead to the properties


def _with_conjuncts(schema: Schema, conjuncts: Sequence[Schema]) -> Schema:
    """The schema with more of ``allOf``."""
    present = schema.get("allOf")
    return {**schema, "allOf": [*(present if isinstance(present, list) else []), *conjuncts]}


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
