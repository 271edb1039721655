"""The decision as arithmetic: the effect of each limit, and known failures of other autoscalers."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fairlead_operator.decide.pods.load import Load, Sample, ServedRequests
from fairlead_operator.decide.scale.autoscale import (
    DEMAND,
    HOUR,
    TICK,
    Decision,
    History,
    Policy,
    Supply,
    decide,
)
from fairlead_operator.decide.scale.target import States, target_of, typical_request
from fairlead_operator.resource.spec import Autoscaling, ScaleDown, ScaleUp, Signal
from support.full import LONG_FORM

POLICY = Policy(
    min_replicas=1,
    max_replicas=8,
    target=100,
    tolerance=0.1,
    up_window=0,
    up_step=4,
    down_window=300,
    down_step=1,
)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"pod-{i}" for i in range(count))


def samples(loads: Mapping[str, float], at: float) -> dict[str, Sample]:
    return {
        pod: Sample(Load(min(load, 64), max(0.0, load - 64)), at) for pod, load in loads.items()
    }


class Fleet:
    """A fleet whose pods are ready ``start`` seconds after their request, under a given load."""

    def __init__(self, policy: Policy, replicas: int = 1, start: float = 0.0) -> None:
        self.policy, self.start, self.now = policy, start, 1e5
        self.history = History()
        self.ready_at = [0.0] * replicas  # long before now
        self.decisions: list[Decision] = []

    def tick(self, demand: float) -> Decision:
        ready = names(sum(1 for at in self.ready_at if at <= self.now))
        seen = samples({pod: demand / len(ready) for pod in ready}, self.now)
        supply = Supply(len(self.ready_at), ready, len(self.ready_at) - len(ready))
        decision = decide(self.policy, self.history, seen, supply, self.now)
        self.history = decision.history
        add = [self.now + self.start] * (decision.replicas - len(self.ready_at))
        self.ready_at = [*self.ready_at, *add][: decision.replicas]
        self.decisions.append(decision)
        self.now += TICK
        return decision

    def run(self, demand: float, seconds: float) -> list[int]:
        return [self.tick(demand).replicas for _ in range(int(seconds / TICK))]


@pytest.mark.parametrize("start", [0.0, 5.0, 120.0, 600.0])
def test_a_burst_to_800_reaches_8_replicas_within_35_seconds(start: float) -> None:
    fleet = Fleet(POLICY, start=start)
    fleet.run(0, 60)
    began = fleet.now
    while fleet.tick(800).replicas < 8:
        assert fleet.now - began <= 35
    assert fleet.run(800, 1200) == [8] * 240, "no more, however long pods load"


def test_replicas_do_not_cascade_while_models_load() -> None:
    fleet = Fleet(dataclasses.replace(POLICY, max_replicas=100), start=300.0)
    assert max(fleet.run(400, 290)) == 4, (
        "demand is a total: 400 requests ask for 4 pods, loaded or not"
    )


def test_the_signal_of_the_resource_measures_the_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(DEMAND) == set(get_args(Signal))
    assert DEMAND["QueueDepth"](Load(running=2, waiting=3)) == 5
    policy = Policy.of(Autoscaling(), target_of(100, 64, 0, None))
    monkeypatch.setitem(DEMAND, policy.signal, lambda load: 100 * load.waiting)
    decision = decide(policy, History(), {"a": Sample(Load(9, 3), 0)}, Supply(1, ("a",)), 0)
    assert decision.inputs["demand"] == 300


def test_neither_running_nor_waiting_alone_decides() -> None:
    supply = Supply(1, ("a",))
    for load in (Load(running=250, waiting=0), Load(running=0, waiting=250), Load(125, 125)):
        assert decide(POLICY, History(), {"a": Sample(load, 0)}, supply, 0).replicas == 3


def test_within_tolerance_nothing_changes() -> None:
    decision = decide(
        POLICY,
        History(),
        samples({"a": 54, "b": 55, "c": 110, "d": 110}, 0),
        Supply(3, names(3)),
        0,
    )
    assert decision.replicas == 3
    on_target = decide(
        POLICY, History(), samples(dict.fromkeys(names(3), 109), 0), Supply(3, names(3)), 0
    )
    assert (on_target.replicas, on_target.limited_by) == (3, ""), "a load on target is not a limit"
    assert [(c.name, c.before, c.after) for c in on_target.clamps] == [("tolerance", 4, 3)]
    assert (
        decide(
            POLICY, History(), samples(dict.fromkeys(names(3), 111), 0), Supply(3, names(3)), 0
        ).replicas
        == 4
    )


def test_a_step_up_holds_for_15_seconds() -> None:
    fleet = Fleet(dataclasses.replace(POLICY, max_replicas=20))
    assert fleet.run(2000, 40) == [5, 5, 5, 9, 9, 9, 13, 13]
    assert fleet.decisions[-1].limited_by == "scaleUp.maxStep"


def test_scaling_up_can_wait_for_a_lasting_need() -> None:
    fleet = Fleet(dataclasses.replace(POLICY, up_window=30))
    fleet.run(50, 60)
    fleet.tick(300)
    assert fleet.run(50, 60) == [1] * 12, "one tick of load"
    assert fleet.run(300, 40)[-1] == 3


def test_pods_that_wait_for_a_node_stop_no_growth() -> None:
    seen = samples({"pod-0": 800}, 0)
    decision = decide(POLICY, History(), seen, Supply(2, ("pod-0",), starting=1), 0)
    assert (decision.replicas, decision.limited_by) == (6, "scaleUp.maxStep")


def test_a_full_pod_that_left_the_endpoints_is_still_demand() -> None:
    full = Supply(1, (), unready=("pod-0",))
    decision = decide(POLICY, History(), samples({"pod-0": 300}, 0), full, 0)
    assert (decision.replicas, decision.inputs["demand"], decision.inputs["ready"]) == (3, 300, 0)
    history, now = History(), 0.0
    for _ in range(int(2 * POLICY.down_window / TICK)):
        seen = samples({"pod-0": 20, "pod-1": 180}, now)
        supply = Supply(2, ("pod-0",), unready=("pod-1",))
        decision = decide(POLICY, history, seen, supply, now)
        assert decision.replicas == 2
        history, now = decision.history, now + TICK


def test_a_pod_that_hangs_unready_stops_shrinking_and_keeps_its_last_load() -> None:
    fleet = Fleet(POLICY, replicas=2)
    fleet.run(150, 400)
    seen = samples({"pod-0": 0}, fleet.now) | samples({"pod-1": 75}, fleet.now - 60)
    hung = Supply(2, ("pod-0",), unready=("pod-1",))
    decision = decide(POLICY, fleet.history, seen, hung, fleet.now)
    assert (decision.replicas, decision.limited_by) == (2, "staleMetrics")
    assert (decision.inputs["demand"], decision.inputs["running"]) == (75, 2)


def test_scaling_down_takes_the_highest_need_of_the_window_one_pod_a_minute() -> None:
    fleet = Fleet(POLICY, replicas=6)
    fleet.run(600, 300)
    held = fleet.run(90, 300)
    assert held == [6] * 60, "the window still holds the need for 6"
    down = fleet.run(90, 300)
    assert down == sorted(down, reverse=True)
    assert [down[i] for i in (0, 11, 12, 24, 36, 48, 59)] == [5, 5, 4, 3, 2, 1, 1]


def test_after_a_restart_nothing_shrinks_for_a_whole_window() -> None:
    fleet = Fleet(POLICY, replicas=5)
    assert fleet.run(100, 300) == [5] * 60
    assert {d.limited_by for d in fleet.decisions} == {"windowFilling"}
    assert fleet.tick(100).replicas == 4


def test_after_a_restart_growing_is_immediate() -> None:
    assert Fleet(POLICY).tick(300).replicas == 3


@pytest.mark.parametrize(
    "known",
    [{}, {"pod-0": Sample(Load(math.nan, 0), 1000.0)}, {"pod-0": Sample(Load(-5, 0), 1000.0)}],
)
def test_without_data_it_holds(known: dict[str, Sample]) -> None:
    decision = decide(POLICY, History(), known, Supply(5, names(5)), 1000.0)
    assert decision.replicas == 5
    assert "no fresh metrics" in decision.message


def test_old_data_alone_moves_nothing_either_way() -> None:
    for load in (0, 5000):
        decision = decide(
            POLICY, History(), samples({"pod-0": load}, 0), Supply(3, ("pod-0",), 2), 60
        )
        assert decision.replicas == 3
        assert decision.history == History()


def test_one_pod_without_fresh_data_stops_shrinking_and_keeps_its_last_load() -> None:
    fleet = Fleet(POLICY, replicas=4)
    fleet.run(300, 400)
    now = fleet.now
    partly = samples({"pod-0": 0, "pod-1": 0, "pod-2": 0}, now) | samples({"pod-3": 250}, now - 600)
    decision = decide(POLICY, fleet.history, partly, Supply(4, names(4)), now)
    assert (decision.replicas, decision.limited_by) == (4, "staleMetrics")
    assert (decision.inputs["demand"], decision.inputs["fresh"]) == (250, 3)


def test_partial_data_may_still_scale_up() -> None:
    decision = decide(POLICY, History(), samples({"pod-0": 500}, 0), Supply(2, names(2)), 0)
    assert decision.replicas == 5


def test_a_pod_without_a_sample_prevents_shrinking_for_a_window() -> None:
    history, now = History(), 0.0
    for _ in range(70):
        decision = decide(POLICY, history, samples({"pod-0": 10}, now), Supply(4, names(4)), now)
        assert decision.replicas == 4
        history, now = decision.history, now + TICK
    seen = samples(dict.fromkeys(names(4), 10), now)
    assert (
        decide(POLICY, history, seen, Supply(4, names(4)), now).limited_by
        == "scaleDown.stabilizationSeconds"
    )


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 60.0])
def test_a_clock_that_jumps_starts_the_window_over(jump: float) -> None:
    fleet = Fleet(POLICY, replicas=4)
    fleet.run(400, 300)
    fleet.run(100, 295)
    fleet.now += jump
    assert fleet.run(100, 300) == [4] * 60
    assert fleet.tick(100).replicas == 3


def test_user_limits_hold_at_once_even_without_data() -> None:
    assert decide(POLICY, History(), {}, Supply(12, ()), 0).replicas == 8
    low = decide(dataclasses.replace(POLICY, min_replicas=3), History(), {}, Supply(1, ()), 0)
    assert (low.replicas, low.limited_by) == (3, "minReplicas")


def test_every_limit_is_recorded_with_before_and_after() -> None:
    policy = dataclasses.replace(POLICY, up_step=1)
    decision = decide(policy, History(), samples({"a": 5000}, 0), Supply(6, ("a",), starting=5), 0)
    assert [(c.name, c.before, c.after) for c in decision.clamps] == [
        ("maxReplicas", 50, 8),
        ("scaleUp.maxStep", 8, 7),
    ]
    assert decision.limited_by == "scaleUp.maxStep"
    entry = decision.entry("2026-01-01T00:00:00Z")
    assert (entry["from"], entry["to"], entry["raw"], entry["supply"]) == (6, 7, 50, 6)
    assert entry["clamps"][0] == {"name": "maxReplicas", "before": 50, "after": 8}
    assert "5000 requests at 100 a pod ask for 50; maxReplicas 50 → 8" in decision.message


def test_where_a_bound_decides_no_other_limit_is_named_and_nothing_changes_with_time() -> None:
    """The status of a fleet at its bound would otherwise be written when a window is filled."""
    at_least = Fleet(dataclasses.replace(POLICY, min_replicas=4), replicas=4)
    at_most = Fleet(dataclasses.replace(POLICY, up_window=60), replicas=POLICY.max_replicas)
    for fleet, load in ((at_least, 30), (at_most, 5000)):
        fleet.run(load, 2 * POLICY.down_window)
        assert len({(d.replicas, d.clamps) for d in fleet.decisions}) == 1
    assert {d.limited_by for d in at_least.decisions} == {"minReplicas"}
    assert {d.limited_by for d in at_most.decisions} == {"maxReplicas"}


def test_the_fifth_turn_of_an_hour_waits() -> None:
    fleet = Fleet(dataclasses.replace(POLICY, down_window=0, down_step=8))
    turns: list[float] = []
    for step in range(2 * int(HOUR / TICK)):
        before = len(fleet.ready_at)
        high = (step // 24) % 2 == 0  # two minutes busy, two idle
        after = fleet.tick(800 if high else 50).replicas
        if after != before and after < before:
            turns.append(fleet.now)
    assert turns, "it does shrink"
    assert all(sum(1 for t in turns if 0 <= at - t < HOUR) <= 2 for at in turns), "two down, two up"
    assert any(d.limited_by == "flapping" for d in fleet.decisions)


@pytest.mark.parametrize(
    ("configured", "tokens", "typical", "expected"),
    [
        (7, 100_000, 500.0, 7.0),
        (None, 102_400, None, 80.0),  # 1,024 assumed
        (None, 102_400, 2048.0, 40.0),
        (None, 393_216, 512.0, 0.8 * 256),  # an 8B model on 80 GiB: bounded by maxRequests
        (None, 0, None, 256.0),
        (None, 0, 512.0, 256.0),
        (None, 100, 5000.0, 1.0),
    ],
)
def test_an_unset_target_is_what_a_pod_holds_of_typical_requests(
    configured: int | None, tokens: int, typical: float | None, expected: float
) -> None:
    target = target_of(configured, 256, tokens, typical)
    assert target.requests == pytest.approx(expected)
    autoscaling = Autoscaling(
        target_per_replica=configured, scale_up=ScaleUp(7, 3), scale_down=ScaleDown(9, 2)
    )
    policy = Policy.of(autoscaling, target)
    limits = Policy(1, 8, target.requests, 0.1, 7, 3, 9, 2)
    assert dataclasses.replace(policy, target_formula="", target_inputs={}) == limits


def test_a_request_of_a_model_with_states_takes_its_own_beside_its_tokens() -> None:
    """The tokens are those beside one sequence's states; without keys states alone count."""
    states = States(tokens=4752.0)
    target = target_of(None, 256, 100_000, 1000.0, states)
    assert target.requests == pytest.approx(0.8 * (100_000 + 4752) / 5752, abs=0.05)
    assert target.formula == (
        "0.8 of min(256 maxRequests, (100000 concurrent tokens + 4752) ÷ (1000 tokens a request, "
        "measured, + 4752 for its states))"
    )
    without_keys = target_of(None, 256, 40 * 32_768, 10.0, States(sequences=40))
    assert without_keys.requests == pytest.approx(0.8 * 40)
    assert without_keys.formula == "0.8 of min(256 maxRequests, 40 states)"
    assert target_of(None, 20, 40 * 32_768, 10.0, States(sequences=40)).requests == 16


def test_a_typical_request_is_the_mean_of_all_pods_once_a_hundred_have_finished() -> None:
    assert typical_request([]) is None
    assert typical_request([ServedRequests(99, 99 * 300)]) is None
    assert (
        typical_request(
            [ServedRequests(90, 90 * 100), ServedRequests(10, 10 * 1100), ServedRequests()]
        )
        == 200
    )


def test_each_decision_shows_the_arithmetic_of_its_target() -> None:
    policy = Policy.of(Autoscaling(), target_of(None, 256, 102_400, None))
    decision = decide(policy, History(), samples({"a": 200}, 0), Supply(1, ("a",)), 0)
    entry = decision.entry("2026-01-01T00:00:00Z")
    shown = ("target", "maxRequests", "concurrentTokens", "typicalTokens", "typicalFrom")
    assert [entry[name] for name in shown] == [80, 256, 102_400, 1024, "assumed"]
    assert entry["why"] == (
        "200 requests at 80 a pod (0.8 of min(256 maxRequests, 102400 concurrent tokens ÷ "
        "1024 tokens a request, assumed)) ask for 3"
    )
    unknown = Policy.of(Autoscaling(), target_of(None, 256, 0, None))
    decision = decide(unknown, History(), samples({"a": 600}, 0), Supply(1, ("a",)), 0)
    assert "at 256 a pod (maxRequests 256: the capacity of a pod is not known)" in decision.message


POLICIES = st.builds(
    Policy,
    min_replicas=st.integers(1, 3),
    max_replicas=st.integers(3, 12),
    target=st.floats(1, 200),
    tolerance=st.floats(0, 0.5),
    up_window=st.sampled_from([0, 20]),
    up_step=st.integers(1, 5),
    down_window=st.sampled_from([0, 30, 300]),
    down_step=st.integers(1, 4),
)
DEMANDS = st.lists(st.tuples(st.floats(0, 3000), st.integers(1, 40)), min_size=1, max_size=6)


@settings(max_examples=100 if LONG_FORM else 12)
@given(POLICIES, DEMANDS, st.floats(0, 100))
def test_any_load_stays_inside_every_limit(
    policy: Policy, demands: list[tuple[float, int]], start: float
) -> None:
    fleet = Fleet(policy, replicas=policy.min_replicas, start=start)
    counts = [policy.min_replicas]
    for demand, ticks in demands:
        for _ in range(ticks):
            counts.append(fleet.tick(demand).replicas)
    assert all(policy.min_replicas <= n <= policy.max_replicas for n in counts)
    steps = [after - before for before, after in itertools.pairwise(counts)]
    for i in range(len(steps)):
        assert sum(n for n in steps[max(0, i - 2) : i + 1] if n > 0) <= policy.up_step, (
            "in 15 seconds"
        )
        assert -sum(n for n in steps[max(0, i - 11) : i + 1] if n < 0) <= policy.down_step, (
            "in a minute"
        )
    steady = fleet.run(demands[-1][0], 2 * HOUR)
    assert len(set(steady[-240:])) == 1, "a steady load comes to rest"


@given(POLICIES, st.floats(0, 3000), st.floats(0, 3000), st.integers(1, 12))
def test_more_load_never_asks_for_less(
    policy: Policy, one: float, more: float, current: int
) -> None:
    """Outside the tolerance: inside it the count stays, which may be more than a higher load asks
    for.
    """
    for demand in (one, one + more):
        assume(abs(demand / (policy.target * current) - 1) > policy.tolerance)
    ready = names(current)
    replicas = []
    for demand in (one, one + more):
        seen = samples(dict.fromkeys(ready, demand / current), 0)
        replicas.append(
            decide(
                policy, History(since=-1000, raws=((0, 0),)), seen, Supply(current, ready), 0
            ).replicas
        )
    assert replicas[0] <= replicas[1]
