"""Calls as people ask for them, in the forms of published templates and tokenizers: a conversation
with them has the ids of transformers, an answer with them is read back as it was meant, whole and
in any pieces, and the grammar of a required call lets the right ones through and no others.
"""

import itertools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jsonschema  # type: ignore[import-untyped]  # it has no stubs
import pytest
from llguidance import LLTokenizer

from fairlead_runtime.api.bodies.tool_bodies import Tool, Tools, tools_of
from fairlead_runtime.api.tools.formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    PLAIN,
    ReplyFormat,
    ToolFormat,
    reply_format,
)
from fairlead_runtime.api.tools.parts import CallArguments, CallBegun, Content, Parser
from fairlead_runtime.grammar.compile import GrammarError, compile_matcher
from fairlead_runtime.models.chat import encode_chat
from fairlead_runtime.request.structured import StructuredOutputs
from fairlead_runtime.serving.detokenize import Detokenizer, vocabulary_of
from fairlead_runtime.serving.prompt_encoder import PromptEncoder
from support import tool_calls
from support.full import LONG_FORM
from support.published_tokenizers import backend, facts_of, ids_of, loaded
from support.real_tokenizers import LLAMA_3_1, MISTRAL_V3, QWEN3, TEKKEN, Tokenizer
from support.tool_calls import Call, Case

# The first run on a machine fetches 80 MB and converts them.
pytestmark = pytest.mark.timeout(1800)
# Every so many cases of 2,701, which ask for 4,444 calls; some of each kind.
EVERY = 1 if LONG_FORM else 16
BEGIN, END = "<|im_start|>assistant\n", "<|im_end|>"  # of an answer of Qwen3's template


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return tool_calls.cases()[::EVERY]


def written(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def answer(calls: Sequence[Call], *, as_text: bool) -> dict[str, Any]:
    """The assistant's message with ``calls``: clients send arguments as text, templates are given
    values.
    """
    functions = [
        {"name": name, "arguments": written(arguments) if as_text else arguments}
        for name, arguments in calls
    ]
    made = [
        {"id": f"call_{number}", "type": "function", "function": function}
        for number, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def conversation(case: Case, *, as_text: bool) -> list[dict[str, Any]]:
    """All turns, each with its calls and their results."""
    messages: list[dict[str, Any]] = []
    for turn in case.turns:
        messages += turn.messages
        if turn.calls:
            messages.append(answer(turn.calls, as_text=as_text))
        messages += [
            {"role": "tool", "tool_call_id": f"call_{number}", "content": written({"done": name})}
            for number, (name, _) in enumerate(turn.calls)
        ]
    return messages


def test_conversations_with_calls_have_the_ids_of_transformers(cases: list[Case]) -> None:
    tokenizer = loaded(QWEN3)
    template: Any = tokenizer.apply_chat_template
    served = backend(tokenizer, PromptEncoder(tokenizer))
    for case in cases:
        expected = template(
            conversation(case, as_text=False),
            tools=case.tools,
            add_generation_prompt=True,
            return_dict=False,
        )
        body = {"messages": conversation(case, as_text=True), "tools": case.tools}
        assert ids_of(served, body) == expected, case.id


# -- answers are read back


def by_template(calls: Sequence[Call]) -> str:
    """The answer of Qwen3's template, with its empty thoughts."""
    template: Any = loaded(QWEN3).apply_chat_template
    said = [{"role": "user", "content": "?"}, answer(calls, as_text=False)]
    text: str = template(said, tokenize=False)
    return text[text.rindex(BEGIN) + len(BEGIN) : text.rindex(END)]


def by_llama(calls: Sequence[Call]) -> str:
    return "; ".join(written({"name": name, "parameters": value}) for name, value in calls)


def by_mistral(calls: Sequence[Call]) -> str:
    """Up to its seventh tokenizer."""
    made = [{"name": name, "arguments": value, "id": "a1b2c3d4e"} for name, value in calls]
    return f"[TOOL_CALLS] {written(made)}"


def by_newer_mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{written(value)}" for name, value in calls)


class Form(NamedTuple):
    """How a model with ``tokenizer`` writes calls, and the format as which they are read: None
    where the template tells.
    """

    write: Callable[[Sequence[Call]], str]
    tokenizer: Tokenizer
    read_as: ToolFormat | None = None

    def replies(self) -> ReplyFormat:
        tokenizer = loaded(self.tokenizer)
        name = self.read_as.name if self.read_as else "auto"
        return reply_format(tokenizer, tool_call_parser=name, reasoning_parser="auto")


FORMS = (
    Form(by_template, QWEN3),
    Form(by_llama, LLAMA_3_1, LLAMA),
    Form(by_mistral, MISTRAL_V3, MISTRAL),
    Form(by_newer_mistral, TEKKEN, MISTRAL),
)


def read(parser: Parser, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and each call with the text of its arguments."""
    parts = [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()]
    calls = [(part.index, part.name) for part in parts if isinstance(part, CallBegun)]
    arguments = [part for part in parts if isinstance(part, CallArguments)]
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return content, [
        (name, "".join(part.text for part in arguments if part.index == index))
        for index, name in calls
    ]


def cut(text: str, draw: random.Random) -> list[str]:
    """Pieces of up to nine characters."""
    ends = [0]
    while ends[-1] < len(text):
        ends.append(ends[-1] + draw.randint(1, 9))
    return [text[begin:end] for begin, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.tokenizer.name)
def test_calls_are_read_back_as_they_were_meant(form: Form, cases: list[Case]) -> None:
    """Not streamed, in random pieces, and token by token."""
    tokenizer, replies, draw = loaded(form.tokenizer), form.replies(), random.Random(0)
    vocabulary, visible = vocabulary_of(tokenizer), replies.shown_ids(tools=True)
    for case in cases:
        use = parsed(case, "auto").use
        for turn in case.turns:
            if not turn.calls:
                continue
            text = form.write(turn.calls)
            stream = Detokenizer(vocabulary, (), visible)
            ids = encode_chat(tokenizer, text)
            streamed = [*map(stream.add, ids), stream.finish()]
            meant = [(name, written(arguments)) for name, arguments in turn.calls]
            for pieces in ([text], cut(text, draw), streamed):
                parser = replies.parser(use, prompt_end="", show_reasoning=True)
                assert read(parser, pieces) == ("", meant), case.id


# -- the grammar of a required call


def parsed(case: Case, choice: Any) -> Tools:
    tools = [Tool.model_validate(tool) for tool in case.tools]
    return tools_of(tools, choice, parallel=None)


def valid(case: Case, call: Call) -> bool:
    schema = case.parameters().get(call.name)
    return schema is not None and jsonschema.Draft202012Validator(schema).is_valid(call.arguments)


def broken(case: Case, call: Call) -> list[Call]:
    """The call of another tool, with another argument, and with each argument of another type."""
    name, arguments = call
    changed = [
        Call(name, {**arguments, key: [value] if isinstance(value, (str, dict)) else str(value)})
        for key, value in arguments.items()
    ]
    changed += [Call(f"{name}2", arguments), Call(name, {**arguments, "another": 1})]
    return [each for each in changed if not valid(case, each)]


def accepts(tokenizer: LLTokenizer, schema: dict[str, Any], values: Sequence[Any]) -> list[bool]:
    """Whether the grammar of ``schema`` lets each of ``values`` through, to its end. A schema that
    nothing can fulfil, as a list that must be one of some texts, is refused whole.
    """
    try:
        matcher = compile_matcher(tokenizer, StructuredOutputs.of({"json": schema}))
    except GrammarError:
        return [False] * len(values)
    found = []
    for value in values:
        walk = matcher.deep_copy()
        ids = tokenizer.tokenize_str(written(value))
        found.append(walk.try_consume_tokens(ids) == len(ids) and walk.is_accepting())
    return found


def listed(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """As a required answer has them."""
    return [{"name": name, "parameters": arguments} for name, arguments in calls]


def test_a_required_answer_is_any_right_call_and_no_wrong_one(cases: list[Case]) -> None:
    tokenizer = facts_of(loaded(QWEN3)).build()
    refused = 0
    for case in cases:
        tools = parsed(case, "required")
        assert tools.schema
        calls = [call for turn in case.turns for call in turn.calls]
        # Some right answers do not fit the schemas that they are asked for with.
        right = [call for call in calls if valid(case, call)]
        wrong = [call for call in calls if not valid(case, call)]
        wrong += [each for call in right[:4] for each in broken(case, call)]
        good = [*([call] for call in right), *([right] if len(right) > 1 else [])]
        bad = [[call] for call in wrong]
        values = [listed(each) for each in (*good, *bad)]
        expected = [True] * len(good) + [False] * len(bad)
        assert accepts(tokenizer, tools.schema, values) == expected, case.id
        refused += len(bad)
    assert refused > 2 * len(cases)


def test_a_required_answer_is_read_back(cases: list[Case]) -> None:
    """As it is written by the grammar, whatever the model's own format."""
    draw = random.Random(0)
    for case in cases:
        use = parsed(case, "required").use
        for turn in case.turns:
            if not turn.calls:
                continue
            text = written(listed(turn.calls))
            meant = [(name, written(arguments)) for name, arguments in turn.calls]
            for pieces in ([text], cut(text, draw)):
                parser = PLAIN.parser(use, prompt_end="", show_reasoning=False)
                assert read(parser, pieces) == ("", meant), case.id


def test_the_forms_are_known_by_their_templates() -> None:
    assert FORMS[0].replies().tools is HERMES
