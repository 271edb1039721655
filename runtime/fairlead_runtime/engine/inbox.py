"""The way into the engine, open to every thread: messages, the bound of the queue, and the engine's
sleep.

Owns the lock between the engine thread and the others, and counts who waits. Knows neither
scheduler nor device; the engine takes messages out, in order, between two steps.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from fairlead_runtime.engine.progress import Progress
from fairlead_runtime.outputs import EngineDead, QueueFull, RequestView, ServiceError
from fairlead_runtime.request import FinishReason, Request
from fairlead_runtime.scheduling.plan import Limits


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the queue may hold. ``queue_timeout`` in seconds."""

    max_queue: int
    queue_timeout: float
    max_requests: int
    num_blocks: int
    block_size: int
    max_model_len: int

    @classmethod
    def of(cls, limits: Limits, *, max_queue: int, queue_timeout: float) -> Self:
        sizes = (limits.num_blocks, limits.block_size, limits.max_model_len)
        return cls(max_queue, queue_timeout, limits.max_requests, *sizes)

    @property
    def capacity(self) -> int:
        """Tokens, prompt and output together, that one request may reach."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class Add:
    request: Request
    at: float  # seconds on the engine's clock
    counts: bool = True  # as one that waits; a canary does not


@dataclass(frozen=True, slots=True)
class Abort:
    """``error``: why the service ends it; None: its client wants it ended. ``reason`` is what
    statistics count.
    """

    request_id: str
    choice: int | None = None  # None: all of them
    reason: FinishReason = FinishReason.ABORT
    error: ServiceError | None = None


@dataclass(frozen=True, slots=True)
class Inspect:
    """Answered by the engine thread between two steps."""

    answer: Callable[[list[RequestView]], None]


Message = Add | Abort | Inspect


class Inbox:
    """``max_queue`` requests may wait beyond those that start at once; ``places`` of these start in
    the next step.
    """

    def __init__(
        self, max_queue: int, places: int, progress: Progress, now: Callable[[], float]
    ) -> None:
        self._max_queue = max_queue
        self._places = places
        self._progress = progress
        self._now = now
        self._messages: deque[Message] = deque()
        self._wake = threading.Condition()
        self._arriving = 0  # Adds among the messages, canaries aside
        self._queued = 0  # taken out, but in no step yet
        self._oldest: float | None = None  # when the one that waits longest came
        self._closed = ""
        self.stopping = False

    # -- any thread

    def add(self, request: Request, *, bounded: bool) -> None:
        """Raises QueueFull or, once closed, EngineDead; ``bounded`` False is for the engine's own
        canaries.
        """
        with self._wake:
            if self._closed:
                raise EngineDead(self._closed)
            if bounded and self.full:
                raise QueueFull(
                    f"{self._max_queue} requests wait already (max_queue)", self.patience()
                )
            self._arriving += bounded
            self.post(Add(request, self._now(), bounded))

    def post(self, message: Message) -> None:
        with self._wake:
            if self._closed:
                return
            if not self._progress.working:
                self._progress.begin()
            self._messages.append(message)
            self._wake.notify()

    def stop(self) -> None:
        with self._wake:
            self.stopping = True
            self._wake.notify()

    @property
    def queued(self) -> int:
        """Requests that no step has taken up yet."""
        return self._arriving + self._queued

    @property
    def full(self) -> bool:
        return self.queued - self._places >= self._max_queue

    def patience(self) -> float:
        """Seconds after which a retry is worth it: as long as the oldest in the queue has waited."""
        waited = self._now() - self._oldest if self._oldest is not None else 0.0
        return min(30.0, max(1.0, waited))

    # -- the engine thread

    def take(self) -> Message | None:
        """The oldest message; None when there is none."""
        with self._wake:
            if not self._messages:
                return None
            message = self._messages.popleft()
            if isinstance(message, Add):
                self._arriving -= message.counts
                self._queued += 1
            return message

    def settle(self, *, queued: int, oldest: float | None, places: int, working: bool) -> None:
        """After a step: who still waits, how many would start at once, whether there is more to do."""
        with self._wake:
            self._queued, self._oldest, self._places = queued, oldest, places
            self._progress.end(working=working or bool(self._messages))

    def wait(self, timeout: float | None) -> None:
        """Sleep until a message or ``stop`` comes, at most ``timeout`` seconds."""
        with self._wake:
            self._wake.wait_for(lambda: bool(self._messages) or self.stopping, timeout)

    def close(self, reason: str) -> list[Request]:
        """Take nothing more; the requests that were still on their way in."""
        with self._wake:
            self._closed = reason
            left = [message.request for message in self._messages if isinstance(message, Add)]
            self._messages.clear()
            return left
