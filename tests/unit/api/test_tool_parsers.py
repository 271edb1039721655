"""The parsers of calls and of reasoning: known texts of each format, and any text in any pieces."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_runtime.api.tools.forced import NamedParser, RequiredParser
from fairlead_runtime.api.tools.formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    FirstCallOnly,
    ReplyFormat,
    ToolUse,
    reply_format,
)
from fairlead_runtime.api.tools.hermes import HermesParser
from fairlead_runtime.api.tools.llama import LlamaParser
from fairlead_runtime.api.tools.mistral import MAX_HEAD, MistralParser
from fairlead_runtime.api.tools.parts import (
    CallArguments,
    CallBegun,
    Content,
    Parser,
    Part,
    Parts,
    PlainParser,
    Reasoning,
)
from fairlead_runtime.api.tools.reasoning import ReasoningParser
from support import tiny

NAMES = frozenset({"f", "get_weather"})


def _id() -> str:
    return "id"


PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": lambda: HermesParser(NAMES, _id),
    "llama": lambda: LlamaParser(NAMES, _id),
    "mistral": lambda: MistralParser(NAMES, _id),
    "required": lambda: RequiredParser(NAMES, _id),
    "named": lambda: NamedParser("f", _id),
    "think": lambda: ReasoningParser(HermesParser(NAMES, _id), inside=False, show=True),
    "inside": lambda: ReasoningParser(PlainParser(), inside=True, show=True),
    "first": lambda: FirstCallOnly(HermesParser(NAMES, _id)),
}


def parsed(parser: Parser, *pieces: str) -> list[Part]:
    """The parts of all pieces, with neighbours of one kind joined."""
    joined = Parts()
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()]:
        match part:
            case Content(text):
                joined.content(text)
            case Reasoning(text):
                joined.reasoning(text)
            case CallArguments(index, text):
                joined.arguments(index, text)
            case CallBegun():
                joined.call(part)
    return joined.take()


def shown(parts: list[Part]) -> tuple[str, list[tuple[str, Any]]]:
    """(content, calls with their parsed arguments)."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    arguments = [part.text for part in parts if isinstance(part, CallArguments)]
    return content, [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


PARIS = {"city": 'Paris "}]</tool_call>', "days": [1, {"from": None}]}
DUMPED = json.dumps(PARIS)
WRITTEN = {
    "hermes": (
        f'Let me look.\n<tool_call>\n{{"name": "get_weather", "arguments": {DUMPED}}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {}, "name": "f"}\n</tool_call>'
    ),
    "llama": (
        f'{{"type": "function", "name": "get_weather", "parameters": {DUMPED}}}; '
        '<|python_tag|>{"name": "f", "arguments": {}}'
    ),
    "mistral": (
        f'Let me look. [TOOL_CALLS] [{{"name": "get_weather", "arguments": {DUMPED}, "id": "x1"}}, '
        '{"name": "f", "arguments": {}}]'
    ),
    "required": (
        f' [{{"name": "get_weather", "parameters": {DUMPED}}},\n'
        '{"name": "f", "parameters": {}}]'
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_calls_of_each_format_are_found(name: str) -> None:
    content, calls = shown(parsed(PARSERS[name](), WRITTEN[name]))
    assert calls == [("get_weather", PARIS), ("f", {})]
    assert content == ("Let me look." if "Let" in WRITTEN[name] else "")


def test_mistrals_newer_form_has_the_name_before_the_arguments() -> None:
    text = f"Hm. [TOOL_CALLS]get_weather[ARGS]{DUMPED}[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{{}}"
    content, calls = shown(parsed(PARSERS["mistral"](), text))
    assert (content, calls) == ("Hm.", [("get_weather", PARIS), ("f", {})])


def test_the_arguments_of_a_named_tool_are_the_whole_text() -> None:
    assert shown(parsed(PARSERS["named"](), f" {DUMPED}\n")) == ("", [("f", PARIS)])


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
def test_a_name_comes_as_soon_as_the_arguments_begin_and_then_they_come_in_pieces(
    name: str,
) -> None:
    parser = PARSERS[name]()
    parts = [part for c in WRITTEN[name] for part in parser.feed(c)]
    first = next(place for place, part in enumerate(parts) if isinstance(part, CallBegun))
    assert parts[first + 1] == CallArguments(0, "{")
    pieces = [part.text for part in parts if isinstance(part, CallArguments)]
    assert "".join(pieces) == DUMPED + "{}"
    assert max(map(len, pieces)) <= len("{}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'a < b, <tool_call> and </tool_call> <tool_call>"f"</tool_call>'),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{name: "f", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"na\\ud8me": 1, "arguments": {"a": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arg'),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("hermes", "<tool_ca"),
        ("hermes", "blanks at the end \n"),
        ("llama", 'Use {"name": "f", "parameters": {}}'),
        ("llama", '{"name": "Bob", "parameters": {}}'),
        ("llama", '{"name": "f", "age": 3}'),
        ("llama", '<|python_tag|>search.call(query="x")'),
        ("llama", '["f", {}]'),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]" + "f" * (MAX_HEAD + 1) + "{}"),
        ("mistral", '[TOOL_CALLS] [{"name": "unknown", "arguments": {}}]'),
        ("mistral", "see [TOOL] and [1]"),
        ("required", '{"name": "f", "parameters": {}}'),
        ("named", "[]"),
    ],
)
def test_text_that_only_looks_like_a_call_stays_text(name: str, text: str) -> None:
    assert parsed(PARSERS[name](), text) == [Content(text)]


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", '{"a": 1'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</too', "", '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> ok', " ok", '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {a: }}</tool_call>', "", "{a: }"),
        ('<tool_call>{"name": "f", "arguments": {}} and more', " and more", "{}"),
    ],
)
def test_a_call_that_is_cut_or_malformed_after_its_beginning_stays_a_call(
    text: str, content: str, arguments: str
) -> None:
    parts = parsed(PARSERS["hermes"](), text)
    assert parts[:2] == [CallBegun(0, "id", "f"), CallArguments(0, arguments)]
    assert parts[2:] == ([Content(content)] if content else [])


PIECES = st.sampled_from(
    [
        *(text for written in WRITTEN.values() for text in (written, written[: len(written) // 2])),
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<think>",
        "</think>",
        '{"name": "f", "arguments": {',
        '"a": "\\"',
        *'{}[]":,;\\ \n<f1é',
        "null",
    ]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


@pytest.mark.parametrize("name", PARSERS)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 400), max_size=8))
def test_any_split_of_any_text_gives_the_same_parts(name: str, text: str, cuts: list[int]) -> None:
    whole = parsed(PARSERS[name](), text)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert parsed(PARSERS[name](), *pieces) == whole
    assert parsed(PARSERS[name](), *text) == whole


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
@given(text=TEXTS)
def test_what_is_no_call_is_shown_whole(name: str, text: str) -> None:
    parts = parsed(PARSERS[name](), text)
    if not any(isinstance(part, CallBegun) for part in parts):
        assert parts == ([Content(text)] if text else [])


@pytest.mark.parametrize("name", ["required", "named"])
@given(text=TEXTS)
def test_what_is_no_forced_call_is_shown_but_for_the_beginning_of_one(name: str, text: str) -> None:
    parts = parsed(PARSERS[name](), text)
    if not any(isinstance(part, CallBegun) for part in parts):
        content = "".join(part.text for part in parts if isinstance(part, Content))
        assert text.startswith(content)
        assert parsed(PARSERS[name](), "x") == [Content("x")]


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
@given(
    arguments=st.dictionaries(
        st.text(), st.recursive(st.text() | st.none(), st.lists, max_leaves=10), max_size=4
    )
)
def test_any_json_object_can_be_arguments(name: str, arguments: dict[str, Any]) -> None:
    for text in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=1)):
        written = WRITTEN[name].replace(DUMPED, text)
        assert shown(parsed(PARSERS[name](), written))[1] == [("get_weather", arguments), ("f", {})]


# -- reasoning


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("think", "<think>\nhm\n</think>\n\nyes", [Reasoning("hm"), Content("yes")]),
        ("think", " \n<think>a < b</think>c ", [Reasoning("a < b"), Content("c ")]),
        ("think", "<think></think>yes", [Content("yes")]),
        ("think", " yes <think>no</think>", [Content(" yes <think>no</think>")]),
        ("think", "<think>hm </thi", [Reasoning("hm")]),
        ("think", "<thi", [Content("<thi")]),
        ("inside", "hm </think> yes", [Reasoning("hm"), Content("yes")]),
        ("inside", "<think>hm", [Reasoning("hm")]),
        (
            "think",
            '<think>call?</think><tool_call>{"name": "f", "arguments": {}}</tool_call>',
            [Reasoning("call?"), CallBegun(0, "id", "f"), CallArguments(0, "{}")],
        ),
    ],
)
def test_reasoning_is_separated(name: str, text: str, parts: list[Part]) -> None:
    assert parsed(PARSERS[name](), text) == parts


@pytest.mark.parametrize("before", ["", " \n", "<think>a</think>", "<think>a</think>\n\n", "<thi"])
def test_the_first_token_of_an_answer_is_one_part(before: str) -> None:
    parser = ReasoningParser(PlainParser(), inside=False, show=True)
    parser.feed(before)
    assert [type(part) for part in parser.feed("Hello")] == [Content]
    assert parser.feed(" you") == [Content(" you")]


def test_reasoning_may_be_left_out() -> None:
    parser = ReasoningParser(PlainParser(), inside=False, show=False)
    assert parsed(parser, "<think>hm</think>yes") == [Content("yes")]


# -- which parser


class FakeTokenizer:
    def __init__(self, template: Any, **special: int) -> None:
        self.chat_template = template
        self.all_special_tokens = list(special)
        self.all_special_ids = list(special.values())


LLAMA_TEMPLATE = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name '
    "and its value}. Do not use variables."
)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ('<tool_call>\\n{\\"name\\": <function-name>}\\n</tool_call>', HERMES, ""),
        ("<tool_call><function=f><parameter=a>", None, ""),
        ("{{ x }}<tool_call>{{ name }}<arg_key>", None, ""),
        (LLAMA_TEMPLATE, LLAMA, ""),
        ("{{ '[TOOL_CALLS] [' }}", MISTRAL, ""),
        ({"default": "x", "tool_use": "[TOOL_CALLS]"}, MISTRAL, ""),
        ("{% if '</think>' in content %}<tool_call>", HERMES, "qwen3"),
        ("{{ content }}", None, ""),
        (None, None, ""),
    ],
)
def test_the_format_is_recognized_in_the_chat_template(
    template: Any, tools: Any, reasoning: str
) -> None:
    tokenizer = FakeTokenizer(template)
    found = reply_format(tokenizer, tool_call_parser="auto", reasoning_parser="auto")
    assert (found.tools, found.reasoning) == (tools, reasoning)
    none = reply_format(tokenizer, tool_call_parser="none", reasoning_parser="none")
    assert (none.tools, none.reasoning) == (None, "")
    chosen = reply_format(tokenizer, tool_call_parser="mistral", reasoning_parser="deepseek_r1")
    assert (chosen.tools, chosen.reasoning) == (MISTRAL, "deepseek_r1")


def test_the_template_of_the_demo_is_recognized() -> None:
    found = reply_format(tiny.tokenizer(), tool_call_parser="auto", reasoning_parser="auto")
    assert (found.tools, found.reasoning) == (HERMES, "")


def test_marks_that_are_special_tokens_are_shown_to_the_parsers_that_read_them() -> None:
    tokenizer = FakeTokenizer("", **{"[TOOL_CALLS]": 5, "[ARGS]": 6, "<think>": 7, "<s>": 1})
    found = reply_format(tokenizer, tool_call_parser="mistral", reasoning_parser="qwen3")
    assert found.shown_ids(tools=True) == {5, 6, 7}
    assert found.shown_ids(tools=False) == {7}


@pytest.mark.parametrize(
    ("reasoning", "prompt_end", "inside"),
    [
        ("qwen3", "<|assistant|>", False),
        ("qwen3", "<|assistant|><think>\n", True),
        ("qwen3", "<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<|assistant|>", True),
        ("deepseek_r1", "<|assistant|><think>\n\n</think>\n\n", False),
        ("", "<think>\n", False),
    ],
)
def test_a_prompt_that_ends_with_the_first_mark_begins_the_reasoning(
    reasoning: str, prompt_end: str, inside: bool
) -> None:
    replies = ReplyFormat(reasoning=reasoning)
    parser = replies.parser(ToolUse(), prompt_end=prompt_end, show_reasoning=True)
    begins = Reasoning("hm") if inside else Content("hm")
    assert parsed(parser, "hm") == [begins]
    assert replies.begins_inside(prompt_end) is inside


def test_mistrals_ids_are_what_its_template_accepts_in_the_next_turn() -> None:
    replies = ReplyFormat(tools=MISTRAL)
    parser = replies.parser(ToolUse(names=NAMES), prompt_end="", show_reasoning=True)
    ids = [part.id for part in parsed(parser, WRITTEN["mistral"]) if isinstance(part, CallBegun)]
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert len({*ids}) == 2


def test_one_call_is_kept_where_parallel_calls_are_not_allowed() -> None:
    replies = ReplyFormat(tools=HERMES)
    use = ToolUse(names=NAMES, parallel=False)
    parser = replies.parser(use, prompt_end="", show_reasoning=True)
    assert shown(parsed(parser, WRITTEN["hermes"])) == ("Let me look.", [("get_weather", PARIS)])


class Looked(str):
    """A text that counts the looks at single characters of it."""

    __slots__ = ("looks",)
    looks: int

    def __getitem__(self, place: Any) -> str:
        self.looks += isinstance(place, int)
        return super().__getitem__(place)

    def __iter__(self) -> Any:
        self.looks += len(self)
        return super().__iter__()


LONG = "It thinks, and " * 2000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("think", f"<think>{LONG}</think>{LONG}"),
        ("inside", LONG),
        ("hermes", LONG),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": "{LONG}"}}}}</tool_call>{LONG}'),
        ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {{"a": "{LONG}"}}}}]'),
        ("mistral", f'[TOOL_CALLS]f[ARGS]{{"a": "{LONG}"}}'),
        ("llama", LONG),
        ("required", f'[{{"name": "f", "parameters": {{"a": "{LONG}"}}}}]'),
        ("named", f'{{"a": "{LONG}"}} {LONG}'),
    ],
)
def test_long_texts_are_searched_not_read_character_by_character(name: str, text: str) -> None:
    looked = Looked(text)
    looked.looks = 0
    parts = parsed(PARSERS[name](), looked)
    assert looked.looks < 100
    # The same in pieces of one character, which nothing can skip.
    assert parts == parsed(PARSERS[name](), *text)
