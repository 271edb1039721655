"""What happened to requests, as numbers: counts and distributions since the start.

Owns the clocks of live requests and the totals they end in. Called by the engine thread once per
step and once per request's beginning and end; read by the thread that answers a scrape. Knows no
metric's name and no Prometheus.

One request counts once, however many choices it has: its first token is that of its fastest choice.
Time between tokens is that of each choice. Canaries leave no trace in any number about requests.
"""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fairlead_runtime import metric_names as names
from fairlead_runtime.engine.engine import CANARY, Observer
from fairlead_runtime.request import FinishReason, Request
from fairlead_runtime.scheduling.plan import Event, Token, Work

BY_THEMSELVES = frozenset({FinishReason.STOP, FinishReason.LENGTH})


@dataclass(slots=True)
class Distribution:
    """A histogram in plain numbers: ``counts[i]`` values lie in (bounds[i-1], bounds[i]], the last
    beyond them all.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> "Distribution":
        return Distribution(self.bounds, list(self.counts), self.sum)


@dataclass(slots=True)
class Totals:
    """Since the start. Times in seconds; the distributions of whole requests are of those that
    finished by themselves.
    """

    arrivals: int = 0
    prompt_tokens: int = 0  # of requests whose first token has come
    generation_tokens: int = 0
    canaries: int = 0  # that had a first step
    finished: Counter[FinishReason] = field(default_factory=Counter)
    first_token: Distribution = field(default_factory=lambda: Distribution(names.TTFT_BUCKETS))
    between_tokens: Distribution = field(default_factory=lambda: Distribution(names.ITL_BUCKETS))
    queue: Distribution = field(default_factory=lambda: Distribution(names.LATENCY_BUCKETS))
    prefill: Distribution = field(default_factory=lambda: Distribution(names.LATENCY_BUCKETS))
    decode: Distribution = field(default_factory=lambda: Distribution(names.LATENCY_BUCKETS))
    inference: Distribution = field(default_factory=lambda: Distribution(names.LATENCY_BUCKETS))
    whole: Distribution = field(default_factory=lambda: Distribution(names.LATENCY_BUCKETS))
    prompt_length: Distribution = field(default_factory=lambda: Distribution(names.LENGTH_BUCKETS))
    output_length: Distribution = field(default_factory=lambda: Distribution(names.LENGTH_BUCKETS))
    step_tokens: Distribution = field(default_factory=lambda: Distribution(names.ITERATION_BUCKETS))

    def copy(self) -> "Totals":
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        copied = {
            name: v.copy() for name, v in values.items() if isinstance(v, Distribution | Counter)
        }
        return Totals(**values | copied)


@dataclass(frozen=True, slots=True)
class Reading:
    """A consistent copy for one scrape.

    ``settled`` counts requests, canaries too, that still had no step when the last step ended.
    """

    totals: Totals
    inflight: int  # live requests
    settled: int
    oldest: float | None  # when the one that waits longest for its first step arrived
    canaries_waiting: int
    canaries_running: int


@dataclass(slots=True)
class Clock:
    """One live request's times on the engine's clock."""

    request: Request
    canary: bool
    arrived: float
    last: list[float | None]  # per choice: when its latest token came
    started: float | None = None  # when its first step began
    first: float | None = None  # when its first token came
    tokens: int = 0


class Measures(Observer):
    """Every method may be called from any thread; the engine thread's calls are short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = Totals()
        self._clocks: dict[str, Clock] = {}
        self._unstarted: dict[str, Clock] = {}  # in order of arrival
        self._settled = 0  # how many were unstarted when the last step ended
        self._canaries: dict[str, Clock] = {}  # those of the clocks

    # -- the engine thread

    def arrived(self, request: Request, at: float) -> None:
        clock = Clock(request, request.id.startswith(CANARY), at, [None] * request.params.n)
        with self._lock:
            self._clocks[request.id] = self._unstarted[request.id] = clock
            if clock.canary:
                self._canaries[request.id] = clock
            else:
                self._totals.arrivals += 1

    def stepped(self, work: Work, events: Sequence[Event], began: float, ended: float) -> None:
        with self._lock:
            if self._unstarted:
                self._start(work, began)
            tokens = sum([row.count for row in work.rows])
            if self._canaries:
                tokens -= sum(
                    row.count for row in work.rows if row.sequence.request.id in self._canaries
                )
            if tokens:
                self._totals.step_tokens.add(tokens)
            self._count_tokens(events, ended)
            self._settled = len(self._unstarted)

    def ended(self, request: Request, reason: FinishReason, at: float) -> None:
        with self._lock:
            clock = self._clocks.pop(request.id, None)
            self._unstarted.pop(request.id, None)
            self._canaries.pop(request.id, None)
            self._settled = min(self._settled, len(self._unstarted))
            if clock is not None and not clock.canary:
                self._finish(clock, reason, at)

    def _start(self, work: Work, began: float) -> None:
        """Note who had a first step."""
        for row in work.rows:
            clock = self._unstarted.pop(row.sequence.request.id, None)
            if clock is None:
                continue
            clock.started = began
            if clock.canary:
                self._totals.canaries += 1
            else:
                self._totals.queue.add(max(0.0, began - clock.arrived))

    def _count_tokens(self, events: Sequence[Event], now: float) -> None:
        """All tokens of a step come at its end, so most gaps between tokens are equal: each is
        added once, with its count.
        """
        gaps: dict[float, int] = {}
        clocks, made = self._clocks, 0
        for event in events:
            if not isinstance(event, Token):
                continue
            sequence = event.sequence
            clock = clocks.get(sequence.request.id)
            if clock is None or clock.canary:
                continue
            made += 1
            clock.tokens += 1
            before = clock.last[sequence.choice]
            clock.last[sequence.choice] = now
            if before is not None:
                gap = now - before
                gaps[gap] = gaps.get(gap, 0) + 1
            elif clock.first is None:
                clock.first = now
                self._totals.prompt_tokens += len(clock.request.prompt)
                self._totals.first_token.add(now - clock.arrived)
        self._totals.generation_tokens += made
        for gap, times in gaps.items():
            self._totals.between_tokens.add(gap, times)

    def _finish(self, clock: Clock, reason: FinishReason, at: float) -> None:
        totals = self._totals
        totals.finished[reason] += 1
        if clock.first is None or clock.started is None or reason not in BY_THEMSELVES:
            return
        last = max(came for came in clock.last if came is not None)
        totals.whole.add(at - clock.arrived)
        totals.prefill.add(clock.first - clock.started)
        totals.decode.add(last - clock.first)
        totals.inference.add(last - clock.started)
        totals.prompt_length.add(len(clock.request.prompt))
        totals.output_length.add(clock.tokens)

    # -- any thread

    def read(self) -> Reading:
        with self._lock:
            oldest = next((clock for clock in self._unstarted.values() if not clock.canary), None)
            running = sum(clock.started is not None for clock in self._canaries.values())
            return Reading(
                totals=self._totals.copy(),
                inflight=len(self._clocks) - len(self._canaries),
                settled=self._settled,
                oldest=oldest.arrived if oldest else None,
                canaries_waiting=len(self._canaries) - running,
                canaries_running=running,
            )
