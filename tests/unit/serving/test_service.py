"""The service on a real engine thread with an executor that needs no model."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from fairlead_runtime.engine.engine import Engine
from fairlead_runtime.outputs import (
    ChoiceEvent,
    Draining,
    DrainResult,
    EngineDead,
    Health,
    ModelFacts,
    Output,
    QueueFull,
    QueueTimeout,
    ServiceError,
    SlowReader,
    Submission,
    TextLate,
)
from fairlead_runtime.request.sequence import (
    FinishReason,
    RequestError,
    SamplingParams,
    Status,
    pack_ids,
)
from fairlead_runtime.scheduling.plan import Work
from fairlead_runtime.serving.choice import ChoiceText
from fairlead_runtime.serving.detokenize import Vocabulary
from fairlead_runtime.serving.engine_link import LocalEngine
from fairlead_runtime.serving.intake import Intake
from fairlead_runtime.serving.service import ENDS_A_TURN, Service
from fairlead_runtime.serving.stream import (
    EVENT_BYTES,
    MAX_UNREAD_BYTES,
    MAX_UNREAD_SECONDS,
    STOP_EVENTS,
    WHOLE_EVENTS,
    Stream,
)
from support.fake_engine import VOCABULARY, Clock, FakeRunner, rig
from support.full import LONG_FORM

pytestmark = pytest.mark.anyio
WITHIN = 600.0 if LONG_FORM else 30.0  # seconds after which a test hangs rather than waits


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def words() -> Vocabulary:
    """Token 17 has the text "t17 ": every token's text is final at once and shows its id."""
    token_bytes = {token: f"t{token} ".encode() for token in range(VOCABULARY)}
    return Vocabulary(
        decode=lambda ids: "".join(f"t{token} " for token in ids),
        special=frozenset(),
        token_bytes=token_bytes,
        byte_level=True,
        token_text=lambda token: f"t{token} ",
    )


class Gate:
    """Lets the engine thread take one step at a time, or run freely once open."""

    def __init__(self) -> None:
        self._tickets = threading.Semaphore(0)
        self._open = threading.Event()
        self.entered = threading.Event()
        self.steps = 0  # that have begun

    def __call__(self, work: Work) -> None:
        self.steps += 1
        self.entered.set()
        while not self._open.is_set() and not self._tickets.acquire(timeout=0.01):
            pass

    def step(self, count: int = 1) -> None:
        self._tickets.release(count)

    def open(self) -> None:
        self._open.set()


@asynccontextmanager
async def running(
    fault: Callable[[Work], None] | None = None, **changes: Any
) -> AsyncIterator[Service]:
    engine = rig(FakeRunner(fault), **changes)
    facts = ModelFacts(eos_ids=frozenset(), vocab_size=VOCABULARY, seed=0)
    intake = Intake(engine.bounds.resolve_max_tokens, facts)
    service = Service(LocalEngine(engine), intake, words())
    service.start()
    try:
        async with asyncio.timeout(WITHIN):
            yield service
    finally:
        if isinstance(fault, Gate):
            fault.open()
        await service.stop()


def engine_of(service: Service) -> Engine:
    link = service._engine
    assert isinstance(link, LocalEngine)
    return link._engine


def ask(prompt: int = 4, max_tokens: int | None = 6, start: int = 1, **more: Any) -> Submission:
    ids = tuple((start + i) % VOCABULARY for i in range(prompt))
    fields = {k: more.pop(k) for k in ("id", "tenant", "priority") if k in more}
    return Submission(prompt=ids, params=SamplingParams(max_tokens=max_tokens, **more), **fields)


async def read(stream: Stream) -> dict[int, list[Output]]:
    outputs: dict[int, list[Output]] = {}
    async for output in stream:
        outputs.setdefault(output.index, []).append(output)
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def test_a_stream_brings_every_token_its_text_and_one_finish() -> None:
    async with running() as service:
        outputs = (await read(await service.submit(ask())))[0]
        ids = tokens(outputs)
        assert len(ids) == 6
        assert "".join(output.text for output in outputs) == "".join(f"t{token} " for token in ids)
        assert [output.finish_reason for output in outputs if output.finish_reason] == [
            FinishReason.LENGTH
        ]
        assert (await service.report()).engine.scheduler.used == 0


async def test_text_is_made_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    take, threads = ChoiceText.take, set()

    def spied(text: ChoiceText, events: list[ChoiceEvent]) -> tuple[Output, bool]:
        threads.add(threading.current_thread().name)
        return take(text, events)

    monkeypatch.setattr(ChoiceText, "take", spied)
    async with running() as service:
        await asyncio.gather(*[read(await service.submit(ask(start=i))) for i in range(4)])
    assert threads == {"text_0"}


async def test_text_that_comes_too_late_ends_the_request_in_the_engine_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()

    def stuck(_: ChoiceText, __: list[ChoiceEvent]) -> tuple[Output, bool]:
        release.wait(WITHIN)
        raise ValueError("too late for this to matter")

    monkeypatch.setattr(ChoiceText, "take", stuck)
    async with running() as service:
        service._texts._seconds = 0.01
        stream = await service.submit(ask(max_tokens=200, prompt=20))
        with pytest.raises(TextLate):
            await anext(stream)
        release.set()
        assert (await service.drain(WITHIN)).aborted == 0
        assert (await service.report()).engine.scheduler.used == 0


async def test_choices_come_with_their_index_and_end_alone() -> None:
    async with running() as service:
        outputs = await read(await service.submit(ask(n=3, seed=5)))
        assert sorted(outputs) == [0, 1, 2]
        assert all(len(tokens(each)) == 6 for each in outputs.values())
        assert len({tuple(tokens(each)) for each in outputs.values()}) == 3


async def test_a_second_request_knows_how_many_tokens_were_cached() -> None:
    async with running() as service:
        await read(await service.submit(ask(prompt=17)))
        stream = await service.submit(ask(prompt=17))
        await read(stream)
        assert stream.cached_tokens == 16


async def test_a_step_wakes_the_event_loop_once_however_many_tokens_it_gave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as service:
        wakes = 0
        link = service._engine
        real = link._call_on_loop  # type: ignore[attr-defined]

        def counted(*args: Any) -> None:
            nonlocal wakes
            wakes += 1
            real(*args)

        monkeypatch.setattr(link, "_call_on_loop", counted)
        streams = [await service.submit(ask(start=i)) for i in range(8)]
        await asyncio.gather(*map(read, streams))
        snapshot = (await service.report()).engine
        assert snapshot.counters.generated_tokens == 48
        assert wakes <= snapshot.counters.steps + 1


@pytest.mark.parametrize("parts", [1, 2, 3])
async def test_a_stop_text_ends_the_choice_and_is_cut_off(parts: int) -> None:
    async with running() as service:
        plain = (await read(await service.submit(ask(max_tokens=8, seed=1))))[0]
        text = "".join(output.text for output in plain)
        whole = [f"t{token} " for token in tokens(plain)]
        stop = "".join(whole[3 : 3 + parts])[1:]  # begins within a token's text, spans some
        stopped = (
            await read(await service.submit(ask(max_tokens=8, seed=1, stop=("never", stop))))
        )[0]
        assert "".join(output.text for output in stopped) == text[: text.index(stop)]
        assert stopped[-1].finish_reason is FinishReason.STOP
        assert stopped[-1].stop_reason == stop
        await service.drain(5.0)
        assert (await service.report()).engine.scheduler.used == 0


async def test_stop_token_ids_end_the_choice_count_and_do_not_show() -> None:
    async with running() as service:
        plain = (await read(await service.submit(ask(max_tokens=8, seed=1))))[0]
        third = tokens(plain)[2]
        stopped = (
            await read(await service.submit(ask(max_tokens=8, seed=1, stop_token_ids=(third,))))
        )[0]
        assert tokens(stopped) == tokens(plain)[:3]
        assert "".join(output.text for output in stopped) == "".join(
            f"t{t} " for t in tokens(plain)[:2]
        )
        assert (stopped[-1].finish_reason, stopped[-1].stop_reason) == (FinishReason.STOP, third)


async def test_closing_a_stream_early_frees_its_blocks() -> None:
    gate = Gate()
    async with running(gate) as service:
        stream = await service.submit(ask(max_tokens=200, prompt=20))
        gate.step(3)
        await anext(stream)
        await stream.aclose()
        gate.open()
        assert (await service.drain(WITHIN)).aborted == 0
        assert (await service.report()).engine.counters.generated_tokens <= 4
        assert (await service.report()).engine.scheduler.used == 0
        with pytest.raises(ServiceError):
            await anext(stream)


async def test_closing_a_stream_that_was_never_read_aborts_it_too() -> None:
    gate = Gate()
    async with running(gate) as service:
        async with await service.submit(ask(max_tokens=200)):
            pass
        gate.open()
        assert (await service.drain(WITHIN)).aborted == 0
        assert (
            await service.report()
        ).engine.counters.generated_tokens <= 1  # of the step that was under way
        assert (await service.report()).engine.scheduler.used == 0


async def test_cancel_ends_the_stream_with_abort() -> None:
    gate = Gate()
    async with running(gate) as service:
        stream = await service.submit(ask(max_tokens=200, id="mine"))
        gate.step(2)
        await anext(stream)
        assert await service.cancel("mine")
        gate.open()
        outputs = (await read(stream))[0]
        assert outputs[-1].finish_reason is FinishReason.ABORT
        assert not await service.cancel("mine")


async def test_aborts_through_the_service_at_random_points_leave_no_block_held() -> None:
    draw = random.Random(3)
    count = 10_000 if LONG_FORM else 600
    limits: dict[str, Any] = {"num_blocks": 40, "offload_units": 16, "max_requests": 6}
    async with running(max_queue=count, queue_timeout=WITHIN, **limits) as service:

        async def one(number: int) -> None:
            stream = await service.submit(
                ask(
                    draw.randint(1, 30), draw.randint(1, 20), start=number, n=draw.choice([1, 1, 3])
                )
            )
            leave_after = draw.randint(0, 12)
            async with stream:
                async for _ in stream:
                    leave_after -= 1
                    if leave_after <= 0:
                        break

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(one(number))
                if number % 20 == 0:
                    await asyncio.sleep(0)
        assert (await service.drain(WITHIN)).aborted == 0
        assert (await service.report()).engine.scheduler.used == 0
        assert not service._streams
        engine_of(service)._scheduler.check()


async def test_bad_requests_are_refused_before_anything_runs() -> None:
    async with running(num_blocks=8) as service:
        with pytest.raises(RequestError, match="prompt: is empty"):
            await service.submit(ask(prompt=0))
        for prompt in ((1, VOCABULARY), (-1, 1), (1, 2**70)):
            with pytest.raises(RequestError, match="from 0 to 999"):
                await service.submit(Submission(prompt=prompt))
        for packed in (pack_ids((1, VOCABULARY)), pack_ids((1, -1))):
            with pytest.raises(RequestError, match="from 0 to 999"):
                await service.submit(Submission(prompt=packed))
        with pytest.raises(RequestError, match=r"30 \+ max_tokens 3 = 33 tokens"):
            await service.submit(ask(prompt=30, max_tokens=3))
        outputs = (await read(await service.submit(ask(prompt=30, max_tokens=None))))[0]
        assert len(tokens(outputs)) == 2
        assert (await service.report()).engine.counters.generated_tokens == 2


async def test_a_request_with_the_id_of_a_live_one_gets_a_longer_one_and_both_are_served() -> None:
    gate = Gate()
    async with running(gate) as service:
        first = await service.submit(ask(start=1, id="same", seed=5))
        second = await service.submit(ask(start=2, id="same", seed=5))
        assert first.request_id == "same"
        assert second.request_id.startswith("same-")
        gate.open()
        one, two = await asyncio.gather(read(first), read(second))
        again = await read(await service.submit(ask(start=1, id="same", seed=5)))
        assert tokens(one[0]) == tokens(again[0]) != tokens(two[0])


async def test_a_full_queue_refuses_says_when_to_retry_and_stays_ready() -> None:
    gate = Gate()
    async with running(gate, max_requests=1, max_queue=2) as service:
        streams = [await service.submit(ask(start=i)) for i in range(3)]
        with pytest.raises(QueueFull) as full:
            await service.submit(ask())
        assert full.value.retry_after is not None
        assert service.health().ready
        gate.open()
        await asyncio.gather(*map(read, streams))
        assert service.health().ready


async def test_a_wait_that_is_too_long_ends_the_stream_with_the_reason() -> None:
    class Ticking:
        """Every look at the clock takes a second."""

        def __init__(self) -> None:
            self.now = 0.0

        def __call__(self) -> float:
            self.now += 1.0
            return self.now

    gate = Gate()  # the first must not end before the second is queued
    async with running(gate, max_requests=1, queue_timeout=20.0, clock=Ticking()) as service:
        first = await service.submit(ask(max_tokens=100))
        second = await service.submit(ask(start=9))
        gate.open()
        with pytest.raises(QueueTimeout, match="20 s"):
            await read(second)
        await read(first)
        assert (await service.report()).engine.counters.queue_timeouts == 1


async def test_a_drain_lets_running_streams_finish_and_refuses_new_ones() -> None:
    gate = Gate()
    async with running(gate) as service:
        stream = await service.submit(ask(max_tokens=10))
        gate.step()
        await anext(stream)
        draining = asyncio.create_task(service.drain(WITHIN))
        await asyncio.sleep(0)
        assert service.health().reason == "draining"
        with pytest.raises(Draining):
            await service.submit(ask())
        gate.open()
        outputs = (await read(stream))[0]
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert await draining == DrainResult(finished=1, aborted=0)


async def test_a_drain_that_has_begun_serves_new_requests_until_it_refuses_and_counts_them() -> (
    None
):
    async with running() as service:
        service.begin_drain()
        assert service.health().reason == "draining"
        assert (await read(await service.submit(ask())))[0]
        service.refuse_new()
        with pytest.raises(Draining) as refused:
            await service.submit(ask())
        assert refused.value.retry_after is not None
        assert await service.drain(WITHIN) == DrainResult(finished=1, aborted=0)


async def test_a_drain_that_is_undone_leaves_the_service_ready() -> None:
    gate = Gate()
    async with running(gate) as service:
        before = await service.submit(ask(max_tokens=4))
        draining = asyncio.create_task(service.drain(WITHIN))
        await asyncio.sleep(0)
        draining.cancel()
        service.resume()
        assert service.health().ready
        after = await service.submit(ask(start=9, max_tokens=4))
        gate.open()
        for stream in (before, after):
            assert (await read(stream))[0][-1].finish_reason is FinishReason.LENGTH


async def test_a_drain_that_takes_too_long_ends_the_rest_with_an_error() -> None:
    gate = Gate()
    async with running(gate) as service:
        stream = await service.submit(ask(max_tokens=100))
        gate.step()
        await anext(stream)
        assert await service.drain(0.05) == DrainResult(finished=0, aborted=1)
        gate.open()
        with pytest.raises(Draining, match=r"0\.05 s"):
            await read(stream)


async def test_a_dead_engine_ends_every_stream_and_says_so() -> None:
    gate = Gate()
    broken = threading.Event()

    def fault(work: Work) -> None:
        gate(work)
        if broken.is_set():
            raise RuntimeError("the device is gone")

    async with running(fault) as service:
        streams = [await service.submit(ask(start=i, max_tokens=50)) for i in range(3)]
        gate.step(3)  # the first step may begin before the last one is in
        await asyncio.gather(*map(anext, streams))
        broken.set()
        gate.open()
        for stream in streams:
            outputs = (await read(stream))[0]
            assert outputs[-1].finish_reason is FinishReason.ERROR
        await service.died.wait()
        assert not service.health().alive
        with pytest.raises(EngineDead):
            await service.submit(ask())


async def test_every_stream_ends_however_the_engine_thread_ends() -> None:
    def fault(work: Work) -> None:
        raise SystemExit  # what no step catches

    async with running(fault) as service:
        with pytest.raises(EngineDead):
            await read(await service.submit(ask()))
        await service.died.wait()
        assert not service.health().alive


async def test_a_stream_that_is_never_read_is_aborted_at_the_limit() -> None:
    async with running(max_model_len=32_768, num_blocks=9000) as service:
        stream = await service.submit(ask(max_tokens=30_000))
        while stream._error is None:
            await asyncio.sleep(0.01)
            assert stream._unread_bytes <= MAX_UNREAD_BYTES + 64
        with pytest.raises(SlowReader):
            await read(stream)
        assert (await service.report()).engine.counters.slow_readers == 1
        await service.drain(WITHIN)
        assert (await service.report()).engine.scheduler.used == 0


async def test_a_reader_is_not_too_slow_while_the_event_loop_stands_still() -> None:
    gate = Gate()
    count = 2 * MAX_UNREAD_BYTES // EVENT_BYTES
    async with running(gate, max_model_len=32_768, num_blocks=9000) as service:
        reading = asyncio.create_task(read(await service.submit(ask(max_tokens=count))))
        await asyncio.sleep(0)
        gate.open()
        while (await service.report()).engine.counters.generated_tokens < count:
            time.sleep(0.001)  # noqa: ASYNC251 - it stands still on purpose
        assert len(tokens((await reading)[0])) == count
        assert (await service.report()).engine.counters.slow_readers == 0


def test_unread_time_counts_from_the_first_chance_to_read() -> None:
    class Owner:
        async def cancel(self, request_id: str) -> bool:
            return False

        def make_text(self, stream: Stream) -> None: ...
        def stop_choice(self, stream: Stream, choice: int) -> None: ...
        def wake_in_turn(self, stream: Stream) -> None: ...

    stream = Stream("r", Owner(), {0: ChoiceText(0, ask(), words())})
    event = ChoiceEvent("r", 0, 7, None, None)
    late = MAX_UNREAD_SECONDS + 1
    for now, turn, overdue in (
        (0.0, 0, False),
        (late, 0, False),  # the loop stood still
        (late, 1, False),
        (2 * late, 2, True),
    ):
        stream.push(event, now, turn)
        assert stream.overdue(now) is overdue


async def test_streams_that_end_in_one_step_wake_few_readers_in_a_turn() -> None:
    """Each end takes long beside a token: another stream's tokens come between them."""
    gate, count = Gate(), 3 * ENDS_A_TURN
    ended = 0

    async def one(service: Service, start: int) -> None:
        nonlocal ended
        await read(await service.submit(ask(start=start, max_tokens=1)))
        ended += 1

    async with running(gate, max_requests=count, max_queue=count, num_blocks=1024) as service:
        readers = [asyncio.create_task(one(service, number)) for number in range(count)]
        await asyncio.sleep(0)
        gate.open()
        while ended < count:
            before = ended
            await asyncio.sleep(0)
            assert ended - before <= ENDS_A_TURN
        await asyncio.gather(*readers)
        assert (await service.drain(WITHIN)).aborted == 0


async def test_a_whole_answer_has_the_tokens_and_the_text_of_a_stream() -> None:
    async with running() as service:
        for more in ({}, {"stop": "t9 "}, {"n": 3}):
            asked = ask(max_tokens=40, seed=3, **more)
            streamed = await read(await service.submit(asked))
            stream = await service.submit(replace(asked, whole=True))
            assert stream._batch == (STOP_EVENTS if "stop" in more else WHOLE_EVENTS)
            whole = await read(stream)
            for index, outputs in streamed.items():
                assert tokens(whole[index]) == tokens(outputs)
                texts = ["".join(part.text for part in each) for each in (whole[index], outputs)]
                assert texts[0] == texts[1]
                assert whole[index][-1][4:7] == outputs[-1][4:7], "why it ended"


async def test_a_reader_that_lags_gets_several_steps_in_one_output() -> None:
    gate = Gate()
    async with running(gate) as service:
        stream = await service.submit(ask(max_tokens=20))
        gate.open()
        await service._no_clients.wait()
        outputs = (await read(stream))[0]
        assert len(outputs) == 1
        assert len(outputs[0].token_ids) == 20


async def test_the_canary_takes_the_real_path_and_shows_in_no_queue() -> None:
    async with running() as service:
        assert 0 < await service.canary() < VOCABULARY
        assert (await service.report()).engine.counters.generated_tokens == 1
        assert not service._streams


async def test_a_waiting_canary_succeeds_with_the_tokens_of_other_requests() -> None:
    gate = Gate()
    async with running(gate, max_requests=1) as service:
        stream = await service.submit(ask(max_tokens=100))
        gate.step()
        await anext(stream)
        canary = asyncio.create_task(service.canary(max_wait=0.05))
        await asyncio.sleep(0)
        gate.step(2)
        while gate.steps < 4:
            time.sleep(0.001)  # noqa: ASYNC251 - its time is over when the loop sees the tokens
        token = await canary
        assert token in tokens([await anext(stream)])
        with pytest.raises(ServiceError, match="no token within"):
            await service.canary(max_wait=0.05)


async def test_the_debug_view_shows_live_requests_without_their_text() -> None:
    gate = Gate()
    async with running(gate, max_requests=1) as service:
        first = await service.submit(ask(id="first", max_tokens=9, tenant="a"))
        second = await service.submit(ask(id="second"))
        gate.step()
        await anext(first)
        asking = asyncio.create_task(service.requests())
        await asyncio.sleep(0)
        gate.step(2)
        views = {view.id: view for view in await asking}
        assert views["first"].status in {Status.PREFILLING, Status.DECODING}
        assert views["first"].tenant == "a"
        assert views["second"].status is Status.PENDING
        assert views["second"].waits_for
        gate.open()
        await asyncio.gather(read(first), read(second))
        assert await service.requests() == []


async def test_health_follows_progress_when_a_step_hangs() -> None:
    gate, clock = Gate(), Clock()
    async with running(gate, clock=clock) as service:
        clock.now += 86_400.0  # an idle day is not a hang
        assert service.health() == Health(alive=True, ready=True)
        stream = await service.submit(ask())
        await asyncio.to_thread(gate.entered.wait, WITHIN)
        clock.now += 4.0
        assert service.health().ready
        clock.now += 2.0
        health = service.health()
        assert (health.alive, health.ready) == (True, False)
        assert "no step for 6 s" in health.reason
        clock.now += 60.0
        assert not service.health().alive
        gate.open()
        await read(stream)
        await service.requests()
        assert service.health().ready


async def test_a_stop_text_that_is_read_late_does_not_end_the_next_request_with_its_id() -> None:
    async with running() as service:
        plain = (await read(await service.submit(ask(max_tokens=3, seed=1))))[0]
    stop = f" t{tokens(plain)[1]} "
    gate = Gate()
    async with running(gate) as service:
        unread = await service.submit(ask(id="same", max_tokens=3, seed=1, stop=(stop,)))
        gate.step(3)
        await service._no_clients.wait()
        second = await service.submit(ask(id="same", max_tokens=5))
        assert (await read(unread))[0][-1].stop_reason == stop
        gate.open()
        outputs = (await read(second))[0]
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert len(tokens(outputs)) == 5


async def test_a_stop_text_counts_as_a_stop_in_the_statistics() -> None:
    async with running() as service:
        plain = (await read(await service.submit(ask(max_tokens=50, seed=1))))[0]
    stop = f" t{tokens(plain)[1]} "
    gate = Gate()
    async with running(gate) as service:
        ended: list[FinishReason] = []
        engine_of(service)._observer.ended = lambda request, reason, at: ended.append(reason)  # type: ignore[method-assign]
        stream = await service.submit(ask(max_tokens=50, seed=1, stop=(stop,)))
        gate.step(3)
        assert (await read(stream))[0][-1].stop_reason == stop
        gate.open()
        await service.drain(WITHIN)
        assert ended == [FinishReason.STOP]


async def test_an_idle_engine_is_not_ready_after_three_failed_canaries() -> None:
    broken = threading.Event()

    def fault(work: Work) -> None:
        if broken.is_set() and all(
            row.sequence.request.id.startswith("canary/") for row in work.rows
        ):
            raise RuntimeError("the device is gone")

    async with running(fault, max_queue=1) as service:
        await service.probe_idle_engine()
        assert (await service.report()).engine.counters.generated_tokens == 1
        engine_of(service)._fault = lambda *_, **__: None  # type: ignore[method-assign]
        broken.set()
        for _ in range(3):
            assert service.health().ready
            await service.probe_idle_engine()
        assert "3 canaries" in service.health().reason
        assert service.health().alive
        broken.clear()
        await service.probe_idle_engine()
        assert service.health().ready


async def test_a_busy_engine_gets_no_idle_canary() -> None:
    gate = Gate()
    async with running(gate) as service:
        stream = await service.submit(ask())
        await service.probe_idle_engine()
        assert set(service._streams) == {stream.request_id}
        gate.open()
        await read(stream)
