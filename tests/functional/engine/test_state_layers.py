"""Layers that keep a state of fixed size, on packed rows: each row's logits are those of
transformers' own pass over its whole sequence, however it is cut into steps.

The cache begins full of NaN, so that a state that nobody wrote shows.
"""

import functools
import random

import numpy as np
import pytest
import torch

from fairlead_runtime.device.model.paged_model import PagedModel
from support import tiny, tiny_states
from support.engine_rig import paged
from support.state_rows import StateRows, expected

# Of the largest logit's size: rounding moves logits by less than 1e-4, a wrong state by 1e-2.
CLOSE = 1e-3


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
    model, draw = model_of(family), random.Random(family)
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
