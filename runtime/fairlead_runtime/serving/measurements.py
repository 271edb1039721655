"""Measures requests: counts and histograms since the start.

Owns the times of live requests and the totals. The engine thread calls it once per step and when a
request arrives or ends; the thread that answers a scrape reads it. Knows nothing of Prometheus.

A request counts once, however many choices it has: its first token is that of its fastest choice.
The time between tokens is measured per choice. No number about requests includes canaries.
"""

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fairlead_runtime.engine.engine import CANARY, Observer
from fairlead_runtime.outputs import EngineSnapshot
from fairlead_runtime.request.sequence import FinishReason, Request
from fairlead_runtime.scheduling.plan import Event, Token, Work
from fairlead_runtime.settings import metric_names as names

COMPLETED = frozenset({FinishReason.STOP, FinishReason.LENGTH})


@dataclass(slots=True)
class Histogram:
    """``counts[i]`` values lie in (bounds[i-1], bounds[i]]; the last count is above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> "Histogram":
        return Histogram(self.bounds, list(self.counts), self.sum)


@dataclass(slots=True)
class Totals:
    """Totals since the start. Times in seconds. The histograms of whole requests (all but ``ttft``,
    ``itl``, ``queue`` and ``step_tokens``) contain COMPLETED requests only. ``per_token``,
    the mean time between two tokens of a choice, leaves out requests of one token.
    """

    arrivals: int = 0
    prompt_tokens: int = 0  # of requests whose first token has come
    cached_tokens: int = 0  # those among them that their first step found in the prefix cache
    generation_tokens: int = 0
    canaries: int = 0  # canaries that had a first step
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
    ttft: Histogram = field(default_factory=lambda: Histogram(names.TTFT_BUCKETS))
    itl: Histogram = field(default_factory=lambda: Histogram(names.ITL_BUCKETS))
    per_token: Histogram = field(default_factory=lambda: Histogram(names.ITL_BUCKETS))
    queue: Histogram = field(default_factory=lambda: Histogram(names.LATENCY_BUCKETS))
    prefill: Histogram = field(default_factory=lambda: Histogram(names.LATENCY_BUCKETS))
    decode: Histogram = field(default_factory=lambda: Histogram(names.LATENCY_BUCKETS))
    inference: Histogram = field(default_factory=lambda: Histogram(names.LATENCY_BUCKETS))
    e2e: Histogram = field(default_factory=lambda: Histogram(names.LATENCY_BUCKETS))
    prompt_length: Histogram = field(default_factory=lambda: Histogram(names.LENGTH_BUCKETS))
    computed_length: Histogram = field(default_factory=lambda: Histogram(names.LENGTH_BUCKETS))
    output_length: Histogram = field(default_factory=lambda: Histogram(names.LENGTH_BUCKETS))
    max_tokens: Histogram = field(default_factory=lambda: Histogram(names.LENGTH_BUCKETS))
    choices: Histogram = field(default_factory=lambda: Histogram(names.N_BUCKETS))
    preemptions: Histogram = field(default_factory=lambda: Histogram(names.PREEMPTION_BUCKETS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(names.ITERATION_BUCKETS))

    def copy(self) -> "Totals":
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        copied = {name: v.copy() for name, v in values.items() if isinstance(v, Histogram | dict)}
        return Totals(**values | copied)


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """A consistent copy for one scrape. ``tenants`` has those with live requests: how many had no
    step yet, and how many had one.
    """

    totals: Totals
    inflight: int  # live requests
    oldest: float | None  # arrival of the request that waits longest for its first step
    canaries_waiting: int
    canaries_running: int
    tenants: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The values that a scrape shows: the engine after its last step, and the requests it has
    measured.
    """

    engine: EngineSnapshot
    requests: MetricsSnapshot


@dataclass(slots=True)
class RequestTimes:
    """The times of one live request, by the engine's clock."""

    request: Request
    canary: bool
    arrived: float
    last_token: list[float | None]  # per choice: time of its latest token
    first_step: float | None = None  # when its first step began
    first_token: float | None = None
    tokens: int = 0
    cached: int = 0  # prompt tokens that its first step found in the prefix cache
    gaps: int = 0  # between two tokens of one choice
    gap_seconds: float = 0.0  # their sum
    preemptions: dict[int, int] = field(default_factory=dict)  # by choice, as of its last token


class RequestMetrics(Observer):
    """Measurements of the requests. Every method may be called from any thread; the engine thread's
    calls are short.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = Totals()
        self._requests: dict[str, RequestTimes] = {}
        self._waiting: dict[str, RequestTimes] = {}  # in order of arrival
        self._canaries: dict[str, RequestTimes] = {}  # the canaries among _requests

    # -- the engine thread

    def arrived(self, request: Request, at: float) -> None:
        times = RequestTimes(request, request.id.startswith(CANARY), at, [None] * request.params.n)
        with self._lock:
            self._requests[request.id] = self._waiting[request.id] = times
            if times.canary:
                self._canaries[request.id] = times
            else:
                self._totals.arrivals += 1

    def stepped(self, work: Work, events: Sequence[Event], began: float, ended: float) -> None:
        with self._lock:
            if self._waiting:
                self._start(work, began)
            if tokens := self._prompt_rows(work) + self._count_tokens(events, ended):
                self._totals.step_tokens.add(tokens)

    def ended(self, request: Request, reason: FinishReason, at: float) -> None:
        with self._lock:
            times = self._requests.pop(request.id, None)
            self._waiting.pop(request.id, None)
            self._canaries.pop(request.id, None)
            if times is not None and not times.canary:
                self._finish(times, reason, at)

    def _start(self, work: Work, began: float) -> None:
        """Record the requests that had their first step."""
        for row in work.rows:
            times = self._waiting.pop(row.sequence.request.id, None)
            if times is None:
                continue
            times.first_step = began
            times.cached = min(row.start, len(times.request.prompt))
            if times.canary:
                self._totals.canaries += 1
            else:
                self._totals.queue.add(max(0.0, began - times.arrived))

    def _prompt_rows(self, work: Work) -> int:
        """Tokens of prompts that the step computes; a decode computes none."""
        return sum(
            min(row.count, len(row.sequence.request.prompt) - row.start)
            for row in work.rows
            if row.start < len(row.sequence.request.prompt)
            and row.sequence.request.id not in self._canaries
        )

    def _count_tokens(self, events: Sequence[Event], now: float) -> int:
        """How many tokens were generated. All tokens of a step come at its end, so most gaps
        between tokens are equal: add each gap once, with its count.
        """
        gaps: dict[float, int] = {}
        requests, generated = self._requests, 0
        for event in events:
            if type(event) is not Token:
                continue
            sequence = event.sequence
            times = requests.get(sequence.request.id)
            if times is None or times.canary:
                continue
            generated += 1
            times.tokens += 1
            previous = times.last_token[sequence.choice]
            times.last_token[sequence.choice] = now
            if sequence.preemptions:
                times.preemptions[sequence.choice] = sequence.preemptions
            if previous is not None:
                gap = now - previous
                gaps[gap] = gaps.get(gap, 0) + 1
                times.gaps += 1
                times.gap_seconds += gap
            elif times.first_token is None:
                times.first_token = now
                self._totals.prompt_tokens += len(times.request.prompt)
                self._totals.cached_tokens += times.cached
                self._totals.ttft.add(now - times.arrived)
        self._totals.generation_tokens += generated
        for gap, count in gaps.items():
            self._totals.itl.add(gap, count)
        return generated

    def _finish(self, times: RequestTimes, reason: FinishReason, at: float) -> None:
        totals = self._totals
        totals.finished[reason] += 1
        if times.first_token is None or times.first_step is None or reason not in COMPLETED:
            return
        last_token = max(time for time in times.last_token if time is not None)
        totals.e2e.add(at - times.arrived)
        totals.prefill.add(times.first_token - times.first_step)
        totals.decode.add(last_token - times.first_token)
        totals.inference.add(last_token - times.first_step)
        if times.gaps:
            totals.per_token.add(times.gap_seconds / times.gaps)
        request, prompt = times.request, len(times.request.prompt)
        totals.prompt_length.add(prompt)
        totals.computed_length.add(prompt - times.cached)
        totals.output_length.add(times.tokens)
        totals.max_tokens.add(request.max_tokens)
        totals.choices.add(request.params.n)
        totals.preemptions.add(sum(times.preemptions.values()))

    # -- any thread

    def read(self) -> MetricsSnapshot:
        with self._lock:
            oldest = next((times for times in self._waiting.values() if not times.canary), None)
            running = sum(times.first_step is not None for times in self._canaries.values())
            return MetricsSnapshot(
                totals=self._totals.copy(),
                inflight=len(self._requests) - len(self._canaries),
                oldest=oldest.arrived if oldest else None,
                canaries_waiting=len(self._canaries) - running,
                canaries_running=running,
                tenants=self._tenants(),
            )

    def _tenants(self) -> dict[str, tuple[int, int]]:
        counts: dict[str, tuple[int, int]] = {}
        for times in self._requests.values():
            if not times.canary:
                waiting, running = counts.get(times.request.tenant, (0, 0))
                started = times.first_step is not None
                counts[times.request.tenant] = (waiting + (not started), running + started)
        return counts
