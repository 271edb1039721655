"""The watches: what kopf is told, what is passed on, and that they are opened again."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import kopf
import pytest

from fairlead_operator.cluster import watches
from fairlead_operator.cluster.client import PAGE
from fairlead_operator.cluster.watches import Watches
from fairlead_operator.resource.kinds import EVENT, POD, WATCHED, Kind, Object


@pytest.mark.parametrize(
    ("kind", "deleted"), [("ADDED", False), ("MODIFIED", False), ("DELETED", True), (None, False)]
)
def test_every_object_is_passed_on(kind: str | None, *, deleted: bool) -> None:
    seen: list[tuple[Kind, bool, Object]] = []
    observe = watches._observer(POD, lambda *news: seen.append(news))
    body: Object = {"metadata": {"name": "a"}}
    asyncio.run(observe(event={"type": kind, "object": body}, name="a", body=None))
    assert seen == [(POD, deleted, body)]


def test_kopf_only_watches_what_the_store_holds_and_writes_nothing() -> None:
    handlers = watches.registry(WATCHED, {}, lambda *_: None)
    assert len(handlers._watching.get_all_handlers()) == len(WATCHED)
    assert handlers._changing.get_all_handlers() == []
    assert handlers._spawning.get_all_handlers() == []
    settings = kopf.OperatorSettings()
    watches._configure(settings, WATCHED)
    assert not settings.posting.enabled
    assert settings.scanning.disabled
    assert settings.peering.standalone
    assert settings.watching.label_selectors["", "v1", "pods"] == POD.labels
    assert settings.watching.field_selectors["", "v1", "events"] == EVENT.fields
    assert len(settings.watching.label_selectors) == sum(bool(k.labels) for k in WATCHED)


def configured() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    watches._configure(settings, WATCHED)
    return settings


def test_news_of_an_object_wait_for_no_worker_of_another() -> None:
    """A worker stays for ``idle_timeout`` after its object's news: a bound would delay others."""
    assert configured().queueing.worker_limit is None


def test_kopf_lists_in_pages() -> None:
    assert configured().watching.chunk_size == PAGE


def test_kopf_keeps_no_copy_of_an_object() -> None:
    storage = configured().persistence.diffbase_storage
    body = kopf.Body({"metadata": {"name": "chat"}, "spec": {"replicas": 1}})
    assert storage.build(body=body) == {}
    assert storage.fetch(body=body) is None


class Opened:
    """Watches of the namespaces a and b whose ``_once`` ends at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.one = Watches(WATCHED, ["a", "b"], {}, lambda *_: None)
        self.namespaces: list[list[str]] = []
        monkeypatch.setattr(self.one, "_once", self.open)

    def open(self) -> None:
        self.namespaces.append(self.one._watched)

    async def run_until(self, ended: Callable[[], bool]) -> int:
        """Run until ``ended``; returns how often the restart was reported."""
        restarts: list[None] = []
        task = asyncio.create_task(self.one.run(lambda: restarts.append(None), pause=0.0))
        while not ended():  # noqa: ASYNC110 - conditions of several kinds
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return len(restarts)


def test_watches_that_end_are_opened_again_and_it_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Opened(monkeypatch)
    restarts = asyncio.run(opened.run_until(lambda: len(opened.namespaces) >= 4))
    assert restarts >= 3
    assert opened.namespaces[:4] == [["a", "b"]] * 4


def test_namespaces_that_are_gone_are_left_out_and_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, stops = Opened(monkeypatch), []

    async def go() -> None:
        await opened.run_until(lambda: bool(opened.namespaces))
        opened.namespaces.clear()
        opened.one._stop = lambda: stops.append("stopped")
        opened.one.leave_out(frozenset({"a"}))
        assert stops == [], "the watch ends by itself"
        await opened.run_until(lambda: bool(opened.namespaces))
        stops.clear()
        opened.one.leave_out(frozenset())
        assert stops == ["stopped"], "a namespace that is back is watched at once"

    asyncio.run(go())
    assert opened.namespaces[0] == ["b"]
    opened.one.leave_out(frozenset({"a", "b"}))
    opened.namespaces.clear()

    async def turns() -> None:
        count = iter(range(20))
        await opened.run_until(lambda: next(count) == 19)

    asyncio.run(turns())
    assert opened.namespaces == [], "no namespace at all would mean all of them"


def test_more_to_watch_starts_kopf_anew_at_once_and_less_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Opened(monkeypatch)
    one, restarts, running = opened.one, list[None](), threading.Event()

    def watch() -> None:
        running.clear()
        opened.open()
        assert running.wait(60)

    async def go() -> None:
        one.leave_out(frozenset({"a", "b"}))
        task = asyncio.create_task(one.run(lambda: restarts.append(None), pause=3600.0))
        for count, left_out in ((1, {"a"}), (2, frozenset())):
            one._stop = running.set
            one.leave_out(frozenset(left_out))
            while len(opened.namespaces) < count:  # noqa: ASYNC110 - a thread says it
                await asyncio.sleep(0.001)
        one._stop = lambda: pytest.fail("what is left out is watched on")
        one.leave_out(frozenset({"b"}))
        one.leave_out(frozenset())
        one._stop = running.set
        running.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    monkeypatch.setattr(one, "_once", watch)
    asyncio.run(go())
    assert opened.namespaces == [["b"], ["a", "b"]]
    assert restarts == [], "nothing ended by itself"


def test_no_end_of_a_watch_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Watches(WATCHED, [], {}, lambda *_: None)

    async def fail(_: Any) -> None:
        raise SystemExit("kopf gave up")

    monkeypatch.setattr(one, "_watch", fail)
    one._once()
