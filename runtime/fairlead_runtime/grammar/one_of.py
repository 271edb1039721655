"""Whether the branches of a ``oneOf`` exclude each other, as far as types, constants, ranges and
required properties tell.

Owns the count of comparisons, which alone bounds the work: the verdict depends neither on the
machine's speed nor on the order of names. Imports no library.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fairlead_runtime.grammar.references import Schema, pointed

Values = frozenset[tuple[str, str]]

MAX_COMPARISONS = 100_000  # of one document: less than a second
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_TELLING = frozenset(
    {
        *("additionalProperties", "anyOf", "const", "enum", "exclusiveMaximum"),
        *("exclusiveMinimum", "maximum", "minimum", "oneOf", "patternProperties", "properties"),
        *("required", "type"),
    }
)
_MAX_DEPTH = 8  # of properties and alternatives within each other that are compared
_MAX_CONJUNCTS = 64


class TooManyComparisonsError(Exception):
    """The branches are too many, or too deep, to be compared."""


class Exclusion:
    """Compares the schemas of one document. ``roots``: of ``schema_roots``."""

    def __init__(self, roots: Mapping[int, Schema]) -> None:
        self.comparisons = 0
        self._roots = roots
        self._known: dict[frozenset[int], _Facts] = {}
        self._verdicts: dict[tuple[object, ...], bool] = {}

    def excludes(self, schema: Schema, branches: Sequence[Any]) -> bool:
        """Whether no value fulfils two branches. ``schema``: what they lie in, whose types hold for
        all. Raises TooManyComparisonsError.
        """
        root = self._roots[id(schema)]
        facts = [self._facts([branch], root) for branch in branches]
        shared = self._facts([schema], root).types
        if _apart([branch.values for branch in facts]) or _tagged(facts, shared):
            return True  # at once, however many
        return all(
            self._part(first, second, shared) for first, second in itertools.combinations(facts, 2)
        )

    def _part(self, first: "_Facts", second: "_Facts", shared: frozenset[str]) -> bool:
        """Whether no value of these types fulfils both. The shallowest answer comes first, so that
        it does not matter which property is compared first.
        """
        return any(self._disjoint(first, second, shared, depth) for depth in range(_MAX_DEPTH + 1))

    def _disjoint(
        self, first: "_Facts", second: "_Facts", types: frozenset[str], depth: int
    ) -> bool:
        self._spend(1)
        types = types & first.types & second.types
        if _differ(first, second, types):
            return True
        if first is second or depth == 0:
            return False
        key = (*sorted((id(first), id(second))), types, depth)
        if key not in self._verdicts:
            self._verdicts[key] = any([*self._parts_differ(first, second, types, depth - 1)])
        return self._verdicts[key]

    def _parts_differ(
        self, first: "_Facts", second: "_Facts", types: frozenset[str], depth: int
    ) -> Iterator[bool]:
        """Whether a property that one of them requires tells them apart, or all alternatives do. A
        caller takes all answers, so that the count is the same in any order.
        """
        if types == {"object"}:
            for name in first.required | second.required:
                pair = first.of_property(name), second.of_property(name)
                yield self._disjoint(*pair, _TYPES, depth)
        for branching, opposite in ((first, second), (second, first)):
            for options in branching.alternatives:
                verdicts = [self._disjoint(each, opposite, types, depth) for each in options]
                yield all(verdicts)

    def _facts(self, schemas: Iterable[Any], root: Schema) -> "_Facts":
        """What the schemas say together of a value: one object where the same ones do."""
        parts = self._conjuncts(schemas, root)
        self._spend(1 + len(parts))
        key = frozenset(map(id, parts))
        if key not in self._known:
            self._known[key] = _Facts(parts, functools.partial(self._facts, root=root))
        return self._known[key]

    def _conjuncts(self, schemas: Iterable[Any], root: Schema) -> list[Any]:
        """The schemas, their ``allOf`` and what they refer to, without those whose references begin
        elsewhere and those that tell nothing.
        """
        conjuncts: dict[int, Any] = {}
        waiting = [*schemas]
        while waiting and len(conjuncts) < _MAX_CONJUNCTS:
            part = waiting.pop()
            if id(part) in conjuncts or (
                part is not False and self._roots.get(id(part)) is not root
            ):
                continue
            conjuncts[id(part)] = part
            if isinstance(part, dict):
                waiting += _list(part.get("allOf"))
                reference = part.get("$ref")
                if isinstance(reference, str) and reference.startswith("#"):
                    waiting.append(pointed(reference, root))
        return [part for part in conjuncts.values() if part is False or _TELLING & part.keys()]

    def _spend(self, comparisons: int) -> None:
        self.comparisons += comparisons
        if self.comparisons > MAX_COMPARISONS:
            raise TooManyComparisonsError


class _Facts:
    """What a value of all these schemas fulfils. ``facts`` of further schemas."""

    def __init__(self, parts: list[Any], facts: Callable[[Iterable[Any]], "_Facts"]) -> None:
        self._parts = [part for part in parts if isinstance(part, dict)]
        self._facts = facts
        self._properties: dict[str, _Facts] = {}
        self.values = _values(self._parts)
        self.types = _types(self._parts, self.values) if False not in parts else frozenset[str]()
        self.range = _range(self._parts)
        self.required = frozenset(name for part in self._parts for name in required(part))

    @functools.cached_property
    def constants(self) -> dict[str, Values]:
        """The values of the properties that have a finite number of them."""
        names = {name for part in self._parts for name in _mapping(part.get("properties"))}
        values = {name: self.of_property(name).values for name in names}
        return {name: finite for name, finite in values.items() if finite is not None}

    @functools.cached_property
    def alternatives(self) -> "list[list[_Facts]]":
        options = (part.get(key) for part in self._parts for key in ("anyOf", "oneOf"))
        return [[self._facts([o]) for o in each] for each in options if isinstance(each, list)]

    def of_property(self, name: str) -> "_Facts":
        if name not in self._properties:
            self._properties[name] = self._facts(self._schemas_of(name))
        return self._properties[name]

    def _schemas_of(self, name: str) -> Iterator[Any]:
        for part in self._parts:
            properties = _mapping(part.get("properties"))
            if name in properties:
                yield properties[name]
            elif not part.get("patternProperties"):
                yield part.get("additionalProperties", True)


def _differ(first: _Facts, second: _Facts, types: frozenset[str]) -> bool:
    """Whether no value fulfils both, as far as they tell without their inner schemas."""
    if not types or (
        first.values is not None
        and second.values is not None
        and first.values.isdisjoint(second.values)
    ):
        return True
    if types == {"number"}:
        (low, high), (next_low, next_high) = first.range, second.range
        return bool(high < next_low or next_high < low)
    return types == {"object"} and any(
        first.constants[name].isdisjoint(second.constants[name])
        for name in (first.required | second.required) & first.constants.keys()
        if name in second.constants
    )


def _apart(values: Sequence[Values | None]) -> bool:
    """Whether all are finite and no value is in two."""
    finite = [constants for constants in values if constants is not None]
    return len(finite) == len(values) and (len(frozenset().union(*finite)) == sum(map(len, finite)))


def _tagged(facts: Sequence[_Facts], shared: frozenset[str]) -> bool:
    """Whether all are objects, and one property that all require has other values in each."""
    return all(each.types & shared <= {"object"} for each in facts) and any(
        _apart([each.constants.get(name) for each in facts])
        for name in frozenset.intersection(*(each.required for each in facts))
    )


def _types(parts: list[Schema], values: Values | None) -> frozenset[str]:
    types = _TYPES
    for part in parts:
        if "type" in part:
            names = part["type"] if isinstance(part["type"], list) else [part["type"]]
            types &= {"number" if name == "integer" else str(name) for name in names}
    return types if values is None else types & {kind for kind, _ in values}


def _values(parts: list[Schema]) -> Values | None:
    """Type and text of each value that ``const`` and ``enum`` leave; None without them."""
    sets = [
        frozenset(map(_value, [part["const"]] if "const" in part else part["enum"]))
        for part in parts
        if "const" in part or isinstance(part.get("enum"), list)
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


def _range(parts: list[Schema]) -> tuple[float, float]:
    """The bounds; an integer stays one, because no double may hold it."""

    def numbers(*keywords: str) -> list[float]:
        bounds = [part.get(keyword) for part in parts for keyword in keywords]
        return [b for b in bounds if isinstance(b, int | float) and type(b) is not bool]

    return (
        max([float("-inf"), *numbers("minimum", "exclusiveMinimum")]),
        min([float("inf"), *numbers("maximum", "exclusiveMaximum")]),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def required(schema: Mapping[str, Any]) -> list[str]:
    """The names that ``required`` lists; none where it is no list of names."""
    return [name for name in _list(schema.get("required")) if isinstance(name, str)]
