"""Answers that are not streamed: encoded in short pieces that together are one JSON body."""

import itertools
from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from fairlead_runtime.api.answers import response_bodies
from fairlead_runtime.api.answers.logprob_bodies import PIECE_TOKENS
from fairlead_runtime.api.answers.response_bodies import (
    PIECE,
    ChatEncoder,
    CompletionEncoder,
    Frame,
    Usage,
    WholeChoice,
)
from fairlead_runtime.outputs import Output
from fairlead_runtime.request.logprobs import Logprob
from fairlead_runtime.request.sequence import FinishReason

TOKENS, TOP = 1000, 20
ENTRIES = {i: Logprob(-0.5 - i, i + 1, f"é{i}") for i in range(TOP)}


def choice() -> WholeChoice:
    whole = WholeChoice()
    for step in range(TOKENS):
        reason = FinishReason.LENGTH if step == TOKENS - 1 else None
        whole.add(Output(0, (step % TOP,), "é0", (ENTRIES,), reason))
    return whole


@pytest.mark.parametrize(
    ("encoder", "name"),
    [(ChatEncoder, "chat_content"), (CompletionEncoder, "completion_logprobs")],
)
def test_no_piece_of_a_whole_answer_encodes_many_tokens(
    encoder: type[ChatEncoder] | type[CompletionEncoder],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode, sizes = getattr(response_bodies, name), []

    def counted(
        ids: list[int], entries: list[Mapping[int, Logprob]], *more: Any, **named: Any
    ) -> Any:
        sizes.append(len(ids))
        return encode(ids, entries, *more, **named)

    monkeypatch.setattr(response_bodies, name, counted)
    frame = Frame(id="a", created=1, model="m", top=TOP, usage=False, token_bytes={})
    pieces: list[bytes] = []
    for piece in encoder(frame).body_pieces([choice(), choice()], Usage()):
        assert len(sizes) - len(pieces) <= 1, "one slice of tokens for a piece"
        pieces.append(piece)
    assert max(sizes) == PIECE_TOKENS
    assert sum(sizes) == 2 * TOKENS
    assert max(map(len, pieces)) <= 2 * PIECE
    body = orjson.loads(b"".join(pieces))
    assert [c["index"] for c in body["choices"]] == [0, 1]
    for answer in body["choices"]:
        assert answer["finish_reason"] == "length"
        if encoder is ChatEncoder:
            assert len(answer["logprobs"]["content"]) == TOKENS
        else:
            lists = answer["logprobs"]
            assert {len(values) for values in lists.values()} == {TOKENS}
            widths = [len(text) for text in lists["tokens"]]
            assert lists["text_offset"] == [0, *itertools.accumulate(widths)][:-1]
