"""The tokens that each sequence with structured output may take next, as bit masks, in the engine's
process.

Owns the compiled grammars, the state of each sequence in its grammar, and the threads that compile
and fill masks: a mask is made while the model runs. The state follows from the sequence's tokens
alone, so chunks, preemption, offload, prefix hits and reruns of a step change nothing. Compiles
only what a ``checker`` has accepted.
"""

import codecs
import copy
import logging
import threading
import time
from collections import OrderedDict, abc, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from fairlead_runtime.child.threads import be_nicer
from fairlead_runtime.grammar.compile import (
    JSON_TEXT,
    GrammarError,
    TokenizerFacts,
    check,
    compile_matcher,
    lexer_fuel,
    mark_ids,
)
from fairlead_runtime.request.sequence import Failure, FailureKind, Sequence
from fairlead_runtime.request.structured import TOO_COMPLEX, Reasoning, StructuredOutputs

CACHE_BYTES = 128 * 1024 * 1024  # of compiled grammars that no sequence needs
USE_BYTES = 512 * 1024  # that a kept grammar counts for its growth at least; usual ones take less
FUEL_BYTES = 48  # that a unit of a lexer's work adds to its states; at most 37 were measured
# A grammar that has grown by more is not kept: outputs that share its states share their limit.
GROWN_BYTES = 16 * 1024 * 1024
LOOK_SECONDS = 0.005  # of a processor, between two looks, which take 0.1 ms
# A mask takes milliseconds; where one takes longer than this, of a processor, its sequence fails
# rather than hold up the others.
MASK_SECONDS = 2.0
LATE_LOOK_SECONDS = 0.25  # by the clock, between two looks for such masks
COMPILER_NICE = 5  # no step waits for a compilation: the steps go first
STACK = 16 * 1024 * 1024  # of our threads: eight times that in which the grammar was checked

log = logging.getLogger("fairlead.grammar")

Array = np.ndarray[Any, np.dtype[Any]]


class Growth:
    """Bytes by which a compiled grammar has grown: copies of a matcher share the states of its
    lexer, which it keeps. The processor's time decides only when to look. ``is_spent``: it is not
    worth keeping. Without a matcher nothing grows.
    """

    def __init__(self, matcher: LLMatcher | None = None) -> None:
        self.nbytes = 0
        self.is_spent = False
        self._fuel = 0 if matcher is None else lexer_fuel(matcher)
        self._seconds = 0.0  # since the last look; threads may lose some of each other's

    def count(self, matcher: LLMatcher, seconds: float) -> None:
        """Count a mask of the matcher, a copy, that took so long."""
        self._seconds += seconds
        if self._seconds >= LOOK_SECONDS:
            self._seconds = 0.0
            self.nbytes = max(self.nbytes, FUEL_BYTES * (lexer_fuel(matcher) - self._fuel))
            self.is_spent |= self.nbytes > GROWN_BYTES


class Guide:
    """One sequence's place in its grammars, which must all allow a token. ``at_end``: nothing but
    the end may follow. ``reasoning``: the mark that must come before the output, or, without
    grammars, that ends what may take only so many tokens. ``growth``: of the first grammar,
    counted with all copies.
    """

    __slots__ = ("_eos", "_followed", "_mask", "_matchers", "_reasoning", "at_end", "growth")

    def __init__(
        self,
        matchers: abc.Sequence[LLMatcher],
        mask: Array,
        eos: Array,
        growth: Growth,
        reasoning: "ReasoningEnd | None" = None,
    ) -> None:
        self.at_end = False
        self.growth = growth
        self._matchers = matchers
        self._mask = mask  # after ``_followed`` generated tokens; not changed, only replaced
        self._eos = eos
        self._followed = 0
        self._reasoning = reasoning  # None: over

    def fork(self) -> "Guide":
        """Copy the place for another sequence."""
        reasoning = copy.copy(self._reasoning)
        matchers = [matcher.deep_copy() for matcher in self._matchers]
        return Guide(matchers, self._mask, self._eos, self.growth, reasoning)

    def mask(self, sequence: Sequence) -> Array:
        """int32 words: token i is bit i % 32 of word i // 32, lowest bit first. Raises
        GrammarError.
        """
        generated = sequence.tokens[sequence.prompt_len :]
        if len(generated) > self._followed:
            mask = self._follow(generated[self._followed :])
            if self._reasoning is not None and self._reasoning.comes_in(
                generated[self._followed :]
            ):
                self._reasoning = None
            self._followed = len(generated)
            self._mask = mask
        reasoning = self._reasoning
        if reasoning is not None and reasoning.begun and self._is_due(reasoning, sequence):
            return reasoning.only_next(self._mask)
        if not self._matchers:
            return self._mask
        text_mask = self._mask & ~self._eos
        self.at_end = not text_mask.any()
        return text_mask if sequence.request.params.ignore_eos and not self.at_end else self._mask

    def _is_due(self, reasoning: "ReasoningEnd", sequence: Sequence) -> bool:
        """Whether the reasoning must end: its tokens are used up, or half of all where an output
        must follow.
        """
        request = sequence.request
        bound = request.params.reasoning
        if bound is not None and reasoning.tokens >= bound.most:
            return True
        return bool(self._matchers) and sequence.generated >= request.max_tokens // 2

    def _follow(self, tokens: abc.Sequence[int]) -> Array:
        """The mask after these tokens. Raises GrammarError."""
        began = time.thread_time()
        try:
            for matcher in self._matchers:
                matcher.consume_tokens([*tokens])
                check(matcher)
            mask = fill(self._matchers, len(self._mask))
        except GrammarError:
            self.growth.is_spent = True  # a lexer at its limit fails for every copy
            raise
        if self._matchers:
            self.growth.count(self._matchers[0], time.thread_time() - began)
        return mask


class ReasoningEnd:
    """The mark that ends a model's reasoning. Knows how much of it the text so far ends with.
    ``begin``: the mark that the model begins to reason with; "" where the prompt has begun it.
    ``tokens``: of the reasoning so far.
    """

    def __init__(self, tokenizer: LLTokenizer, mark: str, begin: str = "") -> None:
        self.tokens = 0
        self._tokenizer = tokenizer
        self._begin = begin.encode()
        self._head = b""  # the text before it has begun
        self._mark = mark.encode()
        # By the length of what is written of the mark, the token that goes on with it.
        rests = [mark_ids(tokenizer, mark[size:]) for size in range(len(mark))]
        self._next = [ids[0] for ids in rests]
        self._tail = b""

    @property
    def begun(self) -> bool:
        return not self._begin

    def comes_in(self, tokens: abc.Sequence[int]) -> bool:
        """Whether the reasoning is over, or does not come, once these tokens follow."""
        for place, token in enumerate(tokens):
            if self.begun:
                return self._ends_in(tokens[place:])
            self._head = (self._head + self._tokenizer.decode_bytes([token])).lstrip()
            if self._head.startswith(self._begin):
                self._tail = self._head[len(self._begin) :]
                self._begin = b""
                if self._mark in self._tail:
                    return True
            elif not self._begin.startswith(self._head):
                return True
        return False

    def _ends_in(self, tokens: abc.Sequence[int]) -> bool:
        """Whether the mark is complete once these tokens of the reasoning follow."""
        self.tokens += len(tokens)
        text = self._tail + self._tokenizer.decode_bytes([*tokens])
        self._tail = text[-len(self._mark) :]
        return self._mark in text

    def only_next(self, mask: Array) -> Array:
        """The mask of the token that goes on with the mark, where ``mask`` allows that; within a
        character it does not, or it would if it allowed all.
        """
        if _within_character(self._tail):
            return mask
        size = next(
            n for n in reversed(range(len(self._mark))) if self._tail.endswith(self._mark[:n])
        )
        word, bit = divmod(self._next[size], 32)
        only = np.zeros_like(mask)
        only.view(np.uint32)[word] = mask.view(np.uint32)[word] & np.uint32(1 << bit)
        return only if only.any() else mask


def _within_character(text: bytes) -> bool:
    """Whether UTF-8 wants more bytes after this one's last character."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(text)
    return bool(decoder.getstate()[0])


def fill(matchers: abc.Sequence[LLMatcher], words: int) -> Array:
    """The mask of what all matchers allow, made without the interpreter's lock. Raises
    GrammarError.
    """
    masks = np.empty((len(matchers), words), dtype=np.int32)
    for matcher, mask in zip(matchers, masks, strict=True):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        check(matcher)
    common: Array = np.bitwise_and.reduce(masks)
    return common


class Masks(NamedTuple):
    """The masks by sequence id, and for a sequence without one the reason."""

    words: Mapping[int, Array]
    failed: Mapping[int, Failure]


NO_MASKS = Masks({}, {})


class _Round:
    """Masks made by all threads, each of which takes the next sequence when it has made one: a
    sequence costs no task of its own.
    """

    def __init__(self, guides: "Guides", sequences: abc.Sequence[Sequence]) -> None:
        self._guides = guides
        self._rest = deque(sequences)
        self._outcomes: dict[int, Array | GrammarError] = {}
        # By thread that makes a mask: the clock of its processor time, and what it was before.
        self._begun: dict[int, tuple[int, float]] = {}
        self._tasks = guides.start(self._make, len(sequences))

    def _make(self) -> None:
        """One thread's part."""
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        while (sequence := self._next()) is not None:
            self._begun[thread] = clock, time.thread_time()
            try:
                self._outcomes[sequence.id] = sequence.guide.mask(sequence)
            except GrammarError as error:
                self._outcomes[sequence.id] = error
            finally:
                del self._begun[thread]

    def _next(self) -> Sequence | None:
        try:
            return self._rest.popleft()
        except IndexError:
            return None

    def wait(self) -> tuple[Mapping[int, Array | GrammarError], abc.Sequence[Sequence]]:
        """What is made, by sequence id, and the sequences that no thread has begun, where masks
        that take longer than MASK_SECONDS have all threads. They are left to these.
        """
        self._wait_for_threads()
        rest = list(iter(self._next, None))
        late = self._wait_for_threads()  # a thread may have begun another one meanwhile
        if late:
            self._guides.replace_threads()
        for task in self._tasks:
            if task not in late:
                task.result()  # raises what is no fault of a grammar
        return self._outcomes.copy(), rest

    def _wait_for_threads(self) -> "set[Future[None]]":
        """Wait until each has ended or is late with a mask. Returns the tasks of the late ones."""
        running = wait(self._tasks, timeout=LATE_LOOK_SECONDS).not_done
        while self._late() < len(running):
            running = wait(self._tasks, timeout=LATE_LOOK_SECONDS).not_done
        return running

    def _late(self) -> int:
        """How many threads make a mask that takes longer than MASK_SECONDS."""
        return sum(
            time.clock_gettime(clock) - began >= MASK_SECONDS
            for clock, began in self._begun.copy().values()
        )


class PendingMasks:
    """Masks that are being made. As a context it ends when no thread works on them any more, or
    they were given up.
    """

    def __init__(self, guides: "Guides", sequences: abc.Sequence[Sequence]) -> None:
        self._guides = guides
        self._sequences = sequences
        self._round = _Round(guides, sequences)
        self._masks: Masks | None = None

    def result(self) -> Masks:
        """Wait for them."""
        if self._masks is None:
            self._masks = self._wait()
        return self._masks

    def _wait(self) -> Masks:
        words: dict[int, Array] = {}
        failed: dict[int, Failure] = {}
        sequences = self._sequences
        while sequences:
            outcomes, rest = self._round.wait()
            behind = {sequence.id for sequence in rest}
            for sequence in sequences:
                outcome = outcomes.get(sequence.id)
                if isinstance(outcome, np.ndarray):
                    words[sequence.id] = outcome
                elif sequence.id not in behind:
                    failed[sequence.id] = _failure(sequence, outcome)
            if rest:
                self._round = _Round(self._guides, rest)
            sequences = rest
        return Masks(words, failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.result()


def _failure(sequence: Sequence, error: GrammarError | None) -> Failure:
    """The failure of a sequence of which there is no mask; without an error it is late."""
    if error is None:
        log.warning("the mask of a grammar is late", extra=_named(sequence))
    else:
        log.warning("no mask of a grammar: %s", error, extra=_named(sequence))
    return Failure(TOO_COMPLEX, FailureKind.GRAMMAR)


def _named(sequence: Sequence) -> dict[str, str]:
    """The field of a log line that says whose mask it is."""
    return {"request_id": sequence.request.id}


class Guides:
    """The grammars of one engine. ``threads``: how many fill masks."""

    def __init__(self, facts: TokenizerFacts, *, threads: int = 1) -> None:
        self._tokenizer: LLTokenizer = facts.build()
        self._words = facts.words
        self._eos = np.zeros(facts.words, dtype=np.int32)
        for token in facts.eos_ids:
            self._eos.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._threads = threads
        self._compiler = _pool(1, nice=COMPILER_NICE)
        self._fillers = _pool(threads)
        self._cached: OrderedDict[str, tuple[Guide, int]] = OrderedDict()
        self._json_texts: dict[str, LLMatcher] = {}  # of JSON_TEXT, by the mark before it

    def prepare(
        self, outputs: StructuredOutputs | Reasoning, done: Callable[[Guide | Failure], None]
    ) -> None:
        """Compile on another thread, then call ``done`` there with a guide to ``fork`` for each
        sequence, or with a Failure.
        """
        self._compiler.submit(self._prepare, outputs, done)

    def _prepare(
        self, outputs: StructuredOutputs | Reasoning, done: Callable[[Guide | Failure], None]
    ) -> None:
        try:
            guide = self.compile(outputs)
        except GrammarError as error:
            done(Failure(str(error), FailureKind.GRAMMAR))
        except Exception as error:
            log.exception("a grammar could not be compiled")
            message = f"cannot be compiled ({type(error).__name__})"
            done(Failure(message, FailureKind.GRAMMAR))
        else:
            done(guide)

    def _bounded(self, reasoning: Reasoning) -> Guide:
        """A guide that allows everything until the reasoning must end."""
        end = ReasoningEnd(self._tokenizer, reasoning.end, reasoning.begin)
        return Guide((), fill((), self._words), self._eos, Growth(), end)

    def compile(self, outputs: StructuredOutputs | Reasoning) -> Guide:
        """A guide at the start of the output, with its first mask. For one thread at a time. Raises
        GrammarError.
        """
        if isinstance(outputs, Reasoning):
            return self._bounded(outputs)
        for spent in [key for key, (guide, _) in self._cached.items() if guide.growth.is_spent]:
            del self._cached[spent]
        key = outputs.digest + outputs.reasoning_end
        if key not in self._cached:
            size = outputs.compiled_bytes + 4 * self._words
            self._cached[key] = self._compile(outputs), size
        self._cached.move_to_end(key)
        while self.cached_bytes() > CACHE_BYTES and len(self._cached) > 1:
            self._cached.popitem(last=False)
        return self._cached[key][0]

    def _compile(self, outputs: StructuredOutputs) -> Guide:
        end, is_json = outputs.reasoning_end, outputs.kind in ("json", "json_object")
        matchers = [compile_matcher(self._tokenizer, outputs)]
        if is_json:
            matchers.append(self._json_text(end))
        reasoning = ReasoningEnd(self._tokenizer, end) if end else None
        mask = fill(matchers, self._words)
        return Guide(matchers, mask, self._eos, Growth(matchers[0]), reasoning)

    def cached_bytes(self) -> int:
        """Bytes of the compiled grammars that are kept, with what they have grown to."""
        return sum(
            size + max(USE_BYTES, guide.growth.nbytes) for guide, size in self._cached.values()
        )

    def _json_text(self, end: str) -> LLMatcher:
        """A matcher of JSON_TEXT behind the mark; compiling it takes longer than most schemas."""
        if end not in self._json_texts:
            grammar = JSON_TEXT.after_reasoning(end)
            self._json_texts[end] = compile_matcher(self._tokenizer, grammar)
        return self._json_texts[end].deep_copy()

    def masks(self, sequences: abc.Sequence[Sequence]) -> PendingMasks:
        """Start the masks of sequences that have a guide."""
        return PendingMasks(self, sequences)

    def start(self, fill_masks: Callable[[], None], rows: int) -> "list[Future[None]]":
        """Call the function in every thread that fills masks, in no more than there are rows."""
        return [self._fillers.submit(fill_masks) for _ in range(min(self._threads, rows))]

    def replace_threads(self) -> None:
        """Leave the threads that fill masks to what they do, and go on with others."""
        self._fillers.shutdown(wait=False)
        self._fillers = _pool(self._threads)


def _pool(threads: int, nice: int = 0) -> ThreadPoolExecutor:
    """Threads with a larger stack: compiling and matching recurse over the grammar."""
    pool = ThreadPoolExecutor(
        threads, thread_name_prefix="grammar", initializer=lambda: be_nicer(nice)
    )
    before = threading.stack_size(STACK)
    try:
        started = threading.Barrier(threads + 1)
        for _ in range(threads):
            pool.submit(started.wait)
        started.wait()
    finally:
        threading.stack_size(before)
    return pool
