"""Gemma on two ranks, each with two of its four heads and both with its only one of keys, starts
and writes what one process does.
"""

import pytest

from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.device.proof import selftest
from support import rank_pair
from support.real_weights import GEMMA
from support.token_draws import DRAWS, draw

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def add(a, b):\n    return",
    "Once upon a time there was a",
]


def texts(dtype: str, ranks: int, count: int) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=count)
    with LLM(
        str(GEMMA.folder()),
        dtype=dtype,
        tensor_parallel=ranks,
        max_model_len=512,
        max_batch_tokens=128,
        num_blocks=64,
    ) as llm:
        results = llm.generate(PROMPTS, params, use_tqdm=False)
    return [result.outputs[0].text for result in results]


def test_two_ranks_write_what_one_does() -> None:
    """In bfloat16 for as long as rounding leaves a text alone."""
    assert texts("float32", 2, 24) == texts("float32", 1, 24)
    two, one = texts("bfloat16", 2, 8), texts("bfloat16", 1, 8)
    assert sum(ours == theirs for ours, theirs in zip(two, one, strict=True)) >= 3, (two, one)


@pytest.mark.parametrize("number", DRAWS)
@pytest.mark.parametrize(
    ("dtype", "quantization", "fused"),
    [
        ("float32", "none", "fused 18/18 layers"),
        ("bfloat16", "none", "fused 18/18 layers, bfloat16 weights"),
        ("float32", "int8", "fused 18/18 layers, int8 weights"),
        ("bfloat16", "int8", "fused 18/18 layers, int8 weights"),
    ],
)
def test_two_ranks_start_with_every_layer_fused(
    dtype: str, quantization: str, fused: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(monkeypatch, number)
    rank_pair.part()
    pair = rank_pair.Pair()
    try:
        pair.prepare(GEMMA.folder(), quantization, dtype)
        loaded = rank_pair.load(GEMMA.folder(), quantization, dtype)
        served, result = selftest.prepare_rank(
            loaded, pair.rank_group, rank_pair.CPU, quantization=quantization
        )
    finally:
        pair.end()
    assert str(served.fusion) == fused
    assert result is not None
    rounds = quantization == "int8"
    assert 0 < result.delta <= result.tolerance / (1 if rounds else 2), str(result)
    assert (result.rounding is not None) == rounds
