"""What the checks between two steps say of states that must not be, with a step in flight."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fairlead_runtime.request.sequence import Sequence, Status
from fairlead_runtime.scheduling import invariants
from fairlead_runtime.scheduling.invariants import InvariantViolation
from fairlead_runtime.scheduling.plan import Result
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.sizing.groups import LayerGroup
from support import whole_run
from support.fake_engine import FULL, MIXED, limits, request


def in_flight() -> tuple[Scheduler, Sequence]:
    """A sequence of which a step is launched and not collected, and one that waits."""
    scheduler = Scheduler(limits(max_requests=1), FULL)
    for name in ("first", "second"):
        scheduler.add(request(name, 5, 9))
    work = scheduler.commit(scheduler.plan())
    scheduler.launch(work)
    scheduler.check()
    (row,) = work.rows
    return scheduler, row.sequence


def test_a_sequence_that_waits_is_not_in_flight() -> None:
    scheduler, _ = in_flight()
    (waiting,) = scheduler.waiting
    waiting.steps_in_flight = 1
    with pytest.raises(InvariantViolation, match=r"I14.*waits while it is in flight"):
        scheduler.check()


def test_who_has_ended_holds_blocks_for_a_step_in_flight_alone() -> None:
    scheduler, running = in_flight()
    scheduler.abort(running.request.id)
    scheduler.check()  # its dead row is in flight
    assert running.status is Status.ABORTED
    running.steps_in_flight = 0
    with pytest.raises(InvariantViolation, match=r"I14.*with no step in flight"):
        scheduler.check()


def test_no_more_sequences_run_than_may() -> None:
    scheduler = Scheduler(limits(max_requests=2), FULL)
    for name in ("first", "second"):
        scheduler.add(request(name, 5, 9))
    scheduler.launch(scheduler.commit(scheduler.plan()))
    scheduler.check()
    scheduler.state.limits = limits(max_requests=1)
    with pytest.raises(InvariantViolation, match=r"I7.*2 sequences run, more than max_requests"):
        scheduler.check()


class InParts(Scheduler):
    """Checks one small part after each step, as the engine does."""

    parts: Iterator[None] | None = None
    rounds = 0

    def check(self) -> None:
        self.parts = self.parts or self.checks()
        try:
            next(self.parts)
        except StopIteration:
            self.parts = None
            InParts.rounds += 1


def test_a_check_between_whose_parts_steps_run_finds_no_fault_in_a_sound_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(invariants, "ENTRIES_PER_PART", 16)
    monkeypatch.setattr(InParts, "rounds", 0)
    for seed in range(10):
        for ahead in (False, True):
            whole_run.run(whole_run.draw(seed), InParts, ahead=ahead)
    assert InParts.rounds > 20


def decoding(blocks: int = 64, groups: tuple[LayerGroup, ...] = FULL) -> Scheduler:
    """A sequence that decodes for long, and one that has ended and left its blocks cached."""
    scheduler = Scheduler(limits(max_requests=2, num_blocks=blocks, max_model_len=1024), groups)
    for name, prompt, output in (("decodes", 40, 200), ("ended", 41, 1)):
        scheduler.add(request(name, prompt, output))
    while len(scheduler.running) + len(scheduler.waiting) > 1:
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> None:
    work = scheduler.commit(scheduler.plan())
    scheduler.update(work, {row.sequence.id: Result(5) for row in work.rows if row.samples})


def check_between_steps(scheduler: Scheduler, prompt: list[int] | None = None) -> None:
    """Before each step a request with the prompt, where there is one, comes too."""
    for number, _ in enumerate(scheduler.checks()):
        if prompt is not None:
            scheduler.add(replace(request(f"new-{number}", len(prompt), 3), prompt=prompt))
        step(scheduler)


def no_content(scheduler: Scheduler) -> None:
    unit = next(iter(scheduler.state.cache.pool.cached))
    scheduler.state.cache.pool.content[unit] = None


def other_content(scheduler: Scheduler) -> None:
    pool, (sequence,) = scheduler.state.cache.pool, scheduler.running
    pool.forget(sequence.tables[0][0])
    pool.register(sequence.tables[0][0], 0, b"other")


FAULTS: dict[str, Callable[[Scheduler], object]] = {
    "I1: unit 63 is neither free, cached nor referenced": lambda s: s.state.cache.pool.free.remove(
        63
    ),
    "I2: unit 0 has 2 references, and tables name it 1 times": lambda s: (
        s.state.cache.pool.refs.__setitem__(0, 2)
    ),
    "I3: unit 63 is free or cached twice": lambda s: s.state.cache.pool.free.insert(0, 63),
    "I3: unit .* is cached without content": no_content,
    "I10: sequence 0: hash 0 covers other tokens": lambda s: s.running[0].hashes.reverse(),
    "I10: sequence 0: block 0 holds other content": other_content,
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_is_found_while_steps_run_between_the_parts(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariants, "ENTRIES_PER_PART", 16)
    scheduler = decoding()
    FAULTS[message](scheduler)
    with pytest.raises(InvariantViolation, match=message):
        check_between_steps(scheduler)


def test_content_of_another_layer_group_is_other_content() -> None:
    scheduler = decoding(groups=MIXED)
    pool, (sequence,) = scheduler.state.cache.pool, scheduler.running
    unit = sequence.tables[0][0]
    digest = pool.content[unit]
    assert digest is not None
    twin = pool.find(1, digest)
    assert twin is not None
    for one in (unit, twin):
        pool.forget(one)
    pool.register(unit, 1, digest)
    with pytest.raises(InvariantViolation, match="I10: sequence 0: block 0 holds other content"):
        scheduler.check()


def test_a_leaked_reference_is_found_though_traffic_moves_its_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(invariants, "ENTRIES_PER_PART", 64)
    scheduler, shared = Scheduler(limits(num_blocks=400), FULL), [1] * 65
    scheduler.add(replace(request("first", 65, 100), prompt=shared))
    step(scheduler)
    leaked = scheduler.running[0].tables[0][0]
    scheduler.state.cache.pool.refs[leaked] += 1
    with pytest.raises(InvariantViolation, match=f"I2: unit {leaked} has . references"):
        check_between_steps(scheduler, shared)


def test_no_part_of_a_check_grows_with_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "ENTRIES_PER_PART", 256)
    small, large = (sum(1 for _ in decoding(blocks).checks()) for blocks in (64, 4096))
    assert large - small >= (1 + 4) * (4096 - 64) / 256 - 1
