"""The demo model on a real server, in the test's own event loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fairlead_runtime.api.state.state import Backend
from fairlead_runtime.build.build_engine import build
from fairlead_runtime.grammar.checker import Checker
from fairlead_runtime.grammar.compile import CheckLimits
from fairlead_runtime.hub import source
from fairlead_runtime.serving.detokenize import vocabulary_of
from fairlead_runtime.serving.engine_link import LocalEngine
from fairlead_runtime.serving.measurements import RequestMetrics
from fairlead_runtime.serving.metrics import EngineMetrics
from fairlead_runtime.serving.prompt_encoder import PromptEncoder
from fairlead_runtime.serving.service import Service
from fairlead_runtime.settings.engine_config import EngineConfig
from support.api_harness import MODEL, WITHIN, Server, running_server

CONFIG = EngineConfig(
    num_blocks=256,
    block_size=8,
    max_batch_tokens=256,
    max_requests=32,
    max_queue=4096,
    served_name=MODEL,
)
# Processor time alone decides what a grammar may take, however busy the machine is.
PATIENT = CheckLimits(seconds=WITHIN)


@asynccontextmanager
async def demo(config: EngineConfig = CONFIG, **settings: Any) -> AsyncIterator[Server]:
    """What `fairlead serve demo:` serves, in this event loop."""
    services: list[Service] = []

    async def load() -> Backend:
        metrics, measurements = EngineMetrics(MODEL), RequestMetrics()
        built = build(source.resolve("demo:").path, config, observer=measurements)
        engine = LocalEngine(built.engine, measurements)
        grammars = Checker(built.grammar_facts, limits=PATIENT, max_wait=WITHIN)
        vocabulary = vocabulary_of(built.tokenizer)
        service = Service(engine, built.intake, vocabulary, grammars=grammars)
        services.append(service)
        service.start()

        async def exposition() -> bytes:
            return metrics.exposition(await service.report())

        return Backend(
            service=service,
            encoder=PromptEncoder(built.tokenizer),
            vocabulary=vocabulary,
            metrics=exposition,
            memory=built.memory.as_dict(),
            died=service.died,
        )

    try:
        async with running_server(load, source="demo:", **settings) as server:
            yield server
    finally:
        for service in services:
            await service.stop()
