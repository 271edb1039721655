"""Asynchronous steps of the engine: the next step is launched before the tokens of the last are
known, and nobody can tell.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlead_runtime.engine.engine import Engine
from fairlead_runtime.engine.observer import Observer
from fairlead_runtime.request.sequence import FinishReason, Request
from fairlead_runtime.scheduling.plan import DeviceLostError, Event, Work
from support.fake_engine import (
    FULL,
    MIXED,
    VOCABULARY,
    Collected,
    FakeRunner,
    LaunchingRunner,
    request,
    rig,
    run,
)
from support.full import LONG_FORM

STOPS = tuple(range(1, VOCABULARY, 16))
STOP_TEXT = 17  # a token that is a multiple of it is the client's stop text
EXAMPLES = 2000 if LONG_FORM else 60


@pytest.fixture(autouse=True)
def _check_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_runtime.engine.engine.CHECK_EVERY", 1)


class Seen(Observer):
    """Counts what metrics would."""

    def __init__(self) -> None:
        self.rows = self.tokens = 0

    def stepped(self, work: Work, events: Sequence[Event], began: float, ended: float) -> None:
        self.rows += sum(row.samples for row in work.rows)
        self.tokens += len(events)


# -- the order of work


def launching(*texts: Request, **changes: Any) -> tuple[Engine, LaunchingRunner]:
    runner = LaunchingRunner()
    engine = rig(runner, **changes)
    for one in texts:
        engine.submit(one)
    return engine, runner


def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_asked_for() -> None:
    engine, runner = launching(request("a", max_tokens=5), request("b", max_tokens=5))
    run(engine)
    assert runner.log == [
        ("launch", 0),
        ("launch", 1),
        ("collect", 0),
        ("launch", 2),
        ("collect", 1),
        ("launch", 3),
        ("collect", 2),
        ("launch", 4),
        ("collect", 3),
        ("collect", 4),
    ]
    # The last token of each is known to be the last: no row is computed for nothing.
    assert len(runner.launched) == 10


def test_chunks_of_a_prompt_follow_each_other_and_its_first_token() -> None:
    """Beside a decode of another text, whose tokens the host has not seen either."""
    engine, runner = launching(request("a", max_tokens=9), request("long", prompt=70, max_tokens=3))
    collected = run(engine)
    assert [what for what, _ in runner.log[1:-1]] == ["launch", "collect"] * 8
    rows = [row[1:] for row in runner.launched if row.sequence.request.id == "long"]
    assert rows == [(0, 22, False), (22, 31, False), (53, 17, True), (70, 1, True), (71, 1, True)]
    for one in (request("a", max_tokens=9), request("long", prompt=70, max_tokens=3)):
        alone = rig(FakeRunner())
        alone.submit(one)
        assert collected.tokens[one.id, 0] == run(alone).tokens[one.id, 0]


def test_a_decode_in_flight_counts_as_one_and_what_is_left_of_a_prompt_as_prompt() -> None:
    engine, _ = launching(request("a", max_tokens=9), request("long", prompt=24, max_tokens=9))
    counted = []
    for _ in range(3):
        engine.step()
        last = engine.snapshot().scheduler.last  # of the step that was launched last
        counted.append((last.prefill_tokens, last.decode_tokens))
    assert counted == [(2, 1), (0, 2), (0, 2)]
    engine, _ = launching(request("long", prompt=33))
    engine.step()
    last = engine.snapshot().scheduler.last
    assert (last.prefill_tokens, last.decode_tokens) == (1, 0)


def test_a_step_that_the_host_samples_waits_for_what_is_in_flight() -> None:
    """Its chunks do not: they sample nothing."""
    engine, runner = launching(request("b", prompt=70, max_tokens=3, bad_words=((1, 2),)))
    run(engine)
    assert runner.log == [
        ("launch", 0),
        ("launch", 1),
        ("collect", 0),
        ("collect", 1),
        *(("execute", step) for step in range(2, 5)),
    ]


def test_who_waits_for_a_prompt_starts_when_it_is_collected() -> None:
    """Another choice of the same request, or a request with the same prefix: not one step later."""
    twice = request("a", prompt=20, max_tokens=9, n=2)
    for texts in ([twice], [request("a", 20, 9), replace(request("a", 20, 5), id="b")]):
        engine, runner = launching(*texts)
        engine.step()
        assert runner.log == [("launch", 0), ("collect", 0)]
        engine.step()
        assert len(engine._scheduler.running) == 2
        assert runner.log[2:] == [("launch", 1), ("launch", 2), ("collect", 1)]


def test_while_a_prefix_is_not_all_in_flight_nobody_waits_for_it() -> None:
    leader = request("a", prompt=70, max_tokens=9)
    follower = replace(leader, id="b", prompt=[*leader.prompt, 1, 2, 3])
    engine, runner = launching(leader, follower)
    engine.step()
    # The second chunk is launched beside the first, the third has the last block of both prompts.
    assert runner.log == [("launch", 0), ("launch", 1), ("collect", 0)]
    engine.step()
    assert runner.log[3:] == [("launch", 2), ("collect", 1)]
    engine.step()
    assert runner.log[5:] == [("collect", 2)]
    engine.step()
    assert [row.start for row in runner.launched if row.sequence.request.id == "b"] == [68, 73]


def test_each_call_brings_one_step_of_tokens() -> None:
    engine, _ = launching(request("a", max_tokens=6))
    counts: list[int] = []
    while not engine.idle or not counts:
        counts.append(len(engine.step()))
    assert counts == [1, 1, 1, 1, 1, 1, 0]


def test_a_request_that_arrives_starts_behind_the_step_in_flight() -> None:
    engine, runner = launching(request("a", max_tokens=12))
    for _ in range(4):
        engine.step()
    assert len(runner.flying) == 1
    runner.log.clear()
    engine.submit(request("late", max_tokens=4))
    engine.step()
    assert [what for what, _ in runner.log] == ["launch", "collect"]
    assert [row.sequence.request.id for row in runner.launched[-2:]] == ["a", "late"]


def test_blocks_are_copied_when_nothing_is_in_flight() -> None:
    """The last block of a prompt, for another choice that takes the place of one that ends."""
    engine, runner = launching(
        request("ends", prompt=5, max_tokens=3),
        request("two", prompt=10, max_tokens=9, n=2),
        max_requests=2,
    )
    for _ in range(3):
        engine.step()
    assert runner.log[-3:] == [("launch", 2), ("collect", 1), ("collect", 2)]
    engine.step()
    assert engine.snapshot().scheduler.running == 2
    assert runner.log[-3:] == [("launch", 3), ("launch", 4), ("collect", 3)]


def test_one_that_waits_takes_the_place_of_one_that_certainly_ends_in_the_very_next_step() -> None:
    engine, runner = launching(
        request("a", max_tokens=5), request("b", max_tokens=9), request("next"), max_requests=2
    )
    for _ in range(4):
        engine.step()
    assert runner.log[-2:] == [("launch", 4), ("collect", 3)]  # the last token of a is in flight
    events = engine.step()
    assert runner.log[-2:] == [("launch", 5), ("collect", 4)]
    assert [row.sequence.request.id for row in runner.launched[-2:]] == ["b", "next"]
    assert any(event.request_id == "a" and event.finish for event in events)
    assert engine.snapshot().scheduler.running == 2


@pytest.mark.parametrize("slots", [1, 2, 16])
def test_behind_a_queue_each_step_is_launched_beside_the_one_before(slots: int) -> None:
    """Whoever ends, and however often: the device is never left waiting."""
    texts = [request(f"r{i}", 2 + i % 5, max_tokens=1 + i % 7) for i in range(8 * slots)]
    engine, runner = launching(*texts, max_requests=slots, num_blocks=40 * slots)
    collected = run(engine)
    steps = sum(what == "launch" for what, _ in runner.log)
    order = [entry for i in range(steps - 1) for entry in (("launch", i + 1), ("collect", i))]
    assert runner.log == [("launch", 0), *order, ("collect", steps - 1)]
    assert engine.counters.invariant_violations == 0
    for one in texts:
        alone = rig(FakeRunner())
        alone.submit(one)
        assert collected.tokens[one.id, 0] == run(alone).tokens[one.id, 0]


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority", "fair"])
@pytest.mark.parametrize("leaves", [False, True])
def test_nobody_overtakes_by_taking_the_place_before_the_blocks_come(
    policy: str, leaves: bool
) -> None:
    """Its place is free when the last token of the one before is in flight, or when that has left;
    its blocks one step later, which a large request needs, and a small one behind it does not.
    """
    asked = [request("big", 48, 6), request("large", 60, 8), request("small", 3, 30)]
    engine, runner = launching(
        *asked, policy=policy, max_requests=1, num_blocks=24, max_batch_tokens=64, safety_margin=0
    )
    while not any(row.sequence.generated for row in runner.launched):
        engine.step()
    if leaves:
        engine.abort("big")
    run(engine)
    order = list(dict.fromkeys(row.sequence.request.id for row in runner.launched))
    assert order == ["big", "large", "small"]


def test_one_that_waits_for_blocks_stops_no_launch() -> None:
    engine, runner = launching(
        request("a", prompt=8, max_tokens=40), request("big", prompt=40), num_blocks=13
    )
    for _ in range(10):
        engine.step()
    assert len(engine._scheduler.waiting) == 1
    assert runner.log[-2:] == [("launch", 10), ("collect", 9)]


@pytest.mark.parametrize("offload_units", [0, 12])
def test_who_lacks_a_block_is_preempted_once_nothing_is_in_flight(offload_units: int) -> None:
    """Two that decode, and blocks for one of them."""
    few: dict[str, Any] = {"num_blocks": 12, "safety_margin": 0.0, "allow_block_sharing": False}
    texts = [request(name, prompt=8, max_tokens=30) for name in "ab"]
    alone = rig(FakeRunner(), **few, offload_units=offload_units)
    for one in texts:
        alone.submit(one)
    want = run(alone)
    engine, _ = launching(*texts, **few, offload_units=offload_units)
    assert run(engine).tokens == want.tokens
    stats = engine.snapshot().scheduler
    assert stats.preemptions > 0
    assert bool(stats.offloads) == bool(offload_units)
    assert engine.counters.engine_faults == engine.counters.invariant_violations == 0


# -- sequences that end in flight


def stopped_text() -> tuple[Request, list[int]]:
    """A request that a stop token ends in a step that another follows, and its text."""
    for i in range(100):
        one = request(f"s{i}", max_tokens=20, stop_token_ids=STOPS)
        collected = run(launching(one)[0])
        if 4 < len(collected.tokens[one.id, 0]) < 12:
            return one, collected.tokens[one.id, 0]
    raise AssertionError("no text is stopped")


def test_a_sequence_that_a_stop_ends_leaves_one_dead_row_that_nobody_sees() -> None:
    one, text = stopped_text()
    alone = rig(FakeRunner())
    alone.submit(one)
    assert run(alone).tokens[one.id, 0] == text
    seen = Seen()
    runner = LaunchingRunner()
    engine = rig(runner, observer=seen)
    engine.submit(one)
    engine.submit(request("other", max_tokens=20))
    collected = run(engine)
    assert collected.tokens[one.id, 0] == text
    assert collected.finish[one.id, 0] == [FinishReason.STOP]
    rows = [row for row in runner.launched if row.sequence.request.id == one.id]
    assert len(rows) == len(text) + 1
    assert engine.counters.generated_tokens == seen.rows == len(text) + 20


def test_its_blocks_are_its_own_until_the_dead_row_is_collected() -> None:
    one, text = stopped_text()
    engine, _ = launching(
        one, request("other", max_tokens=20), num_blocks=30, allow_block_sharing=False
    )
    while True:
        events = engine.step()
        if any(event.request_id == one.id and event.finish for event in events):
            break
    held = [s for s in engine._scheduler.state.ended.values() if s.request.id == one.id]
    assert len(held) == 1
    pool = engine._scheduler.state.cache.pool
    blocks = [unit for table in held[0].tables for unit in table]
    # A dead row computes the last token: it has a block for that too.
    assert len(blocks) == -(-(len(one.prompt) + len(text)) // 4)
    assert all(pool.refs[unit] == 1 for unit in blocks)
    engine._scheduler.check()
    engine.step()
    assert not engine._scheduler.state.ended
    assert all(pool.refs[unit] == 0 for unit in blocks)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_a_client_may_end_a_sequence_in_flight(reason: FinishReason) -> None:
    engine, runner = launching(request("a", max_tokens=30), request("b", max_tokens=30))
    collected = Collected()
    for _ in range(5):
        collected.take(engine.step())
    assert len(runner.flying) == 1
    before = list(collected.tokens["a", 0])
    if reason is FinishReason.ABORT:
        engine.abort("a")
    else:
        engine.finish("a", 0)
    collected.take(engine.step())
    assert collected.tokens["a", 0] == before
    assert collected.finish["a", 0] == [reason]
    run(engine, into=collected)
    assert collected.finish["b", 0] == [FinishReason.LENGTH]
    alone = rig(FakeRunner())
    alone.submit(request("b", max_tokens=30))
    assert collected.tokens["b", 0] == run(alone).tokens["b", 0]
    assert engine.counters.generated_tokens == len(before) + 30


def test_nothing_is_in_flight_once_the_last_client_has_left() -> None:
    engine, runner = launching(request("a", max_tokens=30))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    engine.step()
    assert not runner.flying
    assert engine.snapshot().scheduler.used == 0
    assert not engine.idle  # it had a step to collect
    engine.step()
    assert engine.idle


def test_the_step_that_ends_the_last_request_leaves_nothing_in_flight() -> None:
    """Whoever takes its last token as the end may make no further step."""
    one, _ = stopped_text()
    engine, runner = launching(one)
    while not any(event.finish for event in engine.step()):
        pass
    assert not runner.flying
    assert engine.snapshot().scheduler.used == 0


def test_the_prefix_cache_gets_nothing_from_dead_rows() -> None:
    texts = [request(f"r{i}", 5 + i, max_tokens=24, stop_token_ids=STOPS) for i in range(8)]
    found = []
    for runner in (FakeRunner(), LaunchingRunner()):
        engine = rig(runner, num_blocks=200, max_batch_tokens=128)
        for one in texts:
            engine.submit(one)
        run(engine)
        contents = engine._scheduler.state.cache.pool.content
        found.append({digest for digest in contents if digest is not None})
        if isinstance(runner, LaunchingRunner):
            assert len(runner.launched) > engine.counters.generated_tokens, "no row was dead"
    assert found[0] == found[1]


# -- faults


def test_a_failing_launch_is_bisected_after_what_is_in_flight() -> None:
    """The one that fails ends; the others keep their tokens, those in flight included."""

    def fault(work: Work) -> None:
        for row in work.rows:
            if row.sequence.request.id == "bad" and row.start >= 14:
                raise RuntimeError("device-side failure")

    def texts(runner: FakeRunner) -> tuple[Collected, Engine]:
        engine = rig(runner)
        for i in range(5):
            engine.submit(request(f"r{i}", max_tokens=12))
        engine.submit(request("bad", max_tokens=12))
        return run(engine), engine

    want, _ = texts(FakeRunner(fault))
    runner = LaunchingRunner(fault)
    got, engine = texts(runner)
    assert got.tokens == want.tokens
    assert got.finish == want.finish
    assert got.finish["bad", 0] == [FinishReason.ERROR]
    assert engine.counters.failed_sequences == 1
    assert engine.counters.engine_faults == engine.counters.invariant_violations == 0
    assert ("collect", 5) in runner.log[: runner.log.index(("execute", 6))]


@pytest.mark.parametrize("step", [0, 1, 2, 7])
def test_a_launched_step_that_fails_is_computed_again_with_what_follows(step: int) -> None:
    def lost(work: Work) -> None:
        if work.step == step:
            raise RuntimeError("device-side failure")

    requests = [request(f"r{i}", max_tokens=12, stop_token_ids=STOPS) for i in range(5)]
    want, got = Collected(), Collected()
    runner = LaunchingRunner(lost=lost)
    for device, into in ((FakeRunner(), want), (runner, got)):
        engine = rig(device, max_batch_tokens=64)
        for one in requests:
            engine.submit(one)
        run(engine, into=into)
        assert engine.counters.engine_faults == engine.counters.invariant_violations == 0
    assert got.tokens == want.tokens
    assert got.finish == want.finish
    executed = [at for what, at in runner.log if what == "execute"]
    assert executed == [step, step + 1]


def test_a_step_that_fails_gives_back_the_blocks_of_who_left_in_flight() -> None:
    runner = LaunchingRunner()
    engine = rig(runner)
    for name in "ab":
        engine.submit(request(name, max_tokens=30))
    for _ in range(5):
        engine.step()
    (flying,) = runner.flying

    def lost(work: Work) -> None:
        if work.step == flying:
            raise RuntimeError("device-side failure")

    runner.lost = lost
    engine.abort("a")
    engine.step()
    assert not engine._scheduler.state.ended
    stats = engine._scheduler.stats()
    assert stats.used == len(engine._scheduler.running[0].tables[0])
    collected = run(engine)
    assert collected.finish["b", 0] == [FinishReason.LENGTH]
    assert engine.counters.invariant_violations == engine.counters.failed_sequences == 0


def test_a_lost_device_ends_the_engine_from_a_launch_too() -> None:
    def fault(work: Work) -> None:
        if work.step == 4:
            raise DeviceLostError("rank 1 was killed")

    engine = rig(LaunchingRunner(fault))
    engine.submit(request("a", max_tokens=12))
    collected = Collected()
    while not engine.dead_reason:
        collected.take(engine.step())
    assert engine.dead_reason == "rank 1 was killed"
    assert "a" in collected.errors


def test_an_internal_error_forgets_what_is_in_flight() -> None:
    engine, runner = launching(request("a", max_tokens=30))
    for _ in range(4):
        engine.step()
    assert len(runner.flying) == 1

    def broken() -> None:
        raise ValueError

    engine._scheduler.plan_ahead = broken  # type: ignore[method-assign]
    collected = Collected()
    collected.take(engine.step())
    assert collected.finish["a", 0] == [FinishReason.ERROR]
    runner.flying.clear()  # nobody collects it
    engine.submit(request("b", max_tokens=5))
    run(engine, into=collected)
    assert collected.finish["b", 0] == [FinishReason.LENGTH]


# -- any workload


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, Request]]:
    """Arrivals (step, request): prompts that share prefixes, choices, stop tokens."""
    arrivals = []
    for i in range(draw(st.integers(1, 9))):
        one = request(
            f"r{draw(st.integers(0, 2))}" if draw(st.booleans()) else f"r{i}",
            draw(st.integers(1, 24)),
            draw(st.integers(1, 20)),
            n=draw(st.sampled_from((1, 1, 2, 3))),
            stop_token_ids=draw(st.sampled_from(((), (), STOPS))),
            bad_words=draw(st.sampled_from(((), (), (), ((1, 2),)))),
        )
        # The prompt follows from the name, so that some are equal; ids are not.
        arrivals.append((draw(st.integers(0, 30)), replace(one, id=f"{i}", seed=i)))
    return arrivals


SCARCE = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(12, 30),
        "max_batch_tokens": st.sampled_from((8, 16, 64)),
        "max_requests": st.sampled_from((2, 4, 8)),
        "safety_margin": st.sampled_from((0.0, 0.2)),
        "allow_block_sharing": st.booleans(),
        "offload_units": st.sampled_from((0, 8, 60)),
        "policy": st.sampled_from(("fifo", "prefill_first", "priority", "fair")),
        "prefill_beside_decodes": st.sampled_from((0, 3)),
        "groups": st.sampled_from((FULL, MIXED)),
    }
)


def cut(tokens: list[int]) -> list[int]:
    """What a client with the stop text sees."""
    for at, token in enumerate(tokens):
        if token % STOP_TEXT == 0:
            return tokens[: at + 1]
    return tokens


def play(
    engine: Engine,
    arrivals: list[tuple[int, Request]],
    *,
    stops: bool,
    aborts: dict[str, int] | None = None,
) -> Collected:
    """Every request to its end, with the invariants checked after each step. ``stops``: the service
    ends a choice as soon as it sees the stop text. ``aborts``: by request, the step in which its
    client leaves.
    """
    collected, due = Collected(), sorted(arrivals, key=lambda arrival: arrival[0])
    stopped: set[tuple[str, int]] = set()
    for step in range(3000):
        while due and due[0][0] <= step:
            engine.submit(due.pop(0)[1])
        for name in [name for name, at in (aborts or {}).items() if at == step]:
            engine.abort(name)
        collected.take(engine.step())
        engine._scheduler.check()
        for key, tokens in collected.tokens.items():
            if stops and key not in stopped and any(t % STOP_TEXT == 0 for t in tokens):
                engine.finish(*key)
                stopped.add(key)
        if engine.idle and not due:
            return collected
    raise AssertionError("not done after 3000 steps")


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    arrivals=requests(),
    limits=SCARCE,
    stops=st.booleans(),
    aborts=st.dictionaries(st.integers(0, 8).map(str), st.integers(1, 40), max_size=3),
    faults=st.sets(st.integers(0, 60), max_size=3),
    losses=st.sets(st.integers(0, 60), max_size=3),
)
def test_launched_steps_give_the_texts_of_steps_one_after_another(
    arrivals: list[tuple[int, Request]],
    limits: dict[str, Any],
    *,
    stops: bool,
    aborts: dict[str, int],
    faults: set[int],
    losses: set[int],
) -> None:
    """Whatever stops, leaves, is preempted, forks or hits the prefix cache, and whichever launches
    and collections fail.
    """

    def failing(steps: set[int]) -> Callable[[Work], None]:
        left = set(steps)

        def fail(work: Work) -> None:
            if work.step in left:
                left.discard(work.step)
                raise RuntimeError("planted")

        return fail

    want = play(rig(FakeRunner(), **limits), arrivals, stops=stops)
    runner = LaunchingRunner(refuse=failing(faults), lost=failing(losses))
    seen = Seen()
    engine = rig(runner, observer=seen, **limits)
    got = play(engine, arrivals, stops=stops, aborts=aborts)
    for _, one in arrivals:
        for choice in range(one.params.n):
            key = one.id, choice
            mine, other = got.tokens.get(key, []), want.tokens[key]
            if one.id in aborts:
                assert mine[: len(other)] == other[: len(mine)]
            elif stops:
                assert cut(mine) == cut(other)
            else:
                assert (mine, got.finish[key]) == (other, want.finish[key])
            assert len(got.finish[key]) == 1
    assert not runner.flying
    assert engine.snapshot().scheduler.used == 0
    counters = engine.counters
    assert counters.invariant_violations == counters.engine_faults == counters.failed_sequences == 0
    delivered = sum(map(len, got.tokens.values()))
    assert counters.generated_tokens == seen.rows == delivered
    assert runner.copied == sorted(set(runner.copied))
