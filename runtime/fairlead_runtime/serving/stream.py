"""One submission's outputs: events from the engine in, Outputs to a possibly slow reader out.

Owns the buffer between the two and its limits. Lets text be made when a reader waits for it, in
``text_thread``; all else runs in the event loop's thread. A reader that forwards is not woken for
an output: to wake a task, and to let it wait again, takes as long as all other work on a token.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol, Self

from fairlead_runtime.outputs import (
    ChoiceEvent,
    Output,
    ServiceError,
    SlowReader,
    StreamTimes,
    Take,
)
from fairlead_runtime.serving.choice import ChoiceText

MAX_UNREAD_BYTES = 256 * 1024  # of one request, roughly counted
MAX_UNREAD_SECONDS = 60.0  # age of a request's oldest unread output
EVENT_BYTES = 64  # of one event; each log-probability counts as much again
# Events of a whole answer whose text is made at once: a stop text ends it only when it is found,
# other text is made in a fraction of a millisecond.
WHOLE_EVENTS = 256
STOP_EVENTS = 4


class StreamOwner(Protocol):
    """The methods of the service that a stream calls."""

    async def cancel(self, request_id: str) -> bool: ...
    def make_text(self, stream: "Stream") -> None: ...
    def stop_choice(self, stream: "Stream", choice: int) -> None: ...
    def wake_in_turn(self, stream: "Stream") -> None: ...


class Stream:
    """The outputs of one submission; see outputs.OutputStream. ``batch``: the events for which a
    reader of a whole answer is woken; None for a reader that gets each as it comes.
    """

    def __init__(
        self,
        request_id: str,
        service: StreamOwner,
        choices: dict[int, ChoiceText],
        times: StreamTimes | None = None,
        batch: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.times = times or StreamTimes()
        self._service = service
        self._choices = choices
        self._unfinished = set(choices)  # choices that the engine has not finished
        self._events: dict[int, list[ChoiceEvent]] = {}
        self._batch = batch
        self._due = False  # the text of the buffered events may be made
        self._buffered = 0  # events, counted for a whole answer
        self._outputs: deque[Output] = deque()
        self._error: Exception | None = None
        self._dropped = False
        self._waiter: asyncio.Future[None] | None = None  # the reader, for the next output
        self._making = False  # the thread makes the next outputs, or will in this turn
        self._take: Take | None = None  # of the reader that forwards
        self._rest: Coroutine[Any, Any, None] | None = None  # of ``take``, for that reader to await
        self._unread_bytes = 0  # that came after the reader's first chance to read
        self._unread_since: float | None = None  # time of that chance; None before it
        self._unread_turn = 0  # the turn of the first unread event

    @property
    def cached_tokens(self) -> int:
        return self.times.cached_tokens

    @property
    def _finished(self) -> bool:
        return all(choice.finished for choice in self._choices.values())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            if not self._making:
                if self._due:
                    self._make_text()
                    continue
                if self._error is not None:
                    raise self._error
                if self._finished:
                    raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if self._rest is not None:
                rest, self._rest = self._rest, None
                await rest
        return self._outputs.popleft()

    async def forward(self, take: Take) -> None:
        """See outputs.OutputStream."""
        self._take = take
        try:
            async for output in self:
                if (rest := take(output)) is not None:
                    await rest
        finally:
            self._take = None
            if self._rest is not None:  # cancelled before it was awaited
                self._rest.close()

    async def aclose(self) -> None:
        """Abort the choices that still run; their blocks are free one step later."""
        if self._unfinished:
            await self._service.cancel(self.request_id)
        self.end(ServiceError("the stream was closed"))
        self._drop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def push(self, event: ChoiceEvent, now: float, turn: int) -> bool:
        """Buffer an event of the engine; True when it is the last one.

        ``turn`` counts how often the readers had a chance to run. The limits apply from the first
        chance on: while the event loop stands still, no reader can read.
        """
        if event.error is not None:
            self._unfinished.clear()
            self.end(event.error)
            return True
        if event.token is not None:
            self._count(event, now)
        if event.finish is not None:
            self._unfinished.discard(event.choice)
        if self._error is None:
            self._buffer(event, now, turn)
            if self._due and self._waiter is not None and not self._making:
                self._make_text()
        return not self._unfinished

    def _buffer(self, event: ChoiceEvent, now: float, turn: int) -> None:
        if not self._events:
            self._unread_bytes, self._unread_since, self._unread_turn = 0, None, turn
        self._events.setdefault(event.choice, []).append(event)
        if self._batch is not None:  # its reader waits for nothing, and no client for it
            self._buffered += 1
            self._due |= event.finish is not None or self._buffered >= self._batch
            return
        self._due = True
        if turn != self._unread_turn and not self._making:
            self._unread_since = now if self._unread_since is None else self._unread_since
            self._unread_bytes += EVENT_BYTES * (
                1 + (len(event.logprobs.top_ids) if event.logprobs else 0)
            )

    def _count(self, event: ChoiceEvent, now: float) -> None:
        times = self.times
        if times.first_token is None:
            times.first_token, times.started = now, event.started
        times.last_token = now
        times.tokens += 1
        times.cached_tokens = event.cached or times.cached_tokens

    def end(self, error: Exception) -> None:
        """Take no more events. Earlier ones can still be read, except after SlowReader."""
        if self._error is None:
            self._error = error
        self._due = bool(self._events)
        if isinstance(error, SlowReader):
            self._drop()
        self._wake_in_turn()

    def _wake_in_turn(self) -> None:
        """Wake the reader for the end, which takes long: many that end at once take turns."""
        if self._waiter is not None:
            self._service.wake_in_turn(self)

    def wake(self) -> None:
        """Let the reader that waits go on."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _drop(self) -> None:
        """Let nothing more be read."""
        self._dropped = True
        self._due = False
        self._events.clear()
        self._outputs.clear()

    def overdue(self, now: float) -> bool:
        since = self._unread_since
        return (
            bool(self._events)
            and since is not None
            and (self._unread_bytes > MAX_UNREAD_BYTES or now - since > MAX_UNREAD_SECONDS)
        )

    def _make_text(self) -> None:
        self._making = True
        self._service.make_text(self)

    # -- called by the thread's owner

    def take(self) -> dict[int, list[ChoiceEvent]]:
        events, self._events = self._events, {}
        self._due, self._buffered = False, 0
        return events

    def make(self, events: dict[int, list[ChoiceEvent]]) -> list[tuple[Output, bool]]:
        """One output of each choice, and whether a stop text ended it. Runs in the thread."""
        return [
            self._choices[index].take(choice_events)
            for index, choice_events in events.items()
            # A stop text may have ended it before the engine has.
            if not self._choices[index].finished
        ]

    def deliver(self, outputs: list[tuple[Output, bool]]) -> None:
        self._making = False
        if not self._dropped:
            for output, stopped_early in outputs:
                self._outputs.append(output)
                if stopped_early:
                    self._service.stop_choice(self, output.index)
        if self._waiter is None:
            return
        if self._take is not None:
            self._forward(self._take)
        if self._rest is not None:
            self.wake()
        elif self._error is not None or self._finished:
            self._wake_in_turn()
        elif self._take is None:
            self.wake()
        elif self._due:
            self._make_text()

    def _forward(self, take: Take) -> None:
        """Let ``take`` have the outputs, up to one for whose rest the reader must wait."""
        try:
            while self._outputs and self._rest is None:
                self._rest = take(self._outputs.popleft())
        except Exception as error:  # noqa: BLE001 - the reader raises it
            self._drop()
            self._error = error

    def fail(self, error: Exception) -> None:
        """The text cannot be made: the stream ends with the error."""
        self._making = False
        self._events.clear()
        self.end(error)
