"""The slot table has on the device what each decode needs, after any history of its sequences, and
sends no more than what changed.
"""

import random
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor

from fairlead_kernels import sample, sample_rows
from fairlead_kernels.attention import DecodeRows
from fairlead_kernels.flashinfer_plan import decode_rows, paged_rows
from fairlead_runtime.device.batch import BatchBuilder
from fairlead_runtime.device.sampling import SamplingBatch
from fairlead_runtime.device.slot_table import PADDING, Draw, SlotTable
from fairlead_runtime.request import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.sizing.groups import LayerGroup

SIZE = 4
GROUPS = (LayerGroup(0, None, (0,)), LayerGroup(1, 6, (1,)))
UNITS = 500
CPU = torch.device("cpu")


def a_table(sequences: int = 8, blocks: int = 32, device: torch.device = CPU) -> SlotTable:
    return SlotTable(
        GROUPS, SIZE, sequences=sequences, blocks=blocks, padding_unit=UNITS, device=device
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
        tokens = array("i", [self.random.randrange(100) for _ in range(length)])
        request = Request(f"{self.count}", tokens, SamplingParams(**params), 99, seed=self.count)
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


def rows_of(sequences: list[Sequence]) -> list[Row]:
    return [Row(s, len(s.tokens) - 1, 1, samples=True) for s in sequences]


def check(table: SlotTable, rows: list[Row], index: Tensor, lens: Any) -> None:
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
    draws = SamplingBatch.of([row.sequence for row in rows]).draws
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
        table.advance(index, torch.tensor([7]))
        table.enter(rows_of([sequence]), index)
        assert table._packets[0] is not sent
        assert torch.equal(sent, before)
        world.append(sequence, 8)
        table.advance(index, torch.tensor([8]))


def test_a_row_in_flight_that_the_table_does_not_have_is_refused() -> None:
    """The host does not know its last token, so it must not send what it has."""
    world, table = World(2), a_table()
    index, sequence = torch.zeros(1, dtype=torch.int64), world.start()
    rows = rows_of([sequence])
    table.enter(rows, index)
    table.advance(index, torch.tensor([7]))
    sequence.flying = 1
    ahead = [rows[0]._replace(start=rows[0].start + 1)]
    for table_ in sequence.tables:
        table_ += [3]
    table.enter(ahead, index)
    assert table.inputs(index).ids.tolist() == [7]
    table.forget(rows)
    with pytest.raises(RuntimeError, match="is in flight, and its row is not"):
        table.enter(ahead, index)


def test_any_history_gives_the_inputs_that_the_host_would_make() -> None:
    """Steps of some sequences, in any order, with steps elsewhere between them, preemptions, failed
    steps, ends, and more sequences over time than the table has rows.
    """
    for seed in range(12):
        world, table = World(seed), a_table()
        rng, index = world.random, torch.zeros(8, dtype=torch.int64)
        for _ in range(40):
            while len(world.live) < 8 and rng.random() < 0.7:
                temperature = rng.choice([0.0, 0.0, 0.7])
                world.start(temperature=temperature, top_k=rng.choice([0, 5]), top_p=0.9)
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
            lens, _ = table.enter(rows, into)
            check(table, rows, into, lens)
            if rng.random() < 0.2:  # the step fails before it is done, or after
                if rng.random() < 0.5:
                    table.advance(into, torch.full((len(into),), 77))
                table.forget(rows)
                continue
            tokens = torch.tensor([rng.randrange(100) for _ in into])
            table.advance(into, tokens)
            for sequence, token in zip(chosen, tokens.tolist(), strict=False):
                world.append(sequence, token)


def test_a_step_sends_only_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    world, table = World(1), a_table()
    sequences = [world.start() for _ in range(4)]
    index, sent = torch.zeros(4, dtype=torch.int64), []
    send = table._send

    def spy(*arguments: Any) -> None:
        send(*arguments)
        _, changed, grown, _ = arguments
        sent.append((len(changed), len(grown)))

    monkeypatch.setattr(table, "_send", spy)
    lengths = [len(s.tokens) for s in sequences]
    for _ in range(5):
        table.enter(rows_of(sequences), index)
        table.advance(index, torch.arange(4))
        for token, sequence in enumerate(sequences):
            world.append(sequence, token)
    new_blocks = [sum((n + i) % SIZE == 1 for n in lengths) for i in range(1, 5)]
    assert sent == [(4, 4), *((0, new) for new in new_blocks)]
    assert sum(new_blocks) > 0


def test_a_row_without_a_token_stays_one_that_can_be_computed() -> None:
    world, table = World(2), a_table()
    index = torch.zeros(2, dtype=torch.int64)
    table.enter(rows_of([world.start()]), index)
    table.advance(index, torch.tensor([-1, 9]))
    assert table.inputs(index).ids.tolist() == [0, 0]
    assert table.lens(index)[1] == 1


def test_more_decodes_than_rows_are_refused() -> None:
    world, table = World(3), a_table(sequences=2)
    rows = rows_of([world.start() for _ in range(3)])
    with pytest.raises(ValueError, match="3 decodes"):
        table.enter(rows, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("params", "draw"),
    [
        ({"temperature": 0.0, "top_k": 5}, Draw.GREEDY),
        ({"temperature": 1.0}, Draw.PLAIN),
        ({"temperature": 1.0, "top_k": 5}, Draw.FILTERED),
        ({"temperature": 1.0, "top_p": 0.9}, Draw.FILTERED),
        ({"temperature": 1.0, "min_p": 0.1}, Draw.FILTERED),
        ({"temperature": 0.0, "logprobs": 0}, Draw.GENERAL),
        ({"temperature": 0.0, "min_tokens": 3}, Draw.GENERAL),
        ({"temperature": 0.0, "presence_penalty": 0.5}, Draw.GENERAL),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, Draw.GENERAL),
        ({"temperature": 0.0, "bad_words": ((3,),)}, Draw.GENERAL),
        ({"temperature": 0.0, "allowed_token_ids": (3,)}, Draw.GENERAL),
    ],
)
def test_the_most_demanding_row_decides_how_a_step_is_sampled(
    params: dict[str, Any], draw: Draw
) -> None:
    world, table = World(4), a_table()
    index = torch.zeros(2, dtype=torch.int64)
    one, other = world.start(temperature=0.0), world.start(**params)
    assert table.enter(rows_of([one, other]), index).draw is draw
    assert table.enter(rows_of([one]), index).draw is Draw.GREEDY


@pytest.mark.full  # torch takes seconds to import what tensors without values need
@torch.inference_mode()
def test_nothing_waits_for_the_device() -> None:
    """On tensors without values, an operation that would read one on the host raises, and so does
    one between the host and the device.
    """
    device = torch.device("meta")
    world, table = World(6), a_table(device=device)
    rows = rows_of([world.start(temperature=1.0, top_p=0.9) for _ in range(3)])
    index = torch.zeros(4, dtype=torch.int64, device=device)
    lens, _ = table.enter(rows, index)
    for group in GROUPS:
        kv_lens, tables = torch.from_numpy(lens), table.tables[group.index]
        decodes = DecodeRows(kv_lens, table.lens(index), tables, index, SIZE, group.window)
        assert decode_rows(decodes).indices.device == device
    inputs = table.inputs(index)
    logits = torch.zeros(4, 50, device=device) + inputs.ids[:, None] + inputs.slots[0][:, None]
    hashes = sample.hash_tokens(50, device)
    tokens = sample_rows.choose(logits, table.parameters(index), hashes)
    table.advance(index, tokens)
    for wait in (tokens.tolist, tokens.nonzero, lambda: logits[tokens > 0]):
        with pytest.raises((NotImplementedError, RuntimeError)):
            wait()


def test_padding_is_nobodys_row() -> None:
    world, table = World(5), a_table()
    index = torch.zeros(8, dtype=torch.int64)
    table.enter(rows_of([world.start() for _ in range(8)]), index)
    assert PADDING not in index.tolist()
    assert len(set(index.tolist())) == 8
