"""Lists of changed logits on the device: a new token finds its entry, and nothing else changes."""

import random
from collections import Counter

import pytest
import torch

from fairlead_kernels.sampling import logit_edits
from fairlead_kernels.sampling.logit_edits import (
    COUNT,
    EMPTY,
    END,
    FORBIDDEN,
    PENALIZED,
    LogitEdits,
)


def lists(rows: int, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((rows, room), EMPTY, dtype=torch.int32)
    return ids, torch.zeros_like(ids)


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_counted_in_the_entries_that_they_have_or_in_new_ones(seed: int) -> None:
    rng, (ids, words) = random.Random(seed), lists(4, 12)
    ids[2, :2], words[2, :2] = torch.tensor([3, 5]), torch.tensor([FORBIDDEN, PENALIZED | 4])
    wanted = [Counter[int]() for _ in range(4)]
    wanted[2][5] = 4
    for _ in range(30):
        rows = rng.sample(range(4), 3)
        tokens = [rng.randrange(8) for _ in rows]
        counting = [rng.random() < 0.8 for _ in rows]
        logit_edits.count(ids, words, *(torch.tensor(x) for x in (rows, tokens, counting)))
        for row, token, counts in zip(rows, tokens, counting, strict=True):
            wanted[row][token] += counts
    for row, counter in enumerate(wanted):
        got = dict(zip(ids[row].tolist(), words[row].tolist(), strict=True))
        used = [i for i in ids[row].tolist() if i != EMPTY]
        assert len(used) == len(set(used))
        assert ids[row].tolist()[: len(used)] == used  # the unused ones lie behind them
        assert {i: w & COUNT for i, w in got.items() if w & COUNT} == +counter
        assert all(w & PENALIZED for w in got.values() if w & COUNT)
    assert words[2, 0] & FORBIDDEN


def test_a_full_list_and_rows_that_share_one_without_counting_stay_as_they_are() -> None:
    ids, words = lists(2, 3)
    ids[1], words[1] = torch.tensor([1, 2, 3]), torch.tensor([PENALIZED, END, 0])
    before = ids.clone(), words.clone()
    rows, counting = torch.tensor([1, 0, 0]), torch.tensor([True, False, False])
    logit_edits.count(ids, words, rows, torch.tensor([9, 4, 5]), counting)
    assert torch.equal(ids, before[0])
    assert torch.equal(words, before[1])


def test_ids_that_have_no_logit_change_nothing() -> None:
    logits = torch.randn(2, 8)
    ids = torch.tensor([[3, 8, 900, EMPTY], [EMPTY] * 4], dtype=torch.int32)
    words = torch.full((2, 4), FORBIDDEN, dtype=torch.int32)
    never = torch.zeros(2, dtype=torch.bool)
    changes = LogitEdits(ids, words, torch.ones(2, 4), torch.ones(2, 3), never, never)
    changed = logit_edits.change(logits, changes)
    assert changed[0, 3] == -torch.inf
    logits[0, 3] = -torch.inf
    assert torch.equal(changed, logits)
