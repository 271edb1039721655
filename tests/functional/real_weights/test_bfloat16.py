"""SmolLM2 in bfloat16, whose rounding no two batches share: the tokens of our greedy answers are
transformers' likeliest, or float32's, as often as two of its own batches agree on which token that
is.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.models import loading
from fairlead_runtime.settings.engine_config import EngineConfig
from support import real_answers
from support.real_weights import SMOLLM2

# The first run on a machine fetches 330 MB and converts them.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.full]
TOKENS = 48
BATCH = 5
PADDING = 0  # token id


def answers(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Ours, in little memory."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    with LLM(
        str(SMOLLM2.folder()),
        dtype="bfloat16",
        max_model_len=2048,
        num_blocks=48,
        block_size=16,
        max_batch_tokens=128,
        max_requests=16,
    ) as llm:
        results = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
    return [list(result.outputs[0].token_ids) for result in results]


def widen_products(model: Any) -> None:
    """Let products of bfloat16 sum in float32 and round once, as processors for that type do: on
    others torch's own are many times slower. For models without biases.
    """

    def widen(module: torch.nn.Linear) -> None:
        weight = module.weight.detach().float()
        module.forward = lambda x: linear(x.float(), weight).bfloat16()  # type: ignore[assignment]

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            widen(module)


@torch.inference_mode()
def likeliest(model: Any, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """After each token of ``texts``, which are padded on the left to one batch."""
    width = max(map(len, texts))
    ids = torch.tensor([[PADDING] * (width - len(text)) + [*text] for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=places).logits
    found: list[list[int]] = logits.argmax(-1).tolist()
    return [row[width - len(text) :] for row, text in zip(found, texts, strict=True)]


def likeliest_in_float32(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    model = loading.load(SMOLLM2.folder(), config=EngineConfig(dtype="float32")).model
    return [likeliest(model, [text])[0] for text in texts]


def test_greedy_tokens_are_those_of_transformers_as_far_as_its_batches_agree() -> None:
    config = EngineConfig(dtype="bfloat16")
    loaded = loading.load(SMOLLM2.folder(), config=config)
    widen_products(loaded.model)
    spoken = real_answers.conversations()
    prompts = [real_answers.prompt_of(loaded.tokenizer, messages) for messages in spoken]
    ours = answers(prompts)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, ours, strict=True)]
    alone = [likeliest(loaded.model, [text])[0] for text in texts]
    exact = likeliest_in_float32(texts)
    together = list(
        itertools.chain.from_iterable(
            likeliest(loaded.model, texts[begin : begin + BATCH])
            for begin in range(0, len(texts), BATCH)
        )
    )
    # For each token of an answer: by how much transformers agrees more with itself than with ours.
    # Its batches round alike: where ours has float32's token and theirs not, theirs was rounded.
    gaps = [
        float(own == other) - float(token in (own, true))
        for prompt, answer, *rows in zip(prompts, ours, alone, together, exact, strict=True)
        for own, other, true, token in zip(
            *(row[len(prompt) - 1 : -1] for row in rows), answer, strict=True
        )
    ]
    gap = torch.tensor(gaps)
    error = float(gap.std()) / len(gaps) ** 0.5
    assert len(gaps) > 25 * len(spoken)
    assert float(gap.mean()) <= max(2 * error, 1 / len(gaps)), (float(gap.mean()), error)
