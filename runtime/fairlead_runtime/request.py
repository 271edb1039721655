"""Requests, their sampling parameters and the state of their sequences, for all other modules.

Owns SamplingParams, Request, Sequence and the table of state transitions. Knows no tensor, queue or
clock.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

MAX_CHOICES = 8
MAX_LOGPROBS = 20


class RequestError(ValueError):
    """The request is invalid. ``param`` names the field, the message says the fix."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self._message = message

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same error about the field's name in ``names``."""
        return type(self)(names.get(self.param, self.param), self._message)


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens, or the longest sequence that the model or cache holds
    ABORT = "abort"  # the client disconnected or the server drained
    ERROR = "error"  # this request failed


class Status(enum.StrEnum):
    """The state shown to users. The scheduler itself uses ``computed`` and ``len(tokens)``."""

    PENDING = "pending"  # waiting: not started yet, preempted or offloaded
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


# All transitions. Preemption leads back to PENDING; the last three states are final.
TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.PENDING: frozenset({Status.PREFILLING, Status.DECODING, Status.FAILED, Status.ABORTED}),
    Status.PREFILLING: frozenset(
        {Status.DECODING, Status.FINISHED, Status.PENDING, Status.FAILED, Status.ABORTED}
    ),
    Status.DECODING: frozenset({Status.FINISHED, Status.PENDING, Status.FAILED, Status.ABORTED}),
    Status.FINISHED: frozenset(),
    Status.FAILED: frozenset(),
    Status.ABORTED: frozenset(),
}
FINAL = frozenset(s for s, following in TRANSITIONS.items() if not following)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 disable those
    filters.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16  # None: as many as the model and the cache allow
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # k: of the chosen token and of the k likeliest

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_whole_number("top_k", self.top_k, 0, 2**31 - 1)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError(
                "top_p",
                "must be above 0 and at most 1; for greedy sampling set temperature to 0",
            )
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_whole_number("seed", self.seed, -(2**63), 2**63 - 1)
        _check_whole_number("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _check_whole_number("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_whole_number("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", f"{self.min_tokens} is above max_tokens, {self.max_tokens}: lower it"
            )
        for token in self.stop_token_ids:
            _check_whole_number("stop_token_ids", token, 0, 2**31 - 1)
        if len(self.stop_token_ids) > 64:
            raise RequestError("stop_token_ids", "has more than 64 ids: give at most 64")
        if self.logprobs is not None:
            _check_whole_number("logprobs", self.logprobs, 0, MAX_LOGPROBS)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(name, f"must be a finite number, not {value!r}"[:200])
    if not low <= value <= high:
        raise RequestError(name, f"must be from {low:g} to {high:g}, not {value:g}")


def _check_whole_number(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, f"must be a whole number, not {value!r}"[:200])
    if not low <= value <= high:
        raise RequestError(name, f"must be from {low} to {high}, not {value}"[:200])


@dataclass(frozen=True, slots=True)
class Request:
    """One client's request: n choices of one prompt. Immutable; its Sequences hold the state.

    ``seed`` and ``max_tokens`` are resolved: never None, as they may be in ``params``. ``salt``
    separates the prefix caches of tenants, ``eos_ids`` are the model's end-of-sequence ids. A lower
    ``priority`` runs first.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    priority: int = 0
    tenant: str = ""
    salt: bytes = b""
    eos_ids: frozenset[int] = frozenset()


class BlockHash(NamedTuple):
    """One full block in the hash chain: ``digest`` is sha256(``parent`` + ``tokens``)."""

    digest: bytes
    parent: bytes
    tokens: bytes  # the block's token ids, 8 bytes each


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. The scheduler orders sequences, a sequence holds blocks, and a batch
    row computes tokens of one sequence.

    ``tokens`` is prompt + generated; ``computed`` counts the leading tokens whose keys and values
    are in the cache; a token is sampled when ``computed`` reaches ``len(tokens)``. Until they
    start, the choices of a request share one list.
    """

    id: int  # unique within a scheduler, in order of arrival
    request: Request
    choice: int
    tokens: list[int]
    computed: int = 0
    status: Status = Status.PENDING
    preemptions: int = 0
    # one per layer group: block ids, NULL where freed
    tables: list[list[int]] = field(default_factory=list)
    # the same for units in host memory; empty unless offloaded
    host: list[list[int]] = field(default_factory=list)
    # of its leading full blocks, as far as hashed yet
    hashes: list[BlockHash] = field(default_factory=list)
    registered: int = 0  # leading full blocks that are in the prefix cache
    limit: int = 0  # tokens at which it ends: prompt + max_tokens
    stops: frozenset[int] = frozenset()  # end-of-sequence and stop ids that end it
    seniors: int = 0  # sequences that were live at its arrival; they bound its preemptions
    # the first step in which it was the next to start and lacked blocks; None once it starts
    blocked_since: int | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def move_to(self, status: Status) -> None:
        """Change the state. A transition that is not in the table is a bug in the caller."""
        if status is self.status:
            return
        if status not in TRANSITIONS[self.status]:
            raise RuntimeError(f"sequence {self.id}: no transition {self.status} → {status}")
        self.status = status
