"""Gauges of a cache whose blocks have several units: they count whole-model blocks."""

import pytest

from fairlead_runtime.engine.engine import Bounds, Engine
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.serving.measurements import RequestMetrics
from fairlead_runtime.serving.metrics import MonotonicCounters, counters, gauges
from fairlead_runtime.settings import metric_names as names
from support.fake_engine import FULL, MIXED, Clock, FakeRunner, limits, request


@pytest.mark.parametrize("groups", [FULL, MIXED])
def test_blocks_are_those_of_the_whole_model(groups: tuple[object, ...]) -> None:
    bounds = limits(num_blocks=40)
    engine = Engine(
        lambda: Scheduler(bounds, groups),  # type: ignore[arg-type]  # either of the two
        FakeRunner(),
        Bounds.of(bounds, max_queue=8, queue_timeout=60.0),
        now=Clock(),
    )
    reading = RequestMetrics().read()
    empty = gauges(reading, engine.snapshot(), 0.0, draining=False)
    assert (empty[names.BLOCKS], empty[names.FREE_BLOCKS]) == (40, 40)
    assert (empty[names.CACHED_BLOCKS], empty[names.KV_CACHE_USAGE]) == (0, 0)
    engine.submit(request("a", prompt=8, max_tokens=4))
    engine.step()
    busy = gauges(reading, engine.snapshot(), 0.0, draining=True)
    held = engine.snapshot().scheduler.used / len(groups)
    assert held >= 2
    assert busy[names.FREE_BLOCKS] == 40 - held
    assert busy[names.KV_CACHE_USAGE] == held / 40
    while not engine.idle:
        engine.step()
    done = gauges(reading, engine.snapshot(), 0.0, draining=False)
    assert done[names.FREE_BLOCKS] == 40
    cached = engine.snapshot().scheduler.cached / len(groups)
    assert done[names.CACHED_BLOCKS] == cached > 0


@pytest.mark.parametrize("offload", [0, 40])
def test_an_offload_is_counted_and_shows_while_its_request_waits(offload: int) -> None:
    """Three requests that grow beyond 12 blocks: the youngest is preempted, and comes back."""
    bounds = limits(num_blocks=12, max_model_len=48, safety_margin=0.0, offload_units=offload)
    engine = Engine(
        lambda: Scheduler(bounds, FULL),
        FakeRunner(),
        Bounds.of(bounds, max_queue=8, queue_timeout=60.0),
        now=Clock(),
    )
    for name in "abc":
        engine.submit(request(name, prompt=8, max_tokens=24))
    measures, monotonic = RequestMetrics(), MonotonicCounters()
    waited: set[float] = set()
    while not engine.idle:
        engine.step()
        now = gauges(measures.read(), engine.snapshot(), 0.0, draining=False)
        assert now[names.OFFLOADED] <= now[names.WAITING]
        waited.add(now[names.OFFLOADED])
    total = counters(measures.read(), engine.snapshot(), monotonic)
    assert total[names.PREEMPTIONS] > 0
    assert total[names.OFFLOADS] == (total[names.PREEMPTIONS] if offload else 0)
    assert 0 in waited
    assert (max(waited) > 0) is (offload > 0)
