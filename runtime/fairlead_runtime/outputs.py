"""What crosses the service's face: a submission going in, outputs, errors and views coming out.

Owns these plain values and nothing else. Every one could be sent over a socket, so that the engine
can move to a process of its own without its clients noticing. Imports neither torch nor asyncio.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

from fairlead_runtime.logprobs import Logprob, TokenLogprobs
from fairlead_runtime.request import FinishReason, SamplingParams, Status
from fairlead_runtime.scheduling.plan import Work
from fairlead_runtime.scheduling.scheduler import SchedulerStats


class ServiceError(Exception):
    """A submission the service cannot serve now, through no fault of the request's.

    ``code`` is a stable word for clients and logs, ``retry_after`` the seconds after which a retry
    is worth it.
    """

    code = "unavailable"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(ServiceError):  # noqa: N818 - named for the condition, as queue.Full is
    """``max_queue`` requests wait already. HTTP: 429 with Retry-After."""

    code = "queue_full"


class QueueTimeout(ServiceError):  # noqa: N818 - named for the condition, as queue.Full is
    """Waited ``queue_timeout`` seconds for a first step. HTTP: 503 with Retry-After."""

    code = "queue_timeout"


class Draining(ServiceError):  # noqa: N818 - named for the condition, as queue.Full is
    """The server is going away: a new request is refused, or a running one outlived the drain.
    HTTP: 503.
    """

    code = "draining"


class EngineDead(ServiceError):  # noqa: N818 - named for the condition, as queue.Full is
    """The engine gave up after failing again and again; the process is about to end. HTTP: 503."""

    code = "engine_dead"


class SlowReader(ServiceError):  # noqa: N818 - named for the condition, as queue.Full is
    """The client read its stream so slowly that its output no longer fits the buffer; the request
    was aborted.
    """

    code = "slow_reader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request as a client means it; the service resolves seed, max_tokens and end-of-sequence
    ids.

    ``prompt`` are token ids within the vocabulary. ``stop`` are texts that end a choice and are cut
    from it. ``id`` must be unique among live requests; empty: the service makes one. ``priority``
    runs lower first.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str = ""
    tenant: str = ""
    salt: bytes = b""
    priority: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """What one choice gained since its last Output; a reader that lags gets several steps in one.

    ``text`` never ends within a character. ``logprobs`` has one mapping (token id → Logprob) per
    token id when asked for. The last Output of a choice, and only it, has a ``finish_reason``;
    ERROR brings a ``message``, and ``stop_reason`` is the stop token's id or the stop text that
    ended the choice.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    message: str = ""


class Emitted(NamedTuple):
    """One event of one choice as the engine publishes it. ``token`` None: it ended without a
    further token.
    """

    request_id: str
    choice: int
    token: int | None
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
    message: str = ""
    error: ServiceError | None = None  # the whole request ends with it
    cached: int = 0  # prompt tokens found in the prefix cache


@dataclass(frozen=True, slots=True)
class RequestView:
    """One live request in /debug/requests. No prompt and no text: counts only."""

    id: str
    status: Status
    tenant: str
    priority: int
    age: float  # seconds since submission
    prompt_tokens: int
    generated_tokens: tuple[int, ...]  # per choice
    max_tokens: int
    blocks: int
    preemptions: int
    waits_for: str  # why it is not running, in words; empty when it runs


@dataclass(frozen=True, slots=True)
class Health:
    """``alive`` false: restart the process. ``ready`` false: send no traffic. ``reason`` says why,
    in words.
    """

    alive: bool
    ready: bool
    reason: str = ""
    last_step_age: float | None = None  # seconds; None while there is no work


@dataclass(slots=True)
class Counters:
    """Totals of one engine since its start."""

    steps: int = 0
    rows: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    step_seconds: float = 0.0
    step_failures: int = 0  # steps in which something raised
    failed_sequences: int = 0
    engine_faults: int = 0  # failures without a culprit
    invariant_violations: int = 0
    queue_timeouts: int = 0
    slow_readers: int = 0
    batch_sizes: dict[int, int] = field(default_factory=dict)  # rows of a step → how many steps

    def count(self, work: Work, seconds: float) -> None:
        """Add one executed step."""
        size = len(work.rows)
        self.steps += 1
        self.rows += size
        self.computed_tokens += sum(row.count for row in work.rows)
        self.generated_tokens += sum(row.samples for row in work.rows)
        self.step_seconds += seconds
        self.batch_sizes[size] = self.batch_sizes.get(size, 0) + 1


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """A consistent picture of the engine after its last step, for metrics and the debug view.

    ``scheduler`` is the scheduler's own statistics; ``queued`` counts submissions that have not
    had a first step yet.
    """

    scheduler: SchedulerStats
    counters: Counters
    queued: int
    num_blocks: int
    block_size: int
    max_model_len: int


class OutputStream(Protocol):
    """The outputs of one submission, all choices interleaved; ends after every choice has finished.

    Iterating raises a ServiceError when the whole request ended for a reason that is not its own.
    ``aclose`` (or leaving ``async with``) cancels what still runs, also when iteration never began.
    ``cached_tokens`` are the prompt tokens found in the prefix cache, known from the first Output
    on; 0 before.
    """

    request_id: str
    cached_tokens: int

    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> Output: ...
    async def aclose(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc: object) -> None: ...


class Drained(NamedTuple):
    """What became of the requests that ran when a drain began; canaries are none."""

    finished: int
    aborted: int  # cut off when the time was up


class ServiceFace(Protocol):
    """The one narrow face between HTTP and the engine; fairlead_runtime.serving.service.Service is
    it.
    """

    max_model_len: int  # tokens one request may have, prompt and output together

    async def submit(self, submission: Submission) -> OutputStream:
        """Raises RequestError (HTTP 400, with the arithmetic), QueueFull, Draining or EngineDead
        before any output.
        """
        ...

    async def cancel(self, request_id: str) -> bool:
        """Abort a live request; False when there is none of that id."""
        ...

    def begin_drain(self) -> None:
        """Refuse new submissions from now on; running ones go on. Callable from a signal handler."""
        ...

    async def drain(self, grace: float) -> Drained:
        """begin_drain, wait for running requests up to ``grace`` seconds, abort the rest."""
        ...

    async def canary(self, patience: float = 10.0) -> int:
        """One token through the real engine, in no request metric: its id. Raises ServiceError
        after ``patience`` seconds.
        """
        ...

    def snapshot(self) -> EngineSnapshot: ...
    def health(self) -> Health: ...
    async def requests(self) -> list[RequestView]: ...
