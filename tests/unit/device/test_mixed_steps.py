"""Launched steps with prompts on a tiny model: what they take from the device, and what they leave
to the next.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fairlead_runtime.device.model.batch import UNKNOWN, Batch
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.sampling.device_sampler import RowSampler
from fairlead_runtime.device.sampling.host_sampler import NON_FINITE
from fairlead_runtime.device.sampling.sequence_table import SequenceTable
from fairlead_runtime.device.sampling.token_readback import TokenReadback
from fairlead_runtime.device.step.mixed_steps import MixedSteps
from fairlead_runtime.device.step.model_runner import ModelRunner
from fairlead_runtime.request.sequence import Request, SamplingParams
from fairlead_runtime.scheduling.plan import DeviceLostError, Finished, Token, Work
from support.engine_rig import EOS, Rig, Setting, greedy, rig
from support.in_flight import InFlight

SETTING = Setting(block_size=4, chunk=16, num_blocks=100, max_requests=4)


class World(InFlight):
    """There always is a next step."""

    def __init__(
        self, *asked: Request, listed: int | None = None, engine: Rig | None = None
    ) -> None:
        engine = engine or rig("llama", "resident")
        super().__init__(engine, replace(SETTING, listed=listed), *asked)

    def launch(self) -> Work:
        work = super().launch()
        assert work is not None
        return work


def long(name: str = "long", **params: Any) -> Request:
    prompt = tuple(range(5, 65))
    params = {"max_tokens": 5, "ignore_eos": True, "temperature": 0.0} | params
    return Request(name, prompt, SamplingParams(**params), 5, seed=3, eos_ids=EOS)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """What the model gets, step by step."""
    seen: list[Batch] = []
    forward = PagedModel.forward

    def spy(self: PagedModel, batch: Batch, *arguments: Any) -> torch.Tensor:
        seen.append(batch)
        return forward(self, batch, *arguments)

    monkeypatch.setattr(PagedModel, "forward", spy)
    return seen


def test_a_decode_beside_a_prompt_computes_the_token_of_the_step_in_flight(
    batches: list[Batch],
) -> None:
    world = World(greedy("short", tuple(range(9, 17)), 6), long())
    world.launch()
    step = world.launch()
    assert step.rows[0].sequence.sampled_in_flight == 2
    at = int(batches[1].sample_index[0])
    computed = int(batches[1].input_ids[at])
    (token,) = world.collect()
    assert isinstance(token, Token)
    assert computed == token.token
    assert computed == rig("llama", "resident").reference(range(9, 17), 6)[0]


def test_what_a_step_in_flight_reads_is_not_written_by_the_next(batches: list[Batch]) -> None:
    """Memory on the host, which may not have been copied to the device yet."""

    def host(batch: Batch) -> list[torch.Tensor]:
        (ragged,) = batch.ragged
        assert ragged.rows is not None
        tables = ragged.query_starts, ragged.kv_lens, ragged.rows
        return [batch.input_ids, batch.positions, batch.sample_index, *batch.slots, *tables]

    world = World(greedy("short", tuple(range(9, 17)), 6), long())
    world.launch()
    for _ in range(3):
        before = [x.clone() for x in host(batches[-1])]
        world.launch()
        assert all(map(torch.equal, host(batches[-2]), before))
        world.collect()
    assert len(batches) == 4


def test_the_states_that_a_step_in_flight_reads_and_writes_are_not_the_next_ones(
    batches: list[Batch],
) -> None:
    """Nor is the memory on the host where their units are listed, with all else of the batch."""

    def host(batch: Batch) -> list[torch.Tensor]:
        (ragged,), states = batch.ragged, batch.states
        assert states is not None
        of_rows = [*batch.slots, ragged.tables, ragged.kv_lens, states.source, states.target]
        return [batch.input_ids, batch.positions, batch.sample_index, *of_rows]

    engine = rig("qwen3_5_text", "ahead")
    world = World(greedy("short", tuple(range(9, 17)), 9), long(), engine=engine)
    world.launch()
    tokens = []
    for _ in range(4):
        before = [x.clone() for x in host(batches[-1])]
        world.launch()
        assert all(map(torch.equal, host(batches[-2]), before))
        last, new = (batch.states for batch in batches[-2:])
        assert last is not None
        assert new is not None
        assert torch.equal(new.source[0], last.target[0])
        assert len({*last.source[0].tolist(), *last.target[0].tolist()}) == 2 * new.source.shape[1]
        assert not {*new.target[0].tolist()} & {*last.source[0].tolist(), *last.target[0].tolist()}
        tokens += [e.token for e in world.collect() if e.sequence.request.id == "short"]
    # A chunk ends at the last block before the prompt's last token.
    assert tokens == engine.reference(range(9, 17), 9)[:3]


def test_a_step_with_a_prompt_sends_the_blocks_that_the_device_lacks(batches: list[Batch]) -> None:
    """Of who decodes beside it too, which may have begun in a step of decodes alone."""
    world = World(greedy("short", tuple(range(9, 17)), 9))
    for _ in range(2):
        world.launch()
    for _ in range(2):
        world.collect()
    world.scheduler.add(long())
    world.launch()
    for _ in range(3):
        world.launch()
        world.collect()
    first, *steps = (batch.growth.spans[:, 1:].tolist() for batch in batches)
    assert first == [[0, 2]]
    assert steps == [[[0, 4]], [[4, 4]], [[8, 4]], [[3, 1], [12, 3]]]


def test_a_part_of_a_prompt_samples_nothing_and_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, wait = [], TokenReadback.wait

    def spy(self: TokenReadback) -> list[int]:
        waits.append(wait(self))
        return waits[-1]

    monkeypatch.setattr(TokenReadback, "wait", spy)
    world = World(long())
    world.launch()
    assert world.collect() == []
    assert waits == [[]]


def test_a_row_that_is_not_finite_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PagedModel.forward

    def spoiled(self: PagedModel, *arguments: Any) -> torch.Tensor:
        out = forward(self, *arguments)
        out[:1] = torch.nan
        return out

    world = World(greedy("bad", (5, 6, 7), 4), greedy("good", (8, 9, 10), 4), long())
    monkeypatch.setattr(PagedModel, "forward", spoiled)
    world.launch()
    monkeypatch.undo()
    world.launch()
    failed, token = world.collect()
    assert isinstance(failed, Finished)
    assert (failed.sequence.request.id, failed.failure) == ("bad", NON_FINITE)
    assert isinstance(token, Token)
    wanted = rig("llama", "resident").reference((8, 9, 10), 4)
    (after,) = world.collect()  # nobody sees the dead row
    assert [token.token, after.token] == wanted[:2]


@pytest.mark.parametrize(("owner", "name"), [(PagedModel, "forward"), (RowSampler, "sample")])
def test_a_launch_that_fails_on_the_way_leaves_no_row_that_is_taken_for_right(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    world = World(greedy("a", (5, 6, 7), 6))
    work = world.scheduler.commit(world.scheduler.plan())

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(RuntimeError, match="planted"):
        world.runner.launch(work)
    monkeypatch.undo()
    events: list[Any] = world.scheduler.update(work, world.runner.execute(work))
    world.launch()
    events += world.collect()
    wanted = rig("llama", "resident").reference((5, 6, 7), 6)
    assert [event.token for event in events] == wanted[:2]


def test_the_host_s_rows_are_refused() -> None:
    world = World(long(max_tokens=2, bad_words=((1,), (2,))), listed=1)
    work = world.scheduler.commit(world.scheduler.plan())
    while not work.rows[0].samples:
        world.scheduler.update(work, {})
        work = world.scheduler.commit(world.scheduler.plan())
    assert not world.runner.launches(work.rows)
    with pytest.raises(ValueError, match="one is not sampled on the device"):
        world.runner.launch(work)


def test_steps_of_decodes_alone_are_not_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    world, launch, seen = World(greedy("a", (5, 6, 7), 6)), MixedSteps.launch, []

    def spy(self: MixedSteps, rows: Any, masks: Any) -> Any:
        seen.append([row.count for row in rows])
        return launch(self, rows, masks)

    monkeypatch.setattr(MixedSteps, "launch", spy)
    for _ in range(2):
        world.launch()
    for _ in range(2):
        world.collect()
    world.scheduler.add(greedy("b", (8, 9), 3))
    world.launch()
    assert seen == [[3], [1, 2]]


class Others:
    """The other ranks of a split model, which note what they are told."""

    def __init__(self, *, lose: bool = False) -> None:
        self.told: list[tuple[str, list[int]]] = []
        self.batches: list[Batch] = []
        self._lose = lose

    def copy(self, work: Work) -> None:
        raise AssertionError

    def forward(self, batch: Batch, keep: torch.Tensor | None, *, ahead: bool = False) -> None:
        assert keep is None
        assert ahead
        self.told.append(("pass", batch.positions.tolist()))
        self.batches.append(batch)

    def share(self, ids: torch.Tensor) -> None:
        if self._lose:
            raise RuntimeError("connection reset")
        self.told.append(("ids", ids.tolist()))

    def failure(self, error: Exception) -> DeviceLostError:
        return DeviceLostError(f"lost: {error}")


def split_world(others: Others, *asked: Request) -> World:
    world, engine = World(*asked), rig("llama", "flashinfer")
    cache = world.runner._cache
    lengths = {"sequences": 4, "max_model_len": 100}
    sampler = RowSampler.of(engine.model, cache, **lengths)
    parts = engine.model, cache, world.runner._attention
    world.runner = ModelRunner(*parts, followers=others, row_sampler=sampler)
    return world


def test_other_ranks_get_the_ids_of_a_pass_with_those_in_flight() -> None:
    """In steps of decodes alone, too: a split model has no others."""
    others = Others()
    world = split_world(others, greedy("a", (5, 6, 7), 6))
    for _ in range(2):
        world.launch()
    tokens = [world.collect()[0].token for _ in range(2)]
    assert tokens == rig("llama").reference((5, 6, 7), 6)[:2]
    assert others.told == [
        ("pass", [0, 1, 2]),
        ("ids", [5, 6, 7]),
        ("pass", [3]),
        ("ids", tokens[:1]),
    ]
    # A message may be made of what was told at any time after: nothing is written there.
    assert [batch.input_ids.tolist() for batch in others.batches] == [[5, 6, 7], [UNKNOWN]]


def test_a_pass_that_fails_once_other_ranks_were_told_loses_the_device() -> None:
    """They may be anywhere in theirs."""
    world = split_world(Others(lose=True), greedy("a", (5, 6, 7), 6))
    with pytest.raises(DeviceLostError, match="lost: connection reset"):
        world.launch()


def test_a_launch_that_fails_before_other_ranks_are_told_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = Others()
    world = split_world(others, greedy("a", (5, 6, 7), 6))
    monkeypatch.setattr(SequenceTable, "enter", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        world.launch()
    assert others.told == []
