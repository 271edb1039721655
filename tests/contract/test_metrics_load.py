"""The operator reads the load and the startup times that the runtime exposes."""

import pytest

from fairlead_operator.decide.pods import startup
from fairlead_operator.decide.pods.load import Load, LoadError, parse
from fairlead_runtime.engine.engine import Bounds, Engine
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.serving.measurements import EngineReport, RequestMetrics
from fairlead_runtime.serving.metrics import EngineMetrics
from fairlead_runtime.settings.startup_parts import PARTS
from support.fake_engine import FULL, Clock, FakeRunner, limits, request


@pytest.mark.parametrize("name", ["demo", "Qwen/Qwen2.5-0.5B", 'a "model" \\n'])
def test_the_operator_reads_the_load_that_the_runtime_exposes(name: str) -> None:
    clock = Clock()
    metrics, measurements = EngineMetrics(name, now=clock), RequestMetrics()
    bounds = limits(max_requests=2)
    engine = Engine(
        lambda: Scheduler(bounds, FULL),
        FakeRunner(clock=clock),
        Bounds.of(bounds, max_queue=100, queue_timeout=60.0),
        now=clock,
        observer=measurements,
    )

    def exposition() -> str:
        return metrics.exposition(EngineReport(engine.snapshot(), measurements.read())).decode()

    assert parse(exposition(), name) == Load(0, 0)
    for number in range(5):
        engine.submit(request(str(number), prompt=10, max_tokens=6))
    engine.step()
    text = exposition()
    assert parse(text, name) == Load(running=2, waiting=3)
    with pytest.raises(LoadError, match="missing for model"):
        parse(text, "another")
    assert startup.read(text, name) == {}, "0 means: not measured yet"
    metrics.started(dict.fromkeys(PARTS, 2.34))
    text = exposition()
    assert startup.read(text, name) == dict.fromkeys(startup.PARTS, 2.3)
    assert {*startup.PARTS.values()} == {*PARTS} - {"download"}, (
        "the pod's init container does that"
    )
    assert parse(text, name) == Load(running=2, waiting=3)
