"""Verdicts on whether structured outputs can be compiled: asked of a child process, remembered by
hash.

Owns the child, the cache of its verdicts and the bounds on waiting for it. Compiles nothing in this
process, so no input can stall or end it. Needs no event loop; ``check`` is for one.
"""

import asyncio
import dataclasses
import functools
import json
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import NamedTuple

from fairlead_runtime.child.process import command_of
from fairlead_runtime.child.program import ChildLost, ChildProgram
from fairlead_runtime.grammar.child import ANSWER, QUESTION, Check, Checked, Setup
from fairlead_runtime.grammar.compile import CheckLimits, TokenizerFacts
from fairlead_runtime.request.sequence import RequestError
from fairlead_runtime.request.structured import StructuredOutputs

MAX_WAITING = 32  # checks that wait or run; one more is refused
MAX_WAIT = 4.5  # seconds for a verdict, from asking; the child's own deadline is shorter
DEFAULT_LIMITS = CheckLimits()
COMMAND = command_of("fairlead_runtime.grammar.child")
# One arena: each further one takes 64 MiB of the address space that the child limits.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
MAX_CACHED = 4096  # verdicts, of a few hundred bytes each beside their texts
MAX_CACHED_TEXT = 16 * 1024 * 1024  # characters of these

NO_GRAMMARS = "this model has no end-of-sequence token, or a tokenizer that llguidance cannot read"
BUSY = "too many grammars wait to be compiled: retry"
LOST = "the program that compiles grammars ended: retry"


class Verdict(NamedTuple):
    error: str  # why it cannot be compiled; empty when it can
    compiled_bytes: int
    enforced: str = ""  # what the engine compiles in place of the source


class CheckerBusy(Exception):  # noqa: N818 - named for the condition, as queue.Full is
    """No verdict now: too many checks wait, or the child was lost. Retry."""

    def __init__(self, message: str = BUSY) -> None:
        super().__init__(message)


@dataclasses.dataclass(slots=True)
class CheckCounts:
    """Totals since the start. ``compilations`` is their number, ``refusals`` those that failed;
    ``hits`` are requests whose verdict was known, ``busy`` those that got none.
    """

    compilations: int = 0
    seconds: float = 0.0  # spent in compilations, by the clock
    refusals: int = 0
    hits: int = 0
    busy: int = 0


class Checker:
    """``facts``: of the model's tokenizer; None when the model cannot have structured output. The
    child starts with the first check. ``max_wait`` in seconds.
    """

    def __init__(
        self,
        facts: TokenizerFacts | None,
        *,
        limits: CheckLimits = DEFAULT_LIMITS,
        max_wait: float = MAX_WAIT,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        self.counts = CheckCounts()
        self._program: ChildProgram[Setup | Check, Checked] | None = None
        if facts is not None:
            setup = Setup(facts, limits)
            self._program = ChildProgram(command, setup, QUESTION, ANSWER, ENVIRONMENT)
        self._max_wait = max_wait
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()
        self._text = 0  # characters that the verdicts hold
        self._checks: dict[str, Future[Verdict]] = {}  # by digest

    @property
    def pending(self) -> int:
        """Checks that wait or run."""
        return len(self._checks)

    async def check(self, outputs: StructuredOutputs) -> StructuredOutputs:
        """The checked outputs with the memory that they take. Raises RequestError for what cannot
        be compiled, CheckerBusy when no verdict comes in time.
        """
        future = self.ask(outputs)
        try:
            # Shielded: another request may wait for the same verdict.
            verdict = await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(future)), timeout=self._max_wait
            )
        except TimeoutError:
            self.counts.busy += 1
            raise CheckerBusy from None
        return _judged(outputs, verdict)

    def check_now(self, outputs: StructuredOutputs) -> StructuredOutputs:
        """``check`` for a caller that may block."""
        return _judged(outputs, self.ask(outputs).result())

    def ask(self, outputs: StructuredOutputs) -> "Future[Verdict]":
        """The verdict, at once when it is known. Raises RequestError for a model without structured
        output and CheckerBusy.
        """
        if self._program is None:
            raise RequestError("structured_outputs", f"is not possible: {NO_GRAMMARS}")
        digest = outputs.digest
        with self._lock:
            known = self._verdicts.get(digest)
            if known is not None:
                self._verdicts.move_to_end(digest)
                self.counts.hits += 1
                future: Future[Verdict] = Future()
                future.set_result(known)
                return future
            if digest in self._checks:
                self.counts.hits += 1
                return self._checks[digest]
            if len(self._checks) >= MAX_WAITING:
                self.counts.busy += 1
                raise CheckerBusy
            future = self._checks[digest] = Future()
        question = Check(json.dumps(_fields(outputs)))
        self._program.ask(question).add_done_callback(functools.partial(self._answered, digest))
        return future

    def _answered(self, digest: str, answer: "Future[Checked]") -> None:
        """Runs in a thread of the child program."""
        with self._lock:
            future = self._checks.pop(digest)
            if isinstance(answer.exception(), ChildLost):
                verdict = None
            else:
                checked = answer.result()
                verdict = Verdict(checked.error, checked.size, checked.enforced)
                self._verdicts[digest] = verdict
                self._text += len(verdict.enforced)
                while len(self._verdicts) > MAX_CACHED or self._text > MAX_CACHED_TEXT:
                    _, oldest = self._verdicts.popitem(last=False)
                    self._text -= len(oldest.enforced)
                self.counts.compilations += 1
                self.counts.seconds += checked.seconds
                self.counts.refusals += bool(verdict.error)
        if verdict is None:
            future.set_exception(CheckerBusy(LOST))
        else:
            future.set_result(verdict)

    def close(self) -> None:
        """End the child and what it runs."""
        if self._program is not None:
            self._program.close()


def _judged(outputs: StructuredOutputs, verdict: Verdict) -> StructuredOutputs:
    if verdict.error:
        raise RequestError(f"structured_outputs.{outputs.kind}", verdict.error)
    return outputs.checked(verdict.compiled_bytes, verdict.enforced)


def _fields(outputs: StructuredOutputs) -> dict[str, object]:
    return {outputs.kind: getattr(outputs, outputs.kind)}
