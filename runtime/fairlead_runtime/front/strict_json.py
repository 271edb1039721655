"""Parses a request's bytes into a JSON object, and refuses input that two parsers could read
differently.

Owns the limits on keys, strings and nesting, checked before any field. Every refusal is a 400 that
names the position and echoes no input.
"""

import itertools
import re
from typing import Any

import orjson
from pydantic_core import from_json

from fairlead_runtime.front.errors import invalid

MAX_BRACKETS = 40_000  # outside strings; enough for 1,024 prompts or messages of many parts
MAX_KEYS = 20_000
MAX_STRINGS = 100_000
MAX_DEPTH = 32

# Possessive, so that it reads each byte once; an unterminated string runs to the end.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
# A comma takes what no string or bracket follows: a list of numbers is few tokens.
_TOKEN = re.compile(_STRING + rb'|\[|\]|\{|\}|:|,[^][{}:"]*+', re.DOTALL)
_FIELD = re.compile("[a-z_]{1,64}")
_BRACKETS = frozenset((b"[", b"]", b"{", b"}"))
_NOT_MARKS = bytes(sorted(set(range(256)) - set(b'[]{}:"')))
_DIGITS = bytes(b"0"[0] if byte in b"0123456789" else b" "[0] for byte in range(256))
_LONG = b"0" * 19  # no integer of fewer digits needs more than 64 bits
_PIECE = 24_000  # bytes: CPython finds in fewer than 30,000 by skipping, twice as fast as in more


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``, by RFC 8259 and stricter: UTF-8, no NaN, numbers of 64 bits,
    unique keys, bounded nesting.

    Raises ApiError 400.
    """
    keys, objects = _check_shape(body)
    value = _parsed(body)
    if _has_long_number(body):
        _check_integers(body)
    if _keys(value, objects) != keys:
        raise invalid(None, "a key appears twice in one object", "invalid_json")
    if not isinstance(value, dict):
        raise invalid(None, "the body must be a JSON object", "invalid_json")
    return value


def _check_shape(body: bytes) -> tuple[int, int]:
    """Check the numbers of strings, keys, containers and levels, at C speed: in one pass over the
    body, or three where it has backslashes, and then in what it keeps. Returns the numbers of keys
    and of objects.
    """
    marks = _marks_outside_strings(body)
    keys = marks.count(b":")
    if keys > MAX_KEYS:
        raise invalid(None, f"the body has more than {MAX_KEYS} keys", "invalid_json")
    brackets = marks.replace(b":", b"")
    if len(brackets) > 2 * MAX_BRACKETS:
        raise invalid(
            None, f"the body has more than {MAX_BRACKETS} lists and objects", "invalid_json"
        )
    depth = 0
    for number, bracket in enumerate(brackets):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            field = _field_at(body, _bracket(body, number))
            message = f"brackets are nested more than {MAX_DEPTH} deep"
            raise invalid(field, message, "invalid_json")
    return keys, brackets.count(b"{")


def _marks_outside_strings(body: bytes) -> bytes:
    """Brackets and colons. Raises ApiError for more than MAX_STRINGS strings.

    A backslash outside strings is no JSON: what follows it may be read wrongly, and is not parsed.
    """
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = body.translate(None, _NOT_MARKS)
    if marks.count(b'"') > 2 * MAX_STRINGS:
        raise invalid(None, f"the body has more than {MAX_STRINGS} strings", "invalid_json")
    return b"".join(marks.split(b'"')[::2])


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body.decode())
    except UnicodeDecodeError as error:
        field = _field_at(body, error.start)
        raise invalid(field, f"byte {error.start} is not UTF-8", "invalid_json") from None
    except orjson.JSONDecodeError as error:
        field = _field_at(body, len(body.decode()[: error.pos].encode()))
        message = f"the body is not JSON: {error.msg}, at character {error.pos}"
        raise invalid(field, message, "invalid_json") from None


def _has_long_number(body: bytes) -> bool:
    """Also for one in a string, and for what follows a point."""
    rest = len(_LONG) - 1  # of a number that begins at the end of a piece
    return any(
        _LONG in body[place : place + _PIECE + rest].translate(_DIGITS)
        for place in range(0, len(body), _PIECE)
    )


def _check_integers(body: bytes) -> None:
    """The parser reads those beyond 64 bits as floating point. Another one reads them as they are,
    and orjson writes none such.
    """
    value = from_json(body)
    for key, member in value.items() if isinstance(value, dict) else [("", value)]:
        try:
            orjson.dumps(member)
        except orjson.JSONEncodeError:
            message = "an integer needs more than 64 bits: send a smaller one, or a string"
            raise invalid(_field_name(key), message, "invalid_json") from None


def _keys(value: Any, objects: int) -> int:
    """The number of keys in ``value``, which has at most ``objects`` objects. The parser keeps one
    of two equal keys, so it is smaller than the number of colons then.
    """
    keys, unseen = 0, [value]
    while unseen and objects:
        members = unseen.pop()
        if isinstance(members, dict):
            keys, objects = keys + len(members), objects - 1
            members = members.values()
        unseen += [inner for inner in members if isinstance(inner, (dict, list))]
    return keys


def _bracket(body: bytes, number: int) -> int:
    """The place of a bracket outside strings, counted from 0. The body's end where there is none,
    since a backslash stands outside strings.
    """
    places = (match.start() for match in _TOKEN.finditer(body) if match[0] in _BRACKETS)
    return next(itertools.islice(places, number, None), len(body))


def _field_at(body: bytes, place: int) -> str | None:
    """The key of the body's own object whose value holds byte ``place``. None where there is none,
    and for a key that is no field's name.
    """
    depth, string, key = 0, b"", b""
    for match in _TOKEN.finditer(body):
        token = match[0]
        if match.end() > place:
            break
        if token in _BRACKETS:
            depth += 1 if token in b"[{" else -1
        elif depth == 1 and token.startswith(b","):
            key = b""
        elif depth == 1 and token == b":":
            key = string[1:-1]
        else:
            string = token
    return _field_name(key.decode(errors="replace")) if depth else None


def _field_name(key: str) -> str | None:
    """None for what is no field's name: a refusal echoes no input."""
    return key if _FIELD.fullmatch(key) else None
