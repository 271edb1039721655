"""The dense draw of a step's rows gives the tokens of the general sampler, from parameters that
never leave the device.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.sampling import sample, sample_rows
from fairlead_kernels.sampling.sample_rows import NOT_FINITE, FindCuts, RowParameters
from fairlead_runtime.device.sampling import host_sampler
from fairlead_runtime.device.sampling.host_sampler import SamplingBatch, draw_keys
from fairlead_runtime.request.seeds import MASK64, mix64
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence

WORDS = st.integers(-(2**63), 2**63 - 1)
PARAMETERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 7, 40, 10_000]),
        "top_p": st.sampled_from([1.0, 0.999, 0.7, 0.2, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.01, 0.4, 1.0]),
    }
)
Given = Any  # (SamplingParams, seed, choice, length)


def general(logits: Tensor, rows: list[Given]) -> list[int]:
    sequences = [
        Sequence(i, Request("r", (1,), params, 9, seed=seed), choice, [1] * length)
        for i, (params, seed, choice, length) in enumerate(rows)
    ]
    tokens: list[int] = host_sampler.sample(logits, SamplingBatch.of(sequences)).tokens.tolist()
    return tokens


def parameters(rows: list[Given]) -> RowParameters:
    columns = [params for params, _, _, _ in rows]
    numbers = np.array([row[1:] for row in rows], dtype=np.int64)
    keys = draw_keys(*(numbers[:, i].copy() for i in range(3)))
    with np.errstate(divide="ignore"):
        min_cut = np.log(np.array([p.min_p for p in columns])).astype(np.float32)
    return RowParameters(
        torch.tensor([p.temperature if p.temperature >= 1e-5 else 0 for p in columns]),
        torch.from_numpy(min_cut),
        torch.tensor([p.top_k for p in columns]),
        torch.tensor([p.top_p for p in columns], dtype=torch.float64),
        torch.from_numpy(keys.view(np.int64)),
    )


def dense(
    logits: Tensor, rows: list[Given], find_cuts: FindCuts | None = sample_rows.cut_of
) -> list[int]:
    hashes = sample.hash_tokens(logits.shape[1], logits.device)
    chosen = sample_rows.choose(logits, parameters(rows), hashes, find_cuts=find_cuts)
    tokens: list[int] = chosen.tolist()
    return tokens


@given(WORDS)
def test_the_mixer_is_that_of_the_seeds(word: int) -> None:
    mixed = int(sample_rows.mix64(torch.tensor([word])))
    assert mixed & MASK64 == mix64(word & MASK64)


@given(
    st.lists(
        st.tuples(PARAMETERS, WORDS, st.integers(0, 7), st.integers(1, 5000)),
        min_size=1,
        max_size=9,
    ),
    st.integers(0, 1000),
    st.sampled_from([2, 50, 400]),
)
def test_every_row_draws_what_the_general_sampler_draws(
    drawn: list[tuple[dict[str, Any], int, int, int]], seed: int, vocabulary: int
) -> None:
    rows = [(SamplingParams(**params), *numbers) for params, *numbers in drawn]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocabulary, generator=generator) * 3
    logits[:, vocabulary // 2 :: 3] = -math.inf  # as at the padded end of a vocabulary
    logits[0, -1] = logits[0, 0]
    assert dense(logits, rows) == general(logits, rows)


def test_thousands_of_draws_without_a_filter_are_those_of_the_general_sampler() -> None:
    rows = [(SamplingParams(temperature=0.8 + i % 3), i, i % 4, 5 + i) for i in range(3000)]
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(5)).expand(3000, 200)
    want = general(logits, rows)
    assert dense(logits, rows, None) == dense(logits, rows) == want
    assert len(set(want)) > 100


def test_rows_are_drawn_alike_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(SamplingParams(temperature=1.0, top_p=0.5), i, 0, 9) for i in range(7)]
    logits = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    whole = dense(logits, rows)
    monkeypatch.setattr(sample, "CPU_CHUNK", 3 * 64)
    assert dense(logits, rows) == whole


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_a_row_that_is_not_finite_has_no_token(wrong: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=5, top_p=0.5)
    rows = [(params, i, 0, 9) for i in range(2)]
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    alone = dense(logits, rows)
    logits[0] = torch.full((30,), wrong)
    assert dense(logits, rows) == [NOT_FINITE, alone[1]]


def test_greedy_rows_need_no_parameters() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    chosen = sample_rows.choose(logits, None, sample.hash_tokens(30, logits.device))
    assert chosen.tolist() == logits.argmax(dim=-1).tolist()
