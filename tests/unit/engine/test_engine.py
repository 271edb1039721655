"""The engine's loop on an executor without a model: isolation, faults, queue limits, time."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from fairlead_runtime.cache import paged, prefix
from fairlead_runtime.engine.engine import FAULT_BUDGET
from fairlead_runtime.engine.observer import Observer, canary
from fairlead_runtime.engine.progress import (
    ALIVE_STEP_SECONDS,
    LONGEST_STEP_SECONDS,
    SLACK,
    StepTimes,
)
from fairlead_runtime.outputs import EngineDead, QueueFull, QueueTimeout, RequestView
from fairlead_runtime.request.sequence import FinishReason, Request, RequestError
from fairlead_runtime.scheduling.plan import DeviceLostError, Event, Work
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.sizing.traffic import Bound
from support.fake_engine import (
    FULL,
    MIXED,
    Clock,
    Collected,
    FakeRunner,
    LaunchingRunner,
    limits,
    request,
    rig,
    run,
)
from support.full import LONG_FORM


def failing_for(*names: str) -> FakeRunner:
    """Raises whenever a row of one of these requests is in the batch."""

    def fault(work: Work) -> None:
        for row in work.rows:
            if row.sequence.request.id in names:
                raise RuntimeError("device-side failure")

    return FakeRunner(fault)


def mixture(count: int, seed: int = 0) -> list[Request]:
    draw = random.Random(seed)
    return [
        request(f"r{i}", draw.randint(1, 40), draw.randint(1, 12), n=draw.choice([1, 1, 1, 2]))
        for i in range(count)
    ]


def serve(
    requests: list[Request], runner: FakeRunner | None = None, **changes: object
) -> Collected:
    engine = rig(runner, **changes)  # type: ignore[arg-type]
    for one in requests:
        engine.submit(one)
    collected = run(engine)
    assert engine.snapshot().scheduler.used == 0
    return collected


def test_every_request_ends_once_with_its_tokens() -> None:
    requests = mixture(40)
    collected = serve(requests)
    for one in requests:
        for choice in range(one.params.n):
            assert collected.finish[one.id, choice] == [FinishReason.LENGTH]
            assert len(collected.tokens[one.id, choice]) == one.max_tokens


def test_output_is_the_same_alone_in_a_batch_and_under_scarce_memory() -> None:
    requests = mixture(40)
    together = serve(requests)
    scarce = serve(requests, num_blocks=16, max_batch_tokens=7)
    for one in requests:
        alone = serve([one])
        for key, tokens in alone.tokens.items():
            assert together.tokens[key] == tokens
            assert scarce.tokens[key] == tokens


@pytest.mark.parametrize("faulty", [("r3",), ("r0", "r7"), ("r1", "r2", "r3", "r4")])
def test_only_the_faulty_requests_fail_and_the_others_keep_their_tokens(
    faulty: tuple[str, ...],
) -> None:
    requests = mixture(12)
    expected = serve(requests)
    collected = serve(requests, failing_for(*faulty))
    for one in requests:
        for choice in range(one.params.n):
            key = one.id, choice
            if one.id in faulty:
                assert collected.finish[key] == [FinishReason.ERROR]
                assert "RuntimeError" in str(collected.failures[one.id])
            else:
                assert collected.tokens[key] == expected.tokens[key]
                assert collected.finish[key] == expected.finish[key]


def test_a_request_that_fails_late_keeps_its_earlier_tokens() -> None:
    requests = [*mixture(8), request("late", max_tokens=9)]
    expected = serve(requests)

    def fault(work: Work) -> None:
        if any(r.sequence.request.id == "late" and r.sequence.generated == 3 for r in work.rows):
            raise RuntimeError("device-side failure")

    collected = serve(requests, FakeRunner(fault))
    assert collected.tokens["late", 0] == expected.tokens["late", 0][:3]
    assert collected.finish["late", 0] == [FinishReason.ERROR]
    assert collected.tokens["r6", 0] == expected.tokens["r6", 0]


def test_bisection_makes_the_copies_once_and_few_further_passes() -> None:
    runner = failing_for("r3")
    # Some of the prompts are equal: without sharing they start in one step all the same.
    engine = rig(
        runner,
        max_batch_tokens=1024,
        max_requests=64,
        num_blocks=1024,
        allow_block_sharing=False,
    )
    for i in range(64):
        engine.submit(request(f"r{i}", max_tokens=2))
    events = engine.step()
    assert sum(event.token is not None for event in events) == 63  # in this very step
    assert len(runner.copied) == 1
    assert runner.attempts <= 2 * 6 + 1  # two per halving of 64 rows, and the first
    collected = run(engine)
    assert runner.copied == sorted(set(runner.copied))
    assert sum(FinishReason.ERROR in reasons for reasons in collected.finish.values()) == 0


def test_a_fault_of_the_whole_batch_alone_loses_no_token() -> None:
    def out_of_memory(work: Work) -> None:
        if len(work.rows) > 3:
            raise MemoryError

    requests = mixture(12)
    collected = serve(requests, FakeRunner(out_of_memory))
    assert collected.tokens == serve(requests).tokens


def test_requests_that_fail_alone_one_after_another_never_end_the_engine() -> None:
    engine = rig(failing_for(*(f"bad{i}" for i in range(20))))
    for i in range(20):
        engine.submit(request(f"bad{i}"))
        assert run(engine).finish[f"bad{i}", 0] == [FinishReason.ERROR]
        assert not engine.dead_reason
    assert engine.counters.failed_sequences == 20
    engine.submit(request("good"))
    assert run(engine).finish["good", 0] == [FinishReason.LENGTH]
    assert engine.not_ready_reason() == ""


def test_requests_that_fail_before_the_canary_runs_do_not_end_the_engine() -> None:
    engine = rig(failing_for(*(f"bad{i}" for i in range(20))), max_requests=1)
    for i in range(20):
        engine.submit(request(f"bad{i}"))
    engine.submit(request("good"))
    collected = run(engine)
    assert not engine.dead_reason
    assert collected.finish["good", 0] == [FinishReason.LENGTH]
    assert engine.counters.engine_faults == 20


def test_an_engine_that_fails_on_every_request_gives_up() -> None:
    def broken(work: Work) -> None:
        raise RuntimeError("the device is gone")

    engine = rig(FakeRunner(broken))
    engine.submit(request("first"))
    collected = Collected()
    for _ in range(FAULT_BUDGET + 2):
        engine_was_dead = bool(engine.dead_reason)
        collected.take(engine.step())
        assert engine_was_dead or engine.not_ready_reason() or engine.dead_reason
    assert engine.dead_reason
    assert collected.finish["first", 0] == [FinishReason.ERROR]
    with pytest.raises(EngineDead):
        engine.submit(request("second"))


def test_a_lost_device_ends_the_engine_with_its_reason_and_no_row_runs_again() -> None:
    ran: list[int] = []

    def lose(work: Work) -> None:
        ran.append(len(work.rows))
        raise DeviceLostError("rank 1 of 2 was ended by SIGKILL")

    engine = rig(FakeRunner(lose))
    requests = mixture(4)
    for one in requests:
        engine.submit(one)
    collected = run(engine)
    assert engine.dead_reason == "rank 1 of 2 was ended by SIGKILL"
    assert len(ran) == 1, "a batch of a lost device is not bisected"
    assert collected.errors.keys() == {one.id for one in requests}
    assert all(isinstance(error, EngineDead) for error in collected.errors.values())


def test_giving_up_ends_running_waiting_and_arriving_requests() -> None:
    engine = rig(FakeRunner(), max_requests=1)
    for name in ("runs", "waits"):
        engine.submit(request(name))
    engine.step()
    engine.submit(request("arrives"))
    engine._give_up("for the test")
    collected = run(engine)
    assert set(collected.errors) == {"runs", "waits", "arrives"}
    assert all(isinstance(error, EngineDead) for error in collected.errors.values())


def test_giving_up_between_two_steps_ends_the_thread() -> None:
    """A scheduler that cannot plan leaves the engine with nothing to do: it must not
    sleep for ever.
    """

    def refuse() -> None:
        raise RuntimeError("no plan")

    engine = rig()
    engine._make_scheduler = lambda: _broken(refuse)
    engine._scheduler = _broken(refuse)
    engine.submit(request("a"))
    thread = threading.Thread(target=engine.run, args=(lambda _events: None,), daemon=True)
    thread.start()
    thread.join(30)
    assert engine.dead_reason
    assert not thread.is_alive()


def _broken(plan: Callable[[], None]) -> Scheduler:
    scheduler = Scheduler(limits(), FULL)
    scheduler.plan = plan  # type: ignore[method-assign,assignment]  # what it does is all that is asked
    return scheduler


def test_a_failing_copy_ends_live_requests_and_empties_the_cache() -> None:
    runner = FakeRunner()
    engine = rig(runner)
    engine.submit(request("before"))
    engine.step()
    real, runner.copy = runner.copy, lambda work: 1 / 0  # type: ignore[method-assign,assignment]
    collected = Collected()
    collected.take(engine.step())
    assert collected.finish["before", 0] == [FinishReason.ERROR]
    assert engine.not_ready_reason()
    runner.copy = real  # type: ignore[method-assign]
    engine.submit(request("after"))
    assert run(engine, into=collected).finish["after", 0] == [FinishReason.LENGTH]
    assert engine.not_ready_reason() == ""
    assert engine.snapshot().scheduler.used == 0


def test_aborts_at_random_moments_leave_no_block_held() -> None:
    seeds, count = (20, 10_000) if LONG_FORM else (4, 600)
    for seed in range(seeds):
        draw = random.Random(seed)
        engine = rig(
            groups=MIXED if seed % 2 else FULL, num_blocks=24, offload_units=8 * (seed % 3)
        )
        collected, live = Collected(), []
        for i in range(count):
            one = request(
                f"a{i}", draw.randint(1, 30), draw.randint(1, 20), n=draw.choice([1, 2, 3])
            )
            engine.submit(one)
            live.append(one)
            while len(live) > draw.randint(0, 12):
                engine.abort(live.pop(draw.randrange(len(live))).id, draw.choice([None, None, 0]))
            collected.take(engine.step())
            engine._scheduler.check()
        for one in live:
            engine.abort(one.id)
        run(engine, into=collected)
        engine._scheduler.check()
        assert engine.snapshot().scheduler.used == 0
        assert not engine._live
        assert not engine._waiting_since
        assert all(len(reasons) == 1 for reasons in collected.finish.values())


def test_max_queue_does_not_count_requests_that_start_at_once() -> None:
    engine = rig(max_requests=2, max_queue=3)
    for i in range(5):
        engine.submit(request(f"r{i}"))
    with pytest.raises(QueueFull) as full:
        engine.submit(request("r5"))
    assert full.value.retry_after == 1.0
    assert engine.not_ready_reason() == ""
    engine.step()
    with pytest.raises(QueueFull):
        engine.submit(request("r5"))
    run(engine)
    engine.submit(request("r5"))
    assert engine.not_ready_reason() == ""


def test_the_queue_is_bounded_in_prompt_tokens_too() -> None:
    engine = rig(
        max_requests=1,
        max_queue=4,
        num_blocks=1024,
        max_model_len=16_000,
        waiting=Bound(2048, "1/64 of 1 MiB of memory / 8 bytes a token"),
    )
    engine.submit(request("long", 4000))  # nothing waits: it may be longer than the limit
    with pytest.raises(QueueFull) as full:
        engine.submit(request("next", 8))
    assert str(full.value) == (
        "the requests that wait have 4000 prompt tokens; 8 more exceed 2048 "
        "(1/64 of 1 MiB of memory / 8 bytes a token): retry later"
    )
    engine.step()  # the long one runs
    engine.submit(request("one", 2000))
    engine.step()
    with pytest.raises(QueueFull, match="2000 prompt tokens; 49 more exceed 2048 "):
        engine.submit(request("two", 49))
    engine.submit(request("two", 48))
    engine.abort("one")
    engine.step()
    engine.submit(request("three", 2000))
    run(engine)
    assert engine._waiting_tokens == 0
    engine.submit(request("last", 3000))
    run(engine)


def test_a_request_that_waits_too_long_is_ended_with_the_reason() -> None:
    clock = Clock()
    engine = rig(FakeRunner(), clock, max_requests=1, queue_timeout=2.0)
    engine.submit(request("long", max_tokens=50))
    engine.submit(request("waits"))
    collected = Collected()
    collected.take(engine.step())
    clock.now = 2.0
    collected.take(engine.step())
    assert collected.errors == {}
    clock.now = 2.1
    collected.take(engine.step())
    assert isinstance(collected.errors["waits"], QueueTimeout)
    assert "2 s" in str(collected.errors["waits"])
    assert engine.counters.queue_timeouts == 1
    run(engine, into=collected)
    assert collected.finish["long", 0] == [FinishReason.LENGTH]


def test_a_request_that_has_started_is_never_timed_out_by_the_queue() -> None:
    clock = Clock()
    runner = FakeRunner(clock=clock)
    runner.step_time = 10.0
    engine = rig(runner, clock, queue_timeout=1.0)
    engine.submit(request("slow", max_tokens=20))
    assert run(engine).finish["slow", 0] == [FinishReason.LENGTH]


def test_a_request_that_can_never_fit_is_refused_with_the_arithmetic() -> None:
    engine = rig(num_blocks=8)
    assert engine.bounds.resolve_max_tokens(20, None) == 12
    assert engine.bounds.resolve_max_tokens(20, 12) == 12
    with pytest.raises(RequestError, match=r"20 \+ max_tokens 13 = 33 tokens.*32"):
        engine.bounds.resolve_max_tokens(20, 13)


def test_only_the_request_the_scheduler_refuses_ends_with_an_error() -> None:
    engine = rig(num_blocks=8)
    engine.submit(request("never", prompt=40))
    engine.submit(request("fine"))
    collected = run(engine)
    assert collected.finish["never", 0] == [FinishReason.ERROR]
    assert collected.finish["fine", 0] == [FinishReason.LENGTH]


def test_idle_time_is_no_hang_and_time_without_a_step_is() -> None:
    clock = Clock()
    engine = rig(FakeRunner(clock=clock), clock)
    clock.now = 86_400.0
    assert engine.progress.age() is None
    engine.submit(request("decode", prompt=1, max_tokens=1))
    assert engine.progress.age() == 0.0
    clock.now += 61.0  # no step runs
    assert engine.progress.age() == pytest.approx(61.0)
    assert engine.progress.allowance() == 0.0


def allowances(times: StepTimes, *requests: tuple[int, float]) -> list[float]:
    """The allowance of the first step of each request, one after another: tokens of its prompt and
    seconds of its steps.
    """
    clock, runner = Clock(), FakeRunner()
    runner.clock = clock
    engine = rig(
        runner,
        clock,
        max_batch_tokens=8192,
        num_blocks=4096,
        max_model_len=16_384,
        step_times=times,
    )
    seen: list[float] = []
    runner.fault = lambda _: seen.append(engine.progress.allowance())
    firsts = []
    for number, (tokens, seconds) in enumerate(requests):
        runner.step_time = seconds
        firsts.append(len(seen))
        engine.submit(request(f"r{number}", prompt=tokens, max_tokens=1))
        run(engine)
    return [seen[first] for first in firsts]


def test_the_first_step_may_take_what_the_profiling_run_says() -> None:
    slow_cpu = StepTimes(per_token=0.16, decode=0.5, full=0.16 * 8192)
    small, full = allowances(slow_cpu, (1, 0.5), (8192, 1000.0))
    assert small == pytest.approx(SLACK * 0.5)
    assert full == pytest.approx(SLACK * 0.16 * 8192)
    assert full > ALIVE_STEP_SECONDS


def test_a_launched_prefill_that_is_waited_for_has_its_own_allowance() -> None:
    """Not that of the small step that was launched behind it, nor of the one before."""
    waited: dict[int, float] = {}

    def collected(work: Work) -> None:
        tokens = sum(row.count for row in work.rows)
        waited[tokens] = engine.progress.allowance()

    times = StepTimes(per_token=0.01, decode=0.001, full=90.0)
    large: dict[str, Any] = dict.fromkeys(("max_batch_tokens", "num_blocks", "max_model_len"), 9000)
    engine = rig(LaunchingRunner(lost=collected), step_times=times, **large)
    engine.submit(request("decoding", 10, 30))
    for _ in range(4):
        engine.step()
    engine.submit(request("long", 8000, 5))
    run(engine)
    assert engine.counters.steps_launched > 8
    assert waited[8001] >= SLACK * 80
    assert waited[2] < SLACK


def test_slow_small_steps_do_not_hide_a_hung_large_one() -> None:
    times = StepTimes(per_token=0.001, decode=0.25, full=8.192)
    large = allowances(times, *[(1, 0.25)] * 20, (8192, 8.0))[-1]
    assert large == pytest.approx(SLACK * 8.192)


def test_a_slow_step_earns_the_next_ones_a_longer_allowance_up_to_a_limit() -> None:
    times = StepTimes(per_token=0.001, decode=0.01, full=8.192)
    _, after, *_ = later = allowances(times, (100, 50.0), *[(1, 0.01)] * 500)
    assert after == pytest.approx(SLACK * 50.0)
    assert later[-1] < ALIVE_STEP_SECONDS
    assert allowances(times, (100, 3600.0), (1, 1.0))[-1] == LONGEST_STEP_SECONDS


def test_a_violated_invariant_is_counted_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_runtime.engine.engine.CHECK_EVERY", 1)
    engine = rig()
    engine.submit(request("a", max_tokens=20))
    engine.step()
    assert engine.counters.invariant_violations == 0
    engine._scheduler.state.cache.pool.refs[0] += 1
    collected = run(engine)
    assert collected.finish["a", 0] == [FinishReason.LENGTH]
    assert engine.counters.invariant_violations > 0


def test_the_engine_hashes_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who submits it does; the same digests are found again."""
    engine = rig()
    engine.submit(request("a", 40, 2))
    engine.submit(request("b", 40, 2, n=2))
    hash_blocks = prefix.extend_chain
    blocks: list[int] = []

    def counted(hashes: bytearray, *arguments: Any) -> None:
        before = len(hashes)
        hash_blocks(hashes, *arguments)
        blocks.append(len(hashes) - before)

    monkeypatch.setattr(paged, "extend_chain", counted)
    run(engine)
    assert sum(blocks) == 0


class BrokenObserver(Observer):
    """Every method raises."""

    def arrived(self, request: Request, at: float) -> None:
        raise ValueError

    def stepped(self, work: Work, events: Sequence[Event], began: float, ended: float) -> None:
        raise ValueError

    def ended(self, request: Request, reason: FinishReason, at: float) -> None:
        raise ValueError


def test_what_an_observer_raises_is_counted_and_ends_no_request() -> None:
    engine = rig(observer=BrokenObserver())
    engine.submit(request("a", max_tokens=3))
    engine.submit(request("b", max_tokens=3))
    collected = run(engine)
    assert collected.finish == {(name, 0): [FinishReason.LENGTH] for name in "ab"}
    assert engine.counters.contained_errors == 2 + 3 + 2
    assert engine.counters.engine_faults == engine.counters.step_failures == 0


def test_views_that_raise_are_counted_and_end_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr("fairlead_runtime.engine.engine.request_views", fail)
    engine = rig()
    answers: list[list[RequestView] | None] = []
    engine.submit(request("a", max_tokens=3))
    engine.step()
    engine.inspect(answers.append)
    assert run(engine).finish["a", 0] == [FinishReason.LENGTH]
    assert answers == [None]
    assert engine.counters.contained_errors == 1
    assert engine.counters.engine_faults == 0


def test_a_check_of_the_invariants_runs_in_parts_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step runs at most one part, and the whole check comes to its end."""
    monkeypatch.setattr("fairlead_runtime.engine.engine.CHECK_EVERY", 1)
    monkeypatch.setattr("fairlead_runtime.scheduling.invariants.ENTRIES_PER_PART", 128)
    starts, parts, ends = [0], [0], [0]
    whole = Scheduler.checks

    def counted(scheduler: Scheduler) -> Iterator[None]:
        starts[0] += 1
        for part in whole(scheduler):
            parts[0] += 1
            yield part
        ends[0] += 1

    monkeypatch.setattr(Scheduler, "checks", counted)
    engine = rig()
    for i in range(4):
        engine.submit(request(f"r{i}", prompt=8, max_tokens=40))
    while not engine.idle or not engine.counters.steps:
        before = parts[0]
        engine.step()
        assert parts[0] - before <= 1
    assert starts[0] > 1
    assert ends[0] >= starts[0] - 1
    assert engine.counters.invariant_violations == 0


def test_views_show_status_counts_and_why_a_request_waits() -> None:
    engine = rig(max_requests=1)
    engine.submit(request("runs", prompt=6, max_tokens=9))
    engine.submit(request("next"))
    engine.submit(request("later"))
    engine.step()
    received: list[RequestView] = []
    engine.inspect(lambda views: received.extend(views or []))
    engine.step()
    views = {view.id: view for view in received}
    runs = views["runs"]
    shown = (runs.status, runs.prompt_tokens, runs.blocks, runs.computed_tokens)
    assert shown == ("decoding", 6, 2, 6)
    assert views["runs"].waits_for == ""
    assert "max_requests" in views["next"].waits_for
    assert views["later"].waits_for.startswith("1 ahead of it; needs at most ")


def test_a_request_that_no_step_has_seen_yet_is_said_to_wait_for_the_next() -> None:
    engine = rig()
    engine.submit(request("new"))
    received: list[RequestView] = []
    engine.inspect(lambda views: received.extend(views or []))
    engine.step()
    (new,) = received
    assert new.waits_for.startswith("next: the next step that has room")


def test_a_view_says_how_many_blocks_a_request_needs_and_how_many_are_free() -> None:
    engine = rig(num_blocks=8, block_size=4)
    engine.submit(request("runs", prompt=12, max_tokens=16))
    engine.step()
    engine.submit(request("large", prompt=20, max_tokens=4))
    engine.step()
    received: list[RequestView] = []
    engine.inspect(lambda views: received.extend(views or []))
    engine.step()
    (large,) = (view for view in received if view.id == "large")
    assert large.waits_for.startswith("next: needs at most 6 units of the cache, 3 are free (")


def test_the_thread_returns_after_the_engine_gave_up_during_a_step() -> None:
    engine = rig(FakeRunner())
    engine._give_up("for the test")
    engine.run(lambda _events: None)
    assert engine.dead_reason


def test_a_canary_that_waits_is_neither_timed_out_nor_counted_as_waiting() -> None:
    clock = Clock()
    engine = rig(FakeRunner(), clock, max_requests=1, max_queue=1, queue_timeout=1.0)
    engine.submit(request("long", max_tokens=20))
    probe = canary()
    engine.submit(probe, bounded=False)
    engine.step()
    assert engine.not_ready_reason() == ""
    clock.now += 10.0
    assert run(engine).finish[probe.id, 0] == [FinishReason.LENGTH]
