"""What the HTTP process makes of the tokenizer while its ports are open."""

import asyncio
import threading
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.outputs import ModelFacts
from fairlead_runtime.processes import http_process
from fairlead_runtime.request.text_facts import TextFacts
from fairlead_runtime.serving import wire
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from support.fake_engine import rig

DEMO = Path(http_process.__file__).parents[1] / "demo"


class Engine:
    """A process that has loaded the demo model."""

    bounds = rig().bounds

    def __init__(self, _child: Any) -> None: ...
    async def open(self) -> None: ...
    async def stop(self, max_wait: float) -> None: ...
    def start(self, deliver: Any, ended: Any) -> None: ...

    def load(self, _start: Any, reached: Any) -> Awaitable[Any]:
        loaded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        facts = ModelFacts(frozenset({2}), 1024, 0)
        reached(wire.Progress("profile", 0, 0, time.monotonic()))
        loaded.set_result(SimpleNamespace(facts=facts, bounds=self.bounds, memory={}))
        return loaded

    def tell(self, text: TextFacts | None) -> None:
        told.append(text)


told: list[TextFacts | None] = []


def test_what_takes_as_long_as_the_vocabulary_is_large_is_made_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: dict[str, str] = {}

    def spied(name: str, make: Any) -> Any:
        def made(*arguments: Any) -> Any:
            threads[name] = threading.current_thread().name
            return make(*arguments)

        return made

    module: Any = http_process
    monkeypatch.setattr(http_process, "RemoteEngine", Engine)
    monkeypatch.setattr(http_process, "vocabulary_of", spied("vocabulary", module.vocabulary_of))
    definition = spied("definition", module.with_definition)
    monkeypatch.setattr(http_process, "with_definition", definition)

    async def go() -> None:
        async with AsyncExitStack() as running:
            child: Any = None
            state = ServerState(name="demo:")
            backend = await http_process._load(state, child, "demo:", EngineConfig(), running)
            assert backend.vocabulary.decode([5])
            assert state.startup.ended
            assert state.startup.seconds["profile"] > 0

    asyncio.run(go())
    assert threads == {"vocabulary": "loading", "definition": "loading"}
    (text,) = told
    assert text is not None
    assert text.eos_ids
    assert text.sample
    assert text.definition, "the engine reads no tokenizer"


def test_what_the_words_lack_is_said_once_the_engine_has_checked_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def go() -> None:
        checks, template = asyncio.Event(), asyncio.Event()

        def use_template(*_: object) -> None:
            template.set()
            raise ConfigError("chat_template", "no Jinja")

        monkeypatch.setattr(http_process, "use_template", use_template)
        engine: Any = Engine(None)
        config = EngineConfig(chat_template="x")
        words = http_process._read_words(engine, DEMO, config, checks, checked=True)
        reading = asyncio.ensure_future(words)
        await template.wait()
        assert not reading.done()
        checks.set()
        with pytest.raises(ConfigError, match="no Jinja"):
            await reading

    asyncio.run(go())
