"""A request's text does not depend on the batch, the order of arrival, block size, chunk size or
preemption.

Greedy and sampled requests, in float32; with ``deterministic``, where logits are the same bits, in
bfloat16 and beside states in both.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from fairlead_runtime.request.sequence import Request, SamplingParams
from support.engine_rig import Rig, Setting, prompts, rig
from support.full import LONG_FORM, pairs

MAX_TOKENS = 20
LENGTHS = (11, 37, 5, 24, 50, 18)

PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=0.8, seed=1, max_tokens=MAX_TOKENS),
    SamplingParams(
        temperature=1.3,
        top_k=40,
        seed=2,
        n=2,
        max_tokens=MAX_TOKENS,
        repetition_penalty=1.2,
        prompt_logprobs=1,
    ),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=MAX_TOKENS),
    SamplingParams(
        temperature=1.0,
        min_p=0.02,
        seed=4,
        n=3,
        max_tokens=MAX_TOKENS,
        frequency_penalty=0.5,
        presence_penalty=-0.2,
        logit_bias={7: 2.0},
        bad_words=((9,), (7, 7)),
    ),
    SamplingParams(
        temperature=0.5, top_k=50, top_p=0.95, seed=5, max_tokens=MAX_TOKENS, min_tokens=3
    ),
)
FUSED = ("llama", "gemma2", "gpt2", "gpt_neox", "phi3_longrope")
# One of each kind of state, beside keys or instead of them: transformers' code around products and
# operations in C++.
WITH_STATES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {},
    "falcon_mamba": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
FAMILIES = ("llama", "gemma2", "gpt2", "mixtral", "gpt_oss", "phi3_longrope")

SETTINGS = {
    "blocks of 16": Setting(block_size=16),
    "blocks of 256": Setting(block_size=256, num_blocks=32),
    "chunks of 8": Setting(chunk=8),
    "chunks beside decodes": Setting(beside=5),
    "no prefix cache": Setting(sharing=False),
    "two requests at a time": Setting(max_requests=2),
    "scarce memory": Setting(num_blocks=24),
    "scarce memory, offload": Setting(num_blocks=24, offload=True),
}


def requests(family: str) -> list[Request]:
    all_prompts = prompts(len(family), LENGTHS, 4)
    return [
        Request(str(i), prompt, params, MAX_TOKENS, seed=params.seed or 0)
        for i, (prompt, params) in enumerate(zip(all_prompts, PARAMS, strict=True))
    ]


def texts(
    engine: Rig, setting: Setting, arrivals: list[tuple[int, Request]]
) -> dict[tuple[str, int], list[int]]:
    return engine.run(setting, arrivals).texts


def alone(engine: Rig) -> dict[tuple[str, int], list[int]]:
    """The texts of every request, each run alone."""
    alone_texts: dict[tuple[str, int], list[int]] = {}
    for request in requests(engine.family):
        alone_texts |= texts(engine, Setting(), [(0, request)])
    return alone_texts


def settings_of(family: str) -> dict[str, Setting]:
    """All, or in the short form every other one, as many families each half; scarce memory is in
    both halves.
    """
    half = FAMILIES.index(family) // 2 % 2
    return SETTINGS if LONG_FORM else dict(list(SETTINGS.items())[half::2])


@pytest.mark.parametrize(("family", "kernels"), pairs(FAMILIES, ("torch", "cpu")))
def test_text_is_the_same_alone_and_in_any_batch(family: str, kernels: str) -> None:
    engine, rng = rig(family, kernels), random.Random(family)
    expected = alone(engine)
    assert len({tuple(text) for text in expected.values()}) == len(expected), "two texts are equal"
    preemptions = 0
    for name, setting in settings_of(family).items():
        arrivals = [(rng.randrange(12), request) for request in requests(family)]
        rng.shuffle(arrivals)
        outcome = engine.run(setting, arrivals)
        assert outcome.texts == expected, name
        preemptions += outcome.stats.preemptions if outcome.stats else 0
    assert preemptions > 0


@pytest.mark.parametrize(("family", "kernels"), pairs(FAMILIES, ("cpu", "torch")))
def test_the_order_of_arrival_does_not_matter(family: str, kernels: str) -> None:
    engine = rig(family, kernels)
    in_order = [(0, request) for request in requests(family)]
    setting = replace(Setting(), chunk=32)
    assert texts(engine, setting, in_order) == texts(engine, setting, in_order[::-1])


def test_equal_requests_give_equal_texts_whatever_their_ids() -> None:
    engine = rig("llama")
    first = requests("llama")[2]
    again = replace(first, id="another")
    got = texts(engine, Setting(), [(0, first), (3, again), (5, requests("llama")[4])])
    assert [got[first.id, i] for i in range(2)] == [got["another", i] for i in range(2)]


Logits = dict[tuple[str, int, int], torch.Tensor]  # by request id, choice and length


@contextmanager
def noted(engine: Rig) -> Iterator[Logits]:
    """The logits of every token that is sampled meanwhile, unless chosen without them. Those that
    are computed again must be the same bits.
    """
    seen: Logits = {}
    forward, model = engine.model.forward, vars(engine.model)

    def noting(batch: Any, cache: Any, backend: Any, keep: torch.Tensor | None = None) -> Any:
        logits = forward(batch, cache, backend, keep)
        places = range(len(logits)) if keep is None else _sampled(batch, keep)
        for sequence, place in zip(batch.sampling, places, strict=True):
            key = sequence.request.id, sequence.choice, len(sequence.tokens)
            assert torch.equal(seen.setdefault(key, logits[place].clone()), logits[place]), key
        return logits

    model["forward"] = noting
    try:
        yield seen
    finally:
        del model["forward"]


def _sampled(batch: Any, keep: torch.Tensor) -> list[int]:
    kept = keep.tolist()
    return [kept.index(place) for place in batch.sample_index.tolist()]


@pytest.mark.parametrize(
    ("family", "bfloat16"),
    [
        *((family, True) for family in FUSED),
        *((family, number % 2 > 0) for number, family in enumerate(WITH_STATES)),
        *(
            pytest.param(family, number % 2 == 0, marks=pytest.mark.full)
            for number, family in enumerate(WITH_STATES)
        ),
    ],
)
def test_a_deterministic_request_has_the_same_logits_alone_and_in_any_batch(
    family: str, bfloat16: bool
) -> None:
    layers = dict(WITH_STATES.get(family, {}))
    if family in WITH_STATES:  # few: torch computes a part of them
        layers["num_hidden_layers"] = len(layers.get("layer_types", [1]))
    engine, rng = Rig(family, "fixed", bfloat16=bfloat16, **layers), random.Random(family)
    assert engine.fusion.fused == engine.fusion.layers or layers
    with noted(engine) as expected_logits:
        expected = alone(engine)
    preemptions = compared = 0
    settings = dict([*SETTINGS.items()][-2 if layers and not LONG_FORM else 0 :])
    for name, setting in settings.items():
        arrivals = [(rng.randrange(12), request) for request in requests(family)]
        rng.shuffle(arrivals)
        with noted(engine) as logits:
            outcome = engine.run(setting, arrivals)
        assert outcome.texts == expected, name
        for key in expected_logits.keys() & logits.keys():
            assert torch.equal(expected_logits[key], logits[key]), (name, key)
            compared += 1
        preemptions += outcome.stats.preemptions if outcome.stats else 0
    assert preemptions > 0 or family == "falcon_mamba"  # states alone do not grow
    assert compared > 125 * len(settings)
