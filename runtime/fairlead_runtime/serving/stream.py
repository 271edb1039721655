"""One submission's outputs: events from the engine in, Outputs to a possibly slow reader out.

Owns the buffer between the two and its limits. Makes text when it is read. Runs in the event loop's
thread.
"""

import asyncio
from collections import deque
from typing import Protocol, Self

from fairlead_runtime.outputs import ChoiceEvent, Output, ServiceError, SlowReader
from fairlead_runtime.serving.choice import ChoiceText

MAX_UNREAD_BYTES = 256 * 1024  # of one request, roughly counted
MAX_UNREAD_SECONDS = 60.0  # age of a request's oldest unread output
EVENT_BYTES = 64  # of one event; each log-probability counts as much again


class StreamOwner(Protocol):
    """The methods of the service that a stream calls."""

    async def cancel(self, request_id: str) -> bool: ...
    def stop_choice(self, stream: "Stream", choice: int) -> None: ...


class Stream:
    """The outputs of one submission; see outputs.OutputStream."""

    def __init__(
        self, request_id: str, service: StreamOwner, choices: dict[int, ChoiceText]
    ) -> None:
        self.request_id = request_id
        self.cached_tokens = 0
        self._service = service
        self._choices = choices
        self._unfinished = set(choices)  # choices that the engine has not finished
        self._events: dict[int, list[ChoiceEvent]] = {}
        self._outputs: deque[Output] = deque()
        self._error: ServiceError | None = None
        self._changed = asyncio.Event()
        self._unread_bytes = 0  # that came after the reader's first chance to read
        self._unread_since: float | None = None  # time of that chance; None before it
        self._unread_turn = 0  # the turn of the first unread event

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            self._read()
            if self._outputs:
                break
            if self._error is not None:
                raise self._error
            if all(choice.finished for choice in self._choices.values()):
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._outputs.popleft()

    async def aclose(self) -> None:
        """Abort the choices that still run; their blocks are free one step later."""
        if self._unfinished:
            await self._service.cancel(self.request_id)
        self.end(ServiceError("the stream was closed"))

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
        if event.finish is not None:
            self._unfinished.discard(event.choice)
        if self._error is None:
            if not self._events:
                self._unread_bytes, self._unread_since, self._unread_turn = 0, None, turn
            self._events.setdefault(event.choice, []).append(event)
            if turn != self._unread_turn:
                self._unread_since = now if self._unread_since is None else self._unread_since
                self._unread_bytes += EVENT_BYTES * (
                    1 + (len(event.logprobs.top_ids) if event.logprobs else 0)
                )
            self.cached_tokens = event.cached or self.cached_tokens
            self._changed.set()
        return not self._unfinished

    def end(self, error: ServiceError) -> None:
        """Take no more events. Earlier ones can still be read, except after SlowReader."""
        if self._error is None:
            self._error = error
        if isinstance(error, SlowReader):
            self._events.clear()
        self._changed.set()

    def overdue(self, now: float) -> bool:
        since = self._unread_since
        return (
            bool(self._events)
            and since is not None
            and (self._unread_bytes > MAX_UNREAD_BYTES or now - since > MAX_UNREAD_SECONDS)
        )

    def _read(self) -> None:
        events, self._events = self._events, {}
        for index, choice_events in events.items():
            choice = self._choices[index]
            if choice.finished:
                continue  # a stop text ended it; the engine has not ended it yet
            output, stopped_early = choice.take(choice_events)
            self._outputs.append(output)
            if stopped_early:
                self._service.stop_choice(self, index)
