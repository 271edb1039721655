"""Parses a request's bytes into a JSON object, and refuses input that two parsers could read
differently.

Owns the limits on keys, strings and nesting, checked before any field. Every refusal is a 400 that
names the position and echoes no input.
"""

import itertools
import json
import re
from typing import Any

import orjson

from fairlead_runtime.api.errors import ApiError, invalid

MAX_BRACKETS = 40_000  # outside strings; enough for 64 prompts or 1,024 messages of many parts
MAX_KEYS = 20_000
MAX_STRINGS = 100_000
MAX_DEPTH = 32

# Possessive, so that it reads each byte once; an unterminated string runs to the end.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{}:]|,(?=\s*")', re.DOTALL)
_FIELD = re.compile(rb"[a-z_]{1,64}")
_BRACKETS = frozenset((b"[", b"]", b"{", b"}"))
_NOT_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONG = re.compile(rb"[0-9]{19}")
_NUMBER = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(-?[0-9]++)([.eE][-+.eE0-9]*+)?', re.DOTALL)
_INTEGERS = range(-(2**63), 2**64)  # what messages between our processes and answers can hold


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``, by RFC 8259 and stricter: UTF-8, no NaN, integers of 64 bits,
    unique keys, bounded nesting.

    Raises ApiError 400.
    """
    _check_shape(body)
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
        if _SURROGATE.search(body):
            _check_surrogates(body)
        if _LONG.search(body):
            _check_integers(body)
    except ApiError:
        raise
    except UnicodeDecodeError as error:
        field = _field_at(body, error.start)
        raise invalid(field, f"byte {error.start} is not UTF-8", "invalid_json") from None
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at character {error.pos}"
        raise invalid(None, f"the body is not JSON: {detail}", "invalid_json") from None
    except (ValueError, RecursionError):
        # Integers of thousands of digits, nesting beyond the parser's stack.
        raise invalid(None, "the body is not JSON: a number is too long", "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(None, "the body must be a JSON object", "invalid_json")
    return value


def _check_shape(body: bytes) -> None:
    """Check the numbers of keys, containers and levels outside strings, in one pass at C speed."""
    # Counts unescaped quotes. After an even run of backslashes it misses a closing quote, never an
    # opening one.
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:
        raise invalid(None, f"the body has more than {MAX_STRINGS} strings", "invalid_json")
    bare = _STRING.sub(b"", body)
    if bare.count(b":") > MAX_KEYS:
        raise invalid(None, f"the body has more than {MAX_KEYS} keys", "invalid_json")
    brackets = bare.translate(None, _NOT_BRACKETS)
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


def _check_surrogates(body: bytes) -> None:
    """Json accepts half a surrogate pair, which is not a character; orjson refuses it."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        field = _field_at(body, len(body.decode()[: error.pos].encode()))
        raise invalid(field, "a \\u escape is half a surrogate pair", "invalid_json") from None


def _check_integers(body: bytes) -> None:
    for match in _NUMBER.finditer(body):
        digits, fraction = match[1], match[2]
        if digits and not fraction and int(digits) not in _INTEGERS:
            message = "an integer needs more than 64 bits: send a smaller one, or a string"
            raise invalid(_field_at(body, match.start()), message, "invalid_json")


def _bracket(body: bytes, number: int) -> int:
    """The place of a bracket outside strings, counted from 0."""
    brackets = (match for match in _TOKEN.finditer(body) if match[0] in _BRACKETS)
    return next(itertools.islice(brackets, number, None)).start()


def _field_at(body: bytes, place: int) -> str | None:
    """The key of the body's own object whose value holds byte ``place``. None where there is none,
    and for a key that is no field's name: a refusal echoes no input.
    """
    depth, string, key = 0, b"", b""
    for match in _TOKEN.finditer(body):
        token = match[0]
        if match.end() > place:
            break
        if token in _BRACKETS:
            depth += 1 if token in b"[{" else -1
        elif depth == 1 and token == b",":
            key = b""
        elif depth == 1 and token == b":":
            key = string[1:-1]
        else:
            string = token
    return key.decode() if _FIELD.fullmatch(key) else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise invalid(None, "a key appears twice in one object", "invalid_json")
    return parsed


def _no_constant(name: str) -> Any:
    raise invalid(None, f"the body is not JSON: {name} is not a number", "invalid_json")
