"""A scrape after a run with known times and counts."""

import ast
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fairlead_runtime.engine.engine import Bounds, Engine, Prepare, canary
from fairlead_runtime.engine.inbox import Guide
from fairlead_runtime.outputs import QueueFull
from fairlead_runtime.request.sequence import Failure, FinishReason
from fairlead_runtime.scheduling.plan import Work
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.serving.measurements import EngineReport, Histogram, RequestMetrics, Totals
from fairlead_runtime.serving.metrics import (
    HELP,
    NOTHING,
    EngineMetrics,
    FrontReport,
    MonotonicCounters,
)
from fairlead_runtime.settings import metric_names as names
from fairlead_runtime.sizing.traffic import Bound
from support.fake_engine import FULL, Clock, FakeRunner, limits, request, run

REJECTIONS = "vllm:admission_rejections_total"
STEP = 0.25  # seconds: exact in binary, so that sums are too


class Bench:
    """An engine on a virtual clock, with a step that takes STEP seconds, and its statistics."""

    def __init__(
        self,
        *,
        max_queue: int = 100,
        waiting: Bound | None = None,
        prepare: Prepare | None = None,
        **changes: object,
    ) -> None:
        self.clock = Clock()
        self.runner = FakeRunner(clock=self.clock)
        self.runner.step_time = STEP
        self.stats = EngineMetrics('a "model"', now=self.clock)
        self.measurements = RequestMetrics()
        bounds = limits(**changes)
        self.engine = Engine(
            lambda: Scheduler(bounds, FULL),
            self.runner,
            Bounds.of(bounds, max_queue=max_queue, queue_timeout=60.0, waiting=waiting),
            now=self.clock,
            observer=self.measurements,
            prepare=prepare,
        )

    def exposition(self, *, draining: bool = False, front: FrontReport = NOTHING) -> str:
        report = EngineReport(self.engine.snapshot(), self.measurements.read())
        return self.stats.exposition(report, draining=draining, front=front).decode()

    def scrape(self, *, draining: bool = False, front: FrontReport = NOTHING) -> dict[str, float]:
        """By series name; further labels than the common two as ``name{value}``."""
        found: dict[str, float] = {}
        text = self.exposition(draining=draining, front=front)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                own = {
                    k: v for k, v in sample.labels.items() if k not in {names.MODEL, names.ENGINE}
                }
                key = sample.name + (f"{{{','.join(own.values())}}}" if own else "")
                assert key not in found, "a series appears twice"
                found[key] = sample.value
        return found


def test_one_request_leaves_exactly_its_times_and_tokens() -> None:
    """Prompt 10, output 6: one prefill step that gives the first token, five decodes; it waited 2 s
    before.
    """
    bench = Bench()
    bench.engine.submit(request("a", prompt=10, max_tokens=6))
    bench.clock.now += 2
    run(bench.engine)
    seen = bench.scrape()
    assert seen["vllm:prompt_tokens_total"] == 10
    assert seen["vllm:generation_tokens_total"] == 6
    assert seen["vllm:request_success_total{length}"] == 1
    assert seen["fairlead_arrivals_total"] == 1
    expected = {
        names.QUEUE_TIME: 2,
        names.TTFT: 2 + STEP,
        names.E2E_LATENCY: 2 + 6 * STEP,
        names.PREFILL_TIME: STEP,
        names.DECODE_TIME: 5 * STEP,
        names.INFERENCE_TIME: 6 * STEP,
        names.REQUEST_PROMPT_TOKENS: 10,
        names.REQUEST_COMPUTED_TOKENS: 10,
        names.REQUEST_GENERATION_TOKENS: 6,
        names.REQUEST_MAX_TOKENS: 6,
        names.REQUEST_N: 1,
        names.REQUEST_PREEMPTIONS: 0,
        names.TPOT: STEP,
    }
    for name, total in expected.items():
        assert (seen[f"{name}_sum"], seen[f"{name}_count"]) == (total, 1), name
    assert (seen[f"{names.ITL}_sum"], seen[f"{names.ITL}_count"]) == (5 * STEP, 5)
    assert (seen[f"{names.ITERATION_TOKENS}_sum"], seen[f"{names.ITERATION_TOKENS}_count"]) == (
        10 + 6,
        6,
    )
    assert (seen["fairlead_steps_total"], seen["fairlead_step_seconds_total"]) == (6, 6 * STEP)


def test_choices_of_one_request_are_one_request_with_all_their_tokens() -> None:
    bench = Bench()
    bench.engine.submit(request("a", prompt=10, max_tokens=4, n=3))
    run(bench.engine)
    seen = bench.scrape()
    assert seen["vllm:generation_tokens_total"] == 12
    assert seen["vllm:prompt_tokens_total"] == 10
    assert seen[f"{names.TTFT}_count"] == 1
    assert seen[f"{names.ITL}_count"] == 9
    assert seen[f"{names.TPOT}_sum"] == STEP, "one mean, over all choices"
    assert (seen[f"{names.REQUEST_N}_sum"], seen[f"{names.REQUEST_N}_count"]) == (3, 1)
    assert seen[f"{names.REQUEST_MAX_TOKENS}_sum"] == 4
    assert (seen[f"{names.REQUEST_GENERATION_TOKENS}_sum"], seen[f"{names.E2E_LATENCY}_count"]) == (
        12,
        1,
    )
    assert sum(seen[f"vllm:request_success_total{{{reason}}}"] for reason in FinishReason) == 1


def test_gauges_show_running_and_waiting_requests_and_cache_use() -> None:
    bench = Bench(max_requests=2)
    for name in "abcd":
        bench.engine.submit(request(name, prompt=8, max_tokens=50))
    assert bench.scrape()["vllm:num_requests_waiting"] == 4  # on their way in: they wait as well
    bench.engine.step()
    bench.clock.now += 3
    bench.engine.submit(request("e", prompt=8, max_tokens=50))
    seen = bench.scrape(draining=True)
    assert (seen["vllm:num_requests_running"], seen["vllm:num_requests_waiting"]) == (2, 3)
    used = bench.engine.snapshot().scheduler.used
    assert seen["vllm:kv_cache_usage_perc"] == used / 64 > 0
    assert (seen["fairlead_free_blocks"], seen["fairlead_blocks"]) == (64 - used, 64)
    assert seen["fairlead_oldest_wait_seconds"] == STEP + 3
    assert seen["fairlead_inflight"] == seen["fairlead_drain_inflight"] == 4
    assert bench.scrape()["fairlead_drain_inflight"] == 0
    assert seen["vllm:cache_config_info{4,64}"] == 1


def test_running_requests_are_told_by_phase() -> None:
    bench = Bench(max_batch_tokens=8)

    def phases() -> tuple[float, ...]:
        seen = bench.scrape()
        by_phase = [
            seen[f"{names.RUNNING_BY_PHASE}{{{phase}}}"] for phase in ("prefilling", "decoding")
        ]
        assert sum(by_phase) == seen[names.RUNNING]
        return tuple(by_phase)

    bench.engine.submit(request("short", prompt=4, max_tokens=50))
    bench.engine.submit(request("long", prompt=20, max_tokens=50))
    shown = [phases()]
    for _ in range(4):
        bench.engine.step()
        shown.append(phases())
    assert shown == [(0, 0), (1, 1), (1, 1), (1, 1), (0, 2)]


def test_a_request_shows_during_its_first_step_however_long_that_takes() -> None:
    bench = Bench()
    during: list[dict[str, float]] = []
    bench.runner.fault = lambda _work: during.append(bench.scrape())
    bench.engine.submit(request("a"))
    bench.engine.step()
    bench.engine.submit(request("b"))
    bench.engine.step()
    bench.engine.step()
    assert [(seen[names.RUNNING], seen[names.WAITING]) for seen in during] == [
        (0, 1),
        (1, 1),
        (2, 0),
    ]


def test_the_gauges_are_0_after_a_finished_run() -> None:
    bench = Bench()
    for name in "abc":
        bench.engine.submit(request(name))
    run(bench.engine)
    seen = bench.scrape()
    for name in (
        names.RUNNING,
        names.WAITING,
        names.KV_CACHE_USAGE,
        names.OLDEST_WAIT,
        names.INFLIGHT,
    ):
        assert seen[name] == 0, name


def test_prefix_hits_and_preemptions_come_from_the_scheduler() -> None:
    bench = Bench()
    for name in ("a", "b"):
        first = request("same", prompt=20, max_tokens=2)
        bench.engine.submit(type(first)(name, first.prompt, first.params, 2))
        run(bench.engine)
    seen = bench.scrape()
    assert seen["vllm:prefix_cache_queries_total"] == 40
    assert (
        seen["vllm:prefix_cache_hits_total"] == 16
    )  # four full blocks; the last token is always computed
    sources = "local_compute", "local_cache_hit", "external_kv_transfer"
    by_source = [seen[f"vllm:prompt_tokens_by_source_total{{{source}}}"] for source in sources]
    assert by_source == [24, 16, 0]
    assert sum(by_source) == seen["vllm:prompt_tokens_total"]
    assert seen[f"{names.REQUEST_COMPUTED_TOKENS}_sum"] == 24
    tight = Bench(num_blocks=12, max_model_len=48)
    for name in "abcd":
        tight.engine.submit(request(name, prompt=8, max_tokens=30))
    run(tight.engine)
    seen = tight.scrape()
    preemptions = tight.engine.snapshot().scheduler.preemptions
    assert seen["vllm:num_preemptions_total"] == preemptions > 0
    assert seen[f"{names.REQUEST_PREEMPTIONS}_sum"] == preemptions
    assert seen[f"{names.REQUEST_PREEMPTIONS}_count"] == 4


def test_a_request_of_one_token_has_no_time_between_tokens() -> None:
    bench = Bench()
    bench.engine.submit(request("a", max_tokens=1))
    run(bench.engine)
    seen = bench.scrape()
    assert seen[f"{names.E2E_LATENCY}_count"] == 1
    assert seen[f"{names.TPOT}_count"] == 0


def test_a_request_whose_grammar_is_compiled_waits_and_is_deferred() -> None:
    answers: list[Callable[[Guide | Failure], None]] = []
    bench = Bench(prepare=lambda _, answer: answers.append(answer))

    def waiting() -> tuple[float, float, float]:
        seen = bench.scrape()
        reasons = (f"{names.WAITING_BY_REASON}{{{reason}}}" for reason in ("capacity", "deferred"))
        capacity, deferred = (seen[name] for name in reasons)
        return seen[names.WAITING], capacity, deferred

    bench.engine.submit(request("guided", structured_outputs={"regex": "a"}))
    assert waiting() == (1, 1, 0), "on its way in"
    bench.engine.step()
    assert waiting() == (1, 0, 1)
    bench.engine.submit(request("free", max_tokens=50))
    assert waiting() == (2, 1, 1)
    bench.engine.step()
    assert waiting() == (1, 0, 1)
    answers.pop()(Failure("too complex"))
    bench.engine.step()
    assert waiting() == (0, 0, 0)


def test_refusals_are_counted_by_the_limit_that_they_exceed() -> None:
    bench = Bench(max_queue=1, waiting=Bound(40, "few"), max_requests=1)
    bench.engine.submit(request("a", prompt=40))
    with pytest.raises(QueueFull, match="prompt tokens"):
        bench.engine.submit(request("b"))
    bench.engine.abort("a")
    bench.engine.step()
    for name in "cd":
        bench.engine.submit(request(name))
    for name in "ef":
        with pytest.raises(QueueFull, match="max_queue"):
            bench.engine.submit(request(name))
    seen = bench.scrape()
    assert seen[f"{REJECTIONS}{{max_num_queued_tokens}}"] == 1
    assert seen[f"{REJECTIONS}{{max_num_queued_reqs}}"] == 2


def test_requests_are_counted_by_the_names_of_keys_and_no_other_tenant_is_a_label() -> None:
    bench = Bench(max_requests=2)
    front = FrontReport(tenants=("alice", "bob"))
    for number, tenant in enumerate(["alice", "my secret", "alice", "user@example.com"]):
        asked = request(str(number), max_tokens=50)
        bench.engine.submit(replace(asked, tenant=tenant))
    bench.engine.submit(canary(), bounded=False)
    bench.engine.step()
    seen = bench.scrape(front=front)
    tenants = ("alice", "bob", "(others)")
    assert [seen[f"{names.TENANT_RUNNING}{{{tenant}}}"] for tenant in tenants] == [1, 0, 1]
    assert [seen[f"{names.TENANT_WAITING}{{{tenant}}}"] for tenant in tenants] == [1, 0, 1]
    assert not [name for name in seen if "secret" in name or "@" in name]
    for number in range(4):
        bench.engine.abort(str(number))
    run(bench.engine)
    seen = bench.scrape(front=front)
    assert {seen[f"{names.TENANT_RUNNING}{{{tenant}}}"] for tenant in tenants} == {0}


def test_what_the_http_process_counts_is_exposed() -> None:
    lag = Histogram(names.LAG_BUCKETS)
    lag.add(0.3)
    front = FrontReport(
        connections={"public": 7, "admin": 2},
        body_bytes=5,
        logprob_bytes=6,
        resident_bytes=8,
        loop_lag=lag,
    )
    seen = Bench().scrape(front=front)
    assert seen[f"{names.HTTP_CONNECTIONS}{{public}}"] == 7
    assert seen[f"{names.HTTP_CONNECTIONS}{{admin}}"] == 2
    assert (seen[names.HTTP_BODY_BYTES], seen[names.HTTP_LOGPROB_BYTES]) == (5, 6)
    assert seen[names.HTTP_RESIDENT_BYTES] == 8
    assert (seen[f"{names.HTTP_LOOP_LAG}_sum"], seen[f"{names.HTTP_LOOP_LAG}_count"]) == (0.3, 1)


def test_the_engine_is_always_awake() -> None:
    seen = Bench().scrape()
    states = ("awake", "weights_offloaded", "discard_all")
    assert [seen[f"{names.SLEEP_STATE}{{{state}}}"] for state in states] == [1, 0, 0]


def test_canaries_appear_in_no_request_metric() -> None:
    bench, quiet = Bench(), Bench().scrape()
    during: list[dict[str, float]] = []
    bench.engine.submit(canary(), bounded=False)
    during.append(bench.scrape())
    bench.runner.fault = lambda _work: during.append(bench.scrape())
    run(bench.engine)
    ours = {"fairlead_steps_total", "fairlead_step_seconds_total"}  # the engine's, not a request's
    blocks = {names.KV_CACHE_USAGE, names.FREE_BLOCKS, names.CACHED_BLOCKS}
    for seen in (*during, bench.scrape()):
        assert {k: v for k, v in seen.items() if k not in ours | blocks} == {
            k: v for k, v in quiet.items() if k not in ours | blocks
        }
    assert len(during) == 2


def test_a_canary_beside_a_request_is_not_counted_with_it() -> None:
    bench = Bench()
    bench.engine.submit(request("a", prompt=10, max_tokens=6))
    bench.engine.submit(canary(), bounded=False)
    run(bench.engine)
    seen = bench.scrape()
    assert (seen["fairlead_arrivals_total"], seen["vllm:generation_tokens_total"]) == (1, 6)
    assert seen[f"{names.ITERATION_TOKENS}_sum"] == 16
    assert seen["vllm:prefix_cache_queries_total"] == 10


def test_an_aborted_request_counts_as_such_and_in_no_latency_of_whole_requests() -> None:
    bench = Bench()
    bench.engine.submit(request("a", max_tokens=50))
    bench.engine.step()
    bench.engine.abort("a")
    run(bench.engine)
    seen = bench.scrape()
    assert (seen["fairlead_aborted_total"], seen["vllm:request_success_total{abort}"]) == (1, 1)
    assert seen[f"{names.TTFT}_count"] == 1
    assert seen[f"{names.E2E_LATENCY}_count"] == 0
    assert seen["fairlead_inflight"] == 0


def test_a_request_that_a_stop_text_ends_counts_as_finished() -> None:
    """The service finds the text and ends the choice; the others go on."""
    bench = Bench()
    bench.engine.submit(request("a", max_tokens=50, n=2))
    bench.engine.step()
    bench.engine.finish("a", 0)
    bench.engine.step()
    assert bench.scrape()["fairlead_inflight"] == 1
    bench.engine.finish("a", 1)
    run(bench.engine)
    seen = bench.scrape()
    assert (seen["vllm:request_success_total{stop}"], seen["fairlead_aborted_total"]) == (1, 0)
    assert seen[f"{names.E2E_LATENCY}_count"] == 1


def test_a_request_that_fails_alone_is_counted_and_forgotten() -> None:
    bench = Bench()

    def fail(work: Work) -> None:
        if any(row.sequence.request.id == "bad" for row in work.rows):
            raise ValueError("cannot be computed")

    bench.runner.fault = fail
    bench.engine.submit(request("bad"))
    bench.engine.submit(request("good"))
    run(bench.engine)
    seen = bench.scrape()
    assert (seen["fairlead_failed_total"], seen["vllm:request_success_total{length}"]) == (1, 1)
    assert (seen["fairlead_step_failures_total"], seen["fairlead_inflight"]) == (1, 0)


def test_a_new_scheduler_resets_no_counter() -> None:
    counters = MonotonicCounters()
    assert [counters.total("n", value) for value in (3, 5, 1, 2, 0, 4)] == [3, 5, 6, 7, 7, 11]


def test_every_series_exists_from_the_start_with_type_and_help() -> None:
    families = {f.name: f for f in text_string_to_metric_families(Bench().exposition())}
    assert set(families) == declared()
    assert all(family.documentation == HELP[name] for name, family in families.items())
    assert {n for n, f in families.items() if f.type == "counter"} == names.COUNTERS
    for name in (names.RUNNING, names.WAITING, names.KV_CACHE_USAGE, names.CACHE_CONFIG):
        assert families[name].type == "gauge"
    assert families[names.ITERATION_TOKENS].type == "histogram"
    assert not any("_created" in sample.name for f in families.values() for sample in f.samples)
    labels = {
        (s.labels[names.MODEL], s.labels[names.ENGINE])
        for f in families.values()
        for s in f.samples
    }
    assert labels == {('a "model"', "0")}


def declared() -> set[str]:
    """The metric names the module declares."""
    values = (getattr(names, name) for name in dir(names) if name.isupper())
    return {v for v in values if isinstance(v, str)} - {names.MODEL, names.ENGINE, names.PHASE}


def test_the_exposed_name_of_a_counter_ends_in_total() -> None:
    lines = Bench().exposition().splitlines()
    for name in declared():
        starts = (names.exposed(name) + "{", names.exposed(name) + "_bucket{")
        assert any(line.startswith(starts) for line in lines), name


def test_the_number_of_series_does_not_grow_with_requests() -> None:
    bench = Bench()
    before = set(bench.scrape())
    for number in range(40):
        bench.engine.submit(request(f"r{number}", max_tokens=3))
    run(bench.engine)
    assert set(bench.scrape()) == before


def test_metric_names_import_nothing() -> None:
    """The operator imports them without torch and prometheus_client."""
    tree = ast.parse(Path(names.__file__).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize(
    ("value", "place"),
    [(0.5, 0), (1.0, 0), (1.001, 1), (2.0, 1), (5.0, 2), (5.1, 3), (math.inf, 3)],
)
def test_a_value_on_a_bound_belongs_below_it(value: float, place: int) -> None:
    distribution = Histogram((1.0, 2.0, 5.0))
    distribution.add(value, 2)
    assert distribution.counts == [2 * (i == place) for i in range(4)]


def test_buckets_are_cumulative_and_end_with_the_count() -> None:
    bench = Bench()
    for number in range(5):
        bench.engine.submit(request(f"r{number}"))
    run(bench.engine)
    seen = bench.scrape()
    buckets = [v for k, v in seen.items() if k.startswith(f"{names.ITL}_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == seen[f"{names.ITL}_count"] == 25
    assert len(buckets) == len(names.ITL_BUCKETS) + 1


def test_a_scrape_during_a_run_never_sees_half_a_step() -> None:
    """Readings from another thread: tokens generated and gaps between them belong together."""
    measures = RequestMetrics()
    bench = Bench(max_requests=8)
    bench.engine._observer, bench.runner.step_time = measures, 2**-10
    for number in range(60):
        bench.engine.submit(request(f"r{number}", prompt=4, max_tokens=40))
    done = threading.Event()
    torn: list[tuple[int, int, int]] = []
    read_during_the_run = threading.Event()

    # The tenth step waits until the reader has seen the first ones.
    def wait_for_the_reader(work: Work) -> None:
        if work.step == 10:
            read_during_the_run.wait()

    bench.runner.fault = wait_for_the_reader

    def read() -> None:
        for totals in _readings(measures, done):
            if totals.generation_tokens:
                read_during_the_run.set()
            first, gaps = sum(totals.ttft.counts), sum(totals.itl.counts)
            if first + gaps != totals.generation_tokens:
                torn.append((first, gaps, totals.generation_tokens))

    reader = threading.Thread(target=read)
    reader.start()
    run(bench.engine)
    done.set()
    reader.join()
    assert measures.read().totals.generation_tokens == 60 * 40
    assert torn == []


def _readings(measures: RequestMetrics, done: threading.Event) -> Iterator[Totals]:
    while not done.is_set():
        yield measures.read().totals
