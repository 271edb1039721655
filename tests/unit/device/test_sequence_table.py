"""The sequence table has on the device what each decode needs, after any history of its sequences,
and sends no more than what changed.
"""

import random
import weakref
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fairlead_kernels.gpu.triton_attention import TritonAttention
from fairlead_kernels.interface.attention import DecodeRows, Heads
from fairlead_kernels.packages.flashinfer_plan import decode_rows, paged_rows
from fairlead_kernels.sampling import logit_edits, sample, sample_rows
from fairlead_runtime.device.model.batch import BatchBuilder
from fairlead_runtime.device.sampling.host_sampler import SamplingBatch
from fairlead_runtime.device.sampling.logits_processors import LogitChanges
from fairlead_runtime.device.sampling.sampling_mode import GENERAL, DrawKind, SamplingMode
from fairlead_runtime.device.sampling.sequence_table import PADDING, SequenceTable
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.sizing.groups import LayerGroup

SIZE = 4
GROUPS = (LayerGroup(0, None, (0,)), LayerGroup(1, 6, (1,)))
UNITS = 500
VOCABULARY = 100
EOS = frozenset({7, 8})
CPU = torch.device("cpu")


def a_table(
    sequences: int = 8, listed: int = VOCABULARY, device: torch.device = CPU
) -> SequenceTable:
    return SequenceTable(
        GROUPS,
        SIZE,
        sequences=sequences,
        blocks=32,
        listed=listed,
        padding_unit=UNITS,
        device=device,
    )


class World:
    """Sequences as a scheduler would have them: they grow, lose blocks before their window, are
    preempted and come back with others.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0
        self.live: list[Sequence] = []

    def start(self, **params: Any) -> Sequence:
        self.count += 1
        length = self.random.randint(1, 30)
        tokens = array("i", [self.random.randrange(VOCABULARY) for _ in range(length)])
        request = Request(
            f"{self.count}", tokens, SamplingParams(**params), 99, seed=self.count, eos_ids=EOS
        )
        sequence = Sequence(self.count, request, self.count % 3, tokens[:])
        self.live.append(sequence)
        self.blocks(sequence)
        return sequence

    def blocks(self, sequence: Sequence) -> None:
        """As ``grow`` and ``finish_forward``: blocks for all tokens, NULL before the window."""
        if not sequence.tables:
            sequence.tables = [[] for _ in GROUPS]
        missing = -(-len(sequence.tokens) // SIZE) - len(sequence.tables[0])
        for group, table in zip(GROUPS, sequence.tables, strict=True):
            table += [self.random.randrange(UNITS) for _ in range(missing)]
            first = group.first_block(len(sequence.tokens) - 1, SIZE)
            table[:first] = [-1] * first

    def append(self, sequence: Sequence, token: int) -> None:
        sequence.tokens.append(token)
        self.blocks(sequence)

    def preempt(self, sequence: Sequence) -> None:
        sequence.preemptions += 1
        sequence.tables = []
        self.blocks(sequence)


def some_changes(rng: random.Random) -> dict[str, Any]:
    """Parameters that change logits, mostly some of them."""
    every: dict[str, Any] = {
        "repetition_penalty": rng.choice([1.3, 0.7]),
        "frequency_penalty": rng.choice([0.4, -0.2]),
        "presence_penalty": rng.choice([0.6, -0.3]),
        "logit_bias": {rng.randrange(VOCABULARY + 9): rng.uniform(-5, 5) for _ in range(6)},
        "allowed_token_ids": tuple(rng.sample(range(VOCABULARY + 9), 40)),
        "bad_words": ((rng.randrange(VOCABULARY),), (7,)),
        "min_tokens": rng.choice([1, 4, 9]),
        "stop_token_ids": (rng.randrange(VOCABULARY),),
    }
    chosen: dict[str, Any] = {}
    for name in rng.sample(sorted(every), rng.choice([0, 1, 2, 4])):
        chosen[name] = every[name]
    return chosen


def without_changes(sequence: Sequence) -> Sequence:
    p = sequence.request.params
    params = SamplingParams(temperature=p.temperature, top_k=p.top_k, top_p=p.top_p)
    request = replace(sequence.request, params=params)
    return Sequence(sequence.id, request, sequence.choice, sequence.tokens)


def changed_by_host(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """All rows, as the general sampler changes them."""
    wanted = logits.clone()
    changes = LogitChanges.of(sequences, {})
    if changes is not None:
        wanted[torch.from_numpy(changes.rows)] = changes.apply(logits)
    return wanted


def rows_of(sequences: list[Sequence]) -> list[Row]:
    return [Row(s, len(s.tokens) - 1, 1, samples=True) for s in sequences]


def check(table: SequenceTable, rows: list[Row], index: Tensor, lens: Any) -> None:
    """The device's inputs, blocks and parameters are those that the host would make."""
    real, batch = len(rows), BatchBuilder(GROUPS, SIZE).build(rows)
    inputs = table.inputs(index)
    assert inputs.ids[:real].tolist() == batch.input_ids.tolist()
    assert inputs.positions[:real].tolist() == batch.positions.tolist()
    for mine, wanted in zip(inputs.slots, batch.slots, strict=True):
        assert mine[:real].tolist() == wanted.tolist()
        assert mine[real:].tolist() == [UNITS * SIZE] * (len(index) - real)
    assert lens[:real].tolist() == batch.ragged[0].kv_lens.tolist()
    assert table.lens(index).tolist() == lens.tolist()
    assert inputs.ids[real:].tolist() == [0] * (len(index) - real)
    for group, ragged in zip(GROUPS, batch.ragged, strict=True):
        got = decode_rows(
            DecodeRows(
                torch.from_numpy(lens),
                table.lens(index),
                table.tables[group.index],
                index,
                SIZE,
                group.window,
                group.index,
            )
        )
        want = paged_rows(ragged)
        assert got.starts[: real + 1].tolist() == want.starts.tolist()
        assert got.last_lens[:real].tolist() == want.last_lens.tolist()
        pads = [UNITS] * (len(index) - real)
        assert got.indices.tolist() == want.indices.tolist() + pads
    sequences = [row.sequence for row in rows]
    if all(table.mode_of(row) is not GENERAL for row in rows):
        logits = torch.randn(real, VOCABULARY) * 3
        changed = logit_edits.change(logits, table.changes(index[:real]))
        assert torch.equal(changed, changed_by_host(logits, sequences))
    padding = torch.randn(len(index) - real, VOCABULARY)
    assert torch.equal(logit_edits.change(padding, table.changes(index[real:])), padding)
    draws = SamplingBatch.of([without_changes(sequence) for sequence in sequences]).draws
    drawn = table.parameters(index[:real])
    drawing = drawn.temperature.nonzero()[:, 0]
    assert drawing.tolist() == ([] if draws is None else draws.rows.tolist())
    if draws is not None:
        keys = torch.from_numpy(draws.keys.view("int64"))
        assert drawn.keys[drawing].tolist() == keys.tolist()
        for name in ("temperature", "min_cut", "top_k", "top_p"):
            assert getattr(drawn, name)[drawing].tolist() == getattr(draws, name).tolist()


def test_the_next_step_leaves_what_the_last_one_sent_as_it_was() -> None:
    """Its copy to the device may not have run yet."""
    world, table = World(1), a_table()
    index, sequence = torch.zeros(1, dtype=torch.int64), world.start()
    for _ in range(5):
        table.enter(rows_of([sequence]), index)
        sent = table._packets[0]
        before = sent.clone()
        world.append(sequence, 7)
        table.advance(index, torch.tensor([7]), counts=False)
        table.enter(rows_of([sequence]), index)
        assert table._packets[0] is not sent
        assert torch.equal(sent, before)
        world.append(sequence, 8)
        table.advance(index, torch.tensor([8]), counts=False)


def test_a_row_in_flight_that_the_table_does_not_have_is_refused() -> None:
    """The host does not know its last token, so it must not send what it has."""
    world, table = World(2), a_table()
    index, sequence = torch.zeros(1, dtype=torch.int64), world.start()
    rows = rows_of([sequence])
    table.enter(rows, index)
    table.advance(index, torch.tensor([7]), counts=False)
    sequence.launch(1, samples=True)
    ahead = [rows[0]._replace(start=rows[0].start + 1)]
    for table_ in sequence.tables:
        table_ += [3]
    table.enter(ahead, index)
    assert table.inputs(index).ids.tolist() == [7]
    table.forget(rows)
    with pytest.raises(RuntimeError, match="is in flight, and its row is not"):
        table.enter(ahead, index)


@pytest.mark.parametrize("room", [VOCABULARY + 9, 48])
def test_any_history_gives_the_inputs_that_the_host_would_make(room: int) -> None:
    """Steps of some sequences, in any order, with steps elsewhere between them, preemptions, failed
    steps, ends, more sequences over time than the table has rows, and lists that become full.
    """
    full = 0
    for seed in range(12):
        world, table = World(seed), a_table(listed=room)
        rng, index = world.random, torch.zeros(8, dtype=torch.int64)
        for step in range(40):
            while len(world.live) < 8 and rng.random() < 0.7:
                temperature = rng.choice([0.0, 0.0, 0.7])
                drawn = {"temperature": temperature, "top_k": rng.choice([0, 5]), "top_p": 0.9}
                world.start(**drawn, **some_changes(rng))
            for sequence in rng.sample(world.live, len(world.live)):
                if rng.random() < 0.1:
                    world.live.remove(sequence)
                elif rng.random() < 0.1:
                    world.preempt(sequence)
                elif rng.random() < 0.2:  # a step that the table has not seen
                    world.append(sequence, rng.randrange(100))
            chosen = rng.sample(world.live, rng.randint(0, len(world.live)))
            if not chosen:
                continue
            rows, into = rows_of(chosen), index[: rng.randint(len(chosen), 8)]
            lens, _, counts, _ = table.enter(rows, into)
            check(table, rows, into, lens)
            full += sum(table.mode_of(row) is GENERAL for row in rows)
            if rng.random() < 0.2:  # the step fails before it is done, or after
                if rng.random() < 0.5:
                    table.advance(into, torch.full((len(into),), 77), counts=counts)
                table.forget(rows)
                continue
            # Of few ids, so that some occur again.
            tokens = torch.tensor([rng.choice([*range(12), 12 + step]) for _ in into])
            table.advance(into, tokens, counts=counts)
            for sequence, token in zip(chosen, tokens.tolist(), strict=False):
                world.append(sequence, token)
    assert bool(full) == (room < VOCABULARY)


def test_a_step_sends_only_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    world, table = World(1), a_table()
    sequences = [world.start() for _ in range(4)]
    index, sent = torch.zeros(4, dtype=torch.int64), []
    send = table._send

    def spy(*arguments: Any) -> None:
        send(*arguments)
        _, changed, growth, _ = arguments
        sent.append((len(changed), len(growth.spans)))

    monkeypatch.setattr(table, "_send", spy)
    lengths = [len(s.tokens) for s in sequences]
    for _ in range(5):
        table.enter(rows_of(sequences), index)
        table.advance(index, torch.arange(4), counts=False)
        for token, sequence in enumerate(sequences):
            world.append(sequence, token)
    new_blocks = [sum((n + i) % SIZE == 1 for n in lengths) for i in range(1, 5)]
    assert sent == [(4, 4), *((0, new) for new in new_blocks)]
    assert sum(new_blocks) > 0


def test_a_row_without_a_token_stays_one_that_can_be_computed() -> None:
    world, table = World(2), a_table()
    index = torch.zeros(2, dtype=torch.int64)
    table.enter(rows_of([world.start()]), index)
    table.advance(index, torch.tensor([-1, 9]), counts=True)
    assert table.inputs(index).ids.tolist() == [0, 0]
    assert table.lens(index)[1] == 1


def test_more_decodes_than_rows_are_refused() -> None:
    world, table = World(3), a_table(sequences=2)
    rows = rows_of([world.start() for _ in range(3)])
    with pytest.raises(ValueError, match="3 rows"):
        table.enter(rows, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        ({"temperature": 0.0, "top_k": 5}, SamplingMode()),
        ({"temperature": 1.0}, SamplingMode(DrawKind.PLAIN)),
        ({"temperature": 1.0, "top_k": 5}, SamplingMode(DrawKind.FILTERED)),
        ({"temperature": 1.0, "top_p": 0.9}, SamplingMode(DrawKind.FILTERED)),
        ({"temperature": 1.0, "min_p": 0.1}, SamplingMode(DrawKind.FILTERED)),
        ({"temperature": 0.0, "logprobs": 0}, SamplingMode(logprobs=True)),
        ({"temperature": 0.0, "min_tokens": 3}, SamplingMode(changes=True)),
        ({"temperature": 1.0, "presence_penalty": 0.5}, SamplingMode(DrawKind.PLAIN, changes=True)),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, SamplingMode(changes=True)),
        ({"temperature": 0.0, "bad_words": ((3,), (4,))}, SamplingMode(changes=True)),
        ({"temperature": 0.0, "allowed_token_ids": (3,)}, SamplingMode(changes=True)),
        (
            {"temperature": 0.0, "bad_words": ((3,), (4, 5))},
            SamplingMode(changes=True, masked=True),
        ),
        ({"temperature": 1.0, "bad_words": ((4, 5),)}, SamplingMode(DrawKind.PLAIN, masked=True)),
        # The mask holds its ends back.
        ({"temperature": 0.0, "bad_words": ((4, 5),), "min_tokens": 3}, SamplingMode(masked=True)),
        ({"temperature": 0.0, "allowed_token_ids": tuple(range(50))}, GENERAL),
    ],
)
def test_all_rows_together_decide_how_a_step_is_sampled(
    params: dict[str, Any], mode: SamplingMode
) -> None:
    world, table = World(4), a_table(listed=49)
    index = torch.zeros(3, dtype=torch.int64)
    one, other = world.start(temperature=0.0), world.start(**params)
    assert table.mode_of(rows_of([other])[0]) == mode
    assert table.enter(rows_of([one, other]), index).mode == mode
    assert table.enter(rows_of([one]), index).mode == SamplingMode()
    drawn = world.start(temperature=1.0, logprobs=3)
    both = SamplingMode(
        max(DrawKind.PLAIN, mode.draw), mode.changes, logprobs=True, masked=mode.masked
    )
    wanted = GENERAL if mode is GENERAL else both
    assert table.enter(rows_of([one, other, drawn]), index).mode == wanted


def test_rows_whose_ends_are_allowed_again_change_nothing() -> None:
    world, table = World(7), a_table()
    index, sequence = torch.zeros(1, dtype=torch.int64), world.start(min_tokens=2)
    ways = []
    for token in range(4):
        mode = table.enter(rows_of([sequence]), index).mode
        ways.append(mode.changes)
        table.advance(index, torch.tensor([token]), counts=mode.changes)
        world.append(sequence, token)
    assert ways == [True, True, False, False]


def test_a_sequence_that_is_gone_leaves_nothing_but_its_row() -> None:
    world, table, index = World(6), a_table(sequences=2), torch.zeros(2, dtype=torch.int64)
    one, other = world.start(), world.start()
    table.enter(rows_of([one, other]), index)
    places, gone = index.tolist(), weakref.ref(one)
    world.live.remove(one)
    del one
    assert gone() is None
    third = world.start()
    table.enter(rows_of([other, third]), index)
    assert index.tolist() == [places[1], places[0]]
    check(table, rows_of([other, third]), index, np.array([len(other.tokens), len(third.tokens)]))


def test_a_row_keeps_nothing_of_who_had_it_before() -> None:
    world, table = World(8), a_table(sequences=1)
    index = torch.zeros(1, dtype=torch.int64)
    rows = rows_of([world.start(logit_bias={3: 5.0}, frequency_penalty=1.0)])
    table.enter(rows, index)
    table.advance(index, torch.tensor([4]), counts=True)
    logits = torch.randn(1, VOCABULARY)
    for changes in ({}, {"presence_penalty": 1.0}):
        sequence = world.start(**changes)
        table.enter(rows_of([sequence]), index)
        wanted = changed_by_host(logits, [sequence])
        assert torch.equal(logit_edits.change(logits, table.changes(index)), wanted)


def test_a_full_list_sends_its_sequence_the_general_way_until_ids_occur_again() -> None:
    """The host counts a token in flight as a new id; once it knows the ids, fewer may be there."""
    world, table = World(9), a_table(listed=6)
    index, sequence = torch.zeros(1, dtype=torch.int64), world.start(frequency_penalty=1.0)
    ways = []
    for token in (1, 2, 1, 2, 1, 2, 3, 4, 5, 6, 7):
        mode = table.enter(rows_of([sequence]), index).mode
        ways.append(mode is GENERAL)
        table.advance(index, torch.tensor([token]), counts=True)
        world.append(sequence, token)
    assert ways == [False] * 10 + [True]
    ahead = rows_of([world.start(frequency_penalty=1.0)])[0]
    table.enter([ahead], index)
    for flying in range(1, 7):
        table.advance(index, torch.tensor([9]), counts=True)
        ahead.sequence.launch(1, samples=True)
        ahead = ahead._replace(start=ahead.start + 1)
        assert (table.mode_of(ahead) is GENERAL) == (flying > 5)


@pytest.mark.full  # torch takes seconds to import what tensors without values need
@torch.inference_mode()
def test_nothing_waits_for_the_device() -> None:
    """On tensors without values, an operation that would read one on the host raises, and so does
    one between the host and the device.
    """
    device = torch.device("meta")
    world, table = World(6), a_table(device=device)
    changes: dict[str, Any] = {"frequency_penalty": 1.0, "min_tokens": 3, "logit_bias": {3: 1.0}}
    changes |= {"allowed_token_ids": (1, 2), "bad_words": ((3,),)}
    rows = rows_of([world.start(temperature=1.0, top_p=0.9, **changes) for _ in range(3)])
    index = torch.zeros(4, dtype=torch.int64, device=device)
    triton = TritonAttention(Heads(2, 1, 8, 8, torch.float32), device, None)
    lens, _, counts, _ = table.enter(rows, index)
    for group in GROUPS:
        kv_lens, tables = torch.from_numpy(lens), table.tables[group.index]
        decodes = DecodeRows(kv_lens, table.lens(index), tables, index, SIZE, group.window)
        assert decode_rows(decodes).indices.device == device
        for room in (0, 99):
            assert triton.plan_decodes(decodes, room).decodes.device == device
    steps = [row._replace(start=0, count=row.start + 1) for row in rows]
    batch = BatchBuilder(GROUPS, SIZE, tables=table.tables_for(triton), rows=table.rows).build(
        steps
    )
    for slots, ragged in zip(batch.slots, batch.ragged, strict=True):
        assert slots.device == paged_rows(ragged).indices.device == device
        assert triton.plan(ragged).prefills.device == device
    inputs = table.inputs(index)
    logits = torch.zeros(4, 50, device=device) + inputs.ids[:, None] + inputs.slots[0][:, None]
    hashes = sample.hash_tokens(50, device)
    changed = table.changes(index)
    tokens = sample_rows.choose(logits, table.parameters(index), hashes, changes=changed)
    assert sample_rows.logprobs(logits, tokens, 20).numbers.shape == (4, 21)
    table.advance(index, tokens, counts=counts)
    for wait in (tokens.tolist, tokens.nonzero, lambda: logits[tokens > 0]):
        with pytest.raises((NotImplementedError, RuntimeError)):
            wait()


def test_padding_is_nobodys_row() -> None:
    world, table = World(5), a_table()
    index = torch.zeros(8, dtype=torch.int64)
    table.enter(rows_of([world.start() for _ in range(8)]), index)
    assert PADDING not in index.tolist()
    assert len(set(index.tolist())) == 8
