"""The names in a body: slips of known ones, which are refused, and those that nothing reads.

Owns the rule for slips and the walk through a body. Reads no value but objects and lists.
"""

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, get_args
from urllib.parse import quote

from fairlead_runtime.front.errors import invalid
from fairlead_runtime.front.strict_body import ObjectsOf, StrictBody

HEADER = b"fairlead-ignored-fields"
MAX_HEADER = 1024  # characters of its value
MAX_SHOWN = 64  # characters of a name in it
MAX_TRIED = 32  # unknown names of a body that are compared with the known ones
TWO_EDITS = 10  # letters of a name that two edits may have changed
ONE_LETTER = 6  # letters of a name that another letter may have changed
SHORTEST = 4  # letters of a name that a letter more or less may have changed
EMPTY = "%22%22"
# Names of other APIs that look like slips and mean something else: of OpenRouter a list of models
# to fall back to, of Azure what a message's answer was found in.
OTHERS = frozenset({"context", "models"})
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class UnreadName(NamedTuple):
    """A name that nothing reads. ``shown``: its path; ``place``: the path to its object, with the
    index in each list and a dot at its end; ``known``: the names that are known there.
    """

    shown: str
    place: str
    name: str
    known: frozenset[str]


_Unread = dict[tuple[str, type], UnreadName]


def unread_names(
    kind: type[StrictBody],
    body: Mapping[str, Any],
    known: Mapping[type, Collection[str]] = MappingProxyType({}),
) -> Collection[UnreadName]:
    """The names of values in ``body`` and its objects, null left out, that ``kind`` and the types
    of the objects do not read, each once for a path and a type. ``known``: by type what else has a
    meaning there.
    """
    found: _Unread = {}

    @functools.cache  # thousands of names share one set
    def known_of(kind: type[StrictBody]) -> frozenset[str]:
        return frozenset({*_fields(kind), *known.get(kind, ())})

    _collect(kind, body, known_of, "", "", found)
    return found.values()


def _collect(
    kind: type[StrictBody],
    body: Mapping[str, Any],
    known_of: Callable[[type[StrictBody]], frozenset[str]],
    place: str,
    shown: str,
    found: _Unread,
) -> None:
    fields, known = _fields(kind), known_of(kind)
    for name, value in body.items():
        if name in fields:
            if not (types := _object_types(kind, fields[name])):
                continue
            objects = enumerate(value) if isinstance(value, list) else [("", value)]
            for number, each in objects:
                if isinstance(each, dict):
                    at = f"{place}{name}.{number}." if number != "" else f"{place}{name}."
                    if (inner := _type_of(types, each)) is not None:
                        _collect(inner, each, known_of, at, f"{shown}{name}.", found)
        elif value is not None and name not in known and (shown + name, kind) not in found:
            found[shown + name, kind] = UnreadName(shown + name, place, name, known)


@functools.cache
def _fields(kind: type[StrictBody]) -> Mapping[str, str]:
    """By the client's name of a field, ours."""
    return {field.alias or name: name for name, field in kind.model_fields.items()}


@functools.cache
def _object_types(kind: type[StrictBody], name: str) -> tuple[type[StrictBody], ...]:
    """The types of the objects that a field is, or is a list of."""
    field = kind.model_fields[name]
    parts = [mark.kind for mark in field.metadata if isinstance(mark, ObjectsOf)]
    kinds = (*_types(field.annotation), *parts)
    return tuple(dict.fromkeys(kind for kind in kinds if issubclass(kind, StrictBody)))


def _type_of(kinds: tuple[type[StrictBody], ...], value: Mapping[str, Any]) -> Any:
    """The type of an object: of several the one with its ``type``, None for none of them."""
    if len(kinds) == 1:
        return kinds[0]
    tag = value.get("type")
    return _by_tag(kinds).get(tag if isinstance(tag, str) else None)


@functools.cache
def _by_tag(kinds: tuple[type[StrictBody], ...]) -> Mapping[str | None, type[StrictBody]]:
    """Each by its ``type``; the one that may leave it out by None, too."""
    tags: dict[str | None, type[StrictBody]] = {}
    for kind in kinds:
        field = kind.model_fields["type"]
        tags |= dict.fromkeys(get_args(field.annotation), kind)
        if not field.is_required():
            tags[None] = kind
    return tags


def _types(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for argument in get_args(annotation):
        yield from _types(argument)


def refuse_slips(
    unread: Collection[UnreadName], harmless: Collection[str], instead: Mapping[str, str]
) -> None:
    """Raise ApiError 400 for the first name that is a slip of one that is known at its place; the
    body's own has those of ``harmless`` fields too. ``instead``: by name of a field of the body
    that is itself refused, what to do.
    """
    for _, place, name, known in itertools.islice(unread, MAX_TRIED):
        path = place + name
        real = OTHERS if place else {*OTHERS, *harmless}
        if name in real or not _NAME.fullmatch(path):
            continue
        if meant := _meant(name, known if place else {*known, *harmless}):
            message = f"is not known; did you mean {place}{meant}?"
            if not place and meant in instead:
                message += f" That is not supported; {instead[meant]}"
            raise invalid(path, message, "unsupported_parameter")


def _meant(name: str, known: Collection[str]) -> str | None:
    """The known name that ``name`` is a slip of, the nearest one: equal but for case, ``_`` and
    ``-``, or one edit away (a letter missing, added or another, two neighbours exchanged), from
    TWO_EDITS letters on two. A digit more or less is no slip: such names mean another one.
    """
    spelled = _spelled(name)
    found = ((_edits(spelled, _spelled(other)), other) for other in known if _near(name, other))
    edits, meant = min(found, default=(9, None))
    return meant if edits <= (2 if len(spelled) >= TWO_EDITS else 1) else None


def _spelled(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _near(name: str, other: str) -> bool:
    """Whether a look at the edits is worth it: two of them change at most four letters."""
    return len({*_spelled(name)} ^ {*_spelled(other)}) <= 4 and _digits(name) == _digits(other)


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def _edits(a: str, b: str) -> int:
    """Edits between two names, by Damerau's count of neighbours that are exchanged at most once;
    those that short names do not allow count as many.
    """
    if a == b:
        return 0
    if abs(len(a) - len(b)) > 2 or min(len(a), len(b)) < SHORTEST - 1:
        return 9
    other = 1 if min(len(a), len(b)) >= ONE_LETTER else 9
    last: list[int] = []
    row: list[int] = [*range(len(b) + 1)]
    for i, left in enumerate(a, 1):
        before, last, row = last, row, [i]
        for j, right in enumerate(b, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (left != right) * other)
            if i > 1 and j > 1 and (left, a[i - 2]) == (b[j - 2], right):
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
    return row[-1]


def listed(names: Collection[str]) -> bytes:
    """The names as the value of a header, in ASCII without a blank or comma within one. What does
    not fit is only counted, as ``+3``.
    """
    shown: list[str] = []
    room = MAX_HEADER - len(", +99999")
    for name in names:
        word = _word(name)
        room -= len(word) + len(", ")
        if room < 0:
            break
        shown.append(word)
    rest = len(names) - len(shown)
    return ", ".join([*shown, *([f"+{rest}"] if rest else [])]).encode()


def _word(name: str) -> str:
    """At most MAX_SHOWN characters for as many whole ones of a name; an empty one is two quotes:
    a header's value must not end in a blank.
    """
    word = ""
    for each in name[:MAX_SHOWN]:
        escaped = quote(each, safe="")
        if len(word) + len(escaped) > MAX_SHOWN:
            break
        word += escaped
    return word or EMPTY


def header_of(value: bytes) -> list[tuple[bytes, bytes]]:
    """The header that names what was ignored; none for no names."""
    return [(HEADER, value)] if value else []
