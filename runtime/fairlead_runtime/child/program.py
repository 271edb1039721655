"""A child program as the server sees it: questions in, answers out.

Owns the process, which starts with the first question and again with the first one after its end,
and the two threads that talk to it. Needs no event loop.
"""

import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from fairlead_runtime.child.frames import Channel, Codec, FrameError
from fairlead_runtime.child.process import Child

log = logging.getLogger("fairlead.child")

# A program that works on what a client sends needs none of them.
SECRETS = frozenset({"FAIRLEAD_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
END_SECONDS = 5.0  # for a process whose connection has ended to end, before it is killed
QuestionT = TypeVar("QuestionT")
AnswerT = TypeVar("AnswerT")
ReadT = TypeVar("ReadT")


class ChildLost(Exception):  # noqa: N818 - named for the condition, as queue.Full is
    """The program ended before it answered; the next question starts another."""


def listen(child: Child, channel: Channel[Any, ReadT], receive: Callable[[ReadT], None]) -> str:
    """Hand over each message until the process ends. Returns words for how it did."""
    try:
        while (message := channel.receive()) is not None:
            receive(message)
    except FrameError as error:
        child.kill()
        child.reap(END_SECONDS)
        return f"sent what is no message: {error}"
    return child.reap(END_SECONDS)


class ChildProgram(Generic[QuestionT, AnswerT]):
    """A program that reads numbered messages of the type ``question``, the first one ``setup`` with
    the number 0, and answers each other one with a message of the type ``answer`` and the same
    number, in any order. It ends when its input does.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        setup: QuestionT,
        question: "Codec[tuple[int, QuestionT]]",
        answer: "Codec[tuple[int, AnswerT]]",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in SECRETS}
        environment = {**inherited, **(environment or {})}
        self._start: Callable[[], _Run[QuestionT, AnswerT]] = lambda: _Run(
            Child(command, environment=environment), setup, question, answer, self._forget
        )
        self._lock = threading.Lock()
        self._run: _Run[QuestionT, AnswerT] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process that runs; None before the first question and after its end."""
        run = self._run
        return None if run is None else run.pid

    def ask(self, question: QuestionT) -> "Future[AnswerT]":
        """The answer; its exception is ChildLost when the program ends first or cannot start."""
        with self._lock:
            if self._run is None:
                try:
                    self._run = self._start()
                except OSError as error:
                    log.warning("a child process cannot be started: %s", error)
                    lost = Future[AnswerT]()
                    lost.set_exception(ChildLost())
                    return lost
            return self._run.ask(question)

    def close(self) -> None:
        """Close the program's input, upon which it ends."""
        with self._lock:
            run, self._run = self._run, None
        if run is not None:
            run.end()

    def _forget(self, run: "_Run[QuestionT, AnswerT]") -> None:
        with self._lock:
            if self._run is run:
                self._run = None


class _Run(Generic[QuestionT, AnswerT]):
    """One run of the program. Two threads talk to it, because a socket may block: one writes what
    ``ask`` queues, one reads answers. ``ended`` is called at its end, before any question fails.
    """

    def __init__(
        self,
        child: Child,
        setup: QuestionT,
        question: "Codec[tuple[int, QuestionT]]",
        answer: "Codec[tuple[int, AnswerT]]",
        ended: "Callable[[_Run[QuestionT, AnswerT]], None]",
    ) -> None:
        self.pid = child.pid
        self._child = child
        self._channel = Channel(child.connection, question, answer)
        self._ended = ended
        self._ending = False
        self._numbers = itertools.count(1)
        self._futures: dict[int, Future[AnswerT]] = {}
        self._messages: queue.SimpleQueue[tuple[int, QuestionT] | None] = queue.SimpleQueue()
        self._messages.put((0, setup))
        self._writer = threading.Thread(target=self._write, name="child", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="child", daemon=True).start()

    def ask(self, question: QuestionT) -> "Future[AnswerT]":
        """Not called any more once ``ended`` is."""
        number, future = next(self._numbers), Future[AnswerT]()
        self._futures[number] = future
        self._messages.put((number, question))
        return future

    def end(self) -> None:
        self._ending = True
        self._child.hang_up()

    def _write(self) -> None:
        with contextlib.suppress(OSError, FrameError):
            while (message := self._messages.get()) is not None:
                self._channel.send(message)
        self._child.hang_up()

    def _read(self) -> None:
        reason = listen(self._child, self._channel, self._answer)
        if not self._ending:
            log.warning("the child process %s %s", self._child.name, reason)
        self._messages.put(None)  # ends the other thread
        self._writer.join()
        self._child.connection.close()
        self._ended(self)
        for future in self._futures.values():
            future.set_exception(ChildLost())

    def _answer(self, message: tuple[int, AnswerT]) -> None:
        number, answer = message
        future = self._futures.pop(number, None)
        if future is None:
            raise FrameError(f"an answer to question {number}, which nobody asked")
        future.set_result(answer)
