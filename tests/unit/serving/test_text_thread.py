"""The thread in which text is made: one hop for all of a turn, order, errors and the deadline."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from fairlead_runtime.front.errors import from_exception
from fairlead_runtime.outputs import TextLate
from fairlead_runtime.serving.text_thread import TextThread

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Words:
    """A source whose events are words; ``before`` runs in the thread."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.events: list[str] = []
        self.outputs: list[str] = []
        self.threads: set[str] = set()
        self.error: Exception | None = None
        self.changed = asyncio.Event()
        self._before = before

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events

    def make(self, events: list[str]) -> list[str]:
        self.threads.add(threading.current_thread().name)
        self._before()
        return [word.upper() for word in events]

    def deliver(self, outputs: list[str]) -> None:
        self.outputs += outputs
        self.changed.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.changed.set()


def unexpected(_: object) -> None:
    raise AssertionError("nothing is late")


async def test_all_sources_of_one_turn_go_to_the_thread_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = TextThread(unexpected)
    submit, hops = texts._executor.submit, 0

    def counted(work: Callable[[], None]) -> object:
        nonlocal hops
        hops += 1
        return submit(work)

    monkeypatch.setattr(texts._executor, "submit", counted)
    sources = [Words() for _ in range(50)]
    for word in ("a", "b", "c"):
        for source in sources:
            source.events.append(word)
            source.changed.clear()
            texts.make(source)
        for source in sources:
            await source.changed.wait()
    assert hops == 3
    assert all(source.outputs == ["A", "B", "C"] for source in sources)
    assert {name for source in sources for name in source.threads} == {"text_0"}
    texts.close()


async def test_an_error_ends_one_source_alone() -> None:
    def broken() -> None:
        raise ValueError("no text")

    texts, one, other = TextThread(unexpected), Words(broken), Words()
    for source in (one, other):
        source.events.append("a")
        texts.make(source)
    await one.changed.wait()
    await other.changed.wait()
    assert isinstance(one.error, ValueError)
    assert other.outputs == ["A"]
    texts.close()


async def test_text_that_is_not_made_in_time_ends_with_a_clear_error_and_comes_no_more() -> None:
    late: list[object] = []
    texts, release = TextThread(late.append, seconds=0.01), threading.Event()

    def stand_still() -> None:
        release.wait(60)

    slow, behind = Words(stand_still), Words()
    slow.events.append("a")
    texts.make(slow)
    await asyncio.sleep(0)  # its batch leaves
    behind.events.append("b")
    texts.make(behind)
    await slow.changed.wait()
    await behind.changed.wait()
    assert late == [slow, behind]
    for source in (slow, behind):
        assert isinstance(source.error, TextLate)
        answer = from_exception(source.error)
        assert (answer.status, answer.code) == (503, "text_late")
        assert "not made within 0.01 s" in answer.message
    release.set()
    after = Words()
    texts._seconds = 60.0
    after.events.append("c")
    texts.make(after)
    await after.changed.wait()
    assert (slow.outputs, behind.outputs, after.outputs) == ([], [], ["C"])
    assert not behind.threads, "what is late is not made"
    texts.close()
