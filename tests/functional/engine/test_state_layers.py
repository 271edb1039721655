"""Layers that keep a state of fixed size, on packed rows: each row's logits are those of
transformers' own pass over its whole sequence, however it is cut into steps.

The cache begins full of NaN, so that a state that nobody wrote shows.
"""

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch

from fairlead_runtime.device.model.paged_model import PagedModel
from support import tiny, tiny_states
from support.engine_rig import paged
from support.state_rows import StateRows, expected

# Of the largest logit's size: rounding moves logits by less than 1e-4, a wrong state by 1e-2.
CLOSE = 1e-3


# Time steps that a bound moves: some are below 0.12, some above 0.2.
BOUNDED: dict[str, dict[str, Any]] = {
    "nemotron_h": {"time_step_min": 0.12},
    "mamba2": {"time_step_limit": (0.12, 0.2)},
    "granitemoehybrid": {"time_step_limit": (0.12, 0.2)},
}


@functools.cache
def model_of(family: str) -> PagedModel:
    return paged(family)


def tokens_of(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, tiny.VOCAB, length).tolist()
    return tokens


def differs(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("family", tiny_states.FAMILIES)
def test_logits_are_those_of_one_pass_however_rows_are_cut(family: str) -> None:
    check_logits(model_of(family), seed=0)


@pytest.mark.parametrize("family", tiny_states.FAMILIES)
def test_another_beginning_of_a_prompt_moves_the_last_logits(family: str) -> None:
    """What the tests compare depends on the states, so that a lost one shows."""
    model, (first, second) = model_of(family), (tokens_of(seed, 48) for seed in (1, 2))
    last = [expected(model, [*half, *first[24:]])[-1] for half in (first[:24], second[:24])]
    assert differs(*last) > 50 * CLOSE


@pytest.mark.parametrize("family", BOUNDED)
def test_a_prompts_time_steps_are_bounded_in_chunks_and_alone(family: str) -> None:
    model = paged(family, **BOUNDED[family])
    tokens = tokens_of(0, 20)
    moved = differs(expected(model, tokens), expected(model_of(family), tokens))
    assert moved > 10 * CLOSE, "the bounds change nothing"
    check_logits(model, seed=1)


def check_logits(model: PagedModel, seed: int) -> None:
    """Compare the logits of rows that are cut at random, some of one token."""
    draw = random.Random(seed)
    rows = StateRows(model)
    sequences = [rows.sequence(tokens_of(i, length)) for i, length in enumerate((61, 7, 1, 40))]
    wants = [expected(model, sequence.tokens) for sequence in sequences]
    for step in range(200):
        open_ = [s for s in sequences[: step + 1] if s.computed < len(s.tokens)]
        if not open_:
            break
        taken = [s for s in open_ if draw.random() < 0.8] or open_
        draw.shuffle(taken)
        counts = [min(draw.choice((1, 1, 1, 2, 5, 17)), len(s.tokens) - s.computed) for s in taken]
        # A step that is repeated reads and writes the same.
        logits = rows.step(zip(taken, counts, strict=True), times=draw.choice((1, 1, 2)))
        for sequence, got in zip(taken, logits, strict=True):
            assert differs(got, wants[sequence.id][sequence.computed - 1]) < CLOSE
    assert all(s.computed == len(s.tokens) for s in sequences)
