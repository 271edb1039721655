"""The hub's answers that the operator keeps, of a bounded number of models."""

import asyncio

import pytest

from fairlead_operator.probe import hub as module
from fairlead_operator.probe.hub import Hub
from fairlead_operator.resource.spec import Source


def test_the_oldest_answer_is_forgotten_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWERS", 2)
    fetched: list[str] = []
    times = iter(range(100))

    async def answer(_: Hub, repository: str, revision: str) -> dict[str, str]:
        fetched.append(repository)
        return {"name": repository, "revision": revision}

    async def run() -> None:
        monkeypatch.setattr(Hub, "_answer", answer)
        hub = Hub("http://127.0.0.1:1", clock=lambda: float(next(times)))
        for name in ("a/1", "a/2", "a/2", "a/3", "a/3", "a/2", "a/1"):
            assert (await hub.config(Source("hf", name), ""))["name"] == name
        await hub.close()

    asyncio.run(run())
    assert fetched == ["a/1", "a/2", "a/3", "a/1"]
