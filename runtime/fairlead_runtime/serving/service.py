"""The asynchronous face of the engine: submit → stream, cancel, drain.

Owns the engine's thread and the queue back from it: one wake-up of the event loop per step, however
many tokens the step gave. No engine object leaks through it: what goes in is a Submission, what
comes out are Outputs, so it can move to a process of its own. Text is made here, when a stream is
read, never in the engine thread.
"""

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable

from fairlead_runtime.engine.engine import Engine
from fairlead_runtime.engine.observer import CANARY, canary
from fairlead_runtime.engine.progress import ALIVE_WITHIN, READY_WITHIN
from fairlead_runtime.outputs import (
    Drained,
    Draining,
    Emitted,
    EngineDead,
    EngineSnapshot,
    Health,
    RequestView,
    ServiceError,
    SlowReader,
    Submission,
)
from fairlead_runtime.request import Request, RequestError
from fairlead_runtime.serving.detokenize import Vocabulary
from fairlead_runtime.serving.gather import Choice
from fairlead_runtime.serving.intake import Intake
from fairlead_runtime.serving.stream import Stream

log = logging.getLogger("fairlead.service")

IDLE_EVERY = 30.0  # seconds between two canaries of an idle engine
UNPROVEN = 3  # of them may fail in a row before no traffic is wanted
INSPECT_WITHIN = 2.0  # seconds the debug view waits for the running step


class Service:
    """Make it on the event loop that will read the streams, then ``start`` it."""

    def __init__(
        self,
        engine: Engine,
        intake: Intake,
        vocabulary: Vocabulary,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_model_len = engine.bounds.capacity
        self.died = asyncio.Event()
        self._engine = engine
        self._intake = intake
        self._vocabulary = vocabulary
        self._now = now
        self._streams: dict[str, Stream] = {}
        self._draining = False
        self._live_at_drain = 0
        self._quiet = asyncio.Event()  # no client's request lives
        self._quiet.set()
        self._tokens = 0  # delivered so far, any request's
        self._last_token = 0
        self._slow_readers = 0
        self._unproven = 0  # idle canaries that failed in a row
        self._watch: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # -- life

    def start(self) -> None:
        """Start the engine's thread; call it on the event loop that will read the streams."""
        gc.collect()
        # the model's and libraries' objects live as long as the process: never walk them again
        gc.freeze()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._watch = self._loop.create_task(self._watch_idle())

    async def stop(self, patience: float = 10.0) -> None:
        """End the engine's thread after its current step."""
        self._engine.stop()
        if self._watch is not None:
            self._watch.cancel()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, patience)
        gc.unfreeze()

    def begin_drain(self) -> None:
        if not self._draining:
            self._live_at_drain = len(self._clients())
        self._draining = True

    async def drain(self, grace: float) -> Drained:
        self.begin_drain()
        left: list[str] = []
        try:
            async with asyncio.timeout(grace):
                await self._quiet.wait()
        except TimeoutError:
            left = self._clients()
            for request_id in left:
                self._engine.abort(
                    request_id, error=Draining(f"the server stopped after {grace:g} s of draining")
                )
        return Drained(self._live_at_drain - len(left), len(left))

    def _clients(self) -> list[str]:
        """The live requests that are no canaries."""
        return [i for i in self._streams if not i.startswith(CANARY)]

    # -- requests

    async def submit(self, submission: Submission) -> Stream:
        if self._draining:
            raise Draining("the server is shutting down: retry on another replica", retry_after=1.0)
        request = self._intake.request(submission)
        if request.id in self._streams:
            raise RequestError("id", "a live request has this id already")
        return self._start(request, submission, bounded=True)

    def _start(self, request: Request, submission: Submission, *, bounded: bool) -> Stream:
        params = submission.params
        choices = {i: Choice(i, submission, self._vocabulary) for i in range(params.n)}
        stream = Stream(request.id, self, choices)
        self._engine.submit(request, bounded=bounded)
        self._streams[request.id] = stream
        if bounded:
            self._quiet.clear()
        return stream

    async def cancel(self, request_id: str) -> bool:
        known = request_id in self._streams
        if known:
            self._engine.abort(request_id)
        return known

    def stop_choice(self, request_id: str, choice: int) -> None:
        """A stop text ended this choice; the engine knows token ids only."""
        self._engine.finish(request_id, choice)

    async def canary(self, patience: float = 10.0) -> int:
        request, before = canary(), self._tokens
        stream = self._start(
            request, Submission(prompt=request.prompt, params=request.params), bounded=False
        )
        try:
            async with asyncio.timeout(patience), stream:
                output = await anext(stream)
        except TimeoutError:
            # So busy that the canary still waits: any token made meanwhile proves the same path.
            if self._tokens > before:
                return self._last_token
            raise ServiceError(f"no token within {patience:g} s") from None
        if not output.token_ids:
            raise ServiceError(output.message or "the canary ended without a token")
        return output.token_ids[0]

    # -- views

    def snapshot(self) -> EngineSnapshot:
        found = self._engine.snapshot()
        found.counters.slow_readers = self._slow_readers
        return found

    def health(self) -> Health:
        """Forward progress, not a flag: a hung step shows, a long prefill and an idle day do not."""
        engine, age = self._engine, self._engine.progress.age()
        allowance = engine.progress.allowance()
        if engine.dead:
            return Health(alive=False, ready=False, reason=engine.dead, last_step_age=age)
        if age is not None and age > max(READY_WITHIN, allowance):
            alive = age <= max(ALIVE_WITHIN, allowance)
            return Health(alive, ready=False, reason=f"no step for {age:.0f} s", last_step_age=age)
        reason = "draining" if self._draining else engine.unready()
        if self._unproven >= UNPROVEN:
            reason = f"{self._unproven} canaries in a row brought no token"
        return Health(alive=True, ready=not reason, reason=reason, last_step_age=age)

    async def requests(self) -> list[RequestView]:
        loop = asyncio.get_running_loop()
        views: asyncio.Future[list[RequestView]] = loop.create_future()

        def settle(found: list[RequestView]) -> None:
            if not views.done():
                views.set_result(found)

        self._engine.inspect(lambda found: self._call(settle, found))
        try:
            async with asyncio.timeout(INSPECT_WITHIN):
                return await views
        except TimeoutError:
            raise ServiceError("the engine is in a long step: ask again", retry_after=1.0) from None

    async def prove_idle(self) -> None:
        """Send a canary unless real requests prove the path; health remembers those that fail in a
        row.
        """
        if self._streams or self._draining:
            return
        try:
            await self.canary()
        except ServiceError as error:
            self._unproven += 1
            log.warning("an idle engine's canary failed: %s", error)

    async def _watch_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_EVERY)
            await self.prove_idle()

    # -- the way back

    def _run(self) -> None:
        """The engine thread. Whatever ends it, nobody is left waiting."""
        try:
            self._engine.run(self._publish)
        except BaseException as error:
            log.exception("the engine thread ended")
            self._engine.dead = f"the engine thread ended: {type(error).__name__}"
        if self._engine.dead:
            self._call(self._bury)

    def _publish(self, emitted: list[Emitted]) -> None:
        self._call(self._deliver, emitted)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        """Have the event loop call back; one that has closed has nobody left to tell."""
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback, *args)

    def _deliver(self, emitted: list[Emitted]) -> None:
        """On the event loop: hand a step's events to their streams."""
        now = self._now()
        for event in emitted:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if event.token is not None:
                self._tokens, self._last_token, self._unproven = self._tokens + 1, event.token, 0
            if stream.push(event, now):
                self._forget(event.request_id)
            elif stream.overdue(now):
                stream.end(
                    SlowReader(
                        "the stream was read too slowly: its output no longer fits the buffer"
                    )
                )
                self._engine.abort(event.request_id)
                self._slow_readers += 1

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        if not self._clients():
            self._quiet.set()

    def _bury(self) -> None:
        """The engine will answer nobody any more."""
        error = EngineDead(self._engine.dead)
        for request_id, stream in list(self._streams.items()):
            stream.end(error)
            self._forget(request_id)
        self.died.set()
