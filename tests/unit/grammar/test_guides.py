"""Masks of allowed tokens: every output that they allow is what was asked for."""

import gc
import json
import os
import queue
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it has no stubs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from fairlead_runtime.api.tools.grammar import calls_schema
from fairlead_runtime.api.tools.reasoning import END
from fairlead_runtime.child.heap import allocated_bytes
from fairlead_runtime.grammar import compile as compile_module
from fairlead_runtime.grammar import guides as module
from fairlead_runtime.grammar.checker import Checker
from fairlead_runtime.grammar.compile import (
    CheckLimits,
    GrammarError,
    TokenizerFacts,
    definition_of,
)
from fairlead_runtime.grammar.gbnf import lark_of
from fairlead_runtime.grammar.guides import Guide, Guides
from fairlead_runtime.request.sequence import Failure, FailureKind, SamplingParams, Sequence
from fairlead_runtime.request.structured import TOO_COMPLEX, Reasoning, StructuredOutputs
from support import byte_tokenizer, tiny
from support.grammars import (
    EOS,
    EXPONENTIAL,
    TOKENIZER,
    allowed,
    facts,
    generate,
    schemas,
    sequence,
)

GUIDES = Guides(facts())


@pytest.fixture(scope="module")
def shared_checker() -> Iterator[Checker]:
    checker = Checker(facts(), limits=CheckLimits(seconds=300.0))
    yield checker
    checker.close()


def guide(value: dict[str, Any]) -> Guide:
    return GUIDES.compile(StructuredOutputs.of(value)).fork()


def outputs(value: dict[str, Any], count: int = 20, tokens: int = 400) -> list[str]:
    """Random outputs that ended, of ``count``."""
    texts = [
        generate(guide(value), sequence(), random.Random(seed), tokens) for seed in range(count)
    ]
    return [text for text in texts if text is not None]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_every_output_of_a_schema_is_valid(schema: dict[str, Any], seed: int) -> None:
    text = generate(guide({"json": schema}), sequence(), random.Random(seed), 4000)
    assert text is not None
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "pattern",
    [
        "[0-9]{3}-[0-9]{4}",
        "(yes|no|maybe)",
        r"1{1,3}(\.[12]{1,3}){3}",
        "^a+b?$",
        "é😀{2}",
        "[^x]{3}",
    ],
)
def test_every_output_matches_the_expression(pattern: str) -> None:
    texts = outputs({"regex": pattern})
    assert texts
    assert all(re.fullmatch(pattern, text) for text in texts)


def test_every_output_is_one_of_the_choices() -> None:
    choices = ['a"b\\c', "new\nline", "é😀", "\x00\x1f\x7f\x80\u2028", "/slash/", "a", "aa", "{}"]
    texts = outputs({"choice": choices}, 100)
    assert len(texts) == 100
    assert set(texts) == set(choices)


def test_every_output_of_a_grammar_is_in_its_language() -> None:
    for grammar in ('start: "a" start "b" | "c"', 'root ::= "a" root "b" | "c"'):
        for text in outputs({"grammar": grammar}):
            depth = len(text) // 2
            assert text == "a" * depth + "c" + "b" * depth


def test_any_object_is_an_object() -> None:
    texts = outputs({"json_object": True}, 40, 2000)
    assert texts
    assert {type(json.loads(text)) for text in texts} == {dict}


def accepts(value: dict[str, Any], text: str) -> bool:
    """Whether the text, spelled byte by byte, is a whole output."""
    one, of = guide(value), sequence()
    of.tokens += [TOKENIZER.convert_tokens_to_ids(bytes_to_unicode()[b]) for b in text.encode()]
    try:
        return EOS in allowed(one.mask(of))
    except GrammarError:
        return False


@pytest.mark.parametrize(
    ("schema", "text", "other"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, f"{2**63 - 1}", f"{2**63}"),
        ({"type": "integer", "exclusiveMaximum": 2**63}, f"{2**63 - 1}", f"{2**63}"),
        ({"type": "integer", "minimum": 2**59}, f"{2**59}", f"{2**59 - 1}"),
        ({"type": "integer", "exclusiveMinimum": -(2**53)}, f"{1 - 2**53}", f"{-(2**53)}"),
        ({"enum": [[2**60]]}, f"[{2**60}]", f"[{2**60 + 1}]"),
    ],
)
def test_integers_are_those_of_the_schema(schema: dict[str, Any], text: str, other: str) -> None:
    assert accepts({"json": schema}, text)
    assert not accepts({"json": schema}, other)


@pytest.mark.parametrize(
    "before",
    ["", '"%json {" ', '/["]%json \\{/ ', '<"> ', '"a" # "%json {\n | ', '"a" // "%json {\n | '],
)
def test_a_schema_in_a_grammar_is_enforced_as_one_alone(before: str) -> None:
    big = json.dumps({"const": 1234567890123456789})
    with pytest.raises(GrammarError, match="const: an integer beyond"):
        guide({"grammar": f"start: {before}%json\n{big}"})
    either = json.dumps({"oneOf": [{"const": 5}, {"const": "é"}]})
    value = {"grammar": f'start: %json {either} "!"\nOTHER: "%json {big[:-1]}"'}
    assert accepts(value, "5!")
    assert accepts(value, '"é"!')
    assert not accepts(value, "6!")


@pytest.mark.parametrize("value", [{"json": {}}, {"json_object": True}], ids=["json", "object"])
def test_numbers_are_finite_and_names_have_one_spelling(value: dict[str, Any]) -> None:
    for number in ("0", "-1.5", "6.02e23", "1E-99", "9.9e307", "9" * 308, "99e99"):
        assert accepts(value, f'{{"a": {number}}}')
    for number in ("1e308", "95e735", "2e+9999", "9" * 309, "9" * 201 + "e150"):
        assert not accepts(value, f'{{"a": {number}}}')
    for name in ("a", "é", r"\n\"\\", r"\u0001"):
        assert accepts(value, f'{{"{name}": 1}}')
    for name in (r"\u0061", r"\u00e9", r"\/", r"\u000a"):
        assert not accepts(value, f'{{"x": [{{"{name}": 1}}]}}')


def test_a_name_that_is_spelled_with_escapes_is_no_other_name() -> None:
    schema = {
        "properties": {"a": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
        "type": "object",
    }
    assert accepts({"json": schema}, '{"a": null, "b": true}')
    assert not accepts({"json": schema}, r'{"\u0061": true}')


@pytest.mark.parametrize("draft", ["draft-04/schema#", "draft/2020-12/schema"])
def test_references_and_data_of_a_tools_schema_hold_in_a_list_of_calls(draft: str) -> None:
    tool = {
        "$schema": f"http://json-schema.org/{draft}",
        "properties": {"a": {"$ref": "#/definitions/D"}, "b": {"const": {"$ref": "#/a"}}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "definitions": {"D": {"enum": [5]}},
    }
    other = {**tool, "definitions": {"D": {"enum": [6]}}}
    value = {"json": calls_schema([("f", tool), ("g", other)], parallel=True)}
    call = '[{"name": "f", "parameters": {"a": 5, "b": {"$ref": "#/a"}}}]'
    assert accepts(value, call)
    assert not accepts(value, call.replace("5", "6"))
    assert accepts(value, call.replace("5", "6").replace('"f"', '"g"'))


@pytest.mark.parametrize("name", ["a", "é."])
def test_no_comma_follows_where_a_pattern_matches_listed_names_only(name: str) -> None:
    pattern = "^(" + re.escape(name) + "|other)$"
    schema = {
        "type": "object",
        "properties": {"other": {"type": "integer"}},
        "required": ["other", name],
        "additionalProperties": False,
        "patternProperties": {pattern: {"maximum": 5}, "^unlisted.$": {"const": 1}},
    }
    quoted = json.dumps(name, ensure_ascii=False)
    assert accepts({"json": schema}, f'{{"other":4,{quoted}:5,"unlisted1":1}}')
    assert not accepts({"json": schema}, f'{{"other":6,{quoted}:5}}')
    assert not accepts({"json": schema}, f'{{"other":4,{quoted}:6}}')
    schema["patternProperties"] = {pattern: {"maximum": 5}}
    one, of = guide({"json": schema}), sequence()
    whole = f'{{"other":4,{quoted}:null'
    of.tokens += [TOKENIZER.convert_tokens_to_ids(bytes_to_unicode()[b]) for b in whole.encode()]
    after = {TOKENIZER.decode([token]) for token in allowed(one.mask(of))}
    assert "}" in after
    assert not any("," in text for text in after)


def test_a_pattern_holds_for_the_names_that_match_and_not_where_they_are_referred_to() -> None:
    schema = {
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}},
        "type": "object",
        "required": ["a", "b"],
        "additionalProperties": False,
        "patternProperties": {"^a$": {"maximum": 5}},
    }
    assert accepts({"json": schema}, '{"a":4,"b":9}')
    assert not accepts({"json": schema}, '{"a":9,"b":4}')


def test_white_space_between_two_tokens_of_json_is_bounded() -> None:
    """An output that takes white space wherever it may, as small models do, still ends."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"enum": [1]},
            "b": {"type": "array", "items": {"enum": [2]}, "maxItems": 2},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    blank = {
        number for number in range(len(TOKENIZER)) if TOKENIZER.decode([number]) in {" ", "\t"}
    }
    one, of = guide({"json": schema}), sequence()
    for _ in range(1000):
        ids = allowed(one.mask(of))
        if ids == [EOS]:
            break
        blanks = [number for number in ids if number in blank]
        of.tokens.append((blanks or [number for number in ids if number != EOS])[0])
    text = TOKENIZER.decode(of.tokens[1:])
    assert json.loads(text)["a"] == 1
    assert max(len(blanks) for blanks in re.findall(r"\s+", text)) == 16


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= start\nstart ::= "a"\n', ["a"], ["b", ""]),
        ('root ::= "x" start-a start\nstart-a ::= "a"\nstart ::= "b" | start-a', ["xab"], ["xa"]),
        # Names that differ in case or in "-" and "_" alone, also of rules that are terminals.
        ('root ::= TEXT text Text\nTEXT ::= "a"\ntext ::= "b" text?\nText ::= "c"', ["abc"], ["a"]),
        ('root ::= a-b a_b\na-b ::= "1"\na_b ::= "2"\n', ["12"], ["11", "22"]),
        ('root ::= rule1 root2\nrule1 ::= "1"\nroot2 ::= "2"', ["12"], ["1"]),
        (r'root ::= "\u0061" [\u0062-\u0064]', ["ab", "ad"], ["ae", "a"]),
        (r'root ::= "\U00000061" [\U00000062-\U00000064]', ["ab", "ad"], ["ae"]),
        (r'root ::= "\u0022\u005c" [\u005d\u002d\u005e\u0062]', ['"\\]', '"\\-', '"\\^'], ['"a']),
        (r"root ::= [^\u0061]", ["b", "^"], ["a"]),
        (r'root ::= "\\u0061"', [r"\u0061"], ["a"]),
        (r'root ::= "a\u000ab"', ["a\nb"], ["ab"]),
        # What only looks like a name stays.
        ('# start ::= "z"\nroot ::= "a"{2,3} # start\n', ["aa", "aaa"], ["a"]),
        ('root ::= "start" [start]', ["starts"], ["startx"]),
        ('root ::= ("a" | start-1)\n  \nstart-1 ::= [b-c]+', ["a", "bc"], ["ab"]),
    ],
)
def test_grammars_of_llama_cpp_mean_what_they_mean_there(
    grammar: str, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert accepts({"grammar": grammar}, text), text
    for text in bad:
        assert not accepts({"grammar": grammar}, text), text


def test_characters_beyond_the_basic_plane_may_be_written_by_their_number() -> None:
    numbered = r'root ::= "\U0001F600" [\U0001F600-\U0001F64F] "\u00e9"'
    assert lark_of(numbered) == lark_of('root ::= "😀" [😀-🙏] "é"')


CALL = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}}, "b": {"type": "object"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("own", [{}, {"x-guidance": {"whitespace_pattern": " *"}}])
def test_compact_json_has_the_white_space_of_json_dumps_alone(own: dict[str, Any]) -> None:
    outputs = {"json": {**CALL, **own}, "compact": True}
    values: list[dict[str, Any]] = [{"a": []}, {"a": [1, 2]}]
    values.append({"a": [1], "b": {"x": {"y": [None, 1.5]}, "z": ""}})
    for value in values:
        assert accepts(outputs, json.dumps(value))
        assert accepts({"json": CALL}, json.dumps(value))
    for wrong in (
        '{"a":[]}',
        '{"a": [1,2]}',
        '{ "a": []}',
        '{"a": [] }',
        ' {"a": []}',
        '{"a":  []}',
        '{"a": [1 , 2]}',
        '{"a": [],"b": {}}',
        '{\n"a": []}',
        '{"a": []}\n',
        '{"a": [1,\n2]}',
    ):
        assert not accepts(outputs, wrong)
    assert (
        StructuredOutputs.of(outputs).digest
        != StructuredOutputs.of({"json": outputs["json"]}).digest
    )


def test_the_end_is_allowed_only_where_the_output_is_complete() -> None:
    one, of = guide({"regex": "ab?"}), sequence()
    a, b = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "ab")
    seen = []
    for token in (a, b, None):
        ids = allowed(one.mask(of))
        seen.append((EOS in ids, one.at_end))
        if token is not None:
            of.tokens.append(token)
    assert seen == [(False, False), (True, False), (True, True)]


def test_ignore_eos_forbids_the_end_until_nothing_else_is_left() -> None:
    one, of = guide({"regex": "ab?"}), sequence(SamplingParams(ignore_eos=True))
    a, b = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "ab")
    of.tokens.append(a)
    assert allowed(one.mask(of)) == [b]
    of.tokens.append(b)
    assert allowed(one.mask(of)) == [EOS]


@pytest.mark.parametrize("whole", [False, True], ids=["spelled", "one token"])
@pytest.mark.parametrize("value", [{"json": {"enum": [12]}}, {"choice": ["12"]}, {"regex": "12"}])
def test_an_output_begins_after_the_reasoning_which_half_of_the_tokens_end(
    whole: bool, value: dict[str, Any]
) -> None:
    tokenizer = byte_tokenizer.byte_level([], max_length=4096)
    if whole:
        tokenizer.add_special_tokens({"additional_special_tokens": [END]})
    facts = TokenizerFacts.of(tokenizer, len(tokenizer), {EOS})
    assert facts is not None
    asked = StructuredOutputs.of(value).after_reasoning(END)
    guides, endings = Guides(facts), []
    for seed in range(8):
        of = sequence(max_tokens=80)
        one, choose = guides.compile(asked).fork(), random.Random(seed)
        # A model may end its reasoning by itself, and write anything before.
        of.tokens += tokenizer.encode("é < 12 </think " + END * (seed % 2))
        text = generate(one, of, choose, 80, tokenizer)
        assert text is not None
        endings.append(of.generated)
        reasoning, _, answer = text.partition(END)
        assert reasoning.startswith("é < 12 </think ")
        assert answer.strip() == "12"
    assert max(endings[1::2]) < 40 < min(endings[::2])


def bounded(guides: Guides, reasoning: Reasoning) -> Guide:
    made: queue.Queue[Any] = queue.Queue()
    guides.prepare(reasoning, made.put)
    one = made.get(timeout=60)
    assert isinstance(one, Guide)
    return one.fork()


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("whole", [False, True], ids=["spelled", "one token"])
@pytest.mark.parametrize("begin", ["", "<think>"])
@pytest.mark.parametrize("most", [0, 1, 7])
def test_reasoning_has_so_many_tokens_and_all_else_is_free(
    whole: bool, begin: str, most: int
) -> None:
    tokenizer = byte_tokenizer.byte_level([], max_length=4096)
    if whole:
        tokenizer.add_special_tokens({"additional_special_tokens": [END]})
    facts = TokenizerFacts.of(tokenizer, len(tokenizer), {EOS})
    assert facts is not None
    reasoning = Reasoning(most=most, end=END, begin=begin)
    guides = Guides(facts)
    one = bounded(guides, reasoning)
    of = sequence(SamplingParams(reasoning=reasoning, ignore_eos=True), max_tokens=99)
    of.tokens += ids_of(f"\n {begin}") if begin else []
    wanted = ids_of("x")[0]
    for _ in range(most):  # the model would go on for ever
        assert {wanted, EOS} <= {*allowed(one.mask(of))}
        of.tokens.append(wanted)
    for token in tokenizer.encode(END, add_special_tokens=False):
        assert allowed(one.mask(of)) == [token]
        of.tokens.append(token)
    assert {wanted, EOS} <= {*allowed(one.mask(of))}
    of.tokens += ids_of("<think> more of it, " * 2)
    assert {wanted, EOS} <= {*allowed(one.mask(of))}
    again = bounded(guides, reasoning)
    assert allowed(again.mask(of)) == allowed(one.mask(of))  # resumed, all at once


@pytest.mark.parametrize("begin", ["", "<think>"])
def test_reasoning_that_ends_by_itself_or_does_not_come_has_no_bound(begin: str) -> None:
    reasoning = Reasoning(most=9, end=END, begin=begin)
    one, of = bounded(GUIDES, reasoning), sequence(SamplingParams(reasoning=reasoning))
    for text in ("<th", "ey" if begin else f"is{END}", "<think>", "so much more text"):
        assert len(allowed(one.mask(of))) > 200
        of.tokens += ids_of(text)
    assert len(allowed(one.mask(of))) > 200


def test_what_the_model_has_written_of_the_mark_is_not_written_again() -> None:
    reasoning = Reasoning(most=4, end=END)
    one, of = bounded(GUIDES, reasoning), sequence(SamplingParams(reasoning=reasoning))
    of.tokens += ids_of("a</t")
    assert TOKENIZER.decode(allowed(one.mask(of))) == "h"


def test_no_mark_breaks_a_character() -> None:
    reasoning = Reasoning(most=1, end=END)
    one, of = bounded(GUIDES, reasoning), sequence(SamplingParams(reasoning=reasoning))
    first, second = ids_of("é")
    of.tokens.append(first)
    assert len(allowed(one.mask(of))) > 200
    of.tokens.append(second)
    assert TOKENIZER.decode(allowed(one.mask(of))) == "<"


def test_a_bound_on_reasoning_holds_before_a_structured_output_too() -> None:
    asked = StructuredOutputs.of({"choice": ["12"]}).after_reasoning(END)
    of = sequence(SamplingParams(reasoning=Reasoning(most=2, end=END)), max_tokens=99)
    one = GUIDES.compile(asked).fork()
    of.tokens += ids_of("a")
    assert len(allowed(one.mask(of))) > 100
    of.tokens += ids_of("b")
    assert TOKENIZER.decode(allowed(one.mask(of))) == "<"


def test_special_tokens_spell_no_text() -> None:
    ids = set(allowed(guide({"regex": r"(.|\n)+"}).mask(sequence())))
    assert not ids & set(TOKENIZER.all_special_ids)
    assert max(ids) < len(TOKENIZER)  # the logits are wider


def test_a_mask_depends_on_the_tokens_alone() -> None:
    value = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    step_by_step, of = guide(value), sequence()
    choose = random.Random(3)
    for _ in range(12):
        mask = step_by_step.mask(of)
        np.testing.assert_array_equal(mask, step_by_step.mask(of))  # a step that runs again
        np.testing.assert_array_equal(mask, guide(value).mask(of))  # resumed, all at once
        of.tokens.append(choose.choice([number for number in allowed(mask) if number != EOS]))


def test_a_fork_goes_its_own_way() -> None:
    first, second = guide({"regex": "ab|cd"}), sequence()
    other = first.fork()
    one = sequence()
    a, c = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "ac")
    one.tokens.append(a)
    second.tokens.append(c)
    assert TOKENIZER.decode(allowed(first.mask(one))) == "b"
    assert TOKENIZER.decode(allowed(other.mask(second))) == "d"


def test_a_token_that_is_not_allowed_is_an_error_of_its_sequence() -> None:
    of = sequence()
    of.tokens.append(TOKENIZER.convert_tokens_to_ids("x"))
    with pytest.raises(GrammarError):
        guide({"regex": "ab"}).mask(of)


def test_a_checked_source_is_compiled_as_the_check_has_written_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pure Python would hold up the steps."""
    schema = StructuredOutputs(json={"oneOf": [{"const": "é"}, {"const": 2}]})
    grammar = StructuredOutputs(grammar='root ::= "a"')
    checked = [
        one.checked(1, compile_module.enforced(GUIDES._tokenizer, one)) for one in (schema, grammar)
    ]
    for name in ("enforceable", "lark_of"):
        monkeypatch.delattr(compile_module, name)
    guides = Guides(facts())
    assert allowed(guides.compile(checked[0]).mask(sequence()))
    assert allowed(guides.compile(checked[1]).mask(sequence())) == [
        TOKENIZER.convert_tokens_to_ids("a")
    ]


def test_a_source_that_becomes_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "MAX_ENFORCED", 20)
    large, small = (StructuredOutputs(json={"const": "x" * size}) for size in (9, 8))
    assert compile_module.enforced(GUIDES._tokenizer, small) == small.source
    with pytest.raises(GrammarError, match="becomes too large"):
        compile_module.enforced(GUIDES._tokenizer, large)


def prepared(guides: Guides, value: dict[str, Any]) -> Guide | Failure:
    answers: queue.Queue[Guide | Failure] = queue.Queue()
    guides.prepare(StructuredOutputs.of(value), answers.put)
    return answers.get(timeout=300)


def test_a_compilation_answers_on_another_thread_with_a_guide_or_a_failure() -> None:
    assert isinstance(prepared(GUIDES, {"regex": "ab"}), Guide)
    failure = prepared(GUIDES, {"regex": "["})
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.GRAMMAR
    assert str(failure) == f"structured_outputs: {failure.message}"


def test_compiled_grammars_are_kept_up_to_a_number_of_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = []
    compile_matcher = compile_module.compile_matcher

    def counted(tokenizer: Any, outputs: StructuredOutputs) -> Any:
        compiled.append(outputs.source)
        return compile_matcher(tokenizer, outputs)

    monkeypatch.setattr(module, "compile_matcher", counted)
    monkeypatch.setattr(module, "CACHE_BYTES", 2 * (module.USE_BYTES + 4 * facts().words) + 25)
    guides = Guides(facts())
    for regex in ("a", "b", "a", "c", "a", "b"):
        guides.compile(StructuredOutputs(regex=regex).checked(10))
    assert compiled == ["a", "b", "c", "b"]


def test_hundreds_of_small_grammars_are_kept_and_take_no_more_than_they_count(
    shared_checker: Checker,
) -> None:
    guides = Guides(facts())
    gc.collect()
    before = allocated_bytes()
    for number in range(20):
        schema = {"type": "object", "properties": {f"a{number}": {"type": "integer"}}}
        checked = shared_checker.check_now(StructuredOutputs(json=schema))
        generate(guides.compile(checked).fork(), sequence(), random.Random(number), 400)
    gc.collect()
    assert len(guides._cached) == 20
    assert 0 < allocated_bytes() - before < guides.cached_bytes()
    assert 20 * module.CACHE_BYTES / guides.cached_bytes() > 190


GROWING = r"(.|\n)*a(.|\n){60}"  # each "a" doubles its states


def grow(guides: Guides, regex: str, outputs: int = 1) -> None:
    """Follow outputs of 40 tokens, each of another text."""
    for seed in range(outputs):
        one, of, choose = (
            guides.compile(StructuredOutputs(regex=regex)).fork(),
            sequence(),
            random.Random(seed),
        )
        for _ in range(40):
            of.tokens.append(TOKENIZER.convert_tokens_to_ids(choose.choice("ab")))
            one.mask(of)


def test_a_kept_grammar_counts_what_it_has_grown_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0)
    guides = Guides(facts())
    guides.compile(StructuredOutputs(regex=GROWING))
    gc.collect()
    before, counted = allocated_bytes(), guides.cached_bytes()
    grow(guides, GROWING, 15)
    gc.collect()
    grown = allocated_bytes() - before
    assert module.USE_BYTES < grown < guides.cached_bytes() - counted + module.USE_BYTES < 8 * grown
    monkeypatch.setattr(module, "CACHE_BYTES", 2 * module.USE_BYTES)
    guides.compile(StructuredOutputs(regex="b"))
    assert len(guides._cached) == 1


def test_the_growth_of_a_grammar_is_looked_at_once_in_some_time_of_a_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[object] = []

    def look(matcher: object) -> int:
        looks.append(matcher)
        return 0

    monkeypatch.setattr(module, "lexer_fuel", look)
    growth, matcher = module.Growth("kept"), "copy"  # type: ignore[arg-type]
    for _ in range(20):
        growth.count(matcher, module.LOOK_SECONDS / 4)  # type: ignore[arg-type]
    assert looks == ["kept", *5 * ["copy"]]


def test_outputs_of_a_kept_grammar_do_not_use_up_its_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than the library's limit of states, of which one output needs a part."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0)
    guides = Guides(facts())
    first = guides.compile(StructuredOutputs(regex=GROWING))
    grow(guides, GROWING, 60)
    assert guides.compile(StructuredOutputs(regex=GROWING)) is not first
    assert guides.cached_bytes() < 2 * module.GROWN_BYTES


def test_a_grammar_of_which_a_mask_failed_is_not_kept() -> None:
    guides, of = Guides(facts()), sequence()
    outputs = StructuredOutputs(regex="ab")
    kept = guides.compile(outputs)
    of.tokens.append(TOKENIZER.convert_tokens_to_ids("x"))
    with pytest.raises(GrammarError):
        kept.fork().mask(of)
    assert guides.compile(outputs) is not kept


def test_the_steps_go_before_a_compilation() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found: queue.Queue[int] = queue.Queue()
    guides = Guides(facts())
    guides.prepare(StructuredOutputs(regex="a"), lambda _: found.put(priority()))
    assert found.get(timeout=300) == min(19, priority() + module.COMPILER_NICE)


class Stuck:
    """A guide whose mask takes a processor until it is released."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def mask(self, _: Sequence) -> Any:
        while not self.release.is_set():
            sum(range(1000))
        return np.zeros(1, dtype=np.int32)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    guide = Stuck()
    yield guide
    guide.release.set()


class Slow:
    """A guide whose mask takes this processor time, and then this time by the clock."""

    def __init__(self, processor: float, clock: float) -> None:
        self.processor, self.clock = processor, clock

    def mask(self, _: Sequence) -> Any:
        end = time.thread_time() + self.processor
        while time.thread_time() < end:
            pass
        threading.Event().wait(self.clock)
        return np.zeros(1, dtype=np.int32)


class Broken:
    """A guide with a fault that is none of its grammar."""

    def mask(self, _: Sequence) -> Any:
        raise ValueError("broken")


def with_guides(guides: list[Any]) -> list[Sequence]:
    sequences = [sequence() for _ in guides]
    for i, (of, one) in enumerate(zip(sequences, guides, strict=True)):
        of.id, of.guide = i, one
    return sequences


def test_a_late_mask_fails_its_own_sequence_and_none_that_waits_behind_it(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MASK_SECONDS", 0.2)
    guides = Guides(facts(), threads=1)
    late, behind = with_guides([stuck, guide({"regex": "ab"})])
    with guides.masks([late, behind]) as pending:
        words, failed = pending.result()
    assert dict(failed) == {0: Failure(TOO_COMPLEX, FailureKind.GRAMMAR)}
    assert list(words) == [1]
    with guides.masks([behind]) as pending:  # the next step has threads that work
        assert list(pending.result().words) == [1]


@pytest.mark.parametrize(
    ("count", "processor", "clock"),
    [(20, 0.03, 0.0), (1, 0.0, 0.5)],
    ids=["many slow ones", "one without a processor"],
)
def test_a_mask_is_late_by_its_own_processor_time(
    count: int, processor: float, clock: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("MASK_SECONDS", 0.2), ("LATE_LOOK_SECONDS", 0.001)):
        monkeypatch.setattr(module, name, seconds)
    with Guides(facts()).masks(with_guides([Slow(processor, clock)] * count)) as pending:
        words, failed = pending.result()
    assert (len(words), failed) == (count, {})


def test_a_late_thread_is_replaced_though_another_one_raises(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MASK_SECONDS", 0.1)
    guides = Guides(facts(), threads=2)
    fillers = guides._fillers
    with pytest.raises(ValueError, match="broken"):
        guides.masks(with_guides([stuck, Broken()])).result()
    assert guides._fillers is not fillers


def test_masks_cost_a_task_for_each_thread_and_none_for_each_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guides, first = Guides(facts(), threads=2), guide({"regex": "ab"})
    sequences = with_guides([first.fork() for _ in range(50)])
    tasks: list[object] = []
    submit = guides._fillers.submit

    def counted(task: Any) -> Any:
        tasks.append(task)
        return submit(task)

    monkeypatch.setattr(guides._fillers, "submit", counted)
    with guides.masks(sequences) as pending:
        words, failed = pending.result()
    assert (len(tasks), sorted(words), failed) == (2, list(range(50)), {})


def test_a_fault_that_is_not_of_a_grammar_is_one_of_the_step() -> None:
    guides, of = Guides(facts()), sequence()
    with pytest.raises(AttributeError), guides.masks([of]) as pending:  # it has no guide
        pending.result()


def test_a_grammar_that_exceeds_a_limit_while_it_runs_fails_its_sequence() -> None:
    guides, of = Guides(facts()), sequence()
    of.guide = guides.compile(StructuredOutputs.of(EXPONENTIAL)).fork()
    letters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "ab"]
    choose = random.Random(1)
    for _ in range(200_000):
        with guides.masks([of]) as pending:
            words, failed = pending.result()
        if failed:
            break
        of.tokens.append(choose.choice(letters))
    assert dict(failed) == {of.id: Failure(TOO_COMPLEX, FailureKind.GRAMMAR)}
    assert not words


def test_facts_are_of_any_tokenizer_that_can_be_read() -> None:
    tokenizer = tiny.tokenizer()
    found = TokenizerFacts.of(tokenizer, tiny.VOCAB + 40, {3, 2, tiny.VOCAB + 100})
    assert found is not None
    assert (found.size, found.eos_ids) == (tiny.VOCAB + 40, (2, 3))
    assert TokenizerFacts.of(tokenizer.backend_tokenizer, 10, {2}) is not None
    assert TokenizerFacts.of(tokenizer, tiny.VOCAB, set()) is None
    assert TokenizerFacts.of(object(), tiny.VOCAB, {2}) is None
    known = TokenizerFacts.of(tokenizer, tiny.VOCAB, {2}, "made before")
    assert known is not None
    assert known.definition == "made before"
    assert definition_of(object()) == ""
