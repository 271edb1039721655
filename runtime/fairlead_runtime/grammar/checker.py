"""Verdicts on whether structured outputs can be compiled: asked of a child process, remembered by
hash.

Owns the child, the cache of its verdicts, the order in which tenants ask it and the bounds on
waiting for it. Compiles nothing in this process, so no input can stall or end it. Needs no event
loop; ``check`` is for one.
"""

import asyncio
import dataclasses
import functools
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

from fairlead_runtime.child.process import command_of
from fairlead_runtime.child.program import ChildLost, ChildProgram
from fairlead_runtime.grammar.child import ANSWER, MAX_FORKS, QUESTION, Check, Checked, Setup
from fairlead_runtime.grammar.compile import CheckLimits, TokenizerFacts
from fairlead_runtime.grammar.gbnf import why_by_characters
from fairlead_runtime.request.sequence import RequestError
from fairlead_runtime.request.structured import StructuredOutputs
from fairlead_runtime.request.tenant_queue import TenantQueue

MAX_WAITING = 32  # checks that wait or run; one more of the tenant that has most is refused
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
LATE = "the grammar was not compiled in time, since the processor is busy: retry"

log = logging.getLogger("fairlead.grammar")

Key = tuple[str, str]  # a check's tenant and its grammar's digest


class Verdict(NamedTuple):
    error: str  # why it cannot be compiled; empty when it can
    compiled_bytes: int
    enforced: str = ""  # what the engine compiles in place of the source


class CheckerBusy(Exception):  # noqa: N818 - named for the condition, as queue.Full is
    """No verdict now: too many checks wait, the processor is busy or the child was lost. Retry."""

    def __init__(self, message: str = BUSY) -> None:
        super().__init__(message)


@dataclasses.dataclass(slots=True)
class CheckCounts:
    """Totals since the start. ``compilations`` is the number of those with a verdict, ``refusals``
    of those that failed; ``hits`` are requests whose verdict was known, ``busy`` those that got
    none.
    """

    compilations: int = 0
    seconds: float = 0.0  # spent in compilations, by the clock
    refusals: int = 0
    hits: int = 0
    busy: int = 0


@dataclasses.dataclass(slots=True)
class _OpenCheck:
    """One that waits or runs, and how many wait for it."""

    question: Check
    future: "Future[Verdict]" = dataclasses.field(default_factory=Future)
    waiters: int = 1


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
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()  # by digest
        self._text = 0  # characters that the verdicts hold
        self._checks: dict[Key, _OpenCheck] = {}
        self._waiting = TenantQueue[Key]()
        self._running: list[Key] = []

    @property
    def pending(self) -> int:
        """Checks that wait or run."""
        return len(self._checks)

    async def check(self, outputs: StructuredOutputs, tenant: str = "") -> StructuredOutputs:
        """The checked outputs with the memory that they take. Raises RequestError for what cannot
        be compiled, CheckerBusy when no verdict comes in time.
        """
        try:
            verdict = await self._verdict(self.ask(outputs, tenant), (tenant, outputs.digest))
        except (TimeoutError, CheckerBusy) as error:
            self.counts.busy += 1
            raise CheckerBusy(str(error) or BUSY) from None
        return _judged(outputs, verdict)

    async def _verdict(self, future: "Future[Verdict]", key: Key) -> Verdict:
        """Wait for it, at most ``max_wait``. Raises TimeoutError and CheckerBusy."""
        try:
            # Shielded: another request may wait for the same verdict.
            shielded = asyncio.shield(asyncio.wrap_future(future))
            return await asyncio.wait_for(shielded, timeout=self._max_wait)
        finally:
            self._leave(key, future)

    def _leave(self, key: Key, future: "Future[Verdict]") -> None:
        """Wait for a check no longer; one that nobody waits for does not run."""
        with self._lock:
            check = self._checks.get(key)
            if check is None or check.future is not future:
                return  # it has ended
            check.waiters -= 1
            unneeded = [] if check.waiters or key in self._running else self._end([key])
        for ended in unneeded:
            ended.cancel()

    def check_now(self, outputs: StructuredOutputs) -> StructuredOutputs:
        """``check`` for a caller that may block."""
        return _judged(outputs, self.ask(outputs).result())

    def ask(self, outputs: StructuredOutputs, tenant: str = "") -> "Future[Verdict]":
        """The verdict, at once when it is known. Its exception is CheckerBusy. Raises RequestError
        for a model without structured output and CheckerBusy.
        """
        if self._program is None:
            raise RequestError("structured_outputs", f"is not possible: {NO_GRAMMARS}")
        key = tenant, outputs.digest
        with self._lock:
            future = self._known(key)
            if future is not None:
                self.counts.hits += 1
                return future
            refusals = self._make_room(tenant)
            check = self._checks[key] = _OpenCheck(Check(json.dumps(_fields(outputs))))
            self._waiting.add(tenant, key)
        for refusal in refusals:
            refusal.set_exception(CheckerBusy())
        self._start()
        return check.future

    def _known(self, key: Key) -> "Future[Verdict] | None":
        """The verdict that is there, or that the tenant waits for, with one waiter more."""
        _, digest = key
        verdict = self._verdicts.get(digest)
        if verdict is None:
            if (check := self._checks.get(key)) is None:
                return None
            check.waiters += 1
            return check.future
        self._verdicts.move_to_end(digest)
        future: Future[Verdict] = Future()
        future.set_result(verdict)
        return future

    def _make_room(self, tenant: str) -> "list[Future[Verdict]]":
        """What no longer waits, so that a check of the tenant may. Raises CheckerBusy where no
        other tenant has more.
        """
        refusals: list[Future[Verdict]] = []
        while len(self._checks) >= MAX_WAITING:
            last = self._waiting.make_room(tenant)
            if last is None:
                raise CheckerBusy
            refusals += self._end([last])
        return refusals

    def _end(self, keys: Iterable[Key]) -> "list[Future[Verdict]]":
        """Let these checks neither wait nor run. Returns those that did."""
        ended = [(key, self._checks.pop(key)) for key in keys if key in self._checks]
        for (tenant, digest), _ in ended:
            self._waiting.discard(tenant, (tenant, digest))
        return [check.future for _, check in ended]

    def _start(self) -> None:
        """Ask the child whatever it may be asked now."""
        while self._program is not None and (first := self._first()) is not None:
            key, question = first
            answer = self._program.ask(question)
            answer.add_done_callback(functools.partial(self._answered, key))

    def _first(self) -> tuple[Key, Check] | None:
        """The check whose turn it is, which runs from now on. Those of a named tenant run one at a
        time: it never has the whole child.
        """
        with self._lock:
            busy = {tenant for tenant, _ in self._running if tenant}
            if len(self._running) >= MAX_FORKS or (turn := self._waiting.take(busy)) is None:
                return None
            _, key = turn
            self._running.append(key)
            return key, self._checks[key].question

    def _answered(self, key: Key, answer: "Future[Checked]") -> None:
        """Runs in a thread of the child program."""
        lost = isinstance(answer.exception(), ChildLost)
        checked = None if lost or answer.result().late else answer.result()
        with self._lock:
            self._running.remove(key)
            if checked is None:
                futures = self._end([key])
            else:
                verdict = self._remember(key[1], checked)
                futures = self._end([check for check in self._checks if check[1] == key[1]])
        for future in futures:
            if checked is None:
                future.set_exception(CheckerBusy(LOST if lost else LATE))
            else:
                future.set_result(verdict)
        self._start()

    def _remember(self, digest: str, checked: Checked) -> Verdict:
        verdict = Verdict(checked.error, checked.size, checked.enforced)
        self._forget(digest)  # two tenants may have asked at a time
        self._verdicts[digest] = verdict
        self._text += len(verdict.enforced)
        while len(self._verdicts) > MAX_CACHED or self._text > MAX_CACHED_TEXT:
            self._forget(next(iter(self._verdicts)))
        self.counts.compilations += 1
        self.counts.seconds += checked.seconds
        self.counts.refusals += bool(verdict.error)
        if why := why_by_characters(verdict.enforced):
            log.debug("a grammar is read by characters, whose masks take longer: %s", why)
        return verdict

    def _forget(self, digest: str) -> None:
        if digest in self._verdicts:
            self._text -= len(self._verdicts.pop(digest).enforced)

    def close(self) -> None:
        """End the child and what it runs."""
        with self._lock:
            waiting = self._end([key for key in self._checks if key not in self._running])
            self._waiting.clear()
        for future in waiting:
            future.set_exception(CheckerBusy(LOST))
        if self._program is not None:
            self._program.close()


def _judged(outputs: StructuredOutputs, verdict: Verdict) -> StructuredOutputs:
    if verdict.error:
        raise RequestError(f"structured_outputs.{outputs.kind}", verdict.error)
    return outputs.checked(verdict.compiled_bytes, verdict.enforced)


def _fields(outputs: StructuredOutputs) -> dict[str, object]:
    return {outputs.kind: getattr(outputs, outputs.kind)}
