"""Where tokens begin in the text that a completion shows."""

from typing import Any

import orjson
import pytest

from fairlead_runtime.api.answers.prompt_echo import PromptEcho
from fairlead_runtime.api.answers.response_bodies import (
    CompletionEncoder,
    Frame,
    Usage,
    WholeChoice,
)
from fairlead_runtime.api.answers.text_offsets import prompt_offsets
from fairlead_runtime.outputs import Output
from fairlead_runtime.request.logprobs import Logprob
from fairlead_runtime.request.sequence import FinishReason

WORDS = ("<s>", "</s>", " the", "the", "é", " ", "日")
SPECIAL = frozenset({0, 1})


@pytest.mark.parametrize(
    ("text", "ids", "offsets"),
    [
        # Marks of the text take room; one that the tokenizer adds does not.
        ("<s>the</s>é", (0, 3, 1, 4), [0, 3, 6, 10]),
        ("<s>the</s>é", (0, 0, 3, 1, 4), [0, 0, 3, 6, 10]),
        ("the the", (0, 3, 2), [0, 0, 3]),
        ("<s><s>the", (0, 0, 0, 3), [0, 0, 3, 6]),
        ("the", (0, 3, 1), [0, 0, 3]),  # the end that a tokenizer adds
        ("", (0,), [0]),
        # The space that a tokenizer puts in front is none of the text's.
        ("the the", (0, 2, 2), [0, 0, 3]),
        ("the", (5, 3), [0, 0]),
        # Text that no token has, and text that a normalizer has changed.
        ("the \n é", (3, 4), [0, 6]),
        ("ＴＨＥ日é", (3, 6, 4), [0, 3, 4]),
        # The prompt's ids, of whose text the marks are left out.
        ("thethe", (0, 3, 1, 1, 3), [0, 0, 3, 3, 3]),
    ],
)
def test_each_token_of_a_prompt_begins_where_its_text_does(
    text: str, ids: tuple[int, ...], offsets: list[int]
) -> None:
    pieces = [WORDS[token].encode() for token in ids]
    assert [*prompt_offsets(text, ids, SPECIAL, pieces.__getitem__)] == offsets


def test_a_character_of_several_tokens_begins_with_the_first() -> None:
    pieces = [b"a", "日".encode()[:1], "日".encode()[1:], b"b"]
    assert [*prompt_offsets("a日b", range(4), (), pieces.__getitem__)] == [0, 1, 2, 2]


def outputs() -> list[Output]:
    """Two words, and the end, which makes no text."""
    entries = {token: Logprob(-1.0, 1, WORDS[token]) for token in (2, 1)}
    prompt = (None, *({token: Logprob(-1.0, 1, WORDS[token])} for token in (3, 1)))
    tokens = ((2,), (2, 1))
    return [
        Output(
            0,
            ids,
            " the",
            tuple({token: entries[token]} for token in ids),
            FinishReason.STOP if place else None,
            prompt_logprobs=None if place else prompt,
        )
        for place, ids in enumerate(tokens)
    ]


@pytest.mark.parametrize(
    ("ids", "echo", "offsets"),
    [
        ((0, 3, 1), ("<s>the</s>",), [0, 3, 6, 10, 14, 18]),
        ((0, 3, 1), (), [0, 4, 8]),
        ((0,), (), [0, 3, 7]),  # nothing before the output: its first space is dropped
    ],
)
def test_a_stream_has_the_offsets_of_the_whole_answer(
    ids: tuple[int, ...], echo: tuple[str, ...], offsets: list[int]
) -> None:
    def encoder() -> CompletionEncoder:
        frame = Frame(
            id="a",
            created=1,
            model="m",
            top=0,
            usage=False,
            token_bytes={},
            special=SPECIAL,
            hidden=SPECIAL,
            first_text=lambda token: WORDS[token].removeprefix(" "),
            prompts=PromptEcho(ids=(ids,), echo=echo, token_text=lambda token: WORDS[token]),
        )
        return CompletionEncoder(frame)

    whole = WholeChoice()
    for output in outputs():
        whole.add(output)
    body = orjson.loads(b"".join(encoder().body_pieces([whole], Usage())))
    assert body["choices"][0]["logprobs"]["text_offset"] == offsets
    streaming = encoder()
    events = b"".join(streaming.events(0, output) for output in outputs()).split(b"\n\n")
    choices: list[Any] = [orjson.loads(event[6:])["choices"][0] for event in events if event]
    streamed = [each["logprobs"]["text_offset"] for each in choices if each["logprobs"]]
    assert [offset for part in streamed for offset in part] == offsets
