"""The link to an engine over a socket; the other end is the real one, in a thread."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from fairlead_runtime.child.frames import Channel, Codec, FrameError
from fairlead_runtime.child.process import Child, ending
from fairlead_runtime.outputs import (
    EngineDead,
    EngineState,
    ModelFacts,
    Output,
    QueueFull,
    ServiceError,
    Submission,
)
from fairlead_runtime.processes import engine_process
from fairlead_runtime.request.sequence import FinishReason, SamplingParams
from fairlead_runtime.scheduling.plan import Work
from fairlead_runtime.serving import remote_engine, wire
from fairlead_runtime.serving.detokenize import Vocabulary
from fairlead_runtime.serving.intake import Intake
from fairlead_runtime.serving.measurements import RequestMetrics
from fairlead_runtime.serving.remote_engine import RemoteEngine
from fairlead_runtime.serving.service import Service
from fairlead_runtime.serving.stream import Stream
from fairlead_runtime.settings.engine_config import EngineConfig
from support.fake_engine import VOCABULARY, Clock, Collected, FakeRunner, request, rig
from support.fake_engine import run as run_engine

pytestmark = pytest.mark.anyio
FACTS = ModelFacts(eos_ids=frozenset(), vocab_size=VOCABULARY, seed=7)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class EngineThread(Child):
    """An engine in a thread, which has the other end of the socket."""

    def __init__(self, **changes: Any) -> None:
        self.connection, self._other_end = socket.socketpair()
        self.measurements = RequestMetrics()
        self.engine = rig(observer=self.measurements, **changes)
        self.sent: list[wire.FromEngine] = []
        self.code = 0
        self._others = set(threading.enumerate())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reap(self, patience: float) -> str:
        self._thread.join(patience)
        return ending(self.code)

    def kill(self) -> None:
        self.code = -9
        with contextlib.suppress(OSError):  # it has ended
            self._other_end.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Wait for the engine's thread too: at its end it may call what a test has replaced."""
        self.engine.stop()
        for thread in set(threading.enumerate()) - self._others:
            if thread.name == "engine":
                thread.join(10)

    def _run(self) -> None:
        channel = Counted(self._other_end, self.sent)
        assert isinstance(channel.receive(), wire.Start)
        channel.send(wire.Loaded(FACTS, self.engine.bounds, {"planned": 1}))
        engine_process.Server(self.engine, self.measurements, channel).run()
        self._other_end.close()


class Counted(Channel[wire.FromEngine, wire.ToEngine]):
    """Keeps what was sent."""

    def __init__(self, connection: socket.socket, sent: list[wire.FromEngine]) -> None:
        super().__init__(connection, wire.FROM_ENGINE, wire.TO_ENGINE)
        self._messages = sent

    def send(self, message: wire.FromEngine) -> None:
        super().send(message)
        self._messages.append(message)


@asynccontextmanager
async def linked(
    monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> AsyncIterator[tuple[Service, RemoteEngine, EngineThread]]:
    monkeypatch.setattr(engine_process, "leave", lambda _code: None)  # it ends the process
    child = EngineThread(**changes)
    link = RemoteEngine(child)
    await link.open()
    loaded = await link.load(wire.Start("/model", EngineConfig(), 0))
    assert loaded.memory == {"planned": 1}
    service = Service(link, Intake(link.bounds.resolve_max_tokens, loaded.facts), words())
    service.start()
    try:
        yield service, link, child
    finally:
        await service.stop()
        await asyncio.to_thread(child.end)


def words() -> Vocabulary:
    token_bytes = {token: f"t{token} ".encode() for token in range(VOCABULARY)}
    return Vocabulary(lambda _: "", frozenset(), token_bytes, True, str)


def ask(name: str, **params: Any) -> Submission:
    of_engine = request(name, **params)
    return Submission(id=name, prompt=of_engine.prompt, params=of_engine.params)


async def tokens(stream: Stream) -> dict[int, list[int]]:
    outputs: list[Output] = [output async for output in stream]
    found: dict[int, list[int]] = {}
    for output in outputs:
        found.setdefault(output.index, []).extend(output.token_ids)
    return found


async def test_the_tokens_are_those_of_the_engine_and_each_step_is_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submissions = [ask(name, n=2, seed=3, max_tokens=9) for name in "abcd"]
    alone = rig()
    for submission in submissions:
        made = Intake(alone.bounds.resolve_max_tokens, FACTS).request(submission)
        alone.submit(made)
    wanted = run_engine(alone, into=Collected()).tokens
    async with linked(monkeypatch) as (service, _, child):
        streams = [await service.submit(submission) for submission in submissions]
        found = await asyncio.gather(*map(tokens, streams))
        for submission, of_choices in zip(submissions, found, strict=True):
            for choice, ids in of_choices.items():
                assert ids == wanted[submission.id, choice]
        steps = (await service.report()).engine.counters.steps
        messages = [message for message in child.sent if isinstance(message, wire.Events)]
        assert len(messages) <= steps
        assert sum(len(message.events) for message in messages) == 4 * 2 * 9


async def test_a_full_queue_ends_the_stream_before_any_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = threading.Event()

    def gate(_work: Work) -> None:
        opened.wait()

    changes: dict[str, Any] = {"max_requests": 1, "max_queue": 1}
    async with linked(monkeypatch, runner=FakeRunner(gate), **changes) as (service, _, _child):
        streams = [await service.submit(ask(name)) for name in "abcdef"]
        with pytest.raises(QueueFull) as full:
            await tokens(streams[-1])
        assert full.value.retry_after is not None
        opened.set()
        assert len((await tokens(streams[0]))[0]) == 6


async def test_a_step_that_no_frame_holds_is_sent_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, encode = threading.Event(), Codec.encode

    def gate(_work: Work) -> None:
        opened.wait()

    def at_most_four(codec: Codec[Any], message: Any) -> bytes:
        if isinstance(message, wire.Events) and len(message.events) > 4:
            raise FrameError("a message of 9 bytes is larger than 8")
        return encode(codec, message)

    monkeypatch.setattr(Codec, "encode", at_most_four)
    async with linked(monkeypatch, runner=FakeRunner(gate)) as (service, _, child):
        streams = [await service.submit(ask(name)) for name in "abcdefgh"]
        opened.set()
        for found in await asyncio.gather(*map(tokens, streams)):
            assert len(found[0]) == 6
        sizes = [len(each.events) for each in child.sent if isinstance(each, wire.Events)]
        assert 1 < max(sizes) <= 4


async def test_an_event_that_no_frame_holds_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fault(work: Work) -> None:
        if any(row.sequence.request.id == "b" for row in work.rows):
            raise ValueError("x" * 10)

    encode = Codec.encode

    def too_large(codec: Codec[Any], message: Any) -> bytes:
        if isinstance(message, wire.Events) and any(
            event.request_id == "b" and event.error is None for event in message.events
        ):
            raise FrameError("a message of 9 bytes is larger than 8")
        return encode(codec, message)

    async with linked(monkeypatch, runner=FakeRunner(fault)) as (service, _, _child):
        monkeypatch.setattr(Codec, "encode", too_large)
        first, second = await service.submit(ask("a")), await service.submit(ask("b"))
        with pytest.raises(ServiceError, match="larger than 8"):
            await tokens(second)
        assert len((await tokens(first))[0]) == 6


async def test_the_end_of_the_connection_ends_every_stream_and_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, opened = threading.Event(), threading.Event()

    def gate(_work: Work) -> None:
        begun.set()
        opened.wait()

    async with linked(monkeypatch, runner=FakeRunner(gate)) as (service, link, child):
        stream = await service.submit(ask("a"))
        assert await asyncio.to_thread(begun.wait, 10)  # a question is answered between steps
        views = asyncio.create_task(link.requests())
        await asyncio.sleep(0)
        child.kill()
        with pytest.raises(EngineDead, match="SIGKILL"):
            await tokens(stream)
        with pytest.raises(EngineDead):
            await views
        await service.died.wait()
        assert not service.health().alive
        with pytest.raises(EngineDead):
            await service.submit(ask("b"))
        with pytest.raises(EngineDead):
            await service.report()
        opened.set()


async def test_an_engine_that_gives_up_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(_work: Work) -> None:
        raise RuntimeError("the device is gone")

    async with linked(monkeypatch, runner=FakeRunner(fault)) as (service, _, _child):
        (output,) = [output async for output in await service.submit(ask("a"))]
        assert output.finish_reason is FinishReason.ERROR
        await service.died.wait()
        assert "canaries in a row failed" in service.health().reason


async def test_a_scrape_shows_the_last_report_when_the_process_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked(monkeypatch) as (service, link, _):
        await tokens(await service.submit(ask("a")))
        before = await service.report()
        assert before.requests.totals.generation_tokens == 6
        monkeypatch.setattr(remote_engine, "REPORT_SECONDS", 0.01)

        async def silence(_subject: Any) -> Any:
            await asyncio.Event().wait()

        monkeypatch.setattr(link, "_ask", silence)
        assert await service.report() == before


@pytest.fixture
async def silent() -> tuple[RemoteEngine, Clock, Callable[[EngineState], None]]:
    """A link with a clock, and what gives it the state of a pulse."""
    clock = Clock()
    link = RemoteEngine(cast("Child", None), now=clock)  # it is not connected
    return link, clock, lambda state: link._receive(wire.Pulse(state))


async def test_the_age_of_a_step_grows_between_pulses_and_ends_with_its_events(
    silent: tuple[RemoteEngine, Clock, Callable[[EngineState], None]],
) -> None:
    link, clock, pulse = silent
    clock.now = 100.0
    pulse(EngineState("", "", 4.0, 30.0))
    assert link.state() == EngineState("", "", 4.0, 30.0)
    clock.now += 0.5
    assert link.state().step_age == 4.5
    link._receive(wire.Events([]))
    assert link.state().step_age == 0.0
    pulse(EngineState("", "no canary yet", None, 0.0))
    assert link.state() == EngineState("", "no canary yet", None, 0.0)


async def test_silence_counts_as_the_age_of_a_step_also_without_work(
    silent: tuple[RemoteEngine, Clock, Callable[[EngineState], None]],
) -> None:
    link, clock, pulse = silent
    pulse(EngineState("", "", None, 0.0))
    clock.now += remote_engine.QUIET_SECONDS
    assert link.state().step_age is None
    clock.now += 57.0
    assert link.state().step_age == 57.0 + remote_engine.QUIET_SECONDS
    pulse(EngineState("", "", None, 0.0))
    assert link.state().step_age is None


def test_a_request_with_every_parameter_is_decoded_as_it_was() -> None:
    params = SamplingParams(temperature=0, top_p=1, stop_token_ids=(1,), max_tokens=None)
    made = Intake(rig().bounds.resolve_max_tokens, FACTS).request(
        Submission(prompt=(1, 2), params=params)
    )
    content = wire.TO_ENGINE.encode(wire.Submit(made, bounded=True))[4:]
    assert wire.TO_ENGINE.decode(content) == wire.Submit(made, bounded=True)
