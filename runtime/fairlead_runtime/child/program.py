"""A child program as the server sees it: questions in, answers out.

Owns the process, which starts with the first question and again with the first one after its end,
and the two threads that talk to it. Needs no event loop.
"""

import contextlib
import itertools
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, BinaryIO, cast

from fairlead_runtime.child import frames

log = logging.getLogger("fairlead.child")

Answer = dict[str, Any]


class ChildLost(Exception):  # noqa: N818 - named for the condition, as queue.Full is
    """The program ended before it answered; the next question starts another."""


def command_of(module: str) -> tuple[str, ...]:
    """The command that runs one of our modules by this interpreter."""
    # -P: the working directory is no place for modules.
    return (sys.executable, "-P", "-m", module)


class ChildProgram:
    """``setup`` is the first message to every process of it. The program reads messages as
    ``frames`` writes them, answers each question with a message of the same ``number``, in any
    order, and ends when its input does.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        setup: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        self._setup = setup
        self._environment = {**os.environ, **(environment or {})}
        self._lock = threading.Lock()
        self._process: _Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs; None before the first question and after its end."""
        process = self._process
        return None if process is None else process.pid

    def ask(self, question: Mapping[str, Any]) -> "Future[Answer]":
        """The answer; its exception is ChildLost when the program ends first or cannot start."""
        with self._lock:
            if self._process is None:
                try:
                    self._process = _Process(
                        self._command, self._environment, self._setup, self._forget
                    )
                except OSError as error:
                    log.warning("a child process cannot be started: %s", error)
                    lost = Future[Answer]()
                    lost.set_exception(ChildLost())
                    return lost
            return self._process.ask(question)

    def close(self) -> None:
        """Close the program's input, upon which it ends."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def _forget(self, process: "_Process") -> None:
        with self._lock:
            if self._process is process:
                self._process = None


class _Process:
    """One run of the program. Two threads talk to it, because a pipe may block: one writes what
    ``ask`` queues, one reads answers. ``ended`` is called at its end, before any question fails.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        setup: Mapping[str, Any],
        ended: Callable[["_Process"], None],
    ) -> None:
        self._command = command
        self._ended = ended
        self._ending = False
        self._numbers = itertools.count(1)
        self._futures: dict[int, Future[Answer]] = {}
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._messages.put(dict(setup))
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and our own module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self.pid = self._process.pid
        for work in (self._write, self._read):
            threading.Thread(target=work, name="child", daemon=True).start()

    def ask(self, question: Mapping[str, Any]) -> "Future[Answer]":
        """Not called any more once ``ended`` is."""
        number, future = next(self._numbers), Future[Answer]()
        self._futures[number] = future
        self._messages.put({"number": number, **question})
        return future

    def end(self) -> None:
        self._ending = True
        self._messages.put(None)

    def _write(self) -> None:
        pipe = cast("BinaryIO", self._process.stdin)
        with contextlib.suppress(BrokenPipeError), pipe:
            while (message := self._messages.get()) is not None:
                frames.write(pipe, message)

    def _read(self) -> None:
        with cast("BinaryIO", self._process.stdout) as pipe:
            while (message := frames.read(pipe)) is not None:
                self._futures.pop(message["number"]).set_result(message)
        code = self._process.wait()
        if not self._ending:
            log.warning("the child process %s ended: %d", self._command[-1], code)
        self._messages.put(None)  # ends the other thread
        self._ended(self)
        for future in self._futures.values():
            future.set_exception(ChildLost())
