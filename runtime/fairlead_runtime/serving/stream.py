"""One submission's outputs: events from the engine in, Outputs to a possibly slow reader out.

Owns the buffer between the two and its limits. Lets text be made when a reader waits for it, in
``text_thread``; all else runs in the event loop's thread.
"""

import asyncio
from collections import deque
from typing import Protocol, Self

from fairlead_runtime.outputs import ChoiceEvent, Output, ServiceError, SlowReader, StreamTimes
from fairlead_runtime.serving.choice import ChoiceText

MAX_UNREAD_BYTES = 256 * 1024  # of one request, roughly counted
MAX_UNREAD_SECONDS = 60.0  # age of a request's oldest unread output
EVENT_BYTES = 64  # of one event; each log-probability counts as much again


class StreamOwner(Protocol):
    """The methods of the service that a stream calls."""

    async def cancel(self, request_id: str) -> bool: ...
    def make_text(self, stream: "Stream") -> None: ...
    def stop_choice(self, stream: "Stream", choice: int) -> None: ...


class Stream:
    """The outputs of one submission; see outputs.OutputStream."""

    def __init__(
        self,
        request_id: str,
        service: StreamOwner,
        choices: dict[int, ChoiceText],
        times: StreamTimes | None = None,
    ) -> None:
        self.request_id = request_id
        self.times = times or StreamTimes()
        self._service = service
        self._choices = choices
        self._unfinished = set(choices)  # choices that the engine has not finished
        self._events: dict[int, list[ChoiceEvent]] = {}
        self._outputs: deque[Output] = deque()
        self._error: Exception | None = None
        self._dropped = False
        self._waiter: asyncio.Future[None] | None = None  # the reader, for the next output
        self._making = False  # the thread makes the next outputs, or will in this turn
        self._unread_bytes = 0  # that came after the reader's first chance to read
        self._unread_since: float | None = None  # time of that chance; None before it
        self._unread_turn = 0  # the turn of the first unread event

    @property
    def cached_tokens(self) -> int:
        return self.times.cached_tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            if not self._making:
                if self._events:
                    self._make_text()
                    continue
                if self._error is not None:
                    raise self._error
                if all(choice.finished for choice in self._choices.values()):
                    raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

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
            if not self._events:
                self._unread_bytes, self._unread_since, self._unread_turn = 0, None, turn
            self._events.setdefault(event.choice, []).append(event)
            if turn != self._unread_turn and not self._making:
                self._unread_since = now if self._unread_since is None else self._unread_since
                self._unread_bytes += EVENT_BYTES * (
                    1 + (len(event.logprobs.top_ids) if event.logprobs else 0)
                )
            if self._waiter is not None and not self._making:
                self._make_text()
        return not self._unfinished

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
        if isinstance(error, SlowReader):
            self._drop()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _drop(self) -> None:
        """Let nothing more be read."""
        self._dropped = True
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
        self._wake()

    def fail(self, error: Exception) -> None:
        """The text cannot be made: the stream ends with the error."""
        self._making = False
        self._events.clear()
        self.end(error)
