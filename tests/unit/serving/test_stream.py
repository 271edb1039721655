"""When a reader of a stream is too slow: bytes and age of its unread outputs."""

import asyncio
from typing import Any

import pytest

from fairlead_runtime.outputs import ChoiceEvent, EngineDead, ServiceError, SlowReader
from fairlead_runtime.serving.stream import (
    EVENT_BYTES,
    MAX_UNREAD_BYTES,
    MAX_UNREAD_SECONDS,
    Stream,
)


def stream() -> Stream:
    unused: Any = None
    return Stream("r", unused, {0: unused})


class Owner:
    """Makes text at once, in the event loop's thread."""

    def make_text(self, stream: Stream) -> None:
        stream.deliver(stream.make(stream.take()))


def event(token: int = 5) -> ChoiceEvent:
    return ChoiceEvent("r", 0, token, None, None)


@pytest.mark.parametrize(("age", "overdue"), [(MAX_UNREAD_SECONDS, False), (61.0, True)])
def test_an_output_may_wait_a_minute_for_its_reader(age: float, *, overdue: bool) -> None:
    async def go() -> None:
        one = stream()
        assert not one.overdue(1e6), "nothing is unread"
        one.push(event(), 50.0, 1)
        assert not one.overdue(1e6), "no reader had a chance to run"
        one.push(event(), 100.0, 2)
        one.push(event(), 100.0 + age, 3)
        assert one.overdue(100.0 + age) is overdue, "the oldest output counts"

    asyncio.run(go())


def test_unread_outputs_are_bounded_in_bytes() -> None:
    async def go() -> None:
        one = stream()
        one.push(event(), 0.0, 1)
        for _ in range(MAX_UNREAD_BYTES // EVENT_BYTES):
            one.push(event(), 0.0, 2)
        assert not one.overdue(0.0)
        one.push(event(), 0.0, 2)
        assert one.overdue(0.0)

    asyncio.run(go())


@pytest.mark.parametrize(("error", "left"), [(EngineDead("dead"), 1), (SlowReader("slow"), 0)])
def test_earlier_outputs_can_be_read_after_an_end_unless_their_reader_is_too_slow(
    error: ServiceError, left: int
) -> None:
    class Text:
        """A choice's text: one output of all its events."""

        finished = False

        def take(self, events: list[ChoiceEvent]) -> tuple[Any, bool]:
            return [one.token for one in events], False

    async def go() -> None:
        text: Any = Text()
        owner: Any = Owner()
        one = Stream("r", owner, {0: text})
        one.push(event(5), 0.0, 1)
        one.push(event(6), 0.0, 1)
        one.end(error)
        one.push(event(7), 0.0, 1)
        for _ in range(left):
            output: Any = await anext(one)
            assert output == [5, 6]
        with pytest.raises(type(error)):
            await anext(one)

    asyncio.run(go())


def test_the_tokens_that_were_cached_are_those_of_the_first_event() -> None:
    async def go() -> None:
        one = stream()
        one.push(event()._replace(cached=32), 0.0, 1)
        one.push(event(), 0.0, 1)
        assert one.cached_tokens == 32

    asyncio.run(go())
