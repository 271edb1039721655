"""The program that checks grammars: ``python -m fairlead_runtime.grammar.child``.

It builds the tokenizer once, then forks for every check. The fork alone compiles hostile input: its
limits on memory and processor time are a verdict on that, and its deadline by the clock is none: a
fork that is killed there was not given the processor. Owns the messages, which ``child.program``
numbers: in, first ``Setup``, then one ``Check`` for each question, at most MAX_FORKS unanswered;
out, one ``Checked`` for each, in order of completion. Ends when its input does, and its forks with
it.
"""

import json
import os
import random
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from fairlead_runtime.child.frames import Channel, Codec, Message
from fairlead_runtime.child.heap import allocated_bytes, release_memory
from fairlead_runtime.child.life import parent_socket
from fairlead_runtime.grammar.compile import (
    NO_OUTPUT,
    CheckLimits,
    GrammarError,
    TokenizerFacts,
    check,
    compile_matcher,
    enforced,
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


class Setup(Message):
    facts: TokenizerFacts
    limits: CheckLimits


class Check(Message):
    """``outputs``: the fields of StructuredOutputs as JSON, because MessagePack has no integers
    beyond 64 bits, which a schema may hold.
    """

    outputs: str


class Checked(Message):
    """``error``: why it cannot be compiled; empty when it can. ``enforced``: what is compiled in
    place of the source; empty for the source. ``size`` of the compiled grammar in bytes.
    ``seconds`` that the check took. ``late``: it was killed before it had its processor time, and
    the rest says nothing.
    """

    error: str
    enforced: str = ""
    size: int = 0
    seconds: float = 0.0
    late: bool = False


QUESTION: Codec[tuple[int, Setup | Check]] = Codec(tuple[int, Setup | Check])
ANSWER: Codec[tuple[int, Checked]] = Codec(tuple[int, Checked])


@dataclass(frozen=True, slots=True)
class _Fork:
    number: int
    pid: int
    deadline: float
    began: float
    verdict: socket.socket


def main() -> int:
    channel = Channel(parent_socket(), ANSWER, QUESTION)
    first = channel.receive()
    if first is None or not isinstance(first[1], Setup):
        return 0
    facts, limits = first[1].facts, first[1].limits
    tokenizer, size = facts.build(fast=False), facts.size
    del first, facts
    release_memory()
    _serve(tokenizer, size, limits, channel)
    return 0


def _serve(
    tokenizer: LLTokenizer,
    ids: int,
    limits: CheckLimits,
    channel: Channel[tuple[int, Checked], tuple[int, Setup | Check]],
) -> None:
    running: list[_Fork] = []
    with selectors.DefaultSelector() as selector:
        selector.register(channel.connection, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            deadline = min((fork.deadline for fork in running), default=None)
            for key, _ in selector.select(None if deadline is None else max(0.0, deadline - now)):
                if key.data is not None:
                    selector.unregister(key.fileobj)
                    running.remove(key.data)
                    channel.send(_verdict(key.data))
                    continue
                match channel.receive():
                    case (number, Check() as check):
                        fork = _fork(tokenizer, ids, limits, number, check, channel.connection)
                        selector.register(fork.verdict, selectors.EVENT_READ, fork)
                        running.append(fork)
                    case _:
                        for fork in running:
                            os.kill(fork.pid, signal.SIGKILL)
                        return
            for fork in running:
                if fork.deadline <= time.monotonic():
                    os.kill(fork.pid, signal.SIGKILL)  # closes its end: the verdict is read above


def _fork(
    tokenizer: LLTokenizer,
    ids: int,
    limits: CheckLimits,
    number: int,
    request: Check,
    connection: socket.socket,
) -> _Fork:
    """Start a check."""
    receiving, sending = socket.socketpair()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        connection.close()  # whose end tells the server that this program has ended
        receiving.close()
        _check_and_exit(tokenizer, ids, limits, number, request, sending)
    sending.close()
    return _Fork(number, pid, began + limits.seconds, began, receiving)


def _verdict(fork: _Fork) -> tuple[int, Checked]:
    with fork.verdict:
        answer = ANSWER.receive(fork.verdict)
    _, status = os.waitpid(fork.pid, 0)
    end = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if answer is not None:
        _, checked = answer
    elif end == signal.SIGKILL:  # at its deadline, or by a system that lacks memory
        checked = Checked("", late=True)
    else:
        checked = Checked(TIMED_OUT if end == signal.SIGXCPU else CRASHED)
    checked.seconds = time.monotonic() - fork.began
    return fork.number, checked


def _check_and_exit(
    tokenizer: LLTokenizer,
    ids: int,
    limits: CheckLimits,
    number: int,
    request: Check,
    sending: socket.socket,
) -> None:
    """Check in the fork, write the verdict and end without running anything of the parent's."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
        limit = _address_space() + STACK + limits.memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        # The library writes to standard error when it fails to get memory.
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - for its descriptor
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        threading.stack_size(STACK)
        answers: list[Checked] = []
        thread = threading.Thread(
            target=lambda: answers.append(_check(tokenizer, ids, json.loads(request.outputs)))
        )
        thread.start()
        thread.join()
        for checked in answers:
            sending.sendall(ANSWER.encode((number, checked)))
    finally:
        os._exit(0)


def _check(tokenizer: LLTokenizer, ids: int, fields: dict[str, Any]) -> Checked:
    """Compile as the engine will: from what is enforced."""
    try:
        outputs = StructuredOutputs(**fields)
        source = enforced(tokenizer, outputs)
        before = allocated_bytes()
        matcher = compile_matcher(tokenizer, outputs.checked(0, source))
        size = max(0, allocated_bytes() - before)
        for walk in range(WALKS):
            _walk(matcher.deep_copy(), ids, random.Random(walk))  # noqa: S311 - not for secrets
    except GrammarError as error:
        return Checked(str(error))
    except MemoryError:
        return Checked(CRASHED)
    return Checked("", source, size)


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


def _address_space() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - not a user's path
        return int(statm.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
