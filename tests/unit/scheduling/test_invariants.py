"""What the checks between two steps say of states that must not be, with a step in flight."""

import pytest

from fairlead_runtime.request.sequence import Sequence, Status
from fairlead_runtime.scheduling.invariants import InvariantViolation
from fairlead_runtime.scheduling.scheduler import Scheduler
from support.fake_engine import FULL, limits, request


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
