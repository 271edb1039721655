"""How long a text may be before it is tokenized: as long as the longest token of its vocabulary
allows, so that no text that fits is refused.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fairlead_runtime.api.state.state import Backend
from fairlead_runtime.serving.prompt_encoder import PromptEncoder
from support.api_harness import MODEL, FakeService, backend_of, run, running_server

RUN = 64  # characters of the longest token
SPECIAL = ("<|end|>",)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def with_long_runs(character: str) -> PreTrainedTokenizerFast:
    """A token for each byte, and one for each run of 2, 4 to RUN of this character."""
    spelled = {" ": "Ġ"}.get(character, character)
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges, run_of = [], spelled
    while len(run_of) < RUN:
        merges.append((run_of, run_of))
        run_of += run_of
        pieces.append(run_of)
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0])
    made.chat_template = TEMPLATE
    return made


async def _check(character: str, length: int, max_model_len: int, status: int) -> None:
    async def load() -> Backend:
        backend = backend_of(FakeService(max_model_len=max_model_len))
        return replace(backend, encoder=PromptEncoder(with_long_runs(character)))

    text = character * length
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
        ("/v1/responses", {"input": text, "max_output_tokens": 1}),
    ]
    bodies[1][1]["max_tokens"] = 1
    async with running_server(load) as server, server.client() as client:
        for path, body in bodies:
            answer = await client.post(
                path,
                content=json.dumps({"model": MODEL, **body}),
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == status, path
            if status == 400:
                assert "characters cannot fit" in answer.json()["error"]["message"]


@pytest.mark.parametrize("character", [" ", "-", "=", "x"])
def test_a_text_of_long_tokens_that_fits_is_served(character: str) -> None:
    # 30 tokens of 64 characters: 30 times as many as a token usually has.
    run(_check(character, 30 * RUN, 64, 200))


def test_a_text_that_no_tokens_could_hold_is_refused_before_it_is_tokenized() -> None:
    run(_check("x", 64 * RUN + 1, 64, 400))
