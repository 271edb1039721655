"""When a reader of a stream is too slow: bytes and age of its unread outputs."""

import asyncio
from typing import Any, cast

import pytest

from fairlead_runtime.outputs import ChoiceEvent, EngineDead, Output, ServiceError, SlowReader
from fairlead_runtime.request.sequence import FinishReason
from fairlead_runtime.serving.stream import (
    EVENT_BYTES,
    MAX_UNREAD_BYTES,
    MAX_UNREAD_SECONDS,
    STOP_EVENTS,
    WHOLE_EVENTS,
    Stream,
)


def stream() -> Stream:
    unused: Any = None
    return Stream("r", unused, {0: unused})


class Owner:
    """Makes text at once, in the event loop's thread. ``made`` counts how often."""

    made = 0

    def make_text(self, stream: Stream) -> None:
        self.made += 1
        stream.deliver(stream.make(stream.take()))

    def wake_in_turn(self, stream: Stream) -> None:
        stream.wake()

    def stop_choice(self, stream: Stream, choice: int) -> None: ...


class Later(Owner):
    """Makes no text by itself."""

    def make_text(self, stream: Stream) -> None:
        self.made += 1


class Text:
    """A choice's text: one output of all its events."""

    finished = False

    def take(self, events: list[ChoiceEvent]) -> tuple[Output, bool]:
        last = events[-1].finish
        self.finished = last is not None
        return Output(0, tuple(event.token or 0 for event in events), "", finish_reason=last), False


def made_at_once(batch: int | None = None) -> tuple[Stream, Owner]:
    text: Any = Text()
    owner: Any = Owner()
    return Stream("r", owner, {0: text}, batch=batch), owner


def last_event() -> ChoiceEvent:
    return event()._replace(finish=FinishReason.LENGTH)


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
    async def go() -> None:
        one, _ = made_at_once()
        one.push(event(5), 0.0, 1)
        one.push(event(6), 0.0, 1)
        one.end(error)
        one.push(event(7), 0.0, 1)
        for _ in range(left):
            assert (await anext(one)).token_ids == (5, 6)
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


@pytest.mark.parametrize("batch", [STOP_EVENTS, WHOLE_EVENTS])
def test_nobody_is_woken_for_each_token_of_a_whole_answer(batch: int) -> None:
    async def go() -> None:
        one, owner = made_at_once(batch)
        outputs: list[Output] = []
        reading = asyncio.create_task(one.forward(outputs.append))
        await asyncio.sleep(0)
        for number in range(3 * batch):
            one.push(event(number), 0.0, number)
            assert owner.made == (number + 1) // batch
        one.push(last_event(), 0.0, 3 * batch)
        await reading
        assert owner.made == 4
        assert [token for output in outputs for token in output.token_ids] == [*range(3 * batch), 5]

    asyncio.run(go())


def test_a_whole_answer_may_wait_and_its_error_comes_after_what_was_generated() -> None:
    async def go() -> None:
        one, _ = made_at_once(WHOLE_EVENTS)
        for number in range(MAX_UNREAD_BYTES // EVENT_BYTES + 2):
            one.push(event(), number * MAX_UNREAD_SECONDS, number)
            assert not one.overdue(number * MAX_UNREAD_SECONDS), "no client reads it"
        assert len((await anext(one)).token_ids) == MAX_UNREAD_BYTES // EVENT_BYTES + 2
        one.push(event(7), 0.0, 0)
        one.end(EngineDead("dead"))
        assert (await anext(one)).token_ids == (7,)
        with pytest.raises(EngineDead):
            await anext(one)

    asyncio.run(go())


def test_an_output_is_forwarded_without_its_reader_and_what_comes_in_a_wait_is_one() -> None:
    async def go() -> None:
        one, _ = made_at_once()
        outputs: list[Output] = []
        written = asyncio.Event()

        async def write() -> None:
            await written.wait()

        def take(output: Output) -> Any:
            outputs.append(output)
            return write() if output.token_ids == (2,) else None

        reading = asyncio.create_task(one.forward(take))
        await asyncio.sleep(0)
        one.push(event(1), 0.0, 0)
        assert [output.token_ids for output in outputs] == [(1,)], "in the same turn"
        one.push(event(2), 0.0, 0)
        await asyncio.sleep(0)
        one.push(event(3), 0.0, 1)
        one.push(last_event(), 0.0, 2)
        assert len(outputs) == 2, "a write is pending"
        written.set()
        await reading
        assert [output.token_ids for output in outputs] == [(1,), (2,), (3, 5)]

    asyncio.run(go())


def test_text_that_was_begun_before_a_wait_is_not_forwarded_in_it() -> None:
    async def go() -> None:
        one = Stream("r", cast("Any", Later()), {0: cast("Any", Text())})
        written = asyncio.Event()
        outputs: list[Output] = []

        async def write() -> None:
            await written.wait()

        def take(output: Output) -> Any:
            outputs.append(output)
            return write()

        reading = asyncio.create_task(one.forward(take))
        await asyncio.sleep(0)
        one.push(event(1), 0.0, 0)
        one.deliver(one.make(one.take()))
        one.push(event(2), 0.0, 0)
        await asyncio.sleep(0)
        one.deliver(one.make(one.take()))
        assert [output.token_ids for output in outputs] == [(1,)]
        written.set()
        for _ in range(3):
            await asyncio.sleep(0)
        assert [output.token_ids for output in outputs] == [(1,), (2,)]
        reading.cancel()

    asyncio.run(go())


def test_a_reader_is_woken_for_its_end_also_while_more_events_are_made_to_text() -> None:
    """The engine hears of a stop text late: what comes then makes no output."""

    class Stopped(Text):
        def take(self, events: list[ChoiceEvent]) -> tuple[Output, bool]:
            self.finished = True
            return Output(0, (5,), "", finish_reason=FinishReason.STOP), True

    async def go() -> None:
        text, owner = Stopped(), Later()
        one = Stream("r", cast("Any", owner), {0: cast("Any", text)})
        reading = asyncio.create_task(one.forward(lambda _: None))
        await asyncio.sleep(0)
        one.push(event(), 0.0, 0)
        one.deliver(one.make(one.take()))
        one.push(event(), 0.0, 0)
        assert owner.made == 2
        await asyncio.sleep(0)
        assert not reading.done()
        one.deliver(one.make(one.take()))
        for _ in range(3):
            await asyncio.sleep(0)
        assert reading.done()

    asyncio.run(go())


def test_what_a_forwarding_reader_raises_ends_its_stream_with_that() -> None:
    async def go() -> None:
        one, _ = made_at_once()

        def take(_: Output) -> None:
            raise ValueError("cannot be encoded")

        reading = asyncio.create_task(one.forward(take))
        await asyncio.sleep(0)
        one.push(event(), 0.0, 0)
        one.push(event(), 0.0, 0)
        with pytest.raises(ValueError, match="cannot be encoded"):
            await reading

    asyncio.run(go())
