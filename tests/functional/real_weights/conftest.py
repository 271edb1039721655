"""SmolLM2 in float32 with little memory, for all tests of this folder that ask it something."""

from collections.abc import Iterator

import pytest

from fairlead_runtime import LLM
from support.real_weights import SMOLLM2


@pytest.fixture(scope="package")
def llm() -> Iterator[LLM]:
    """40 conversations wait for each other, are preempted and find their common system message."""
    with LLM(
        str(SMOLLM2.folder()),
        dtype="float32",
        max_model_len=2048,
        num_blocks=48,
        block_size=16,
        max_batch_tokens=128,
        max_requests=16,
    ) as started:
        yield started
