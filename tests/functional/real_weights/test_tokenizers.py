"""With tokenizers that were published, of 32,768 to 200,019 words: a prompt has the ids that
transformers gives it, a stream its text, and every output of a schema is valid.
"""

import itertools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it has no stubs
import pytest
from transformers import PreTrainedTokenizerBase

from fairlead_runtime.api.routes.tokenize import detokenize
from fairlead_runtime.front.limits import LARGE_BODY
from fairlead_runtime.grammar.guides import Guides
from fairlead_runtime.request.structured import StructuredOutputs
from fairlead_runtime.serving.detokenize import REPLACEMENT, Detokenizer, Vocabulary, vocabulary_of
from fairlead_runtime.serving.prompt_encoder import PromptEncoder
from support import grammars
from support.api_harness import MODEL
from support.full import LONG_FORM
from support.published_tokenizers import backend, facts_of, ids_of, loaded
from support.real_tokenizers import QWEN3, TOKENIZERS

# The first run on a machine fetches 70 MB and converts them.
pytestmark = pytest.mark.timeout(1800)

TEXTS = (
    "What is the capital of France?",
    "  two spaces,\ttabs\t\tand\r\nline ends \n\n\n of every kind   ",
    "Größe, naïve, coöperate, Ærøskøbing, ﬁn; a\u0301 and á",
    "日本語のテキストと中文字符，以及한국어",  # noqa: RUF001 - a full-width comma
    "Привет, мир! Ελληνικά; עברית; العربية; हिन्दी; ไทย",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 and \U0001d518\U0001d52b\U0001d526 \U0010fffd",
    "def f(x):\n    return {'a': [x ** 2 for x in range(10)]}  # 3.14159e-10\n",
    "12345678901234567890 1,000,000.00 0x1F600 ½ ² Ⅷ",
    "it's we've they'll I'D YOU'RE",
    "<s>[INST] <|im_end|> <|eot_id|> </s> <|endoftext|> <think> <|start|>",
    "a" * 300 + " " * 300 + "\u200b\ufeff\x00\x7f",
    "\\(\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}\\)",
    "SELECT * FROM t WHERE name = 'O''Brien' -- 50 %",
    "https://example.com/a?b=c&d=%20#e user@example.com",
    "#$%^&*()_+-=[]{}|;':\",./<>?`~",
)
CALL = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of the next days",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "price": {"type": "number", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["日本", "naïve", "🙂"]},
        "date": {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]$"},
    },
    "required": ["name", "price", "kind", "date"],
    "additionalProperties": False,
}


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def conversations() -> list[list[dict[str, Any]]]:
    """Thirty: each text asked at once, and each in the fourth message of a conversation."""
    around = list(zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True))
    return [
        *([message("user", text)] for text in TEXTS),
        *(
            [
                message("system", next_text),
                message("user", "Hello!"),
                message("assistant", f"<think>\nno\n</think>\n\n{next_text}"),
                message("user", text),
            ]
            for text, next_text in around
        ),
    ]


@pytest.fixture(params=TOKENIZERS, ids=str)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return loaded(request.param)


def test_a_conversation_has_the_ids_of_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        tokenizer.chat_template = loaded(QWEN3).chat_template
    template: Any = tokenizer.apply_chat_template
    served = backend(tokenizer, PromptEncoder(tokenizer))
    for messages in conversations():
        expected = template(messages, add_generation_prompt=True, return_dict=False)
        assert ids_of(served, {"messages": messages}) == expected
        assert len(expected) > 5


def test_calls_of_tools_have_the_ids_of_transformers() -> None:
    """Clients send arguments as text; a template writes the value."""
    tokenizer = loaded(QWEN3)
    template: Any = tokenizer.apply_chat_template
    served = backend(tokenizer, PromptEncoder(tokenizer))

    def called(arguments: Any) -> list[dict[str, Any]]:
        function = {**CALL, "arguments": arguments}
        calls = [{"id": "call_1", "type": "function", "function": function}]
        return [
            message("user", "Will it rain?"),
            {**message("assistant", ""), "tool_calls": calls},
            {**message("tool", '{"rain": false}'), "tool_call_id": "call_1"},
        ]

    expected = template(
        called(CALL["arguments"]), tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    sent = called(json.dumps(CALL["arguments"]))
    assert ids_of(served, {"messages": sent, "tools": TOOLS}) == expected
    assert "Zürich" in tokenizer.decode(expected)


def test_a_text_has_the_ids_of_transformers_here_and_in_the_process_of_large_ones(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    encoder = PromptEncoder(tokenizer, facts_of(tokenizer).definition)
    served = backend(tokenizer, encoder)
    large = "\n".join(itertools.islice(itertools.cycle(TEXTS), 600))
    try:
        for text in (*TEXTS, large):
            expected = tokenizer(text)["input_ids"]
            assert ids_of(served, {"prompt": text}) == expected
            whole, _ = detokenize(json.dumps({"tokens": expected}).encode(), MODEL, served)
            assert whole["prompt"] == tokenizer.decode(expected)
        assert len(json.dumps(large)) > LARGE_BODY
        assert encoder.child is not None
        assert encoder.child.pid is not None
    finally:
        encoder.close()


def streamed(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    stream = Detokenizer(vocabulary)
    return "".join([*map(stream.add, ids), stream.finish()])


def one_replacement(text: str) -> str:
    """transformers replaces a run of invalid bytes at once, a stream each of them."""
    return re.sub(f"{REPLACEMENT}+", REPLACEMENT, text)


def test_a_stream_gives_the_text_of_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    vocabulary = vocabulary_of(tokenizer)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert streamed(vocabulary, ids) == tokenizer.decode(ids, skip_special_tokens=True)
    choose = random.Random(0)
    for _ in range(40):
        ids = [choose.randrange(len(tokenizer)) for _ in range(60)]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert one_replacement(streamed(vocabulary, ids)) == one_replacement(text)


def test_every_output_of_a_schema_is_valid(tokenizer: PreTrainedTokenizerBase) -> None:
    guides = Guides(facts_of(tokenizer))
    compiled = guides.compile(StructuredOutputs.of({"json": SCHEMA}))
    for seed in range(10 if LONG_FORM else 2):
        text = grammars.generate(
            compiled.fork(), grammars.sequence(), random.Random(seed), 400, tokenizer
        )
        assert text is not None
        jsonschema.validate(json.loads(text), SCHEMA)
