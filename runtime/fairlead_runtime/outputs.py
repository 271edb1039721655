"""The values that cross the interface between HTTP and engine: submissions in, outputs, errors and
views out.

Every value can be sent over a socket: the engine may run in a process of its own
(``serving.wire``).
Imports neither torch nor asyncio.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, Self

from fairlead_runtime.request.logprobs import Logprob, PromptLogprobs, TokenLogprobs
from fairlead_runtime.request.sequence import Failure, FinishReason, SamplingParams, Status
from fairlead_runtime.scheduling.plan import Work
from fairlead_runtime.scheduling.scheduler import SchedulerStats


class ServiceError(Exception):
    """The service cannot serve a valid submission now.

    ``code`` is a stable word for clients and logs; ``retry_after``: retry after that many seconds.
    """

    code = "unavailable"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(ServiceError):  # noqa: N818 - named for the condition, as queue.Full is
    """``max_queue`` requests wait already. HTTP: 429 with Retry-After."""

    code = "queue_full"


class QueueTimeout(ServiceError):  # noqa: N818 - named for the condition, as queue.Full is
    """The request waited ``queue_timeout`` seconds for its first step. HTTP: 429 with
    Retry-After.
    """

    code = "queue_timeout"


class GrammarsBusy(ServiceError):  # noqa: N818 - named for the condition, as queue.Full is
    """Too many grammars wait to be compiled. HTTP: 429 with Retry-After."""

    code = "grammars_busy"


class Draining(ServiceError):  # noqa: N818 - named for the condition, as queue.Full is
    """The server is shutting down: it refuses a new request, or a running one outlived the drain.
    HTTP: 503.
    """

    code = "draining"


class EngineDead(ServiceError):  # noqa: N818 - named for the condition, as queue.Full is
    """The engine gave up after repeated failures; the process is about to end. HTTP: 503."""

    code = "engine_dead"


class TextLate(ServiceError):  # noqa: N818 - named for the condition, as queue.Full is
    """The text of an answer was not made within its deadline. HTTP: 503."""

    code = "text_late"


class SlowReader(ServiceError):  # noqa: N818 - named for the condition, as queue.Full is
    """The client read its stream too slowly for the buffer, so the request was aborted."""

    code = "slow_reader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request as a client sends it; the service resolves seed, max_tokens and end-of-sequence
    ids.

    ``prompt``: token ids within the vocabulary. ``id``: if a live request has it, the service
    appends to it; if empty, the service makes one. ``priority``: lower runs first.
    ``visible_tokens``: special tokens that make text, which others do not. ``whole``: nothing is
    shown before the end, so outputs may come seldom and late.
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str = ""
    tenant: str = ""
    salt: bytes = b""
    priority: int = 0
    visible_tokens: frozenset[int] = frozenset()
    whole: bool = False


class Output(NamedTuple):
    """The part of one choice that was generated since its last Output; a slow reader gets several
    steps in one.

    ``text`` never ends within a character. ``logprobs``, if requested, has one mapping (token id →
    Logprob) per token id. Only the last Output of a choice has a ``finish_reason``. ERROR comes
    with a ``failure``. ``stop_reason`` is the stop token's id or the stop text that ended the
    choice. ``prompt_logprobs``, in the first Output of the first choice if requested, has an entry
    per prompt token, None for the first. ``lengths``: the characters of ``text`` that each token
    made final, where the tokens are several; what the end adds belongs to none.
    """

    index: int  # type: ignore[assignment]  # hides the method of tuples
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    failure: Failure | None = None
    prompt_logprobs: PromptLogprobs | None = None
    lengths: tuple[int, ...] = ()


# Takes an Output; what it returns must be awaited before it takes the next.
Take = Callable[[Output], Coroutine[Any, Any, None] | None]


class ChoiceEvent(NamedTuple):
    """One event of one choice from the engine. ``token`` None: the choice ended without a further
    token.
    """

    request_id: str
    choice: int
    token: int | None
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
    failure: Failure | None = None
    error: ServiceError | None = None  # ends the whole request
    cached: int = 0  # prompt tokens found in the prefix cache
    started: float = 0.0  # of the request's first step, on the engine's clock; with a token
    # of the prompt's tokens from the second on, with the first token of the first choice
    prompt: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestView:
    """One live request in /debug/requests: counts only, no prompt and no text."""

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
    waits_for: str  # why it is not running, in words; empty while it runs
    computed_tokens: int = 0  # of the choice that is furthest
    cached_tokens: int = 0  # of the prompt, found in the prefix cache


class BlockState(StrEnum):
    FREE = "free"
    CACHED = "cached"  # has content that a later request may share; evicted when others are gone
    REFERENCED = "held"  # by one or several sequences


@dataclass(frozen=True, slots=True)
class BlockRun:
    """``count`` neighbouring units of one state from ``first`` on. ``references``: sequences that
    hold each of them. ``requests``: the first few of each tenant's requests that hold one, as
    places in ``CacheView.requests``.
    """

    first: int
    count: int
    state: BlockState
    references: int
    requests: tuple[int, ...]


WHOLE_CACHE = -1  # in place of a map's first unit: all units, in cells of several if they are many


@dataclass(frozen=True, slots=True)
class CacheView:
    """The cache in /debug/cache: counts of all its units, and the map of those from ``start`` to
    ``end`` (exclusive). A unit is a block of one of the ``groups`` of layers. A cell of
    ``per_cell`` units (the last one may have fewer) is held if one of them is, else cached if one
    is, and has the most references of one.
    """

    block_size: int  # tokens
    groups: int
    units: int
    free: int
    cached: int
    host_units: int
    host_free: int
    start: int
    end: int
    requests: tuple[str, ...]
    blocks: tuple[BlockRun, ...]
    per_cell: int = 1


@dataclass(frozen=True, slots=True)
class CacheReset:
    """What a reset of the prefix cache did, in units of the block map: how many were ``evicted``,
    and how many requests ``held`` and keep.
    """

    evicted: int
    held: int


@dataclass(frozen=True, slots=True)
class Health:
    """``alive`` False: restart the process. ``ready`` False: send no traffic. ``reason``: why, in
    words.
    """

    alive: bool
    ready: bool
    reason: str = ""
    last_step_age: float | None = None  # seconds; None while there is no work


@dataclass(frozen=True, slots=True)
class EngineState:
    """The values that health is judged by. ``step_age`` and ``step_allowance`` in seconds: since
    the last progress (None while there is no work), and how long the running step may take.
    """

    dead_reason: str  # why the engine gave up; empty while it runs
    not_ready_reason: str  # why it should get no new traffic; empty when it is ready
    step_age: float | None
    step_allowance: float


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a loaded model and its configuration by which submissions become requests.

    ``seed`` is the default for requests without one.
    """

    eos_ids: frozenset[int]
    vocab_size: int
    seed: int


@dataclass(slots=True)
class Counters:
    """Totals of one engine since its start."""

    steps: int = 0
    rows: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    step_seconds: float = 0.0
    # launched before their tokens could be known: all of these are sampled on the device
    steps_launched: int = 0
    step_failures: int = 0  # steps in which something raised
    failed_sequences: int = 0
    engine_faults: int = 0  # failures that no single request caused
    invariant_violations: int = 0
    contained_errors: int = 0  # exceptions in metrics and views, which end no request
    queue_timeouts: int = 0
    rejected_requests: int = 0  # because max_queue requests wait
    rejected_tokens: int = 0  # because the requests that wait have too many prompt tokens
    slow_readers: int = 0
    # of structured output
    grammar_compilations: int = 0  # in the checking child
    grammar_seconds: float = 0.0  # that they took by the clock
    grammar_refusals: int = 0  # grammars that cannot be compiled
    grammar_cache_hits: int = 0  # requests whose grammar was known
    grammar_busy: int = 0  # requests refused because too many compilations wait
    grammars_pending: int = 0  # that wait or run now
    batch_sizes: dict[int, int] = field(default_factory=dict)  # rows of a step → number of steps

    def count(self, work: Work, seconds: float) -> None:
        """Add one executed step."""
        size = len(work.rows)
        self.steps += 1
        self.rows += size
        self.computed_tokens += sum([row.count for row in work.rows])
        self.generated_tokens += sum([row.samples for row in work.rows])
        self.step_seconds += seconds
        self.batch_sizes[size] = self.batch_sizes.get(size, 0) + 1


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The state of the engine after its last step, for metrics and the debug view.

    ``scheduler``: the scheduler's own statistics. It does not know the requests that came since
    (``arriving``) and those whose grammar is being compiled (``preparing``).
    """

    scheduler: SchedulerStats
    counters: Counters
    arriving: int
    num_blocks: int
    block_size: int
    max_model_len: int
    preparing: int = 0


@dataclass(slots=True)
class StreamTimes:
    """The times of one submission, on the machine's monotonic clock, in seconds; None: not yet.
    ``tokens``: of all choices together.
    """

    submitted: float = 0.0
    started: float | None = None  # its first step
    first_token: float | None = None
    last_token: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0


class OutputStream(Protocol):
    """The outputs of one submission, all choices interleaved; ends after every choice has finished.

    Iterating raises the ServiceError that ended the whole request. ``aclose`` (or leaving ``async
    with``) cancels the choices that still run, even if iteration never began. ``cached_tokens``:
    prompt tokens found in the prefix cache; 0 before the first Output.
    """

    request_id: str

    @property
    def cached_tokens(self) -> int: ...
    @property
    def times(self) -> StreamTimes: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> Output: ...
    async def forward(self, take: Take) -> None:
        """Let ``take`` have every Output, each as soon as it is made, until the stream ends. What
        comes while its result is awaited is one Output. Raises as iterating does, and what
        ``take`` raises.
        """
        ...

    async def aclose(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc: object) -> None: ...


class DrainResult(NamedTuple):
    """Counts of how the requests that ran when a drain began, or came in its grace, have ended;
    without canaries.
    """

    finished: int
    aborted: int  # still running when the drain timed out


class EngineClient(Protocol):
    """The interface between HTTP and the engine, implemented by
    fairlead_runtime.serving.service.Service.
    """

    max_model_len: int  # tokens one request may have, prompt and output together

    async def submit(self, submission: Submission) -> OutputStream:
        """Raises RequestError (HTTP 400, with the arithmetic), QueueFull, Draining or EngineDead
        before any output.
        """
        ...

    async def cancel(self, request_id: str) -> bool:
        """Abort a live request; False when no live request has that id."""
        ...

    def begin_drain(self) -> None:
        """Report not ready; new submissions are still served, and the drain's result counts
        them.
        """
        ...

    def refuse_new(self) -> None:
        """Refuse new submissions; running ones go on."""
        ...

    def resume(self) -> None:
        """Undo begin_drain and refuse_new."""
        ...

    async def drain(self, max_wait: float, waited: float = 0.0) -> DrainResult:
        """begin_drain, refuse_new, wait for running requests up to ``max_wait`` seconds, abort the
        rest with an error that names these seconds and those already ``waited`` for.
        """
        ...

    async def canary(self, max_wait: float = 10.0) -> int:
        """Generate one token with the real engine, counted by no request metric, and return its id.
        Raises ServiceError after ``max_wait`` seconds.
        """
        ...

    def health(self) -> Health: ...
    async def requests(self) -> list[RequestView]: ...

    async def cache(self, start: int) -> CacheView:
        """The map of the blocks from unit ``start`` on."""
        ...

    async def reset_prefix_cache(self) -> CacheReset:
        """Evict every cached block that no request holds; running requests go on."""
        ...
