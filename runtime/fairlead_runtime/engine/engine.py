"""The engine loop. Each step is: inbox → plan → commit → run → update → publish.

Where the device can be given a step before the tokens of the last one are known, the next is
planned and launched first: inbox → plan N+1 → launch N+1 → collect N → update N → publish.

Owns the scheduler, the executor and the inbox between threads. The thread that calls ``run`` (or
``step``) is the engine thread; no other thread touches scheduler, blocks or device. Knows nothing
of asyncio, text or HTTP: it takes Requests and returns one list of ChoiceEvents per step.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from threading import TIMEOUT_MAX
from typing import ParamSpec, TypeVar

from fairlead_runtime.engine.cache_map import CacheCopy
from fairlead_runtime.engine.inbox import Abort, Add, Bounds, Guide, Inbox, Inspect, Prepared
from fairlead_runtime.engine.isolate import Executor, Outcome
from fairlead_runtime.engine.observer import CANARY, Observer, canary
from fairlead_runtime.engine.pipeline import Launcher, Pipeline
from fairlead_runtime.engine.progress import NO_TIMES, StepProgress, StepTimes
from fairlead_runtime.engine.views import LiveRequest, request_views
from fairlead_runtime.outputs import (
    CacheReset,
    ChoiceEvent,
    Counters,
    EngineDead,
    EngineSnapshot,
    EngineState,
    QueueTimeout,
    RequestView,
    ServiceError,
)
from fairlead_runtime.request.sequence import (
    Failure,
    FailureKind,
    FinishReason,
    Request,
    RequestError,
)
from fairlead_runtime.request.structured import Reasoning, StructuredOutputs
from fairlead_runtime.scheduling.plan import DeviceLostError, Event, Token, Work
from fairlead_runtime.scheduling.scheduler import InvariantViolation, Scheduler

__all__ = ["CANARY", "Bounds", "Engine", "Observer", "canary"]
log = logging.getLogger("fairlead.engine")

FAULT_BUDGET = 3  # canaries that may fail in a row before the engine gives up
CHECK_EVERY = 1024  # steps between two checks of the scheduler's invariants
CHECK_SHARE = 0.01  # largest share of the time for these checks, which walk over every block

# Compiles a grammar on another thread and calls the function there.
Prepare = Callable[[StructuredOutputs | Reasoning, Callable[[Guide | Failure], None]], None]
Params = ParamSpec("Params")
Value = TypeVar("Value")


class Engine:
    """``now`` is a monotonic clock in seconds. ``make_scheduler`` is called again after the
    scheduler fails. Without ``prepare`` no request may have structured output; without ``launcher``
    each step is waited for before the next is planned.
    """

    def __init__(
        self,
        make_scheduler: Callable[[], Scheduler],
        executor: Executor,
        bounds: Bounds,
        *,
        now: Callable[[], float],
        observer: Observer | None = None,
        step_times: StepTimes = NO_TIMES,
        prepare: Prepare | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self.bounds = bounds
        self.dead_reason = ""  # why the engine gave up; empty while it runs
        self.idle = False  # the last step had nothing to do: wait for a message
        self.progress = StepProgress(now, step_times)
        self.counters = Counters()
        self._make_scheduler = make_scheduler
        self._scheduler = make_scheduler()
        self._stats = self._scheduler.stats()
        self._executor = executor
        self._pipeline = Pipeline(launcher)
        self._prepare = prepare
        self._now = now
        self._observer = observer or Observer()
        self._inbox = Inbox(bounds, self.progress, now)
        self._live: dict[str, LiveRequest] = {}
        # Arrival times of the requests that have not had a step yet, in order of arrival.
        self._waiting_since: dict[str, float] = {}
        self._waiting_tokens = 0  # their prompt tokens
        self._preparing: dict[str, int] = {}  # choices of requests whose grammar is being compiled
        self._checks: Iterator[None] | None = None  # the rest of a check of the invariants
        self._check_after = 0.0  # the earliest time of its next part
        self._canaries_lost = 0  # canaries that failed in a row
        self._fault_canary: str | None = None  # the canary sent after a fault, until it succeeds
        self._choice_events: list[ChoiceEvent] = []

    # -- any thread

    def submit(self, request: Request, *, bounded: bool = True) -> None:
        """Queue a request. Raises QueueFull or EngineDead. Canaries pass ``bounded`` False."""
        hash_prompt = partial(self._scheduler.prompt_hashes, pause=partial(time.sleep, 0))
        self._inbox.add(request, hash_prompt, bounded=bounded)

    def abort(
        self, request_id: str, choice: int | None = None, error: ServiceError | None = None
    ) -> None:
        """End a request, or one of its choices. Ignores unknown ids."""
        self._inbox.post(Abort(request_id, choice, error=error))

    def finish(self, request_id: str, choice: int) -> None:
        """End a choice because its text contains a stop text; the engine sees token ids only."""
        self._inbox.post(Abort(request_id, choice, FinishReason.STOP))

    def inspect(self, answer: Callable[[list[RequestView] | None], None]) -> None:
        """Make the engine thread call ``answer`` with a view of every live request, or with None
        when making the views failed.
        """
        self._inbox.post(Inspect(self._views, answer))

    def copy_cache(self, start: int, answer: Callable[[CacheCopy | None], None]) -> None:
        """Make the engine thread call ``answer`` with a copy of the cache's units from ``start``
        on, or with None when making the copy failed.
        """
        self._inbox.post(Inspect(lambda: CacheCopy.of(self._scheduler, start), answer))

    def reset_cache(self, answer: Callable[[CacheReset | None], None]) -> None:
        """Make the engine thread evict all cached units that no request holds and call ``answer``
        with their number, or with None when that failed.
        """
        self._inbox.post(Inspect(self._reset_cache, answer))

    def stop(self) -> None:
        """Let ``run`` return after its current step."""
        self._inbox.stop()

    def not_ready_reason(self) -> str:
        """The reason why the engine should get no new traffic, in words; empty when it is ready. A
        full queue is no reason: a pod that answers 429 is seen, one without traffic is not.
        """
        if self._fault_canary is not None:
            return "a step failed for no single request, and no canary has succeeded since"
        return ""

    def state(self) -> EngineState:
        age, allowance = self.progress.age(), self.progress.allowance()
        return EngineState(self.dead_reason, self.not_ready_reason(), age, allowance)

    def snapshot(self) -> EngineSnapshot:
        """The state after the last step. Copying the dictionary is atomic between threads."""
        bounds = self.bounds
        return EngineSnapshot(
            self._stats,
            replace(
                self.counters,
                batch_sizes=dict(self.counters.batch_sizes),
                rejected_requests=self._inbox.rejected_requests,
                rejected_tokens=self._inbox.rejected_tokens,
            ),
            self._inbox.arriving,
            bounds.num_blocks,
            bounds.block_size,
            bounds.max_model_len,
            len(self._preparing),
        )

    # -- the engine thread

    def run(self, publish: Callable[[list[ChoiceEvent]], None]) -> None:
        """Step until the engine is stopped or gives up; sleep while there is nothing to do.

        Calls ``publish`` with the events of each step, in this thread.
        """
        while not self._inbox.stopping and not self.dead_reason:
            if events := self.step():
                publish(events)
            if self.idle and not self.dead_reason:  # no message would wake an engine that gave up
                self.sleep()

    def step(self) -> list[ChoiceEvent]:
        """Run one step and return its events. No request can make it raise. One step may be left in
        flight, but none when no request is left.
        """
        began = self._now()
        self.idle = True
        try:
            self._drain_inbox()
            self._expire_queue(began)
            if (self._scheduler.has_work or self._pipeline) and not self.dead_reason:
                self._advance(began)
        except DeviceLostError as error:
            self._give_up(str(error))
        except Exception as error:
            log.exception("the step failed outside any request")
            self._recover(error)
        self._publish_state()
        events, self._choice_events = self._choice_events, []
        return events

    def _drain_inbox(self) -> None:
        while (message := self._inbox.take()) is not None:
            match message:
                case Add():
                    self._add(message)
                case Abort():
                    self._abort(message)
                case Prepared(request, outcome):
                    self._prepared(request, outcome)
                case Inspect(look, answer):
                    self._contain(answer, self._contain(look))

    def _add(self, add: Add) -> None:
        request, choices = add.request, set(range(add.request.params.n))
        self._live[request.id] = LiveRequest(request, add.arrived, choices, add.hashes)
        self._contain(self._observer.arrived, request, add.arrived)
        if add.bounded:  # a canary has no timeout: its sender limits how long it waits
            self._waiting_since[request.id] = add.arrived
            self._waiting_tokens += len(request.prompt)
        outputs = request.params.guided or request.params.reasoning
        if outputs is None:
            self._schedule(request)
        elif self._prepare is None:
            failure = Failure("this engine has no grammars", FailureKind.GRAMMAR)
            self._end_request(request.id, FinishReason.ERROR, failure)
        else:
            # The scheduler sees the request once its grammar is there, so no step waits for it.
            self._preparing[request.id] = request.params.n
            self._prepare(outputs, lambda outcome: self._inbox.post(Prepared(request, outcome)))

    def _prepared(self, request: Request, outcome: Guide | Failure) -> None:
        live = self._live.get(request.id)
        if live is None or live.request is not request:
            return  # it has ended meanwhile
        self._preparing.pop(request.id, None)
        if isinstance(outcome, Failure):
            log.warning("an accepted grammar was not compiled", extra={"request_id": request.id})
            self._end_request(request.id, FinishReason.ERROR, outcome)
            return
        self._schedule(request)
        for sequence in live.sequences:
            sequence.guide = outcome.fork()

    def _schedule(self, request: Request) -> None:
        live = self._live[request.id]
        hashes, live.hashes = live.hashes, bytearray()
        try:
            live.sequences = self._scheduler.add(request, hashes)
        except RequestError as error:
            self._end_request(request.id, FinishReason.ERROR, Failure(str(error)))

    def _abort(self, abort: Abort) -> None:
        request_id, error = abort.request_id, abort.error
        if request_id not in self._live:
            return
        if error is not None:
            self._choice_events.append(
                ChoiceEvent(request_id, 0, None, None, abort.reason, error=error)
            )
        if not self._live[request_id].sequences:  # its grammar is not compiled yet
            self._end_request(request_id, abort.reason)
            return
        for event in self._scheduler.abort(request_id, abort.choice):
            self._emit([event._replace(reason=abort.reason)])

    def _expire_queue(self, now: float) -> None:
        """End the requests that waited longer than queue_timeout, oldest first."""
        while self._waiting_since:
            request_id, arrived = next(iter(self._waiting_since.items()))
            if now - arrived <= self.bounds.queue_timeout:
                return
            self.counters.queue_timeouts += 1
            message = f"waited {self.bounds.queue_timeout:g} s for a first step (queue_timeout)"
            self._abort(Abort(request_id, error=QueueTimeout(message, self._inbox.retry_after())))

    def _advance(self, began: float) -> None:
        """Collect the oldest step, once the one after it is launched where that is possible."""
        scheduler, pipeline = self._scheduler, self._pipeline
        if not pipeline:
            self._begin(scheduler.commit(scheduler.plan()))
        if pipeline.in_flight:
            plan = scheduler.plan_ahead()
            if plan is not None and pipeline.takes(plan.rows):
                self._begin(scheduler.commit(plan))
        self._collect(began)
        while pipeline and not scheduler.has_work:  # what is in flight is of nobody
            self._collect(self._now())
        ended = self._now()
        if self._checks is None and self.counters.steps % CHECK_EVERY == 0:
            self._checks = scheduler.checks()
        if self._checks is not None and ended >= self._check_after:
            self._check(self._checks, ended)

    def _collect(self, began: float) -> None:
        if self._pipeline.in_flight:  # nothing was begun since
            self.idle = False
        self.progress.begin(self._pipeline.tokens)
        for outcome in self._pipeline.take(self._executor, self._scheduler):
            self._update(outcome, began)
            began = self._now()

    def _begin(self, work: Work) -> None:
        self.idle = not (work.rows or work.offload or work.restore or work.copies)
        self.progress.begin(sum([row.count for row in work.rows]))
        if self._waiting_since:
            now = self._now()
            for row in work.rows:
                if self._stops_waiting(row.sequence.request):
                    live = self._live[row.sequence.request.id]
                    live.cached, live.started = row.start, now
        self._executor.copy(work)
        self.counters.steps_launched += self._pipeline.add(work, self._scheduler)

    def _update(self, outcome: Outcome, began: float) -> None:
        live_work = outcome.ran.living()
        events = self._scheduler.update(outcome.ran, outcome.results)
        for row, error in outcome.failed:
            log.error(
                "a request cannot be computed: %s",
                type(error).__name__,
                exc_info=error,
                extra={"request_id": row.sequence.request.id},
            )
            self.counters.failed_sequences += 1
            reason = f"the model could not compute this request ({type(error).__name__})"
            events += self._scheduler.fail(row.sequence.id, Failure(reason))
        ended = self._now()
        if live_work.rows or not outcome.ran.rows:  # else it was a step of dead rows
            self.counters.count(live_work, ended - began)
            self._contain(self._observer.stepped, live_work, events, began, ended)
        self.counters.step_failures += bool(outcome.failed)
        self._emit(events)
        if live_work.rows:
            self._canaries_lost, self._fault_canary = 0, None
        elif outcome.failed:
            canary_lost = any(
                row.sequence.request.id == self._fault_canary for row, _ in outcome.failed
            )
            self._fault("no request of the batch could be computed", canary_lost=canary_lost)

    def _stops_waiting(self, request: Request) -> bool:
        """Take the request out of those without a step; False when it is not one of them."""
        if self._waiting_since.pop(request.id, None) is None:
            return False
        self._waiting_tokens -= len(request.prompt)
        return True

    def _emit(self, events: Sequence[Event]) -> None:
        """Turn the scheduler's events into ChoiceEvents and close the choices that finished."""
        for event in events:
            sequence = event.sequence
            request_id, choice = sequence.request.id, sequence.choice
            if isinstance(event, Token):
                _, token, _, logprobs, finish, prompt = event
                live = self._live[request_id]
                fields = request_id, choice, token, logprobs, finish, None, None
                # Half the time of a call with ten arguments, once a token.
                choice_event = ChoiceEvent._make((*fields, live.cached, live.started, prompt))
            else:
                finish = event.reason
                choice_event = ChoiceEvent(request_id, choice, None, None, finish, event.failure)
            self._choice_events.append(choice_event)
            if finish is not None:
                self._close(request_id, choice, finish)

    def _close(self, request_id: str, choice: int, reason: FinishReason) -> None:
        live = self._live[request_id]
        live.open.discard(choice)
        if not live.open:
            del self._live[request_id]
            self._preparing.pop(request_id, None)
            self._stops_waiting(live.request)
            self._contain(self._observer.ended, live.request, reason, self._now())

    def _end_request(
        self,
        request_id: str,
        reason: FinishReason,
        failure: Failure | None = None,
        error: ServiceError | None = None,
    ) -> None:
        """End every open choice without calling the scheduler."""
        for choice in sorted(self._live[request_id].open):
            self._choice_events.append(
                ChoiceEvent(request_id, choice, None, None, reason, failure, error)
            )
            self._close(request_id, choice, reason)

    # -- faults that no single request caused

    def _recover(self, error: Exception) -> None:
        """End all live requests and start again with an empty cache: the state of the scheduler or
        the device may be wrong.
        """
        self.counters.step_failures += 1
        canary_lost = self._fault_canary in self._live
        failure = Failure("the engine started over after an internal error")
        for request_id in list(self._live):
            self._end_request(request_id, FinishReason.ERROR, failure)
        self._pipeline.clear()
        self._scheduler, self._checks = self._make_scheduler(), None
        self._fault(f"{type(error).__name__} outside any request", canary_lost=canary_lost)

    def _fault(self, reason: str, *, canary_lost: bool) -> None:
        """Send a canary to find out whether the requests or the engine failed.

        Only lost canaries count towards FAULT_BUDGET. Otherwise three requests that each fail
        alone, one after another, could end the engine for all clients.
        """
        self.counters.engine_faults += 1
        self._canaries_lost += canary_lost
        if self._canaries_lost >= FAULT_BUDGET:
            self._give_up(f"{self._canaries_lost} canaries in a row failed: {reason}")
        elif canary_lost or self._fault_canary is None:
            request = canary()
            self._fault_canary = request.id
            self.submit(request, bounded=False)

    def _give_up(self, reason: str) -> None:
        log.critical("giving up: %s", reason)
        self.dead_reason = reason
        failure, error = Failure(reason), EngineDead(reason)
        self._choice_events += [
            ChoiceEvent(request.id, 0, None, None, FinishReason.ERROR, failure, error)
            for request in self._inbox.close(reason)
        ]
        for request_id in list(self._live):
            self._end_request(request_id, FinishReason.ERROR, failure, error)

    def _check(self, checks: Iterator[None], began: float) -> None:
        """Run the next part of a check of the invariants: a whole one would stall the requests."""
        try:
            next(checks)
        except StopIteration:
            self._checks = None
        except InvariantViolation:
            self._checks = None
            self.counters.invariant_violations += 1
            log.exception("an invariant of the scheduler does not hold")
        ended = self._now()
        self._check_after = ended + (ended - began) / CHECK_SHARE

    def _contain(
        self, call: Callable[Params, Value], *args: Params.args, **kwargs: Params.kwargs
    ) -> Value | None:
        """Call what no request depends on; None when it raised. Logs the first exception, counts
        all.
        """
        try:
            return call(*args, **kwargs)
        except Exception:
            self.counters.contained_errors += 1
            if self.counters.contained_errors == 1:
                log.exception("metrics or a debug view failed; further failures are only counted")
            return None

    # -- between two steps

    def _views(self) -> list[RequestView]:
        return request_views(self._live.values(), self._scheduler.state, self._now())

    def _reset_cache(self) -> CacheReset:
        evicted = self._scheduler.reset_cache()
        pool = self._scheduler.state.cache.pool
        return CacheReset(evicted, held=pool.units - pool.available)

    def _publish_state(self) -> None:
        """Let the other threads see the state after this step."""
        stats = self._stats = self._scheduler.stats()
        free_slots = 0 if stats.waiting else self.bounds.max_requests - stats.running
        oldest, working = next(iter(self._waiting_since.values()), None), self._scheduler.has_work
        self._inbox.after_step(
            queued=len(self._waiting_since),
            tokens=self._waiting_tokens + stats.preempted_tokens,
            choices=stats.waiting + sum(self._preparing.values()),
            oldest=oldest,
            free_slots=free_slots,
            working=working,
        )

    def sleep(self) -> None:
        """Sleep until a message comes or the oldest waiting request times out."""
        oldest = next(iter(self._waiting_since.values()), None)
        seconds = math.inf if oldest is None else oldest + self.bounds.queue_timeout - self._now()
        self._inbox.wait(None if seconds > TIMEOUT_MAX else max(0.0, seconds))
