"""Parses a request's bytes into a JSON object, and refuses input that two parsers could read
differently.

Owns the limits on keys, strings and nesting, checked before any field. Every refusal is a 400 that
names the position and echoes no input.
"""

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
_NOT_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``, by RFC 8259 and stricter: UTF-8, no NaN, unique keys, bounded
    nesting.

    Raises ApiError 400.
    """
    _check_shape(body)
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
        if _SURROGATE.search(body):
            # json accepts half a surrogate pair, which is not a character; orjson refuses it.
            orjson.loads(body)
    except ApiError:
        raise
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not UTF-8: byte {error.start}", "invalid_json") from None
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at character {error.pos}"
        raise invalid(None, f"the body is not JSON: {detail}", "invalid_json") from None
    except (ValueError, RecursionError):
        # Integers of thousands of digits, nesting beyond the parser's stack, lone surrogates.
        message = (
            "the body is not JSON: a number is too long or a \\u escape is half a surrogate pair"
        )
        raise invalid(None, message, "invalid_json") from None
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
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise invalid(None, f"the body is nested more than {MAX_DEPTH} deep", "invalid_json")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise invalid(None, "a key appears twice in one object", "invalid_json")
    return parsed


def _no_constant(name: str) -> Any:
    raise invalid(None, f"the body is not JSON: {name} is not a number", "invalid_json")
