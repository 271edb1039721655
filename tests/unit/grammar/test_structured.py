"""The plain value of a structured output: its shape and the bounds that need no compilation."""

import json
from typing import Any

import pytest

from fairlead_runtime.request.structured import (
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_REGEX,
    MAX_SOURCE,
    StructuredOutputs,
    StructuredOutputsError,
    schema_rule,
    text_rule,
)


def nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("value", "kind", "source"),
    [
        ({"json": {"type": "string"}}, "json", '{"type":"string"}'),
        ({"json": '{"type": "string"}'}, "json", '{"type":"string"}'),
        ({"json": {"b": 1, "a": 2}}, "json", '{"b":1,"a":2}'),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"choice": ["a", "é"]}, "choice", '["a", "é"]'),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"regex": "a", "json": None, "json_object": False}, "regex", "a"),
        ({"json": nested(MAX_DEPTH - 1)}, "json", nested(MAX_DEPTH - 1)),
        ({"regex": "a" * MAX_REGEX}, "regex", "a" * MAX_REGEX),
    ],
)
def test_a_valid_value_has_one_kind_and_one_text(value: Any, kind: str, source: str) -> None:
    outputs = StructuredOutputs.of(value)
    assert (outputs.kind, outputs.source) == (kind, source)
    assert StructuredOutputs.of(outputs) is outputs


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("text", ""),
        ({}, ""),
        ({"json": None}, ""),
        ({"json": {}, "regex": "a"}, ""),
        ({"structural_tag": "x"}, "structural_tag"),
        ({"json": {"type": "string"}, "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"json": "{"}, "json"),
        ({"json": [1]}, "json"),
        ({"json": "true"}, "json"),
        ({"json": {"enum": [float("nan")]}}, "json"),
        ({"json": nested(MAX_DEPTH)}, "json"),
        ({"json": '{"a":' + "[" * 5000 + "]" * 5000 + "}"}, "json"),
        ({"json": {"description": "x" * MAX_SOURCE}}, "json"),
        ({"json_object": 1}, "json_object"),
        ({"regex": ""}, "regex"),
        ({"regex": 3}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"regex": "a" * (MAX_REGEX + 1)}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": ["a", 1]}, "choice"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice"),
        ({"choice": ["a" * MAX_SOURCE, "b"]}, "choice"),
        ({"grammar": " "}, "grammar"),
        ({"grammar": '\n{"grammars": [{"json_schema": {"const": 1}}]}'}, "grammar"),
        ({"grammar": "a" * (MAX_SOURCE + 1)}, "grammar"),
    ],
)
def test_an_invalid_value_is_refused_by_its_field(value: Any, field: str) -> None:
    with pytest.raises(StructuredOutputsError) as refused:
        StructuredOutputs.of(value)
    assert refused.value.field == field
    assert len(str(refused.value)) < 300


def test_brackets_inside_strings_do_not_count_as_nesting() -> None:
    schema = {"description": '[{"\\' * 100}
    assert json.loads(StructuredOutputs(json=schema).source) == schema


def test_the_digest_tells_values_apart_by_kind_and_text() -> None:
    values = [
        {"json": {"enum": ["a"]}},
        {"json": {"enum": ["b"]}},
        {"json_object": True},
        {"regex": "a"},
        {"grammar": "a"},
        {"choice": ["a"]},
        {"choice": ["a", "b"]},
    ]
    assert len({StructuredOutputs.of(value).digest for value in values}) == len(values)
    checked = StructuredOutputs(regex="a").checked(5)
    assert checked.digest == StructuredOutputs(regex="a").digest
    assert checked.compiled_bytes == 5


def test_the_parts_of_a_rule_are_quoted_and_have_bounded_white_space() -> None:
    assert text_rule('a"\n\x7f') == '"a\\"\\n\\u007f"'
    rule = schema_rule({"type": "integer", "x-guidance": {"whitespace_pattern": ".*"}})
    assert rule.startswith("%json {")
    assert ".*" not in rule
    with pytest.raises(StructuredOutputsError, match="nested"):
        schema_rule({"items": json.loads(nested(MAX_DEPTH))})
