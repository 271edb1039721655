"""Requests, their sampling parameters and the state of their sequences, for all other modules.

Owns SamplingParams, Request, Sequence and the table of state transitions. Knows no tensor, queue or
clock.
"""

import enum
import math
from array import array
from collections import abc
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from fairlead_runtime.request.logprobs import TokenLogprobs
from fairlead_runtime.request.structured import (
    PARAM,
    Reasoning,
    StructuredOutputs,
    StructuredOutputsError,
)

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_BIASES = 300
MAX_BIAS = 100.0
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 64
MAX_BAD_WORD_IDS = 64
MAX_STOPS = 32
MAX_STOP_CHARS = 256


class RequestError(ValueError):
    """The request is invalid. ``param`` names the field, the message says the fix."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self._message = message

    def renamed(self, names: abc.Mapping[str, str]) -> Self:
        """The error about the field's name in ``names``."""
        return type(self)(names.get(self.param, self.param), self._message)

    def placed(self, where: str) -> Self:
        """The error with the place of its request among several, in parentheses."""
        return type(self)(self.param, f"{self._message} ({where})")


class TooLongError(RequestError):
    """Prompt and max_tokens together exceed what one request may have: it can never run."""


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens, or the longest sequence that the model or cache holds
    ABORT = "abort"  # the client disconnected or the server drained
    ERROR = "error"  # this request failed


class FailureKind(enum.StrEnum):
    """The part of a request's run that failed."""

    INTERNAL = "internal"  # the server: clients do not get the message
    CONSTRAINTS = "constraints"  # the parameters exclude every token
    GRAMMAR = "grammar"  # of the structured output
    LENGTH = "length"  # it can never run: ``LLM`` alone has such an outcome


class Failure(NamedTuple):
    """The cause of FinishReason.ERROR."""

    message: str
    kind: FailureKind = FailureKind.INTERNAL

    def __str__(self) -> str:
        return f"{PARAM}: {self.message}" if self.kind is FailureKind.GRAMMAR else self.message


NOTHING_ALLOWED = Failure(
    "no token is allowed any more by allowed_token_ids, bad_words, min_tokens and the structured "
    "output together",
    FailureKind.CONSTRAINTS,
)


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
# Python 3.11 takes 0.2 µs to find a member in its class, which each row of a step would pay.
PREFILLING = Status.PREFILLING


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. temperature 0 is greedy, and so is top_p 0; top_k 0, top_p 1 and min_p
    0 disable those filters; the penalties' neutral values are 1 for repetition and 0 for the
    others.

    ``logit_bias`` may be given as a mapping and is kept as pairs, one ``stop`` as a text. A bad
    word is a text, or the ids of one; the engine takes ids only. ``min_tokens`` holds back end and
    stop ids and stop texts.

    ``structured_outputs`` may be given as a mapping of the fields of StructuredOutputs. An output
    that is complete ends there, before ``min_tokens`` and with ``ignore_eos`` too.
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
    repetition_penalty: float = 1.0  # on the tokens of prompt and output
    presence_penalty: float = 0.0  # this one and the next on the output's tokens only
    frequency_penalty: float = 0.0
    logit_bias: abc.Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    stop: str | tuple[str, ...] = ()  # texts that end a choice and are cut from it
    include_stop_str_in_output: bool = False  # do not cut the stop text, or a stop token's
    skip_special_tokens: bool = True  # False: special tokens are text, but for the one that ends it
    prompt_logprobs: int | None = None  # the same of each prompt token but the first
    structured_outputs: Any = None  # StructuredOutputs, or a mapping of its fields
    reasoning: Reasoning | None = None  # a bound on it; None: none

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_whole_number("top_k", self.top_k, 0, 2**31 - 1)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:  # only the likeliest token is left
            object.__setattr__(self, "temperature", 0.0)
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
        _check_ids("stop_token_ids", self.stop_token_ids)
        if len(self.stop_token_ids) > 64:
            raise RequestError("stop_token_ids", "has more than 64 ids: give at most 64")
        if self.logprobs is not None:
            _check_whole_number("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_whole_number("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _allowed(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "stop", _stops(self.stop))
        if self.structured_outputs is not None:
            try:
                outputs = StructuredOutputs.of(self.structured_outputs)
            except StructuredOutputsError as error:
                field = f".{error.field}" if error.field else ""
                raise RequestError(f"structured_outputs{field}", str(error)) from None
            object.__setattr__(self, "structured_outputs", outputs)

    @property
    def guided(self) -> StructuredOutputs | None:
        """``structured_outputs``, which is one of these by now."""
        outputs = self.structured_outputs
        return outputs if isinstance(outputs, StructuredOutputs) else None

    @property
    def penalizes(self) -> bool:
        """Whether a logit depends on the tokens before it."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = tuple(value.items() if isinstance(value, abc.Mapping) else value)
    if len(pairs) > MAX_BIASES:
        raise RequestError("logit_bias", f"has {len(pairs)} ids: give at most {MAX_BIASES}")
    for token, bias in pairs:
        _check_ids("logit_bias", (token,))
        _check_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    return tuple((token, float(bias)) for token, bias in pairs)


def _allowed(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not value:
        raise RequestError("allowed_token_ids", "is empty: give at least one id, or leave it out")
    _check_ids("allowed_token_ids", value)
    return tuple(value)


def _bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        raise RequestError("bad_words", "must be a list of words, not one word")
    words = tuple(word if isinstance(word, str) else tuple(word) for word in value)
    # A text becomes up to two sequences of ids: with a space before it, and without.
    if len(words) > (2 if any(type(word) is tuple for word in words) else 1) * MAX_BAD_WORDS:
        raise RequestError("bad_words", f"has more than {MAX_BAD_WORDS} words: give fewer")
    for word in words:
        if isinstance(word, str):
            if not 1 <= len(word) <= MAX_BAD_WORD_CHARS or not word.strip():
                raise RequestError(
                    "bad_words",
                    f"each word must have 1 to {MAX_BAD_WORD_CHARS} characters that are not all "
                    "spaces",
                )
        elif not 1 <= len(word) <= MAX_BAD_WORD_IDS:
            raise RequestError("bad_words", f"each word must have 1 to {MAX_BAD_WORD_IDS} ids")
        else:
            _check_ids("bad_words", word)
    return words


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) for text in stops):
        raise RequestError("stop", "must be text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise RequestError("stop", f"has {len(stops)} texts: give at most {MAX_STOPS}")
    if not all(1 <= len(text) <= MAX_STOP_CHARS for text in stops):
        raise RequestError("stop", f"each text must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def _check_ids(name: str, ids: abc.Iterable[object]) -> None:
    for token in ids:
        _check_whole_number(name, token, 0, 2**31 - 1)


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


def pack_ids(ids: abc.Sequence[int]) -> "array[int]":
    """Token ids in 4 bytes each, where a list takes about 40. Raises RequestError."""
    try:
        return array("i", ids)
    except OverflowError:
        raise RequestError("prompt", f"token ids must be from 0 to {2**31 - 1}") from None


@dataclass(frozen=True, slots=True)
class Request:
    """One client's request: n choices of one prompt. Immutable; its Sequences hold the state.

    ``prompt`` is kept as ``pack_ids`` returns it, and nobody changes it. ``seed`` and
    ``max_tokens`` are resolved: never None, as they may be in ``params``. ``salt`` separates the
    prefix caches of tenants, ``eos_ids`` are the model's end-of-sequence ids. A lower ``priority``
    runs first.
    """

    id: str
    prompt: abc.Sequence[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    priority: int = 0
    tenant: str = ""
    salt: bytes = b""
    eos_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, array):
            object.__setattr__(self, "prompt", pack_ids(self.prompt))


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One choice of a request. The scheduler orders sequences, a sequence holds blocks, and a batch
    row computes tokens of one sequence.

    ``tokens`` is prompt + generated; ``computed`` counts the leading tokens whose keys and values
    are in the cache; a token is sampled when ``computed`` reaches ``len(tokens)``. Until they
    start, the choices of a request share its prompt and the digests of its blocks.
    """

    id: int  # unique within a scheduler, in order of arrival
    request: Request
    choice: int
    tokens: abc.MutableSequence[int]
    computed: int = 0
    status: Status = Status.PENDING
    preemptions: int = 0
    # one per layer group: block ids, NULL where freed
    tables: list[list[int]] = field(default_factory=list)
    # Of a model with states, its versions: the units of each, in order. A step reads one and writes
    # the next, so that it can be repeated; ``turn`` counts the steps of it that are collected.
    states: list[list[int]] = field(default_factory=list)
    turn: int = 0
    branch: int = 0  # tokens that it shares with an earlier one that left no state there
    # Snapshots that it left where its chunks happened to end, and those of its generated text: the
    # full blocks up to each, and its units. Later ones take their place.
    passing: list[tuple[int, list[int]]] = field(default_factory=list)
    # the tables for units in host memory, and last the units of the state; empty unless offloaded
    host: list[list[int]] = field(default_factory=list)
    # digests of its leading full blocks, as far as hashed yet, one after another
    hashes: bytearray = field(default_factory=bytearray)
    registered: int = 0  # leading full blocks that are in the prefix cache
    limit: int = 0  # tokens at which it ends: prompt + max_tokens
    stops: frozenset[int] = frozenset()  # end-of-sequence and stop ids that end it
    seniors: int = 0  # sequences that were live at its arrival; they bound its preemptions
    # the first step in which blocks were reserved for it; None once it starts
    blocked_since: int | None = None
    # what the sampler keeps from step to step; it follows from the tokens and parameters alone
    sampler_notes: Any = None
    scored: int = 0  # leading tokens whose logits gave a log-probability, see ``scores_prompt``
    # of the prompt's tokens from the second on, until they leave with the first token
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # its place in the grammar of its structured output; the device's, which alone reads it
    guide: Any = None
    # Launched steps that compute it and are not collected, how many of its tokens they compute, and
    # how many they sample, which are not among ``tokens`` yet.
    steps_in_flight: int = 0
    computed_in_flight: int = 0
    sampled_in_flight: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def planned_length(self) -> int:
        """``computed`` once the steps in flight are collected."""
        return self.computed + self.computed_in_flight

    @property
    def length(self) -> int:
        """The number of ``tokens`` once the steps in flight are collected, unless one ends it."""
        return len(self.tokens) + self.sampled_in_flight

    @property
    def finishes_in_flight(self) -> bool:
        """Whether the steps in flight bring its last token, whatever that is."""
        return self.length >= self.limit

    @property
    def scores_prompt(self) -> bool:
        """Whether it must still compute logits of its prompt for prompt_logprobs. It then shares no
        block, since whoever computed that had no use for the logits. The first choice does it for
        all: the others wait for its blocks.
        """
        return (
            self.request.params.prompt_logprobs is not None
            and not self.choice
            and self.scored < len(self.request.prompt) - 1
        )

    @property
    def holds_units(self) -> bool:
        """Whether it has units of the device's pool."""
        return bool(self.tables or self.states)

    def state_source(self) -> list[int]:
        """The units of the state that its next step reads, after those in flight. A step from token
        0 on reads none: whatever lies there, it begins from zeros.
        """
        return self.states[(self.turn + self.steps_in_flight) % len(self.states)]

    def state_target(self) -> list[int]:
        """The units that this step writes its state to, which nobody else reads."""
        return self.states[(self.turn + self.steps_in_flight + 1) % len(self.states)]

    def launch(self, count: int, *, samples: bool) -> None:
        """A step that computes ``count`` of its tokens is in flight."""
        self.steps_in_flight += 1
        self.computed_in_flight += count
        self.sampled_in_flight += samples

    def collect(self, count: int, *, samples: bool) -> None:
        """The oldest step of it is not in flight any more, if one was."""
        if self.steps_in_flight:
            self.steps_in_flight -= 1
            self.computed_in_flight -= count
            self.sampled_in_flight -= samples

    def recall(self) -> None:
        """No step of it counts as launched."""
        self.steps_in_flight = self.computed_in_flight = self.sampled_in_flight = 0

    def move_to(self, status: Status) -> None:
        """Change the state. A transition that is not in the table is a bug in the caller."""
        if status is self.status:
            return
        if status not in TRANSITIONS[self.status]:
            raise RuntimeError(f"sequence {self.id}: no transition {self.status} → {status}")
        self.status = status
