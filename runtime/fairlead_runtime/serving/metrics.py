"""The metrics of one engine in Prometheus' text format, under vLLM's names and our own.

Owns the mapping from measurements and snapshots to series. Every series exists from the start, with
value 0; label values are the model's name and fixed sets. A scrape reads copies, so the engine
thread never waits for it.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fairlead_runtime.outputs import EngineSnapshot
from fairlead_runtime.request.sequence import FinishReason
from fairlead_runtime.serving.measurements import EngineReport, Histogram, MetricsSnapshot, Totals
from fairlead_runtime.settings import metric_names as names
from fairlead_runtime.settings.startup_parts import PARTS, Part

HELP = {
    names.RUNNING: "Choices of requests that are running.",
    names.WAITING: "Choices of requests that wait: never started, preempted or offloaded.",
    names.WAITING_BY_REASON: (
        "The same, by reason: capacity, or deferred while their structured output is compiled."
    ),
    names.SLEEP_STATE: "1 for the engine's state, which is always awake.",
    names.KV_CACHE_USAGE: (
        "Share of cache blocks that requests hold, 0 to 1; evictable cached blocks are free."
    ),
    names.CACHE_CONFIG: "The cache's size, in labels.",
    names.PROMPT_TOKENS: "Prompt tokens of requests whose first token has come.",
    names.PROMPT_TOKENS_BY_SOURCE: "The same, by where their keys and values came from.",
    names.GENERATION_TOKENS: "Tokens generated.",
    names.PREFIX_CACHE_QUERIES: "Prompt tokens looked up in the prefix cache.",
    names.PREFIX_CACHE_HITS: "Prompt tokens found in the prefix cache.",
    names.PREEMPTIONS: "Preemptions.",
    names.REQUEST_SUCCESS: "Requests that ended, by reason.",
    names.ADMISSION_REJECTIONS: (
        "Requests refused because the queue is full: of requests, or of their prompt tokens."
    ),
    names.TTFT: "From arrival to the first token.",
    names.ITL: "Between two tokens of one choice.",
    names.TPOT: "Mean time between two tokens of a choice, by request.",
    names.E2E_LATENCY: "From arrival to the end.",
    names.QUEUE_TIME: "From arrival to the first step.",
    names.PREFILL_TIME: "From the first step to the first token.",
    names.DECODE_TIME: "From the first token to the last.",
    names.INFERENCE_TIME: "From the first step to the last token.",
    names.REQUEST_PROMPT_TOKENS: "Prompt tokens of a request.",
    names.REQUEST_GENERATION_TOKENS: "Tokens generated for a request, all choices together.",
    names.REQUEST_COMPUTED_TOKENS: "Prompt tokens of a request that the prefix cache did not have.",
    names.REQUEST_N: "Choices that a request asks for (n).",
    names.REQUEST_MAX_TOKENS: "The max_tokens of a request, or what fits where it has none.",
    names.REQUEST_PREEMPTIONS: "Preemptions of a request, all choices together.",
    names.ITERATION_TOKENS: "Tokens of a step: those of prompts, and those that it generates.",
    names.ARRIVALS: "Requests that reached the engine.",
    names.ABORTED: "Requests whose client disconnected or that the server aborted.",
    names.FAILED: "Requests that ended with an error.",
    names.RUNNING_BY_PHASE: (
        "Choices of requests that are running, by phase: prefilling, or decoding."
    ),
    names.STEPS: "Steps executed.",
    names.STEP_SECONDS: "Time spent in steps.",
    names.STEPS_LAUNCHED: "Steps that nobody waited for before the next one was planned.",
    names.STEP_FAILURES: "Steps in which something raised.",
    names.ENGINE_FAULTS: "Failures that no single request caused.",
    names.QUEUE_TIMEOUTS: "Requests that waited longer than queue_timeout for a first step.",
    names.SLOW_READERS: "Requests aborted because their stream was read too slowly.",
    names.GRAMMAR_COMPILATIONS: "Grammars of structured output that were compiled for a check.",
    names.GRAMMAR_SECONDS: "Seconds spent in these compilations.",
    names.GRAMMAR_REFUSALS: "Grammars that cannot be compiled.",
    names.GRAMMAR_CACHE_HITS: "Requests whose grammar had been checked before.",
    names.GRAMMAR_BUSY: "Requests refused because too many grammars waited to be compiled.",
    names.GRAMMARS_PENDING: "Compilations of grammars that wait or run.",
    names.CONTAINED_ERRORS: "Exceptions in metrics and debug views, which end no request.",
    names.INVARIANT_VIOLATIONS: "Checks of the scheduler's invariants that failed.",
    names.OFFLOADED: "Waiting requests whose cache is in host memory; each choice counts.",
    names.OFFLOADS: "Preemptions that moved the cache of a choice to host memory.",
    names.OLDEST_WAIT: "How long the request that waits longest for its first step has waited.",
    names.BLOCKS: "Cache blocks, each of block_size tokens in every layer.",
    names.FREE_BLOCKS: "Cache blocks that no request holds, evictable cached ones among them.",
    names.CACHED_BLOCKS: "Cache blocks that no request holds and the prefix cache keeps.",
    names.INFLIGHT: "Live requests.",
    names.DRAIN_INFLIGHT: "Live requests while the server drains, else 0.",
    names.API_KEYS: "API keys that are valid now.",
    names.API_KEY_FILE_BROKEN: (
        "1 while the file of API keys cannot be used and the last keys stay valid, else 0."
    ),
    names.CERTIFICATE_BROKEN: (
        "1 while the files of the TLS certificate cannot be used and the last one stays, else 0."
    ),
    names.UNAUTHORIZED: "Requests without a valid API key.",
    names.KEY_LIMITED: "Requests refused because of the limits of their API key.",
    names.TENANT_WAITING: (
        "Requests that wait for their first step, by the name of their API key; "
        "those of all others together."
    ),
    names.TENANT_RUNNING: "Live requests that had their first step, by the name of their API key.",
    names.HTTP_CONNECTIONS: "Open connections, by port.",
    names.HTTP_BODY_BYTES: "Bytes of request bodies in memory.",
    names.HTTP_LOGPROB_BYTES: "Bytes set aside for the log-probabilities of answers.",
    names.HTTP_RESIDENT_BYTES: "Bytes of RAM that the HTTP process uses.",
    names.HTTP_LOOP_LAG: "How late the HTTP process's event loop is, looked at 4 times a second.",
    names.STARTUP: (
        "Duration of each part of the start, from the process's begin until it was ready; "
        "their sum is the whole."
    ),
}


PORTS = ("public", "admin")
OTHER_TENANTS = "(others)"  # no key can have this name


class Labelled(NamedTuple):
    """One metric whose series differ in a label."""

    name: str
    label: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontReport:
    """Counts of the HTTP process itself. ``tenants``: those whose requests have their own series.
    ``connections``: by port.
    """

    api_keys: int = 0
    api_key_file_broken: bool = False
    certificate_broken: bool = False
    unauthorized: int = 0
    key_limited: int = 0
    tenants: tuple[str, ...] = ()
    connections: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(PORTS, 0))
    body_bytes: int = 0
    logprob_bytes: int = 0
    resident_bytes: int = 0
    loop_lag: Histogram = field(default_factory=lambda: Histogram(names.LAG_BUCKETS))

    @property
    def gauges(self) -> dict[str, float]:
        return {
            names.API_KEYS: self.api_keys,
            names.API_KEY_FILE_BROKEN: self.api_key_file_broken,
            names.CERTIFICATE_BROKEN: self.certificate_broken,
            names.HTTP_BODY_BYTES: self.body_bytes,
            names.HTTP_LOGPROB_BYTES: self.logprob_bytes,
            names.HTTP_RESIDENT_BYTES: self.resident_bytes,
        }

    @property
    def counters(self) -> dict[str, float]:
        return {names.UNAUTHORIZED: self.unauthorized, names.KEY_LIMITED: self.key_limited}

    def by_tenant(self, counts: Mapping[str, tuple[int, int]]) -> list[Labelled]:
        """The live requests of each tenant that has its own series, and of all others together:
        what clients write into ``user`` becomes no label.
        """
        waiting = dict.fromkeys((*self.tenants, OTHER_TENANTS), 0)
        running = dict(waiting)
        for tenant, (not_started, started) in counts.items():
            label = tenant if tenant in waiting else OTHER_TENANTS
            waiting[label] += not_started
            running[label] += started
        return [
            Labelled(names.TENANT_WAITING, "tenant", waiting),
            Labelled(names.TENANT_RUNNING, "tenant", running),
        ]


NOTHING = FrontReport()


class EngineMetrics:
    """Exposes the reports of one engine. ``now`` is the engine's clock, in seconds."""

    def __init__(self, model_name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._model = model_name
        self._now = now
        self._monotonic = MonotonicCounters()
        self._startup: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    def started(self, seconds: Mapping[Part, float]) -> None:
        """Record the seconds of each part of the start."""
        self._startup = {part: seconds.get(part, 0.0) for part in PARTS}

    def exposition(
        self, report: EngineReport, *, draining: bool = False, front: FrontReport = NOTHING
    ) -> bytes:
        """All series, text format 0.0.4. ``draining``: the server takes no new requests."""
        snapshot, reading = report.engine, report.requests
        registry = CollectorRegistry(auto_describe=False)
        scrape = Scrape(
            self._model,
            gauges(reading, snapshot, self._now(), draining=draining) | front.gauges,
            counters(reading, snapshot, self._monotonic) | front.counters,
            histograms(reading.totals) | {names.HTTP_LOOP_LAG: front.loop_lag},
            [
                *labelled(reading, snapshot),
                Labelled(names.STARTUP, names.PHASE, self._startup),
                Labelled(names.HTTP_CONNECTIONS, "port", front.connections),
                *front.by_tenant(reading.tenants),
            ],
            {"block_size": str(snapshot.block_size), "num_gpu_blocks": str(snapshot.num_blocks)},
        )
        registry.register(scrape)
        return generate_latest(registry)


def gauges(
    reading: MetricsSnapshot, snapshot: EngineSnapshot, now: float, *, draining: bool
) -> dict[str, float]:
    scheduler = snapshot.scheduler
    units_per_block = max(1, scheduler.units // snapshot.num_blocks)
    return {
        names.RUNNING: max(0, scheduler.running - reading.canaries_running),
        names.WAITING: _waiting(reading, snapshot),
        names.KV_CACHE_USAGE: scheduler.usage,
        names.OFFLOADED: scheduler.offloaded,
        names.OLDEST_WAIT: 0.0 if reading.oldest is None else max(0.0, now - reading.oldest),
        names.BLOCKS: snapshot.num_blocks,
        names.FREE_BLOCKS: (scheduler.units - scheduler.used) / units_per_block,
        names.CACHED_BLOCKS: scheduler.cached / units_per_block,
        names.GRAMMARS_PENDING: snapshot.counters.grammars_pending,
        names.INFLIGHT: reading.inflight,
        names.DRAIN_INFLIGHT: reading.inflight if draining else 0,
    }


def _waiting(reading: MetricsSnapshot, snapshot: EngineSnapshot) -> int:
    known = snapshot.scheduler.waiting + snapshot.arriving + snapshot.preparing
    return max(0, known - reading.canaries_waiting)


def labelled(reading: MetricsSnapshot, snapshot: EngineSnapshot) -> list[Labelled]:
    """The metrics of the engine that have a label of their own."""
    totals, engine = reading.totals, snapshot.counters
    running = max(0, snapshot.scheduler.running - reading.canaries_running)
    # A canary ends with its first token, so one that runs is prefilling.
    prefilling = max(0, snapshot.scheduler.prefilling - reading.canaries_running)
    waiting = _waiting(reading, snapshot)
    deferred = min(waiting, snapshot.preparing)
    sources = {
        "local_compute": totals.prompt_tokens - totals.cached_tokens,
        "local_cache_hit": totals.cached_tokens,
        "external_kv_transfer": 0,
    }
    rejections = {
        "max_num_queued_reqs": engine.rejected_requests,
        "max_num_queued_tokens": engine.rejected_tokens,
    }
    finished = {reason.value: totals.finished[reason] for reason in FinishReason}
    return [
        Labelled(
            names.RUNNING_BY_PHASE,
            names.PHASE,
            {"prefilling": prefilling, "decoding": running - prefilling},
        ),
        Labelled(
            names.WAITING_BY_REASON,
            "reason",
            {"capacity": waiting - deferred, "deferred": deferred},
        ),
        Labelled(
            names.SLEEP_STATE, "sleep_state", {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        ),
        Labelled(names.PROMPT_TOKENS_BY_SOURCE, "source", sources),
        Labelled(names.ADMISSION_REJECTIONS, "reason", rejections),
        Labelled(names.REQUEST_SUCCESS, "finished_reason", finished),
    ]


def counters(
    reading: MetricsSnapshot, snapshot: EngineSnapshot, monotonic: "MonotonicCounters"
) -> dict[str, float]:
    totals, engine, scheduler = reading.totals, snapshot.counters, snapshot.scheduler
    queries = monotonic.total(names.PREFIX_CACHE_QUERIES, scheduler.prefix_queries)
    return {
        names.PROMPT_TOKENS: totals.prompt_tokens,
        names.GENERATION_TOKENS: totals.generation_tokens,
        # Each canary looks up its one token.
        names.PREFIX_CACHE_QUERIES: max(0, queries - totals.canaries),
        names.PREFIX_CACHE_HITS: monotonic.total(names.PREFIX_CACHE_HITS, scheduler.prefix_hits),
        names.PREEMPTIONS: monotonic.total(names.PREEMPTIONS, scheduler.preemptions),
        names.OFFLOADS: monotonic.total(names.OFFLOADS, scheduler.offloads),
        names.ARRIVALS: totals.arrivals,
        names.ABORTED: totals.finished[FinishReason.ABORT],
        names.FAILED: totals.finished[FinishReason.ERROR],
        names.STEPS: engine.steps,
        names.STEP_SECONDS: engine.step_seconds,
        names.STEPS_LAUNCHED: engine.steps_launched,
        names.STEP_FAILURES: engine.step_failures,
        names.ENGINE_FAULTS: engine.engine_faults,
        names.QUEUE_TIMEOUTS: engine.queue_timeouts,
        names.SLOW_READERS: engine.slow_readers,
        names.GRAMMAR_COMPILATIONS: engine.grammar_compilations,
        names.GRAMMAR_SECONDS: engine.grammar_seconds,
        names.GRAMMAR_REFUSALS: engine.grammar_refusals,
        names.GRAMMAR_CACHE_HITS: engine.grammar_cache_hits,
        names.GRAMMAR_BUSY: engine.grammar_busy,
        names.INVARIANT_VIOLATIONS: engine.invariant_violations,
        names.CONTAINED_ERRORS: engine.contained_errors,
    }


def histograms(totals: Totals) -> dict[str, Histogram]:
    return {
        names.TTFT: totals.ttft,
        names.ITL: totals.itl,
        names.TPOT: totals.per_token,
        names.E2E_LATENCY: totals.e2e,
        names.QUEUE_TIME: totals.queue,
        names.PREFILL_TIME: totals.prefill,
        names.DECODE_TIME: totals.decode,
        names.INFERENCE_TIME: totals.inference,
        names.REQUEST_PROMPT_TOKENS: totals.prompt_length,
        names.REQUEST_GENERATION_TOKENS: totals.output_length,
        names.REQUEST_COMPUTED_TOKENS: totals.computed_length,
        names.REQUEST_N: totals.choices,
        names.REQUEST_MAX_TOKENS: totals.max_tokens,
        names.REQUEST_PREEMPTIONS: totals.preemptions,
        names.ITERATION_TOKENS: totals.step_tokens,
    }


class MonotonicCounters:
    """Sums counters over restarts of the scheduler, which starts from 0 after a fault."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._base: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def total(self, name: str, value: float) -> float:
        with self._lock:
            last = self._last.get(name, 0)
            if value < last:
                self._base[name] = self._base.get(name, 0) + last
            self._last[name] = value
            return self._base.get(name, 0) + value


@dataclass(frozen=True, slots=True, eq=False)
class Scrape(Collector):
    """One scrape's values as metric families. ``cache``: labels of the info series."""

    model: str
    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    histograms: Mapping[str, Histogram]
    labelled: Sequence[Labelled]
    cache: Mapping[str, str]

    def collect(self) -> Iterator[Metric]:
        labels, values = (names.MODEL, names.ENGINE), (self.model, "0")
        for name, number in self.gauges.items():
            gauge = GaugeMetricFamily(name, HELP[name], labels=labels)
            gauge.add_metric(values, number)
            yield gauge
        info = GaugeMetricFamily(
            names.CACHE_CONFIG, HELP[names.CACHE_CONFIG], labels=(*labels, *self.cache)
        )
        info.add_metric((*values, *self.cache.values()), 1)
        yield info
        for name, label, numbers in self.labelled:
            kind = CounterMetricFamily if name in names.COUNTERS else GaugeMetricFamily
            family = kind(name, HELP[name], labels=(*labels, label))
            for value, number in numbers.items():
                family.add_metric((*values, value), number)
            yield family
        for name, number in self.counters.items():
            counter = CounterMetricFamily(name, HELP[name], labels=labels)
            counter.add_metric(values, number)
            yield counter
        for name, distribution in self.histograms.items():
            histogram = HistogramMetricFamily(name, HELP[name], labels=labels)
            histogram.add_metric(values, _cumulative(distribution), distribution.sum)
            yield histogram


def _cumulative(distribution: Histogram) -> list[tuple[str, float]]:
    """(upper bound, count of values at or below it), as Prometheus requires."""
    below, buckets = 0, []
    for bound, count in zip((*distribution.bounds, math.inf), distribution.counts, strict=True):
        below += count
        buckets.append(("+Inf" if math.isinf(bound) else repr(bound), float(below)))
    return buckets
