"""Which structured outputs can be compiled: asked of a child process, remembered by hash.

Owns the child, the cache of its verdicts and the bounds on waiting for it. Compiles nothing in this
process, so no input can stall or end it. Needs no event loop; ``check`` is for one.
"""

import asyncio
import contextlib
import dataclasses
import os
import queue
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, BinaryIO, NamedTuple, cast

from fairlead_runtime.grammar import frames
from fairlead_runtime.grammar.compile import CheckLimits, TokenizerFacts
from fairlead_runtime.request import RequestError
from fairlead_runtime.structured import StructuredOutputs

MAX_WAITING = 32  # checks that wait or run; one more is refused
MAX_WAIT = 4.5  # seconds for a verdict, from asking; the child's own deadline is shorter
DEFAULT_LIMITS = CheckLimits()
# -P: the working directory is no place for modules.
COMMAND = (sys.executable, "-P", "-m", "fairlead_runtime.grammar.child")
MAX_CACHED = 4096  # verdicts, of a few hundred bytes each

NO_GRAMMARS = "this model has no end-of-sequence token, or a tokenizer that llguidance cannot read"
BUSY = "too many grammars wait to be compiled: retry"
LOST = "the program that compiles grammars ended: retry"


class Verdict(NamedTuple):
    error: str  # why it cannot be compiled; empty when it can
    compiled_bytes: int


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
        self._facts = facts
        self._limits = limits
        self._max_wait = max_wait
        self._command = command
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()
        self._asked: dict[str, Future[Verdict]] = {}  # by digest
        self._digests: dict[int, str] = {}  # of the checks that the child has, by number
        self._numbers = 0
        self._child: _Child | None = None

    @property
    def pending(self) -> int:
        """Checks that wait or run."""
        return len(self._asked)

    async def check(self, outputs: StructuredOutputs) -> StructuredOutputs:
        """The same outputs with the memory that they take. Raises RequestError for what cannot be
        compiled, CheckerBusy when no verdict comes in time.
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
        if self._facts is None:
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
            if digest in self._asked:
                self.counts.hits += 1
                return self._asked[digest]
            if len(self._asked) >= MAX_WAITING:
                self.counts.busy += 1
                raise CheckerBusy
            self._numbers += 1
            future = self._asked[digest] = Future()
            self._digests[self._numbers] = digest
            if self._child is None:
                self._child = self._start(self._facts)
            self._child.send({"number": self._numbers, "outputs": _fields(outputs)})
            return future

    def _start(self, facts: TokenizerFacts) -> "_Child":
        setup = {"facts": dataclasses.asdict(facts), "limits": dataclasses.asdict(self._limits)}
        return _Child(self._command, setup, self._answered, self._lost)

    # -- on the threads of the child

    def _answered(self, message: dict[str, Any]) -> None:
        verdict = Verdict(message["error"], message["bytes"])
        with self._lock:
            digest = self._digests.pop(message["number"])
            future = self._asked.pop(digest)
            self._verdicts[digest] = verdict
            while len(self._verdicts) > MAX_CACHED:
                self._verdicts.popitem(last=False)
            self.counts.compilations += 1
            self.counts.seconds += message["seconds"]
            self.counts.refusals += bool(verdict.error)
        future.set_result(verdict)

    def _lost(self, child: "_Child") -> None:
        """The child ended, by itself or by ``close``: the next check starts another."""
        with self._lock:
            if self._child is child:
                self._child = None
            lost, self._asked = [*self._asked.values()], {}
            self._digests.clear()
        for future in lost:
            future.set_exception(CheckerBusy(LOST))

    def close(self) -> None:
        """End the child and what it runs."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """One run of the child program. Two threads talk to it, because a pipe may block: one starts it
    and writes what ``send`` queues, one reads verdicts and calls ``answered``, then ``ended`` once.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        setup: dict[str, Any],
        answered: Callable[[dict[str, Any]], None],
        ended: Callable[["_Child"], None],
    ) -> None:
        self._answered = answered
        self._ended = ended
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._messages.put(setup)
        # One arena: each further one takes 64 MiB of the address space that the child limits.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and our own module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        for work in (self._write, self._read):
            threading.Thread(target=work, name="grammar-check", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        self._messages.put(message)

    def end(self) -> None:
        """Close its input, upon which it kills what it runs and ends."""
        self._messages.put(None)

    def _write(self) -> None:
        pipe = cast("BinaryIO", self._process.stdin)
        with contextlib.suppress(BrokenPipeError), pipe:
            while (message := self._messages.get()) is not None:
                frames.write(pipe, message)

    def _read(self) -> None:
        with cast("BinaryIO", self._process.stdout) as pipe:
            while (message := frames.read(pipe)) is not None:
                self._answered(message)
        self._process.wait()
        self._messages.put(None)  # ends the other thread
        self._ended(self)


def _judged(outputs: StructuredOutputs, verdict: Verdict) -> StructuredOutputs:
    if verdict.error:
        raise RequestError(f"structured_outputs.{outputs.kind}", verdict.error)
    return outputs.checked(verdict.compiled_bytes)


def _fields(outputs: StructuredOutputs) -> dict[str, Any]:
    return {outputs.kind: getattr(outputs, outputs.kind)}
