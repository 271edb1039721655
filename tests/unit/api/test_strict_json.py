"""The parser of bodies against Python's own, which is slower and accepts more."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.front.strict_json import _PIECE, parse_object

KEYS = st.sampled_from(["a", "b", '"', "\\", '\\"', ":", "{", "é"])
PARTS = ['"', "\\", '\\"', "\\\\", "\\n", "[", "]", "{", "}", ":", ",", "1", "-", "e", " ", "a"]


def _objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON of objects, some of which have a key twice."""
    members = st.lists(st.tuples(KEYS.map(json.dumps), values), max_size=4)
    return members.map(lambda found: "{" + ", ".join(": ".join(each) for each in found) + "}")


def _lists(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(values, max_size=4).map(lambda found: "[" + ",".join(found) + "]")


SCALARS = (
    st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6) | st.booleans() | st.none()
)
VALUES = st.recursive(
    SCALARS.map(json.dumps), lambda inner: _objects(inner) | _lists(inner), max_leaves=12
)


def _reference(text: str) -> dict[str, Any]:
    """What ``parse_object`` must return; ValueError where it must refuse."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key appears twice")
        return dict(pairs)

    def integer(digits: str) -> int:
        if not -(2**63) <= (value := int(digits)) < 2**64:
            raise ValueError("more than 64 bits")
        return value

    def no_constant(name: str) -> float:
        raise ValueError(name)

    value = json.loads(
        text, object_pairs_hook=unique, parse_int=integer, parse_constant=no_constant
    )
    json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    if not isinstance(value, dict):
        raise ValueError("no object")  # noqa: TRY004 - as for every refusal
    return value


def _check(text: str) -> None:
    try:
        expected = _reference(text)
    except ValueError:
        with pytest.raises(ApiError):
            parse_object(text.encode())
    else:
        assert parse_object(text.encode()) == expected


@given(_objects(VALUES))
def test_it_reads_what_pythons_parser_reads_and_refuses_the_rest(text: str) -> None:
    _check(text)


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_backslashes_and_quotes_hide_nothing(parts: str) -> None:
    _check('{"a":' + parts + "}")
    _check('{"a":"' + parts + '"}')


@pytest.mark.parametrize(
    "text",
    [
        r"\"" + "[" * 40,  # a quote that opens no string, before brackets that count
        '{"a":[' + r"\"" * 3 + "{" * 40,
    ],
)
def test_brackets_after_a_stray_backslash_are_refused(text: str) -> None:
    with pytest.raises(ApiError):
        parse_object(text.encode())


@pytest.mark.parametrize("text", ['{"n": 1e999}', '{"n": NaN}', '{"n": 1, "user": "x" "y"}'])
def test_a_refusal_names_the_field_where_parsing_ended(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_object(text.encode())
    assert refused.value.param == ("user" if "user" in text else "n")


@pytest.mark.parametrize("integer", [2**64, -(2**63) - 1])
def test_an_integer_that_is_too_long_is_found_wherever_it_begins(integer: int) -> None:
    fits = integer - 1 if integer > 0 else integer + 1
    for before in (0, 3 * _PIECE, *range(_PIECE - 60, _PIECE)):
        text = f'{{"prompt": "{"x" * before}", "seed": [1, {{"a": {integer}}}], "n": 1}}'
        with pytest.raises(ApiError) as refused:
            parse_object(text.encode())
        assert refused.value.param == "seed"
        body = parse_object(text.replace(str(integer), str(fits)).encode())
        assert body["seed"] == [1, {"a": fits}]


@pytest.mark.parametrize("key", ["My Secret", "sk-1234", "x" * 65, "\u05e9", ""])
def test_a_refusal_names_no_key_that_is_no_fields_name(key: str) -> None:
    for value, message in (("NaN", "the body is not JSON"), ("1" * 30, "an integer needs")):
        with pytest.raises(ApiError) as refused:
            parse_object(f'{{"{key}": {value}}}'.encode())
        assert refused.value.param is None
        assert refused.value.message.startswith(message)
