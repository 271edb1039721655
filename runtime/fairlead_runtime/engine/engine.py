"""The engine: one step after another, each of them inbox → plan → commit → run → update → publish.

Owns the scheduler, the device's executor and the inbox between threads; whoever calls ``run`` (or
``step``) is the engine thread, and nothing else touches scheduler, blocks or device. Never knows
asyncio, text or HTTP: what goes in are Requests, what comes out are lists of Emitted, one list a
step.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from fairlead_runtime.engine.inbox import Abort, Add, Bounds, Inbox, Inspect
from fairlead_runtime.engine.isolate import Executor, Outcome, run_isolated
from fairlead_runtime.engine.observer import CANARY, Observer, canary
from fairlead_runtime.engine.progress import Progress
from fairlead_runtime.engine.views import Live, request_views
from fairlead_runtime.outputs import (
    Counters,
    Emitted,
    EngineDead,
    EngineSnapshot,
    QueueTimeout,
    RequestView,
    ServiceError,
)
from fairlead_runtime.request import FinishReason, Request, RequestError
from fairlead_runtime.scheduling.plan import Event, Token, Work
from fairlead_runtime.scheduling.scheduler import InvariantViolation, Scheduler

__all__ = ["CANARY", "Bounds", "Engine", "Observer", "canary"]
log = logging.getLogger("fairlead.engine")

FAULT_BUDGET = 3  # canaries that may fail in a row before the engine gives up
CHECK_EVERY = 1024  # steps between two checks of the scheduler's invariants, and at least
CHECK_SHARE = 0.01  # of the time goes into them: a check walks over every block


class Engine:
    """``now`` is a monotonic clock in seconds; ``make_scheduler`` is called again after a fault of
    the scheduler.
    """

    def __init__(
        self,
        make_scheduler: Callable[[], Scheduler],
        executor: Executor,
        bounds: Bounds,
        *,
        now: Callable[[], float],
        observer: Observer | None = None,
    ) -> None:
        self.bounds = bounds
        self.dead = ""  # why the engine gave up; empty while it lives
        self.stalled = False  # the last step found nothing to do: wait for a message
        self.progress = Progress(now)
        self.counters = Counters()
        self._make_scheduler = make_scheduler
        self._scheduler = make_scheduler()
        self._stats = self._scheduler.stats()
        self._executor = executor
        self._now = now
        self._observer = observer or Observer()
        self._inbox = Inbox(bounds.max_queue, bounds.max_requests, self.progress, now)
        self._live: dict[str, Live] = {}
        self._queued: dict[
            str, float
        ] = {}  # not yet in any step, in order of arrival: when they came
        self._check_after = 0.0  # no check of the invariants before then
        self._faults = 0  # canaries lost in a row
        self._probe: str | None = None  # the canary sent after a fault, until it came through
        self._emitted: list[Emitted] = []

    # -- called from any thread

    def resolve_max_tokens(self, prompt_len: int, max_tokens: int | None) -> int:
        """``max_tokens``, an omitted one clipped to what fits. Raises RequestError for what can
        never fit.

        Reads fixed limits only, as does the scheduler's verdict NEVER, so any thread may ask.
        """
        capacity = self.bounds.capacity
        if prompt_len + (max_tokens or 1) <= capacity:
            return max_tokens or capacity - prompt_len
        verdict = self._scheduler.judge(prompt_len, max_tokens)
        raise RequestError("prompt" if max_tokens is None else "max_tokens", verdict.message)

    def submit(self, request: Request, *, bounded: bool = True) -> None:
        """Queue a request. Raises QueueFull or EngineDead; ``bounded`` False is for the engine's
        own canaries.
        """
        self._inbox.add(request, bounded=bounded)

    def abort(
        self, request_id: str, choice: int | None = None, error: ServiceError | None = None
    ) -> None:
        """End a request, or one of its choices; unknown ids are ignored."""
        self._inbox.post(Abort(request_id, choice, error=error))

    def finish(self, request_id: str, choice: int) -> None:
        """End a choice that is complete for a reason tokens do not show: its text holds a stop
        text.
        """
        self._inbox.post(Abort(request_id, choice, FinishReason.STOP))

    def inspect(self, answer: Callable[[list[RequestView]], None]) -> None:
        """Have the engine thread call ``answer`` with a view of every live request."""
        self._inbox.post(Inspect(answer))

    def stop(self) -> None:
        """Let ``run`` return after its current step."""
        self._inbox.stop()

    def unready(self) -> str:
        """Why no further traffic should come, in words; empty when it may."""
        if self._probe is not None:
            return "a step failed without a culprit and the engine has not proven itself since"
        return (
            f"the queue is full ({self.bounds.max_queue} requests wait)" if self._inbox.full else ""
        )

    def snapshot(self) -> EngineSnapshot:
        """As of the last step; the dictionary is copied whole, which no other thread can interrupt."""
        b = self.bounds
        counters = replace(self.counters, batch_sizes=dict(self.counters.batch_sizes))
        return EngineSnapshot(
            self._stats, counters, self._inbox.queued, b.num_blocks, b.block_size, b.max_model_len
        )

    # -- the engine thread

    def run(self, publish: Callable[[list[Emitted]], None]) -> None:
        """Step until stopped or dead; asleep on a condition while there is nothing to do.

        ``publish`` receives what a step gave, in this thread.
        """
        while not self._inbox.stopping and not self.dead:
            if emitted := self.step():
                publish(emitted)
            if self.stalled and not self.dead:  # the dead get no message that could wake them
                self._sleep()

    def step(self) -> list[Emitted]:
        """One step and what it gave. Raises nothing that a request could cause."""
        began = self._now()
        self.stalled = True
        try:
            self._drain_inbox()
            self._expire_queue(began)
            if self._scheduler.has_work and not self.dead:
                work = self._scheduler.commit(self._scheduler.plan())
                outcome = self._run(work)
                self._update(outcome, began)
        except Exception as error:
            log.exception("the step failed outside any request")
            self._recover(error)
        self._look_ahead()
        emitted, self._emitted = self._emitted, []
        return emitted

    def _drain_inbox(self) -> None:
        while (message := self._inbox.take()) is not None:
            match message:
                case Add(request, at, counts):
                    self._add(request, at, waits=counts)
                case Abort():
                    self._abort(message)
                case Inspect(answer):
                    answer(self._views())

    def _add(self, request: Request, at: float, *, waits: bool) -> None:
        self._live[request.id] = Live(request, at, set(range(request.params.n)))
        self._observer.arrived(request, at)
        try:
            self._live[request.id].sequences = self._scheduler.add(request)
        except RequestError as error:
            self._end(request.id, FinishReason.ERROR, str(error))
        else:
            if waits:  # a canary does not: its sender has a patience of its own
                self._queued[request.id] = at

    def _abort(self, abort: Abort) -> None:
        request_id, error = abort.request_id, abort.error
        if request_id not in self._live:
            return
        if error is not None:
            self._emitted.append(
                Emitted(request_id, 0, None, None, abort.reason, str(error), error)
            )
        for ended in self._scheduler.abort(request_id, abort.choice):
            self._take([ended._replace(reason=abort.reason)])

    def _expire_queue(self, now: float) -> None:
        """The queue is in order of arrival, so only its head can be overdue."""
        while self._queued:
            request_id, came = next(iter(self._queued.items()))
            if now - came <= self.bounds.queue_timeout:
                return
            self.counters.queue_timeouts += 1
            waited = f"waited {self.bounds.queue_timeout:g} s for a first step (queue_timeout)"
            self._abort(Abort(request_id, error=QueueTimeout(waited, self._inbox.patience())))

    def _run(self, work: Work) -> Outcome:
        self.stalled = not (work.rows or work.offload or work.restore or work.copies)
        self.progress.begin(sum(row.count for row in work.rows))
        if self._queued:
            for row in work.rows:
                if self._queued.pop(row.sequence.request.id, None) is not None:
                    self._live[row.sequence.request.id].cached = row.start
        self._executor.copy(work)
        return run_isolated(self._executor, work)

    def _update(self, outcome: Outcome, began: float) -> None:
        events = self._scheduler.update(outcome.ran, outcome.results)
        for row, error in outcome.failed:
            log.error(
                "request %s failed alone: %s",
                row.sequence.request.id,
                type(error).__name__,
                exc_info=error,
            )
            self.counters.failed_sequences += 1
            reason = f"the model could not compute this request ({type(error).__name__})"
            events += self._scheduler.fail(row.sequence.id, reason)
        ended = self._now()
        self.counters.count(outcome.ran, ended - began)
        self.counters.step_failures += bool(outcome.failed)
        self._observer.stepped(outcome.ran, events, began, ended)
        self._take(events)
        if outcome.ran.rows:
            self._faults, self._probe = 0, None
        elif outcome.failed:
            lost = any(row.sequence.request.id == self._probe for row, _ in outcome.failed)
            self._fault("no request of the batch could be computed", lost=lost)
        if self.counters.steps % CHECK_EVERY == 0 and ended >= self._check_after:
            self._check(ended)

    def _take(self, events: Sequence[Event]) -> None:
        """Turn the scheduler's events into plain values for the other side, and close what
        finished.
        """
        for event in events:
            request_id, choice = event.sequence.request.id, event.sequence.choice
            if isinstance(event, Token):
                finish, cached = event.finish, self._live[request_id].cached
                emitted = Emitted(
                    request_id, choice, event.token, event.logprobs, finish, cached=cached
                )
            else:
                finish = event.reason
                emitted = Emitted(request_id, choice, None, None, finish, event.message)
            self._emitted.append(emitted)
            if finish is not None:
                self._close(request_id, choice, finish)

    def _close(self, request_id: str, choice: int, reason: FinishReason) -> None:
        live = self._live[request_id]
        live.open.discard(choice)
        if not live.open:
            del self._live[request_id]
            self._queued.pop(request_id, None)
            self._observer.ended(live.request, reason, self._now())

    def _end(
        self, request_id: str, reason: FinishReason, message: str, error: ServiceError | None = None
    ) -> None:
        """End every open choice without asking the scheduler."""
        for choice in sorted(self._live[request_id].open):
            self._emitted.append(Emitted(request_id, choice, None, None, reason, message, error))
            self._close(request_id, choice, reason)

    # -- faults without a culprit

    def _recover(self, error: Exception) -> None:
        """The scheduler's or the device's state is in doubt: end what lives, start from an empty
        cache.
        """
        self.counters.step_failures += 1
        lost = self._probe in self._live
        for request_id in list(self._live):
            self._end(
                request_id, FinishReason.ERROR, "the engine started over after an internal error"
            )
        self._scheduler = self._make_scheduler()
        self._fault(f"{type(error).__name__} outside any request", lost=lost)

    def _fault(self, reason: str, *, lost: bool) -> None:
        """Ask with a canary whether it was the requests or the engine; only lost canaries count
        against it.

        Otherwise three requests that each fail alone, one after another, could end the engine for
        everybody.
        """
        self.counters.engine_faults += 1
        self._faults += lost
        if self._faults >= FAULT_BUDGET:
            self._die(f"{self._faults} canaries in a row failed: {reason}")
        elif lost or self._probe is None:
            request = canary()
            self._probe = request.id
            self.submit(request, bounded=False)

    def _die(self, reason: str) -> None:
        log.critical("giving up: %s", reason)
        self.dead = reason
        left = [request.id for request in self._inbox.close(reason)]
        error = EngineDead(reason)
        self._emitted += [
            Emitted(i, 0, None, None, FinishReason.ERROR, reason, error) for i in left
        ]
        for request_id in list(self._live):
            self._end(request_id, FinishReason.ERROR, reason, error)

    def _check(self, began: float) -> None:
        try:
            self._scheduler.check()
        except InvariantViolation:
            self.counters.invariant_violations += 1
            log.exception("an invariant of the scheduler does not hold")
        ended = self._now()
        self._check_after = ended + (ended - began) / CHECK_SHARE

    # -- between two steps

    def _views(self) -> list[RequestView]:
        scheduler, bounds = self._scheduler, self.bounds
        waiting, running = list(scheduler.waiting), len(scheduler.running)
        return request_views(
            self._live.values(), waiting, running, bounds.max_requests, self._now()
        )

    def _look_ahead(self) -> None:
        """Tell the other threads how things stand."""
        stats = self._stats = self._scheduler.stats()
        places = 0 if stats.waiting else self.bounds.max_requests - stats.running
        oldest, working = next(iter(self._queued.values()), None), self._scheduler.has_work
        self._inbox.settle(queued=len(self._queued), oldest=oldest, places=places, working=working)

    def _sleep(self) -> None:
        """Until a message comes; while somebody waits whom no plan admits, until that one's time is
        up.
        """
        oldest = next(iter(self._queued.values()), None)
        overdue = None if oldest is None else oldest + self.bounds.queue_timeout
        self._inbox.wait(None if overdue is None else max(0.0, overdue - self._now()))
