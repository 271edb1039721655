"""Rows that change their logits or want log-probabilities get from lists on the device what the
general sampler gives them: token, log-probabilities, rank and likeliest tokens.
"""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.sampling import sample, sample_rows
from fairlead_kernels.sampling.sample_rows import NOT_FINITE, NOTHING_LEFT, RowLogprobs
from fairlead_runtime.device.sampling.host_sampler import SampledTokens, SamplingBatch
from fairlead_runtime.device.sampling.host_sampler import sample as general
from fairlead_runtime.device.sampling.logit_edits import ChangeList
from fairlead_runtime.device.sampling.sampling_mode import GENERAL
from fairlead_runtime.device.sampling.sequence_table import SequenceTable
from fairlead_runtime.request.sequence import MAX_LOGPROBS, Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.sizing.groups import LayerGroup
from support.full import LONG_FORM

WIDTH = 70  # of the vocabulary
IDS = st.integers(0, WIDTH + 5)  # some have no logit
PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.0, 0.4, 1.0, 3.0]),
    "top_k": st.sampled_from([0, 0, 3, 40]),
    "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    "min_p": st.sampled_from([0.0, 0.0, 0.05]),
}
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([1.1, 2.0, 0.5]),
    "frequency_penalty": st.floats(-2, 2, width=16),
    "presence_penalty": st.floats(-2, 2, width=16),
    "logit_bias": st.dictionaries(IDS, st.floats(-100, 100, width=16), max_size=20),
    "allowed_token_ids": st.lists(IDS, min_size=1, max_size=30).map(tuple),
    "bad_words": st.lists(IDS.map(lambda i: (i,)), max_size=6).map(tuple),
    "min_tokens": st.integers(0, 12),
    "stop_token_ids": st.lists(IDS, max_size=3).map(tuple),
    "logprobs": st.integers(0, MAX_LOGPROBS),
}
ROWS = st.fixed_dictionaries(PARAMS, optional=CHANGES)


def a_sequence(number: int, params: dict[str, Any], rng: random.Random) -> Sequence:
    prompt = [rng.randrange(WIDTH) for _ in range(rng.randint(1, 30))]
    request = Request(
        f"{number}", prompt, SamplingParams(**params), 64, seed=number, eos_ids=frozenset({7, 9})
    )
    output = [rng.randrange(WIDTH) for _ in range(rng.randint(0, 8))]
    sequence = Sequence(number, request, number % 3, [*prompt, *output])
    sequence.tables = [[3] * 20]
    return sequence


def a_table(rows: int, listed: int = WIDTH + 6) -> SequenceTable:
    groups, cpu = (LayerGroup(0, None, (0,)),), torch.device("cpu")
    return SequenceTable(
        groups, 4, sequences=rows, blocks=20, listed=listed, padding_unit=0, device=cpu
    )


def on_device(
    table: SequenceTable, sequences: list[Sequence], logits: Tensor
) -> tuple[Tensor, RowLogprobs]:
    """One step, in the mode that its rows need."""
    index = torch.zeros(len(sequences), dtype=torch.int64)
    rows = [Row(s, len(s.tokens) - 1, 1, samples=True) for s in sequences]
    _, way, counts, _ = table.enter(rows, index)
    assert way is not GENERAL
    tokens = sample_rows.choose(
        logits,
        table.parameters(index) if way.draw else None,
        sample.hash_tokens(logits.shape[1], logits.device),
        find_cuts=sample_rows.cut_of if way.draw > 1 else None,
        changes=table.changes(index) if way.changes else None,
    )
    logprobs = sample_rows.logprobs(logits, tokens, MAX_LOGPROBS)
    table.advance(index, tokens, counts=counts)
    return tokens, logprobs


def compare(want: SampledTokens, tokens: Tensor, logprobs: RowLogprobs, logits: Tensor) -> None:
    """Of likeliest tokens that tie, any may come first."""
    assert tokens.tolist() == want.tokens.tolist()
    finite = [row for row, token in enumerate(tokens.tolist()) if token >= 0]
    for (_, wanted, _), row in zip(want.outcomes(), range(len(tokens)), strict=True):
        if wanted is None or row not in finite:
            continue
        count = len(wanted.top_ids)
        values, numbers = logprobs.values[row].tolist(), logprobs.numbers[row].tolist()
        assert values[0] == pytest.approx(wanted.logprob, abs=1e-6)
        assert values[1 : 1 + count] == pytest.approx(wanted.top_logprobs, abs=1e-6)
        assert numbers[0] == wanted.rank
        ids = numbers[1 : 1 + count]
        assert len(set(ids)) == len(ids)
        assert logits[row, ids].tolist() == logits[row, list(wanted.top_ids)].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_get_what_the_general_sampler_gives_whatever_their_history(dtype: torch.dtype) -> None:
    """Several steps: the device counts its tokens itself, the general sampler those of the host."""

    @settings(max_examples=600 if LONG_FORM else 25, deadline=None)
    @given(st.lists(ROWS, min_size=1, max_size=5), st.integers(0, 2**20))
    def any_rows(params: list[dict[str, Any]], seed: int) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        sequences = [a_sequence(number, some, rng) for number, some in enumerate(params)]
        table = a_table(len(sequences))
        for _ in range(6):
            logits = torch.randn(len(sequences), WIDTH, generator=generator) * 3
            logits[:, WIDTH // 2 :: 5] = -math.inf
            logits = logits.to(dtype)
            want = general(logits, SamplingBatch.of(sequences))
            compare(want, *on_device(table, sequences, logits), logits)
            for sequence, token in zip(sequences, want.tokens.tolist(), strict=True):
                sequence.tokens.append(max(token, 0))
                if token < 0:
                    sequence.preemptions += 1  # the device has not counted it

    any_rows()


def test_a_row_is_told_why_it_has_no_token() -> None:
    rng = random.Random(1)
    nothing = {"temperature": 0.8, "allowed_token_ids": (3,), "bad_words": ((3,),)}
    params: list[dict[str, Any]] = [nothing, nothing | {"temperature": 0.0}, nothing]
    params.append({"temperature": 0.8})
    sequences = [a_sequence(number, some, rng) for number, some in enumerate(params)]
    logits = torch.randn(4, WIDTH)
    logits[2, 5] = math.nan
    tokens, _ = on_device(a_table(4), sequences, logits)
    assert tokens[:3].tolist() == [NOTHING_LEFT, NOTHING_LEFT, NOT_FINITE]
    assert tokens.tolist() == general(logits, SamplingBatch.of(sequences)).tokens.tolist()


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    some: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "logprobs": 5}
    params = [{**some, "frequency_penalty": i / 4, "logit_bias": {i: 4.0}} for i in range(7)]
    logits = torch.randn(7, WIDTH) * 3
    sequences = [a_sequence(number, each, rng) for number, each in enumerate(params)]
    tokens, logprobs = on_device(a_table(7), sequences, logits)
    monkeypatch.setattr(sample, "CPU_CHUNK", 3 * WIDTH)
    again, logprobs_again = on_device(a_table(7), sequences, logits)
    assert torch.equal(tokens, again)
    assert all(map(torch.equal, logprobs, logprobs_again))
    assert len(set(tokens.tolist())) > 3


def test_a_list_has_one_entry_for_an_id_whatever_is_said_of_it() -> None:
    params: dict[str, Any] = {"logit_bias": {5: 1.0, 6: 2.0}, "bad_words": ((5,),)}
    params |= {"allowed_token_ids": (5, 6, 7), "repetition_penalty": 2.0, "min_tokens": 3}
    sequence = a_sequence(0, params, random.Random(3))
    changes = ChangeList.of(sequence)
    assert len(set(changes.ids.tolist())) == len(changes.ids)
    assert set(changes.ids.tolist()) == {5, 6, 7, 9, *sequence.tokens}
    assert changes.biases[changes.ids == 6].tolist() == [2.0]
    assert ChangeList.of(a_sequence(1, {"temperature": 0.5}, random.Random(4))).flags == 0
