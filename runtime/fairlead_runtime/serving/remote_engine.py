"""The engine in a process of its own, as the service sees it: an EngineLink over a socket.

Owns the HTTP process's end of the socket and the end of the engine's process: whatever ends it ends
the link, with a reason. The other end is ``processes/engine_process.py``.
"""

import asyncio
import gc
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fairlead_runtime.child.frames import FrameError
from fairlead_runtime.child.process import Child
from fairlead_runtime.engine.inbox import Bounds
from fairlead_runtime.outputs import (
    CacheReset,
    CacheView,
    EngineDead,
    EngineState,
    RequestView,
    ServiceError,
)
from fairlead_runtime.request.sequence import Request
from fairlead_runtime.request.text_facts import TextFacts
from fairlead_runtime.serving import wire
from fairlead_runtime.serving.engine_link import Deliver, settle_memory
from fairlead_runtime.serving.measurements import EngineReport

log = logging.getLogger("fairlead.service")

QUIET_SECONDS = 3 * wire.PULSE_SECONDS  # without a message: the process stands still
REPORT_SECONDS = 2.0  # a scrape waits this long, then shows the last report
REAP_SECONDS = 1.0  # for a process whose end of the socket is closed to end


class RemoteEngine:
    """``child`` is the engine's process; ``now`` the machine's monotonic clock, in seconds."""

    def __init__(self, child: Child, *, now: Callable[[], float] = time.monotonic) -> None:
        self._child = child
        self._now = now
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._loaded: asyncio.Future[wire.Loaded] = asyncio.get_running_loop().create_future()
        self._loaded.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._deliver: Deliver = lambda _: None
        self._ended: Callable[[str], None] = lambda _: None
        self._pulse, self._heard = EngineState("", "", None, 0.0), now()
        self._stepped = self._heard  # when the last events came
        self._numbers = itertools.count()
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._report: EngineReport | None = None
        self._reached: Callable[[wire.Progress], None] = lambda _: None
        self._dead_reason = ""
        self._stopping = self._refused = False

    # -- start and end

    async def open(self) -> None:
        """Connect; call it once, before anything else."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._child.connection)
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))

    def load(
        self, start: wire.Start, reached: Callable[[wire.Progress], None] | None = None
    ) -> Awaitable[wire.Loaded]:
        """Let the process load the model, which calls ``reached`` for what the start does;
        awaiting the result raises ConfigError, ModelError, SelfTestError or EngineDead.
        """
        if reached is not None:
            self._reached = reached
        if not self._loaded.done():  # else it could not even import
            self._send(start)
        return self._loaded

    def tell(self, text: TextFacts | None) -> None:
        """Give the process what it needs of the tokenizer; it waits for this once ``load`` was
        called. With None, or more than a message holds, it reads the tokenizer itself.
        """
        if self._dead_reason:
            return
        try:
            self._send(wire.Words(text))
        except FrameError:
            self._send(wire.Words(None))

    @property
    def bounds(self) -> Bounds:
        return self._loaded.result().bounds

    def start(self, deliver: Deliver, ended: Callable[[str], None]) -> None:
        settle_memory()
        self._deliver, self._ended = deliver, ended
        if self._dead_reason:
            asyncio.get_running_loop().call_soon(ended, self._dead_reason)

    async def stop(self, max_wait: float) -> None:
        if self._stopping:
            return
        self._stopping = True
        loaded = self._loaded.done() and not self._loaded.cancelled()
        if loaded and self._loaded.exception() is None and not self._dead_reason:
            self._send(wire.Stop())
        else:
            self._child.kill()
        await asyncio.to_thread(self._child.reap, max_wait)
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            await self._reading
        gc.unfreeze()

    # -- requests

    def submit(self, request: Request, *, bounded: bool) -> None:
        self._send(wire.Submit(request, bounded))

    def abort(self, request_id: str, error: ServiceError | None = None) -> None:
        if not self._dead_reason:
            self._send(wire.Abort(request_id, error))

    def finish(self, request_id: str, choice: int) -> None:
        if not self._dead_reason:
            self._send(wire.Finish(request_id, choice))

    def state(self) -> EngineState:
        """The engine's state by the last messages. Where none came for QUIET_SECONDS the process
        itself stands still, with or without work.
        """
        if self._dead_reason:
            return EngineState(self._dead_reason, "", None, 0.0)
        now, pulse = self._now(), self._pulse
        silent = now - self._heard
        age = None if pulse.step_age is None else pulse.step_age + silent
        if age is not None:
            age = min(age, now - self._stepped)
        elif silent > QUIET_SECONDS:
            age = silent
        return EngineState("", pulse.not_ready_reason, age, pulse.step_allowance)

    async def requests(self) -> list[RequestView] | None:
        views: list[RequestView] | None = await self._ask("requests")
        return views

    async def cache(self, start: int) -> CacheView | None:
        view: CacheView | None = await self._ask("cache", start)
        return view

    async def reset_cache(self) -> CacheReset | None:
        reset: CacheReset | None = await self._ask("reset")
        return reset

    async def report(self) -> EngineReport:
        """The last one when the process does not answer now."""
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                report: EngineReport = await self._ask("report")
        except TimeoutError:
            if self._report is None:
                raise ServiceError("the engine process does not answer: retry") from None
            return self._report
        self._report = report
        return report

    async def _ask(self, subject: Any, start: int = 0) -> Any:
        number = next(self._numbers)
        self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(wire.Ask(number, subject, start))
            return await self._questions[number]
        finally:
            del self._questions[number]

    def _send(self, message: wire.ToEngine) -> None:
        if self._dead_reason or self._writer is None:
            raise EngineDead(self._dead_reason or "the engine process is not connected")
        self._writer.write(wire.TO_ENGINE.encode(message))

    # -- from the engine's process

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = ""
        try:
            while (message := await wire.FROM_ENGINE.read(reader)) is not None:
                self._receive(message)
        except FrameError as error:
            reason = f"sent what is no message: {error}"
            self._child.kill()
        end = await asyncio.to_thread(self._child.reap, REAP_SECONDS)
        self._lose(f"the engine process {reason or end}")

    def _receive(self, message: wire.FromEngine) -> None:
        self._heard = self._now()
        match message:
            case wire.Events(events):
                self._stepped = self._heard
                try:
                    self._deliver(events)
                except Exception:
                    log.exception("the events of a step could not be delivered")
            case wire.Pulse(state):
                self._pulse = state
            case (
                wire.Views(number, answer)
                | wire.Cache(number, answer)
                | wire.Reset(number, answer)
                | wire.Report(number, answer)
            ):
                question = self._questions.get(number)
                if question is not None and not question.done():
                    question.set_result(answer)
            case wire.Progress():
                self._reached(message)
            case wire.Loaded():
                if not self._loaded.done():
                    self._loaded.set_result(message)
            case wire.Refused():
                if not self._loaded.done():
                    self._refused = True  # its end is no news
                    self._loaded.set_exception(message.error)
            case wire.Gone(reason):
                self._lose(reason)

    def _lose(self, reason: str) -> None:
        """The engine has ended; the first reason counts."""
        if self._dead_reason:
            return
        self._dead_reason = reason
        error = EngineDead(reason)
        for waiting in (self._loaded, *self._questions.values()):
            if not waiting.done():
                waiting.set_exception(error)
        if not self._stopping and not self._refused:
            log.error("the engine has ended: %s", reason)
            self._ended(reason)
