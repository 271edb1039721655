"""A program that answers every question in a fork of its own, which may be hostile: its limits on
memory and processor time are a verdict on the question, and its deadline by the clock is none: a
fork that is killed there was not given the processor.

Owns the forks, their limits and their end. Reads and writes numbered messages, in order of
completion. Ends when its input does, and its forks with it.
"""

import os
import resource
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from fairlead_runtime.child.frames import Channel, Codec

# Smaller than the stacks of the engine's threads, so that a grammar that passes here cannot
# overflow those.
STACK = 2 * 1024 * 1024
NICENESS = 5
FAULT = 70  # exit code of a fork whose work raised something else than MemoryError

QuestionT = TypeVar("QuestionT")
AnswerT = TypeVar("AnswerT")


class Limits(Protocol):
    """Of one fork: time by the clock, processor time, and bytes of address space that it may
    add.
    """

    @property
    def seconds(self) -> float: ...
    @property
    def cpu_seconds(self) -> int: ...
    @property
    def memory(self) -> int: ...


class Ending(Enum):
    """Why a fork gave no answer."""

    LATE = "late"  # at its deadline, or by a system that lacks memory
    SLOW = "slow"  # its processor time was used up
    CRASHED = "crashed"  # it lacked memory
    FAILED = "failed"  # it raised what nobody expected


@dataclass(frozen=True, slots=True)
class _Fork:
    number: int
    pid: int
    deadline: float
    began: float
    verdict: socket.socket


@dataclass(frozen=True, slots=True)
class Forks(Generic[QuestionT, AnswerT]):
    """``work`` runs in each fork; ``finish`` gets its answer, or why there is none, and the seconds
    that it took, and returns what is sent.
    """

    limits: Limits
    codec: Codec[tuple[int, AnswerT]]
    work: Callable[[QuestionT], AnswerT]
    finish: Callable[[AnswerT | Ending, float], AnswerT]

    def serve(self, channel: Channel[tuple[int, AnswerT], tuple[int, Any]]) -> None:
        """Answer until the input ends."""
        running: list[_Fork] = []
        with selectors.DefaultSelector() as selector:
            selector.register(channel.connection, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                deadline = min((fork.deadline for fork in running), default=None)
                wait = None if deadline is None else max(0.0, deadline - now)
                for key, _ in selector.select(wait):
                    if key.data is not None:
                        selector.unregister(key.fileobj)
                        running.remove(key.data)
                        channel.send(self._verdict(key.data))
                        continue
                    if (message := channel.receive()) is None:
                        for fork in running:
                            os.kill(fork.pid, signal.SIGKILL)
                        return
                    fork = self._fork(*message, channel.connection)
                    selector.register(fork.verdict, selectors.EVENT_READ, fork)
                    running.append(fork)
                for fork in running:
                    if fork.deadline <= time.monotonic():
                        os.kill(fork.pid, signal.SIGKILL)  # closes its end: the verdict is read

    def _fork(self, number: int, question: QuestionT, connection: socket.socket) -> _Fork:
        receiving, sending = socket.socketpair()
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            connection.close()  # whose end tells the server that this program has ended
            receiving.close()
            self._answer_and_exit(number, question, sending)
        sending.close()
        return _Fork(number, pid, began + self.limits.seconds, began, receiving)

    def _verdict(self, fork: _Fork) -> tuple[int, AnswerT]:
        with fork.verdict:
            message = self.codec.receive(fork.verdict)
        _, status = os.waitpid(fork.pid, 0)
        end = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        answer: AnswerT | Ending
        if message is not None:
            _, answer = message
        elif end == signal.SIGKILL:
            answer = Ending.LATE
        elif os.waitstatus_to_exitcode(status) == FAULT:
            answer = Ending.FAILED
        else:
            answer = Ending.SLOW if end == signal.SIGXCPU else Ending.CRASHED
        return fork.number, self.finish(answer, time.monotonic() - fork.began)

    def _answer_and_exit(self, number: int, question: QuestionT, sending: socket.socket) -> None:
        """Work in the fork, write the answer and end without running anything of the parent's."""
        code = 0
        try:
            _enter(self.limits)
            answers: list[AnswerT | Exception] = []
            thread = threading.Thread(target=lambda: answers.append(self._worked(question)))
            thread.start()
            thread.join()
            for answer in answers:
                if isinstance(answer, Exception):
                    code = 0 if isinstance(answer, MemoryError) else FAULT
                else:
                    sending.sendall(self.codec.encode((number, answer)))
        finally:
            os._exit(code)

    def _worked(self, question: QuestionT) -> AnswerT | Exception:
        try:
            return self.work(question)
        except Exception as error:  # noqa: BLE001 - its kind is all that is told
            return error


def _enter(limits: Limits) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
    limit = _address_space() + STACK + limits.memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Libraries write to standard error when they fail to get memory.
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - for its descriptor
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    threading.stack_size(STACK)


def _address_space() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - not a user's path
        return int(statm.read().split()[0]) * resource.getpagesize()
