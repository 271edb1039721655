"""A forward pass as a message, at the rank that follows: which tensors it computes with."""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch

from fairlead_kernels.interface.attention import AttentionBackend
from fairlead_kernels.packages.flashinfer_plan import paged_rows
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.batch import UNKNOWN, Batch, BatchBuilder
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.model.rank_group import RankGroup
from fairlead_runtime.device.ranks import rank_messages
from fairlead_runtime.device.ranks.rank_messages import Follower
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.sizing.groups import LayerGroup

GROUPS = (LayerGroup(0, None, (0,)), LayerGroup(1, 4, (1,)))


@dataclass
class Cache:
    groups: tuple[LayerGroup, ...] = GROUPS
    block_size: int = 4


@dataclass
class Model:
    device = torch.device("cpu")
    given: list[Batch] = field(default_factory=list)

    def forward(self, batch: Batch, *_: object) -> None:
        self.given.append(batch)


@dataclass
class SecondRank:
    """A group as its second rank has it: what the leader shares arrives in the rank's tensor."""

    ids: list[int]
    shared: int = 0

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self.shared += 1
        return x.copy_(torch.tensor(self.ids))


def batch_of(ids: list[int]) -> Batch:
    """A part of a prompt and a decode, whose last token is the last of ``ids``."""
    prompt, decode = ids[:3], [20, 21, ids[3]]
    rows = []
    for index, (tokens, start) in enumerate(((prompt, 0), (decode, 2))):
        request = Request(str(index), tuple(tokens), SamplingParams(), 4)
        sequence = Sequence(index, request, 0, tokens)
        sequence.tables = [[index], [index + 5]]
        rows.append(Row(sequence, start, len(tokens) - start, samples=bool(index)))
    return BatchBuilder(GROUPS, 4).build(rows)


def followed(sent: Batch, ranks: SecondRank, *, ahead: bool) -> Batch:
    model = Model()
    follower_of(model, ranks).follow(rank_messages.forward(sent, None, ahead=ahead))
    (given,) = model.given
    return given


def follower_of(model: Model, ranks: SecondRank, shape: tuple[int, int] | None = None) -> Follower:
    return Follower(
        cast("PagedModel", model),
        cast("CacheStorage", Cache()),
        cast("AttentionBackend", None),
        cast("RankGroup", ranks),
        shape,
    )


@pytest.mark.parametrize("ahead", [False, True])
def test_a_rank_computes_with_the_ids_that_the_leader_has(ahead: bool) -> None:
    """``ahead``: the host that sends the message does not know the last of them yet."""
    known = [10, 11, 12, 13]
    sent = batch_of([*known[:3], UNKNOWN if ahead else 13])
    ranks = SecondRank(known)
    assert followed(sent, ranks, ahead=ahead).input_ids.tolist() == known
    assert ranks.shared == ahead


def test_a_rank_gets_the_batch_that_the_leader_sent() -> None:
    sent = batch_of([10, 11, 12, 13])
    got = followed(sent, SecondRank([]), ahead=False)
    assert got.positions.tolist() == [0, 1, 2, 2]
    assert got.sample_index.tolist() == [3]
    assert [slots.tolist() for slots in got.slots] == [slots.tolist() for slots in sent.slots]
    for ours, theirs in zip(got.ragged, sent.ragged, strict=True):
        assert (ours.window, ours.group) == (theirs.window, theirs.group)
        for name in ("query_starts", "kv_lens", "tables"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("shape", [None, (3, 60)], ids=["on the host", "on the device"])
def test_a_rank_keeps_the_blocks_and_is_sent_new_ones_alone(shape: tuple[int, int] | None) -> None:
    """Through a preemption and a step that the leader makes again, too."""
    leader, follower = BatchBuilder(GROUPS, 4), follower_of(Model(), SecondRank([]), shape)
    sequences = []
    for index, length in enumerate((100, 40, 7)):
        tokens = list(range(length))
        request = Request(str(index), tuple(tokens), SamplingParams(), 4)
        sequences.append(Sequence(index, request, 0, tokens))
    sizes = []
    for step in range(12):
        for sequence in sequences:
            sequence.tokens.append(step)
            sequence.tables = sequence.tables or [[], []]
            for group, table in enumerate(sequence.tables):
                while 4 * len(table) < len(sequence.tokens):
                    table.append(1000 * sequence.id + 100 * group + len(table) + step)
        rows = [Row(s, len(s.tokens) - 1, 1, samples=True) for s in sequences[step % 2 :]]
        with suppress(ZeroDivisionError), leader.forgetting(rows):
            batch = leader.build(rows)
            if step == 5:  # before the other ranks are told
                raise ZeroDivisionError
        sent = rank_messages.forward(leader.build(rows) if step == 5 else batch, None)
        sizes.append(sum(map(len, sent.tensors)))
        got = follower.batch(sent.tensors)
        assert [slots.tolist() for slots in got.slots] == [x.tolist() for x in batch.slots]
        for ours, theirs in zip(got.ragged, batch.ragged, strict=True):
            assert paged_rows(ours).indices.tolist() == paged_rows(theirs).indices.tolist()
        if step == 7:
            sequences[0].preemptions += 1
            sequences[0].tables = []
    whole = 4 * 2 * sum(len(s.tables[0]) for s in sequences)
    assert all(size < whole for step, size in enumerate(sizes) if step not in (0, 5, 8))
    assert all(sizes[step] > 4 * 2 * 25 for step in (0, 8))


def test_what_a_rank_sends_to_a_gpu_is_pinned_so_that_no_copy_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[list[int]] = []

    def pin(x: torch.Tensor) -> torch.Tensor:
        pinned.append(x.tolist())
        return x

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    parts = rank_messages.forward(batch_of([10, 11, 12, 13]), None).tensors
    follower = follower_of(Model(), SecondRank([]))
    follower.batch(parts)
    assert pinned == []
    follower._pinned = True
    got = follower.batch(parts)
    assert pinned == [x.tolist() for x in (got.input_ids, got.positions, got.sample_index)]
