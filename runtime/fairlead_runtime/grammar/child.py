"""The program that checks grammars: ``python -m fairlead_runtime.grammar.child``.

It builds the tokenizer once, then forks for every check. The fork alone compiles hostile input: it
has a limit on its memory and processor time, and is killed at its deadline. Reads and writes
messages as ``frames`` does: in, first the tokenizer's facts and the limits, then one request per
check; out, one verdict per check, in order of completion. Ends when its input does, and its forks
with it.
"""

import json
import os
import random
import resource
import selectors
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLTokenizer

from fairlead_runtime.child import frames
from fairlead_runtime.child.heap import release_memory
from fairlead_runtime.grammar.compile import (
    NO_OUTPUT,
    CheckLimits,
    GrammarError,
    TokenizerFacts,
    check,
    compile_matcher,
)
from fairlead_runtime.request.structured import TOO_COMPLEX, StructuredOutputs

MAX_FORKS = 2  # checks at a time
# Smaller than the stacks of the engine's threads, so that a grammar that passes here cannot
# overflow those.
STACK = 2 * 1024 * 1024
NICENESS = 5
WALKS = 2  # random outputs that a check begins
WALK_TOKENS = 32  # of each

TIMED_OUT = "takes too long to compile: simplify its patterns, counts or alternatives"
CRASHED = "takes too much memory to compile: simplify its patterns, counts or alternatives"


@dataclass(frozen=True, slots=True)
class _Fork:
    number: int
    pid: int
    deadline: float
    began: float


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when this program ends
    reader = frames.Reader(sys.stdin.fileno())
    waiting: list[dict[str, Any]] = []
    while not waiting:
        messages = reader.read()
        if messages is None:
            return 0
        waiting += messages
    first = waiting.pop(0)
    facts, limits = TokenizerFacts(**first["facts"]), CheckLimits(**first["limits"])
    tokenizer, size = facts.build(fast=False), facts.size
    del first, facts
    release_memory()
    _serve(tokenizer, size, limits, waiting, reader, sys.stdout.buffer)
    return 0


def _serve(
    tokenizer: LLTokenizer,
    ids: int,
    limits: CheckLimits,
    waiting: list[dict[str, Any]],
    reader: frames.Reader,
    target: BinaryIO,
) -> None:
    running: dict[int, _Fork] = {}  # by the descriptor of its verdict
    with selectors.DefaultSelector() as selector:
        selector.register(reader.descriptor, selectors.EVENT_READ)
        while True:
            while waiting and len(running) < MAX_FORKS:
                end, fork = _fork(tokenizer, ids, limits, waiting.pop(0))
                running[end] = fork
                selector.register(end, selectors.EVENT_READ)
            now = time.monotonic()
            ends = min((fork.deadline for fork in running.values()), default=None)
            for key, _ in selector.select(None if ends is None else max(0.0, ends - now)):
                if key.fd != reader.descriptor:
                    selector.unregister(key.fd)
                    frames.write(target, _verdict(key.fd, running.pop(key.fd)))
                elif (messages := reader.read()) is not None:
                    waiting += messages
                else:
                    for fork in running.values():
                        os.kill(fork.pid, signal.SIGKILL)
                    return
            for fork in running.values():
                if fork.deadline <= time.monotonic():
                    os.kill(fork.pid, signal.SIGKILL)  # closes its end: the verdict is read above


def _fork(
    tokenizer: LLTokenizer, ids: int, limits: CheckLimits, request: dict[str, Any]
) -> tuple[int, _Fork]:
    """Start a check; the descriptor on which its verdict arrives."""
    receiving, sending = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(receiving)
        _check_and_exit(tokenizer, ids, limits, request, sending)
    os.close(sending)
    return receiving, _Fork(request["number"], pid, began + limits.seconds, began)


def _verdict(end: int, fork: _Fork) -> dict[str, Any]:
    with open(end, "rb") as pipe:
        answer = frames.read(pipe)
    _, status = os.waitpid(fork.pid, 0)
    if answer is None:
        expired = os.WIFSIGNALED(status) and os.WTERMSIG(status) in {
            signal.SIGKILL,
            signal.SIGXCPU,
        }
        answer = {"error": TIMED_OUT if expired else CRASHED, "bytes": 0}
    return {"number": fork.number, "seconds": time.monotonic() - fork.began, **answer}


def _check_and_exit(
    tokenizer: LLTokenizer,
    ids: int,
    limits: CheckLimits,
    request: dict[str, Any],
    sending: int,
) -> None:
    """Check in the fork, write the verdict and end without running anything of the parent's."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
        limit = _memory("size") + STACK + limits.memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        # The library writes to standard error when it fails to get memory.
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - for its descriptor
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        threading.stack_size(STACK)
        before = _memory("resident")
        answer: dict[str, Any] = {}
        thread = threading.Thread(
            target=lambda: answer.update(_check(tokenizer, ids, json.loads(request["outputs"])))
        )
        thread.start()
        thread.join()
        grown = max(0, _memory("resident") - before)
        if answer:
            with open(sending, "wb") as pipe:
                frames.write(pipe, {"bytes": grown, **answer})
    finally:
        os._exit(0)


def _check(tokenizer: LLTokenizer, ids: int, outputs: dict[str, Any]) -> dict[str, Any]:
    try:
        matcher = compile_matcher(tokenizer, StructuredOutputs(**outputs))
        for walk in range(WALKS):
            _walk(matcher.deep_copy(), ids, random.Random(walk))  # noqa: S311 - not for secrets
    except GrammarError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": CRASHED}
    return {"error": ""}


def _walk(matcher: LLMatcher, ids: int, choose: random.Random) -> None:
    """Follow the beginning of a random output. Raises GrammarError where no token is allowed or a
    limit is exceeded.
    """
    for _ in range(WALK_TOKENS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        _check_mask(matcher)
        if matcher.is_stopped():
            return
        if not allowed:
            raise GrammarError(NO_OUTPUT)
        start = choose.randrange(ids)
        later = allowed >> start
        token = start + _lowest_bit(later) if later else _lowest_bit(allowed)
        matcher.consume_token(token)
        _check_mask(matcher)


def _lowest_bit(value: int) -> int:
    return (value & -value).bit_length() - 1


def _check_mask(matcher: LLMatcher) -> None:
    try:
        check(matcher)
    except GrammarError as error:
        raise GrammarError(NO_OUTPUT if str(error) == NO_OUTPUT else TOO_COMPLEX) from None


def _memory(kind: str) -> int:
    """Bytes of this process's address space ("size") or of its memory in use ("resident")."""
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - not a user's path
        pages = statm.read().split()
    return int(pages[0 if kind == "size" else 1]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
