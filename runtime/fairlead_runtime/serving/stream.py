"""One submission's way back: events in from the engine, Outputs out to a reader who may be slow.

Owns the buffer between the two and its bound. Text is made when it is read. Belongs to the event
loop's thread.
"""

import asyncio
from collections import deque
from typing import Protocol, Self

from fairlead_runtime.outputs import Emitted, Output, ServiceError, SlowReader
from fairlead_runtime.serving.gather import Choice

MAX_HELD = 256 * 1024  # bytes of unread output one request may hold, by a rough count
MAX_UNREAD = 60.0  # seconds its oldest unread output may lie there
EVENT_COST = 64  # bytes an event takes; each log-probability as much again


class Owner(Protocol):
    """What a stream asks of the service."""

    async def cancel(self, request_id: str) -> bool: ...
    def stop_choice(self, request_id: str, choice: int) -> None: ...


class Stream:
    """The outputs of one submission; see outputs.OutputStream."""

    def __init__(self, request_id: str, service: Owner, choices: dict[int, Choice]) -> None:
        self.request_id = request_id
        self.cached_tokens = 0
        self._service = service
        self._choices = choices
        self._open = set(choices)  # those the engine has not finished
        self._events: dict[int, list[Emitted]] = {}
        self._ready: deque[Output] = deque()
        self._error: ServiceError | None = None
        self._changed = asyncio.Event()
        self._held = 0
        self._unread_since = 0.0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._ready:
            self._read()
            if self._ready:
                break
            if self._error is not None:
                raise self._error
            if all(choice.finished for choice in self._choices.values()):
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Abort what still runs; the blocks are free one step later."""
        if self._open:
            await self._service.cancel(self.request_id)
        self.end(ServiceError("the stream was closed"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def push(self, event: Emitted, now: float) -> bool:
        """Take an event of the engine, which costs nothing but memory until somebody reads; True
        with the last.
        """
        if event.error is not None:
            self._open.clear()
            self.end(event.error)
            return True
        if event.finish is not None:
            self._open.discard(event.choice)
        if self._error is None:
            if not self._events:
                self._held, self._unread_since = 0, now
            self._events.setdefault(event.choice, []).append(event)
            self._held += EVENT_COST * (1 + (len(event.logprobs.top_ids) if event.logprobs else 0))
            self.cached_tokens = event.cached or self.cached_tokens
            self._changed.set()
        return not self._open

    def end(self, error: ServiceError) -> None:
        """No more is taken; what came before is still read, but for a reader too slow to get there."""
        if self._error is None:
            self._error = error
        if isinstance(error, SlowReader):
            self._events.clear()
        self._changed.set()

    def overdue(self, now: float) -> bool:
        return bool(self._events) and (
            self._held > MAX_HELD or now - self._unread_since > MAX_UNREAD
        )

    def _read(self) -> None:
        events, self._events = self._events, {}
        for index, of_choice in events.items():
            choice = self._choices[index]
            if choice.finished:
                continue  # a stop text ended it before the engine heard of it
            output, early = choice.take(of_choice)
            self._ready.append(output)
            if early:
                self._service.stop_choice(self.request_id, index)
