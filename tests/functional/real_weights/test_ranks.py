"""Gemma on two ranks, each with two of its four heads and both with its only one of keys, writes
what one process does.
"""

import pytest

from fairlead_runtime import LLM, SamplingParams
from support.real_weights import GEMMA

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
