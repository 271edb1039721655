"""The asynchronous interface of the engine: submit → stream, cancel, drain.

Owns the live streams and hands each step's events to them, all in one turn of the event loop. Takes
Submissions and returns Outputs, whose text ``text_thread`` makes. Where the engine runs is
``engine_link``'s.
"""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from fairlead_runtime.engine.observer import CANARY, canary
from fairlead_runtime.engine.progress import ALIVE_STEP_SECONDS, READY_STEP_SECONDS
from fairlead_runtime.grammar.checker import Checker, CheckerBusy
from fairlead_runtime.outputs import (
    CacheReset,
    CacheView,
    ChoiceEvent,
    Draining,
    DrainResult,
    EngineDead,
    GrammarsBusy,
    Health,
    RequestView,
    ServiceError,
    SlowReader,
    StreamTimes,
    Submission,
)
from fairlead_runtime.request.sequence import Request, SamplingParams
from fairlead_runtime.request.structured import StructuredOutputs
from fairlead_runtime.serving.choice import ChoiceText
from fairlead_runtime.serving.detokenize import Vocabulary
from fairlead_runtime.serving.engine_link import EngineLink
from fairlead_runtime.serving.intake import Intake
from fairlead_runtime.serving.measurements import EngineReport
from fairlead_runtime.serving.stream import STOP_EVENTS, WHOLE_EVENTS, Stream
from fairlead_runtime.serving.text_thread import TextThread

log = logging.getLogger("fairlead.service")

IDLE_CANARY_INTERVAL = 30.0  # seconds between two canaries of an idle engine
ENDS_A_TURN = 8  # readers woken for their end in one turn of the event loop: each takes 0.3 ms
MAX_FAILED_CANARIES = 3  # idle canaries that fail in a row make the server not ready
ViewT = TypeVar("ViewT")
INSPECT_SECONDS = 2.0  # the debug view waits this long for the running step


class Service:
    """Create it on the event loop that will read the streams, then ``start`` it."""

    def __init__(
        self,
        engine: EngineLink,
        intake: Intake,
        vocabulary: Vocabulary,
        *,
        grammars: Checker | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_model_len = engine.bounds.capacity
        self.died = asyncio.Event()
        self._engine = engine
        self._intake = intake
        self._grammars = grammars or Checker(None)
        self._vocabulary = vocabulary
        self._now = now
        self._streams: dict[str, Stream] = {}
        self._texts = TextThread(self._text_late)
        self._draining = False
        self._refusing = False
        self._drain_requests = 0  # that ran when the drain began, or came since
        self._clients = 0  # live requests that are not canaries
        self._no_clients = asyncio.Event()  # set while there are none
        self._no_clients.set()
        self._tokens = 0  # delivered so far, of all requests
        self._last_token = 0
        self._slow_readers = 0
        self._turn = 0  # how often readers had a chance to run after a delivery
        self._turn_pending = False
        self._ended: deque[Stream] = deque()  # whose readers are to be woken for the end
        self._failed_canaries = 0  # idle canaries that failed in a row
        self._idle_probe: asyncio.Task[None] | None = None

    # -- start and end

    def start(self) -> None:
        """Let the engine step; call it on the event loop that will read the streams."""
        self._engine.start(self._deliver, self._end_all_streams)
        self._idle_probe = asyncio.get_running_loop().create_task(self._probe_when_idle())

    async def stop(self, max_wait: float = 10.0) -> None:
        """End the engine after its current step."""
        if self._idle_probe is not None:
            self._idle_probe.cancel()
        self._grammars.close()
        self._texts.close()
        await self._engine.stop(max_wait)

    def begin_drain(self) -> None:
        if not self._draining:
            self._drain_requests = self._clients
        self._draining = True

    def refuse_new(self) -> None:
        self._refusing = True

    def resume(self) -> None:
        self._draining = self._refusing = False

    async def drain(self, max_wait: float, waited: float = 0.0) -> DrainResult:
        self.begin_drain()
        self.refuse_new()
        unfinished: list[str] = []
        try:
            async with asyncio.timeout(max_wait):
                await self._no_clients.wait()
        except TimeoutError:
            unfinished = [i for i in self._streams if not i.startswith(CANARY)]
            error = Draining(f"the server stopped after {waited + max_wait:g} s of draining")
            for request_id in unfinished:
                self._engine.abort(request_id, error=error)
                # An engine that hangs delivers no end.
                self._streams[request_id].end(error)
        return DrainResult(self._drain_requests - len(unfinished), len(unfinished))

    # -- requests

    async def submit(self, submission: Submission) -> Stream:
        if self._refusing:
            raise Draining("the server is shutting down: retry on another replica", retry_after=1.0)
        request = self._intake.request(submission)
        outputs = request.params.guided
        if outputs is not None:
            request = replace(request, params=await self._checked(request, outputs))
        if request.id in self._streams:  # gateways repeat a request with its id
            request = replace(request, id=f"{request.id}-{uuid.uuid4().hex[:8]}")
        return self._start(request, submission, bounded=True)

    async def _checked(self, request: Request, outputs: StructuredOutputs) -> SamplingParams:
        """The parameters, once their grammar was found to be one that the engine may compile."""
        try:
            checked = await self._grammars.check(outputs, request.tenant)
        except CheckerBusy as error:
            raise GrammarsBusy(str(error), retry_after=1.0) from None
        return replace(request.params, structured_outputs=checked)

    def _start(self, request: Request, submission: Submission, *, bounded: bool) -> Stream:
        params = submission.params
        choices = {i: ChoiceText(i, submission, self._vocabulary) for i in range(params.n)}
        times = StreamTimes(submitted=self._now(), prompt_tokens=len(request.prompt))
        batch = None
        if submission.whole:
            batch = STOP_EVENTS if params.stop else WHOLE_EVENTS
        stream = Stream(request.id, self, choices, times, batch)
        self._engine.submit(request, bounded=bounded)
        self._streams[request.id] = stream
        if bounded:
            self._clients += 1
            self._no_clients.clear()
            self._drain_requests += self._draining
        return stream

    async def cancel(self, request_id: str) -> bool:
        live = request_id in self._streams
        if live:
            self._engine.abort(request_id)
        return live

    def make_text(self, stream: Stream) -> None:
        self._texts.make(stream)

    def _text_late(self, stream: Stream) -> None:
        if self._streams.get(stream.request_id) is stream:
            self._engine.abort(stream.request_id)

    def stop_choice(self, stream: Stream, choice: int) -> None:
        """End a choice because of a stop text; the engine sees token ids only. A stream that is
        read after the engine has ended it changes nothing: its id may be another request's by now.
        """
        if self._streams.get(stream.request_id) is stream:
            self._engine.finish(stream.request_id, choice)

    def wake_in_turn(self, stream: Stream) -> None:
        """Wake its reader in one of the next turns of the event loop, with few others: streams
        that go on are served between them.
        """
        self._ended.append(stream)
        if len(self._ended) == 1:
            asyncio.get_running_loop().call_soon(self._wake_ended)

    def _wake_ended(self) -> None:
        for _ in range(min(ENDS_A_TURN, len(self._ended))):
            self._ended.popleft().wake()
        if self._ended:
            asyncio.get_running_loop().call_soon(self._wake_ended)

    async def canary(self, max_wait: float = 10.0) -> int:
        request, before = canary(), self._tokens
        stream = self._start(
            request, Submission(prompt=request.prompt, params=request.params), bounded=False
        )
        try:
            async with asyncio.timeout(max_wait), stream:
                output = await anext(stream)
        except TimeoutError:
            # The engine is so busy that the canary still waits: a token of another request proves
            # the same path.
            if self._tokens > before:
                return self._last_token
            raise ServiceError(f"no token within {max_wait:g} s") from None
        if not output.token_ids:
            raise ServiceError(str(output.failure or "the canary ended without a token"))
        return output.token_ids[0]

    # -- views

    async def report(self) -> EngineReport:
        report = await self._engine.report()
        counters, grammars = report.engine.counters, self._grammars.counts
        counters.slow_readers = self._slow_readers
        counters.grammar_compilations = grammars.compilations
        counters.grammar_seconds = grammars.seconds
        counters.grammar_refusals = grammars.refusals
        counters.grammar_cache_hits = grammars.hits
        counters.grammar_busy = grammars.busy
        counters.grammars_pending = self._grammars.pending
        return report

    def health(self) -> Health:
        """Health from forward progress: a hung step fails it; a long prefill or idle time
        does not.
        """
        engine = self._engine.state()
        age, allowance = engine.step_age, engine.step_allowance
        if engine.dead_reason:
            return Health(alive=False, ready=False, reason=engine.dead_reason, last_step_age=age)
        if age is not None and age > max(READY_STEP_SECONDS, allowance):
            alive = age <= max(ALIVE_STEP_SECONDS, allowance)
            return Health(alive, ready=False, reason=f"no step for {age:.0f} s", last_step_age=age)
        reason = "draining" if self._draining else engine.not_ready_reason
        if self._failed_canaries >= MAX_FAILED_CANARIES:
            reason = f"{self._failed_canaries} canaries in a row returned no token"
        return Health(alive=True, ready=not reason, reason=reason, last_step_age=age)

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits. May be read in any thread."""
        return bool(self._streams)

    async def requests(self) -> list[RequestView]:
        return await _inspected(self._engine.requests())

    async def cache(self, start: int) -> CacheView:
        return await _inspected(self._engine.cache(start))

    async def reset_prefix_cache(self) -> CacheReset:
        return await _inspected(self._engine.reset_cache())

    async def probe_idle_engine(self) -> None:
        """Send a canary unless real requests test the engine. Counts canaries that fail in a
        row.
        """
        if self._streams or self._draining:
            return
        try:
            await self.canary()
        except ServiceError as error:
            self._failed_canaries += 1
            log.warning("a canary of the idle engine failed: %s", error)

    async def _probe_when_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_CANARY_INTERVAL)
            await self.probe_idle_engine()

    # -- from the engine

    def _deliver(self, events: list[ChoiceEvent]) -> None:
        """Hand a step's events to their streams."""
        now = self._now()
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if event.token is not None:
                self._tokens, self._last_token, self._failed_canaries = (
                    self._tokens + 1,
                    event.token,
                    0,
                )
            if stream.push(event, now, self._turn):
                self._remove(event.request_id)
            elif stream.overdue(now):
                stream.end(
                    SlowReader(
                        "the stream was read too slowly: its output no longer fits the buffer"
                    )
                )
                self._engine.abort(event.request_id)
                self._slow_readers += 1

        if not self._turn_pending:
            # Runs after the readers that these events wake.
            self._turn_pending = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn, self._turn_pending = self._turn + 1, False

    def _remove(self, request_id: str) -> None:
        del self._streams[request_id]
        self._clients -= not request_id.startswith(CANARY)
        if not self._clients:
            self._no_clients.set()

    def _end_all_streams(self, reason: str) -> None:
        """The engine has ended: end every stream with EngineDead."""
        error = EngineDead(reason)
        for request_id, stream in list(self._streams.items()):
            stream.end(error)
            self._remove(request_id)
        self.died.set()


async def _inspected(answer: Awaitable[ViewT | None]) -> ViewT:
    """The view that the engine gives of itself. Raises ServiceError."""
    try:
        async with asyncio.timeout(INSPECT_SECONDS):
            view = await answer
    except TimeoutError:
        raise ServiceError("the engine is in a long step: retry", retry_after=1.0) from None
    if view is None:
        raise ServiceError("the view could not be made: see the log")
    return view
