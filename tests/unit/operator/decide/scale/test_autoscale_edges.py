"""Decisions at the edges of a limit: both sides of the tolerance, small and large savings."""

import dataclasses
import math

import pytest

from fairlead_operator.decide.pods.load import Load, Sample
from fairlead_operator.decide.scale.autoscale import (
    DOWN_PERIOD,
    HOUR,
    TICK,
    TURNS,
    UP_PERIOD,
    Decision,
    History,
    Policy,
    Supply,
    decide,
)

POLICY = Policy(
    min_replicas=1,
    max_replicas=20,
    target=100,
    tolerance=0.1,
    up_window=0,
    up_step=4,
    down_window=300,
    down_step=20,
)
NOW = 1e5


def names(count: int) -> tuple[str, ...]:
    return tuple(f"pod-{i}" for i in range(count))


def long_history(demand: int, **changes: object) -> History:
    """A window full of one demand, every tick of it."""
    ticks = [NOW - i * TICK for i in range(int(POLICY.down_window / TICK), 0, -1)]
    history = History(since=ticks[0], raws=tuple((at, demand) for at in ticks))
    return dataclasses.replace(history, **changes)  # type: ignore[arg-type]  # fields by name


def decided(
    demand: float, current: int, history: History | None = None, policy: Policy = POLICY
) -> Decision:
    ready = names(current)
    seen = {pod: Sample(Load(demand / current, 0), NOW) for pod in ready}
    filled = history or long_history(math.ceil(demand / policy.target))
    return decide(policy, filled, seen, Supply(current, ready), NOW)


@pytest.mark.parametrize(
    ("demand", "replicas"),
    [(1101, 12), (1099, 10), (901, 10), (899, 9), (799, 8)],
)
def test_the_tolerance_is_as_wide_below_the_target_as_above(demand: int, replicas: int) -> None:
    assert decided(demand, 10).replicas == replicas


def test_a_small_saving_after_many_turns_waits_and_a_large_one_does_not() -> None:
    """The last turns began within the hour and ended a stretch that began before it: a saving of
    more than two thirds looks at the beginning.
    """
    old = tuple((NOW - 60.0 * i, NOW - HOUR - 60.0) for i in range(TURNS + 1, 0, -1))
    turned = {"turns": old, "direction": 1, "last": NOW - 600.0}
    small = decided(500, 8, long_history(5, **turned))
    assert (small.replicas, small.limited_by) == (8, "flapping")
    large = decided(200, 8, long_history(2, **turned))
    assert (large.replicas, large.limited_by) == (2, "")
    recent = tuple((at, NOW - 900.0) for at, _ in old)
    again = decided(200, 8, long_history(2, **(turned | {"turns": recent})))
    assert (again.replicas, again.limited_by) == (8, "flapping")


def test_a_steps_room_returns_after_its_period() -> None:
    recent = History(since=NOW, raws=(), changes=((NOW - UP_PERIOD + 1, 4),))
    assert decided(900, 5, recent).limited_by == "scaleUp.maxStep"
    past = History(since=NOW, raws=(), changes=((NOW - UP_PERIOD, 4),))
    assert decided(900, 5, past).replicas == 9
    one = dataclasses.replace(POLICY, down_step=1)
    held = decided(100, 5, long_history(1, changes=((NOW - DOWN_PERIOD + 1, -1),)), one)
    assert (held.replicas, held.limited_by) == (5, "scaleDown.maxStep")
    freed = decided(100, 5, long_history(1, changes=((NOW - DOWN_PERIOD, -1),)), one)
    assert freed.replicas == 4
