"""Messages from other threads to the engine, the limit of the queue, and the engine's sleep.

Owns the lock between the engine thread and the others, and counts waiting requests. Knows neither
scheduler nor device; the engine takes messages out, in order, between two steps.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from fairlead_runtime.engine.progress import StepProgress
from fairlead_runtime.outputs import EngineDead, QueueFull, ServiceError
from fairlead_runtime.request.sequence import Failure, FinishReason, Request, TooLongError
from fairlead_runtime.scheduling.admission import refusal
from fairlead_runtime.scheduling.plan import Limits
from fairlead_runtime.sizing.traffic import QUEUED_CHOICES, Bound, waiting_tokens

MEASURED_STEPS = 64  # in which requests left the queue: the last ones, by which it drains
LONGEST_RETRY = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the queue and on one request. ``queue_timeout`` in seconds, ``waiting`` in prompt
    tokens.
    """

    max_queue: int
    queue_timeout: float
    max_requests: int
    num_blocks: int
    block_size: int
    max_model_len: int
    waiting: Bound
    cache_tokens: int | None = None  # as in Limits

    @classmethod
    def of(
        cls, limits: Limits, *, max_queue: int, queue_timeout: float, waiting: Bound | None = None
    ) -> Self:
        """``waiting``: by default what memory that nobody counted holds."""
        rows, longest = limits.max_requests, limits.max_model_len
        waiting = waiting or waiting_tokens(max_queue, rows, longest)
        sizes = (limits.num_blocks, limits.block_size, longest)
        return cls(max_queue, queue_timeout, rows, *sizes, waiting, limits.cache_tokens)

    @property
    def capacity(self) -> int:
        """The most tokens of one request, prompt and output together."""
        tokens = self.cache_tokens
        held = self.num_blocks * self.block_size if tokens is None else tokens
        return min(self.max_model_len, held)

    def resolve_max_tokens(self, prompt_len: int, max_tokens: int | None) -> int:
        """``max_tokens``, or the largest value that fits when it is omitted. Raises TooLongError
        for a request that can never fit.
        """
        if message := refusal(self, prompt_len, max_tokens):
            raise TooLongError("prompt" if max_tokens is None else "max_tokens", message)
        return max_tokens or self.capacity - prompt_len


class Guide(Protocol):
    """The beginning of a structured output. The device knows what it holds."""

    def fork(self) -> Any:
        """The beginning for one sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Add:
    request: Request
    arrived: float  # seconds on the engine's clock
    hashes: bytearray  # of its prompt's blocks
    bounded: bool = True  # counts towards max_queue; a canary does not


@dataclass(frozen=True, slots=True)
class Abort:
    """``error``: why the service ends the request; None when its client does. Metrics count
    ``reason``.
    """

    request_id: str
    choice: int | None = None  # None: all choices
    reason: FinishReason = FinishReason.ABORT
    error: ServiceError | None = None


@dataclass(frozen=True, slots=True)
class Inspect:
    """The engine thread calls ``look`` between two steps, and ``answer`` with what it returns, or
    with None when it raised. A look may evict what nobody holds; it changes nothing else.
    """

    look: Callable[[], Any]
    answer: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A compilation has ended: each of the request's sequences gets a fork of its Guide."""

    request: Request
    outcome: Guide | Failure


Message = Add | Abort | Inspect | Prepared


class Inbox:
    """``max_queue`` requests may wait, besides those that start in the next step, as many as slots
    are free. Together they may have ``waiting`` prompt tokens, those of preempted sequences
    included, and QUEUED_CHOICES choices for each that may wait; a single one may have more.
    """

    def __init__(self, bounds: Bounds, progress: StepProgress, now: Callable[[], float]) -> None:
        self._max_queue, self._most_tokens = bounds.max_queue, bounds.waiting
        self._free_slots = bounds.max_requests
        self._progress = progress
        self._now = now
        self._messages: deque[Message] = deque()
        self._wake = threading.Condition()
        self._arriving = 0  # Adds among the messages, without canaries
        self._waiting = 0  # requests taken out that have not had a step yet
        self._known = 0  # those among them that the engine counted after its last step
        self._arriving_tokens = self._waiting_tokens = 0  # their prompt tokens
        self._arriving_choices = self._waiting_choices = 0
        self._oldest: float | None = None  # arrival of the request that waits longest
        # When the queue began to drain, then when requests left it, and how many; empty while
        # nobody waits.
        self._departures: deque[tuple[float, int]] = deque(maxlen=MEASURED_STEPS + 1)
        self._closed = ""  # why no request is accepted; empty while the inbox is open
        self.rejected_requests = self.rejected_tokens = 0  # requests refused, by the limit
        self.stopping = False

    # -- any thread

    def add(
        self, request: Request, hash_prompt: Callable[[Request], bytearray], *, bounded: bool
    ) -> None:
        """Raises QueueFull or, once closed, EngineDead. Canaries pass ``bounded`` False.

        The prompt of a request that may wait is hashed here: a long one would stall the engine's
        thread.
        """
        with self._wake:
            self._check_open()
            if bounded and (message := self._refusal(request)):
                raise QueueFull(message, self.retry_after())
            self._count_arriving(request, bounded)
            arrived = self._now()
        try:
            hashes = hash_prompt(request)
        except BaseException:  # memory may run out; what never comes must not keep its place
            with self._wake:
                self._count_arriving(request, -bounded)
            raise
        with self._wake:
            self._check_open()
            self.post(Add(request, arrived, hashes, bounded))

    def _count_arriving(self, request: Request, requests: int) -> None:
        """Count so many requests with this prompt more: 1, 0 or -1."""
        self._arriving += requests
        self._arriving_tokens += requests * len(request.prompt)
        self._arriving_choices += requests * request.params.n

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(self._closed)

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
        """Requests that have not had a step yet."""
        return self._arriving + self._waiting

    @property
    def arriving(self) -> int:
        """Requests that came since the last step."""
        return self.queued - self._known

    def _refusal(self, request: Request) -> str:
        """The reason why the request must not wait, with the arithmetic; "" if it may. Counts the
        refusal.
        """
        if self.queued - self._free_slots >= self._max_queue:
            self.rejected_requests += 1
            return f"{self._max_queue} requests wait already (max_queue)"
        if not self.queued:
            return ""
        choices = self._arriving_choices + self._waiting_choices
        most = QUEUED_CHOICES * self._max_queue
        if choices + request.params.n - self._free_slots > most:
            self.rejected_requests += 1
            return (
                f"{choices} choices wait already; {request.params.n} more exceed {most} "
                f"({QUEUED_CHOICES} * max_queue {self._max_queue}): retry later, or lower n"
            )
        tokens, prompt_tokens = self._arriving_tokens + self._waiting_tokens, len(request.prompt)
        if tokens + prompt_tokens <= self._most_tokens.most:
            return ""
        self.rejected_tokens += 1
        return (
            f"the requests that wait have {tokens} prompt tokens; {prompt_tokens} more exceed "
            f"{self._most_tokens.most} ({self._most_tokens.text()}): retry later"
        )

    def retry_after(self) -> float:
        """Seconds after which to retry: in which the queue empties as fast as it did lately. While
        none has left it, as long as the oldest request has waited.
        """
        now, departures = self._now(), sum(count for _, count in [*self._departures][1:])
        seconds = now - self._oldest if self._oldest is not None else 0.0
        if departures:
            seconds = self.queued * (now - self._departures[0][0]) / departures
        return min(LONGEST_RETRY, max(1.0, seconds))

    # -- the engine thread

    def take(self) -> Message | None:
        """The oldest message; None when there is none."""
        with self._wake:
            if not self._messages:
                return None
            message = self._messages.popleft()
            if isinstance(message, Add):
                self._count_arriving(message.request, -message.bounded)
                self._waiting += message.bounded
                self._waiting_tokens += message.bounded * len(message.request.prompt)
                self._waiting_choices += message.bounded * message.request.params.n
            return message

    def after_step(
        self,
        *,
        queued: int,
        tokens: int,
        choices: int,
        oldest: float | None,
        free_slots: int,
        working: bool,
    ) -> None:
        """Record the queue after a step, its prompt tokens and choices, and whether there is more
        work.
        """
        with self._wake:
            self._measure(self._waiting - queued, queued)
            self._waiting = self._known = queued
            self._oldest, self._free_slots = oldest, free_slots
            self._waiting_tokens, self._waiting_choices = tokens, choices
            self._progress.end(working=working or bool(self._messages))

    def _measure(self, departures: int, queued: int) -> None:
        """Note how many left the queue in a step. Those that found a free slot do not count: the
        queue drains from the first step on after which somebody waits.
        """
        if not queued:
            self._departures.clear()
        elif departures or not self._departures:
            self._departures.append((self._now(), departures))

    def wait(self, timeout: float | None) -> None:
        """Sleep until a message or ``stop`` comes, for at most ``timeout`` seconds."""
        with self._wake:
            self._wake.wait_for(lambda: bool(self._messages) or self.stopping, timeout)

    def close(self, reason: str) -> list[Request]:
        """Accept no more messages; return the requests that were not taken out."""
        with self._wake:
            self._closed = reason
            requests = [message.request for message in self._messages if isinstance(message, Add)]
            self._messages.clear()
            return requests
