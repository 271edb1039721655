"""The metrics of one engine in Prometheus' text format, under vLLM's names and our own.

Owns the mapping from measurements and snapshots to series. Every series exists from the start, with
value 0; label values are the model's name and fixed sets. A scrape reads copies, so the engine
thread never waits for it.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fairlead_runtime import metric_names as names
from fairlead_runtime.outputs import EngineSnapshot
from fairlead_runtime.request import FinishReason
from fairlead_runtime.serving.measurements import EngineReport, Histogram, MetricsSnapshot, Totals

HELP = {
    names.RUNNING: "Choices of requests that are running.",
    names.WAITING: "Choices of requests that wait: never started, preempted or offloaded.",
    names.KV_CACHE_USAGE: (
        "Share of cache blocks that requests hold, 0 to 1; evictable cached blocks are free."
    ),
    names.CACHE_CONFIG: "The cache's size, in labels.",
    names.PROMPT_TOKENS: "Prompt tokens of requests whose first token has come.",
    names.GENERATION_TOKENS: "Tokens generated.",
    names.PREFIX_CACHE_QUERIES: "Prompt tokens looked up in the prefix cache.",
    names.PREFIX_CACHE_HITS: "Prompt tokens found in the prefix cache.",
    names.PREEMPTIONS: "Preemptions.",
    names.REQUEST_SUCCESS: "Requests that ended, by reason.",
    names.TTFT: "From arrival to the first token.",
    names.ITL: "Between two tokens of one choice.",
    names.E2E_LATENCY: "From arrival to the end.",
    names.QUEUE_TIME: "From arrival to the first step.",
    names.PREFILL_TIME: "From the first step to the first token.",
    names.DECODE_TIME: "From the first token to the last.",
    names.INFERENCE_TIME: "From the first step to the last token.",
    names.REQUEST_PROMPT_TOKENS: "Prompt tokens of a request.",
    names.REQUEST_GENERATION_TOKENS: "Tokens generated for a request, all choices together.",
    names.ITERATION_TOKENS: "Tokens computed in a step, prefill and decode together.",
    names.ARRIVALS: "Requests that reached the engine.",
    names.ABORTED: "Requests whose client disconnected or that the server aborted.",
    names.FAILED: "Requests that ended with an error.",
    names.STEPS: "Steps executed.",
    names.STEP_SECONDS: "Time spent in steps.",
    names.STEP_FAILURES: "Steps in which something raised.",
    names.ENGINE_FAULTS: "Failures that no single request caused.",
    names.QUEUE_TIMEOUTS: "Requests that waited longer than queue_timeout for a first step.",
    names.SLOW_READERS: "Requests aborted because their stream was read too slowly.",
    names.GRAMMAR_COMPILATIONS: "Grammars of structured output that were compiled for a check.",
    names.GRAMMAR_SECONDS: "Seconds spent in these compilations.",
    names.GRAMMAR_REFUSALS: "Grammars that cannot be compiled.",
    names.GRAMMAR_CACHE_HITS: "Requests whose grammar had been checked before.",
    names.GRAMMAR_BUSY: "Requests refused because too many grammars waited to be compiled.",
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
    names.STARTUP: (
        "Duration of the start: until the weights were in memory (loaded), "
        "and from then until the self-test passed (warmed)."
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontReport:
    """What the HTTP process counts itself."""

    api_keys: int = 0
    api_key_file_broken: bool = False
    certificate_broken: bool = False
    unauthorized: int = 0
    key_limited: int = 0

    @property
    def gauges(self) -> dict[str, float]:
        return {
            names.API_KEYS: self.api_keys,
            names.API_KEY_FILE_BROKEN: self.api_key_file_broken,
            names.CERTIFICATE_BROKEN: self.certificate_broken,
        }

    @property
    def counters(self) -> dict[str, float]:
        return {names.UNAUTHORIZED: self.unauthorized, names.KEY_LIMITED: self.key_limited}


NOTHING = FrontReport()


class EngineMetrics:
    """Exposes the reports of one engine. ``now`` is the engine's clock, in seconds."""

    def __init__(self, model_name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._model = model_name
        self._now = now
        self._monotonic = MonotonicCounters()
        self._startup = {"loaded": 0.0, "warmed": 0.0}

    def started(self, *, loaded: float, warmed: float) -> None:
        """Record the duration of the start in seconds: from the start of the process until the
        weights are in memory, and from then until the self-test has passed.
        """
        self._startup = {"loaded": loaded, "warmed": warmed}

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
            histograms(reading.totals),
            {reason.value: reading.totals.finished[reason] for reason in FinishReason},
            {"block_size": str(snapshot.block_size), "num_gpu_blocks": str(snapshot.num_blocks)},
            self._startup,
        )
        registry.register(scrape)
        return generate_latest(registry)


def gauges(
    reading: MetricsSnapshot, snapshot: EngineSnapshot, now: float, *, draining: bool
) -> dict[str, float]:
    scheduler = snapshot.scheduler
    # The scheduler's numbers are those after the last step: requests that arrived since also wait.
    arriving = max(0, snapshot.queued - reading.waiting_after_step)
    units_per_block = max(1, scheduler.units // snapshot.num_blocks)
    return {
        names.RUNNING: max(0, scheduler.running - reading.canaries_running),
        names.WAITING: max(0, scheduler.waiting + arriving - reading.canaries_waiting),
        names.KV_CACHE_USAGE: scheduler.usage,
        names.OFFLOADED: scheduler.offloaded,
        names.OLDEST_WAIT: 0.0 if reading.oldest is None else max(0.0, now - reading.oldest),
        names.BLOCKS: snapshot.num_blocks,
        names.FREE_BLOCKS: (scheduler.units - scheduler.used) / units_per_block,
        names.CACHED_BLOCKS: scheduler.cached / units_per_block,
        names.INFLIGHT: reading.inflight,
        names.DRAIN_INFLIGHT: reading.inflight if draining else 0,
    }


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
        names.E2E_LATENCY: totals.e2e,
        names.QUEUE_TIME: totals.queue,
        names.PREFILL_TIME: totals.prefill,
        names.DECODE_TIME: totals.decode,
        names.INFERENCE_TIME: totals.inference,
        names.REQUEST_PROMPT_TOKENS: totals.prompt_length,
        names.REQUEST_GENERATION_TOKENS: totals.output_length,
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
    """One scrape's values as metric families. ``finished``: requests by reason. ``cache``: labels
    of the info series. ``startup``: seconds by phase.
    """

    model: str
    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    histograms: Mapping[str, Histogram]
    finished: Mapping[str, int]
    cache: Mapping[str, str]
    startup: Mapping[str, float]

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
        startup = GaugeMetricFamily(
            names.STARTUP, HELP[names.STARTUP], labels=(*labels, names.PHASE)
        )
        for phase, seconds in self.startup.items():
            startup.add_metric((*values, phase), seconds)
        yield startup
        for name, number in self.counters.items():
            counter = CounterMetricFamily(name, HELP[name], labels=labels)
            counter.add_metric(values, number)
            yield counter
        ended = CounterMetricFamily(
            names.REQUEST_SUCCESS, HELP[names.REQUEST_SUCCESS], labels=(*labels, "finished_reason")
        )
        for reason, count in self.finished.items():
            ended.add_metric((*values, reason), count)
        yield ended
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
