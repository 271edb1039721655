"""Rows become tensors: positions, slots and tables by their definitions, in reused buffers."""

import itertools
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairlead_kernels.interface.attention import NULL
from fairlead_kernels.packages.flashinfer_plan import paged_rows
from fairlead_runtime.device.model.batch import Batch, BatchBuilder
from fairlead_runtime.device.model.block_tables import DeviceTables
from fairlead_runtime.device.model.table_rows import TableRows
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.sizing.groups import LayerGroup

FULL = (LayerGroup(0, None, (0,)),)


def sequence(index: int, tokens: list[int], *tables: list[int]) -> Sequence:
    created = Sequence(index, Request(str(index), tuple(tokens), SamplingParams(), 4), 0, tokens)
    created.tables = list(tables)
    return created


def test_a_prefill_and_a_decode_are_packed_one_after_the_other() -> None:
    first, second = sequence(0, [10, 11, 12, 13, 14], [7, 2]), sequence(1, [20, 21, 22], [5])
    batch = BatchBuilder(FULL, 4).build(
        [Row(first, 1, 3, samples=False), Row(second, 2, 1, samples=True)]
    )
    assert batch.input_ids.tolist() == [11, 12, 13, 22]
    assert batch.positions.tolist() == [1, 2, 3, 2]
    assert batch.slots[0].tolist() == [29, 30, 31, 22]
    assert batch.ragged[0].query_starts.tolist() == [0, 3, 4]
    assert batch.ragged[0].kv_lens.tolist() == [4, 3]
    assert batch.ragged[0].tables.tolist() == [[7], [5]]
    assert batch.sample_index.tolist() == [3]
    assert batch.sampling == [second]


def test_every_group_has_its_own_slots_tables_and_window() -> None:
    groups = (LayerGroup(0, None, (0,)), LayerGroup(1, 4, (1,)))
    row = Row(sequence(0, list(range(9)), [3, 1, 4], [NULL, 8, 6]), 8, 1, samples=True)
    batch = BatchBuilder(groups, 4).build([row])
    assert [slots.tolist() for slots in batch.slots] == [[16], [24]]
    assert [ragged.tables.tolist() for ragged in batch.ragged] == [[[3, 1, 4]], [[NULL, 8, 6]]]
    assert [(ragged.window, ragged.group) for ragged in batch.ragged] == [(None, 0), (4, 1)]


def test_a_step_without_samples_has_an_empty_index() -> None:
    batch = BatchBuilder(FULL, 4).build([Row(sequence(0, [1, 2, 3], [0]), 0, 2, samples=False)])
    assert batch.sample_index.tolist() == []
    assert batch.sampling == []


def test_a_token_without_a_block_is_refused() -> None:
    with pytest.raises(RuntimeError, match="layer group 0"):
        BatchBuilder(FULL, 4).build([Row(sequence(0, [1, 2], [NULL]), 0, 2, samples=False)])


def test_the_next_build_reuses_the_memory_of_the_last() -> None:
    builder = BatchBuilder(FULL, 4)
    long = builder.build([Row(sequence(0, list(range(8)), [0, 1]), 0, 8, samples=True)])
    at = long.input_ids.data_ptr()
    short = builder.build([Row(sequence(1, [5, 6], [2]), 0, 2, samples=True)])
    assert short.input_ids.data_ptr() == at
    assert short.input_ids.tolist() == [5, 6]
    assert short.ragged[0].tables.tolist() == [[2]]


def same(batch: Batch, fresh: Batch) -> bool:
    """Whether both say the same of their rows; a table's entries before what the row's window sees
    and beyond its blocks say nothing.
    """
    pairs = [
        (batch.input_ids, fresh.input_ids),
        (batch.positions, fresh.positions),
        (batch.sample_index, fresh.sample_index),
        *zip(batch.slots, fresh.slots, strict=True),
    ]
    for one, other in zip(batch.ragged, fresh.ragged, strict=True):
        pairs += [(one.query_starts, other.query_starts), (one.kv_lens, other.kv_lens)]
        starts = other.query_starts.tolist()
        for row, length in enumerate(other.kv_lens.tolist()):
            position, first = length - (starts[row + 1] - starts[row]), 0
            if other.window is not None:
                first = max(0, position - other.window + 1)
            seen = slice(first // other.block_size, -(-length // other.block_size))
            pairs.append((one.tables[row, seen], other.tables[row, seen]))
    return all(map(torch.equal, *zip(*pairs, strict=True))) and batch.sampling == fresh.sampling


def device_builder(groups: tuple[LayerGroup, ...], block_size: int, rows: int) -> BatchBuilder:
    tensor = torch.zeros(len(groups), rows, 80, dtype=torch.int32)
    tables = DeviceTables(groups, block_size, tensor)
    return BatchBuilder(groups, block_size, tables=tables, rows=TableRows(len(groups), rows))


def same_on_device(batch: Batch, fresh: Batch) -> bool:
    """Whether both have the same slots, and flashinfer's rows of both are the same."""
    for one, other in zip(
        map(paged_rows, batch.ragged), map(paged_rows, fresh.ragged), strict=True
    ):
        for name in ("query_starts", "starts", "indices", "last_lens"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    return all(map(torch.equal, batch.slots, fresh.slots))


@given(
    starts=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    steps=st.lists(
        st.sampled_from(["next", "again", "ended", "preempted", "prefill"]), max_size=40
    ),
    block_size=st.sampled_from([4, 16]),
    groups=st.sampled_from([FULL, (*FULL, LayerGroup(1, None, (1,))), (LayerGroup(0, 8, (0,)),)]),
)
def test_a_batch_that_follows_the_last_one_is_as_a_new_one(
    starts: list[int], steps: list[str], block_size: int, groups: tuple[LayerGroup, ...]
) -> None:
    """With tables on the host and on a device."""
    kept, units = BatchBuilder(groups, block_size), itertools.count()
    on_device = device_builder(groups, block_size, rows=len(starts))
    sequences = [
        sequence(i, list(range(100 * i, 100 * i + n)), *([] for _ in groups))
        for i, n in enumerate(starts)
    ]
    for step in ["next", *steps]:
        if step == "ended" and len(sequences) > 1:
            sequences.pop(0)
        first = sequences[0]
        if step == "preempted":
            first.preemptions += 1
            first.tables = [[] for _ in groups]
        for one in sequences:
            for group, table in zip(groups, one.tables, strict=True):
                while len(table) * block_size < len(one.tokens):
                    table.append(next(units))
                if group.window is not None:  # of a step of at most three tokens
                    passed = max(0, len(one.tokens) - 3 - group.window) // block_size
                    table[:passed] = [NULL] * passed
        count = min(3, len(first.tokens)) if step == "prefill" else 1
        rows = [Row(s, len(s.tokens) - 1, 1, samples=True) for s in sequences[1:]]
        rows.insert(0, Row(first, len(first.tokens) - count, count, samples=True))
        fresh = BatchBuilder(groups, block_size).build(rows)
        assert same(kept.build(rows), fresh)
        assert same_on_device(on_device.build(rows), fresh)
        if step != "again":
            for one in sequences:
                one.tokens.append(next(units))


def test_a_batch_with_a_window_is_built_again() -> None:
    builder, one = BatchBuilder((LayerGroup(0, 4, (0,)),), 4), sequence(0, list(range(8)), [3, 7])
    first = builder.build([Row(one, 7, 1, samples=True)])
    one.tokens.append(8)
    one.tables[0][:] = [NULL, 7, 5]
    batch = builder.build([Row(one, 8, 1, samples=True)])
    assert batch is not first
    assert batch.ragged[0].tables[0, 1:].tolist() == [7, 5]


def test_a_batch_of_the_next_decodes_is_the_last_one_changed() -> None:
    builder, one = BatchBuilder(FULL, 4), sequence(0, [1] * 7, [3, 7])
    other = sequence(1, [1] * 33, list(range(20, 29)))
    rows = [Row(other, 32, 1, samples=True), Row(one, 6, 1, samples=True)]
    first = builder.build(rows)
    for step in range(1, 4):
        one.tokens.append(6)
        other.tokens.append(7)
        one.tables[0][2:] = [9] * (step > 1)
        rows = [Row(other, 32 + step, 1, samples=True), Row(one, 6 + step, 1, samples=True)]
        assert builder.build(rows) is first
    assert (first.positions.tolist(), first.slots[0].tolist()) == ([35, 9], [115, 37])
    prompt = Row(sequence(2, [1, 2], [40]), 0, 2, samples=True)
    beside = builder.build([*rows, prompt])  # what followed comes to the tables with it
    assert beside.growth.rows.tolist() == [0, 1, 2]
    assert beside.growth.spans.tolist() == [[1, 2, 1], [2, 0, 1]]
    assert beside.slots[0].tolist() == [115, 37, 160, 161]
    whole = BatchBuilder(FULL, 4, follows=False)
    assert whole.build(rows) is not whole.build(rows)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_step_with_a_prompt_adds_to_the_tables_what_is_new_and_no_more(on_device: bool) -> None:
    builder = device_builder(FULL, 4, rows=2) if on_device else BatchBuilder(FULL, 4)
    long, prompt = sequence(0, [1] * 200, list(range(50))), sequence(1, [2] * 40, [60, 61])
    builder.build([Row(long, 199, 1, samples=True)])
    long.tokens.append(1)
    long.tables[0].append(50)
    rows = [Row(long, 200, 1, samples=True), Row(prompt, 0, 8, samples=False)]
    growth = builder.build(rows).growth
    assert growth.units.tolist() == [[50, 60, 61]]
    long_row, prompt_row = growth.rows.tolist()
    assert growth.spans.tolist() == [[long_row, 50, 1], [prompt_row, 0, 2]]
    prompt.tables[0] += [62]
    again = [Row(long, 200, 1, samples=True), Row(prompt, 8, 4, samples=False)]
    assert builder.build(again).growth.spans.tolist() == [[prompt_row, 2, 1]]
    assert builder.build(again).growth.units.tolist() == [[]]


def test_what_a_step_that_failed_has_added_is_added_again() -> None:
    """Another rank may not have heard of it."""
    builder, one = BatchBuilder(FULL, 4), sequence(0, [1] * 9, [3, 7, 5])
    rows = [Row(one, 8, 1, samples=True)]
    with suppress(ZeroDivisionError), builder.forgetting(rows):
        builder.build(rows)
        raise ZeroDivisionError
    one.tokens.append(1)
    assert builder.build([Row(one, 9, 1, samples=True)]).growth.units.tolist() == [[3, 7, 5]]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_row_whose_blocks_are_too_few_is_refused(on_device: bool) -> None:
    """Behind its blocks are those of who had the row before."""
    builder = device_builder(FULL, 4, rows=1) if on_device else BatchBuilder(FULL, 4)
    builder.build([Row(sequence(0, [1] * 9, [3, 7, 5]), 8, 1, samples=True)])
    with pytest.raises(RuntimeError, match="a token of this step has no block"):
        builder.build([Row(sequence(1, [1] * 9, [4, 6]), 8, 1, samples=True)])


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=8),
    st.sampled_from([4, 16]),
    st.randoms(use_true_random=False),
)
def test_any_rows_match_the_definitions_token_by_token(
    shapes: list[tuple[int, int]], block_size: int, rng: object
) -> None:
    rows: list[Row] = []
    free = list(range(200))
    rng.shuffle(free)  # type: ignore[attr-defined]  # hypothesis types its generator as object
    for index, (start, count) in enumerate(shapes):
        length = start + count
        table = [free.pop() for _ in range(-(-length // block_size))]
        tokens = [1000 * index + i for i in range(length)]
        rows.append(Row(sequence(index, tokens, table), start, count, samples=index % 2 == 0))
    batch = BatchBuilder(FULL, block_size).build(rows)
    expected = [
        (s.tokens[p], p, s.tables[0][p // block_size] * block_size + p % block_size)
        for s, start, count, _ in rows
        for p in range(start, start + count)
    ]
    packed = zip(
        batch.input_ids.tolist(), batch.positions.tolist(), batch.slots[0].tolist(), strict=True
    )
    assert list(packed) == expected
    assert [batch.input_ids.tolist()[i] for i in batch.sample_index.tolist()] == [
        s.tokens[start + count - 1] for s, start, count, samples in rows if samples
    ]
