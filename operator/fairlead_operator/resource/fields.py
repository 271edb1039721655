"""Reads frozen dataclasses from a JSON body: fields declare their bounds, errors name their path.

Owns the conversion between camelCase bodies and dataclasses, and the check of one value against its
bounds. ``spec`` declares the fields.
"""

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
UNITS = {unit: Fraction(1000) ** power for power, unit in enumerate(["n", "u", "m", ""], -3)}
UNITS |= {unit: Fraction(1000**power) for power, unit in enumerate("kMGTPE", 1)}
UNITS |= {unit + "i": Fraction(1024**power) for power, unit in enumerate("KMGTPE", 1)}
# What a field of the resource takes.
QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,3})?)(m|[kMGTPE]|[KMGTPE]i)?")
# What Kubernetes takes and stores, here and in objects of others: any length, also with exponents.
_ANY_QUANTITY = re.compile(
    r"\+?((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)([numkMGTPE]|[KMGTPE]i)?"
)
_LARGEST = 2**63 - 1  # the number that the server stores for a larger one with a binary unit


class ResourceError(ValueError):
    """A resource that is invalid. ``field`` is the dotted path, e.g. ``spec.cache.blockSize``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


class Quantity(str):
    """A Kubernetes quantity as written, in any form. ``value`` is in bytes or cores, rounded up."""

    __slots__ = ()

    @property
    def exact(self) -> Fraction:
        match = _ANY_QUANTITY.fullmatch(self)
        if match is None:
            raise ValueError(f"{self!r} is not a quantity")
        return Fraction(match[1]) * UNITS[match[2] or ""]

    @property
    def stored(self) -> Fraction:
        """The number that the server stores of it for a resource: whole thousandths, rounded up."""
        number = min(self.exact, Fraction(_LARGEST)) if self.endswith("i") else self.exact
        return Fraction(math.ceil(number * 1000), 1000)

    @property
    def value(self) -> int:
        return math.ceil(self.exact)


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    pattern: str | None = None,
    longest: int | None = None,
) -> Any:
    """A field with the same bounds as in the CRD; ``longest`` bounds a string's, list's or
    mapping's length.
    """
    meta = {"low": low, "high": high, "pattern": pattern, "longest": longest}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def read(kind: type[T], body: Any, path: str, ignored: list[str] | None = None) -> T:
    """An instance of the dataclass ``kind``. null means absent.

    Without ``ignored`` an unknown key is an error, which names the nearest known one; with it,
    the path of each unknown key is added to the list.
    """
    values = mapping(body, path)
    hints = get_type_hints(kind)
    fields = {camel(f.name): f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    note_unknown(values, fields, path, ignored)
    arguments: dict[str, Any] = {}
    for key, f in fields.items():
        at = f"{path}.{key}"
        if values.get(key) is not None:
            arguments[f.name] = _convert(hints[f.name], values[key], at, ignored)
            check(f.metadata, arguments[f.name], at)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ResourceError(at, "must be set")
    return kind(**arguments)


def mapping(body: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise ResourceError(path, f"must be an object, not {_quoted(body)}")
    return body


def note_unknown(
    body: Mapping[str, Any], known: Any, path: str, ignored: list[str] | None = None
) -> None:
    """Add the path of each unknown key to ``ignored``; raise for the first one without a list."""
    for key in body:
        if key not in known and ignored is not None:
            ignored.append(f"{path}.{key}")
        elif key not in known:
            near = get_close_matches(str(key), list(known), n=1)
            raise ResourceError(
                f"{path}.{key}", "no such field" + (f"; did you mean {near[0]}?" if near else "")
            )


def check(meta: Mapping[str, Any], value: Any, path: str) -> None:
    """Check a value against its field's bounds; the error names the bound."""
    longest, low, high, pattern = (meta.get(k) for k in ("longest", "low", "high", "pattern"))
    if longest is not None and len(value) > longest:
        raise ResourceError(path, f"is longer than {longest}: shorten it")
    if low is not None and value < low:
        raise ResourceError(path, f"{value} is below the smallest allowed, {low}: raise it")
    if high is not None and value > high:
        raise ResourceError(path, f"{value} is above the largest allowed, {high}: lower it")
    if pattern is not None and re.search(pattern, value) is None:
        raise ResourceError(path, f"{_quoted(value)} does not have the form {pattern}: correct it")


def _convert(hint: Any, value: Any, path: str, ignored: list[str] | None) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert(next(a for a in args if a is not type(None)), value, path, ignored)
    if origin is Literal:
        if value not in args or not isinstance(value, str):
            raise ResourceError(path, f"{_quoted(value)} is not supported: use {', '.join(args)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ResourceError(path, f"must be a list, not {_quoted(value)}")
        return tuple(_convert(args[0], v, f"{path}[{i}]", ignored) for i, v in enumerate(value))
    if origin is not None:  # Mapping[str, str]
        entries = mapping(value, path).items()
        return {str(k): _convert(str, v, f"{path}.{k}", ignored) for k, v in entries}
    if dataclasses.is_dataclass(hint):
        return read(hint, value, path, ignored)  # type: ignore[arg-type]
    return _scalar(hint, value, path)


def _scalar(hint: type, value: Any, path: str) -> Any:
    if hint is Quantity and isinstance(value, int | str) and not isinstance(value, bool):
        if value == "" or QUANTITY.fullmatch(str(value)):
            return Quantity(value)
        raise ResourceError(path, f"{_quoted(value)} is not a quantity: write it like 16Gi or 500m")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
        Quantity: "a quantity",
    }
    raise ResourceError(path, f"must be {names[hint]}, not {_quoted(value)}")


def _quoted(value: Any) -> str:
    return repr(value)[:60]


def as_body(value: Any) -> Any:
    """The inverse of ``read`` for rendering: camelCase, with None and empty strings left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = (
            (camel(f.name), as_body(getattr(value, f.name))) for f in dataclasses.fields(value)
        )
        return {key: item for key, item in items if item is not None and item != ""}
    if isinstance(value, tuple):
        return [as_body(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value
