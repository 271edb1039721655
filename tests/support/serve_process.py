"""`fairlead serve` as processes of their own, on free ports.

Both processes of a server are forked from one that has already imported torch and the models: the
imports take longer than the tests themselves. tests/functional/api/test_processes.py and
tests/functional/commands/test_demo.py start the command without this.
"""

import itertools
import json
import logging
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from fairlead_runtime.child import process
from fairlead_runtime.processes import engine_process, rank_process

WITHIN = 300.0  # seconds; a limit for hung processes, long enough for a busy machine
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(
    ["fairlead_runtime.processes.http_process", "fairlead_runtime.build.build_engine"]
)


class Process:
    """The process, its log while it runs, and clients for both ports."""

    def __init__(
        self,
        arguments: list[str],
        environ: Mapping[str, str],
        prepare: Callable[[], None],
        prepare_http: Callable[[], None],
    ) -> None:
        reading, writing = forks.Pipe(duplex=False)
        self._process = forks.Process(
            target=_main, args=(arguments, dict(environ), prepare, prepare_http, writing)
        )
        self._process.start()
        writing.close()
        self.lines: list[str] = []
        self.ports: dict[str, str] = {}
        self._messages: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    def _read(self, reading: Connection) -> None:
        with os.fdopen(os.dup(reading.fileno()), encoding="utf-8") as log:
            reading.close()
            for line in log:
                self.lines.append(line)
                self._messages.put(_message(line))
        self._messages.put(None)

    def until_logged(self, text: str) -> None:
        """Wait for a log line whose message contains ``text``; keep the ports logged before."""
        while True:
            message = self._messages.get(timeout=WITHIN)
            if message is None:
                raise AssertionError("the server ended:\n" + "".join(self.lines))
            kind, _, address = message.partition(" port: ")
            if address:
                self.ports[kind] = address
            if text in message:
                return

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def client(self, port: str = "public") -> httpx.Client:
        return httpx.Client(base_url=self.ports[port], timeout=WITHIN)

    def terminate(self) -> None:
        """SIGTERM, as the kubelet sends it."""
        os.kill(self.pid, signal.SIGTERM)

    @property
    def engine_pid(self) -> int:
        """The engine's process, which starts after the ports."""
        parent = self._process.pid
        while not (children := Path(f"/proc/{parent}/task/{parent}/children").read_text()):
            pass
        return int(children)

    def end(self) -> int:
        """The exit code, once the process and every process that it started have ended."""
        self._process.join(WITHIN)
        self._join_reader()
        if self._process.exitcode is None:
            raise AssertionError("the server does not end:\n" + "".join(self.lines))
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join(WITHIN)
        self._join_reader()

    def _join_reader(self) -> None:
        """The log ends when no process is left that could write to it."""
        self._reader.join(WITHIN)
        if self._reader.is_alive():
            raise AssertionError("a process of the server is left:\n" + "".join(self.lines))

    @property
    def last_log_line(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(self.lines[-1])
        return found


PROGRAMS = {module.__name__: module.main for module in (engine_process, rank_process)}


class Fork:
    """The process of an engine or a rank, forked from its parent; what ``child.process`` uses of
    Popen. ``prepare`` runs in it first.
    """

    def __init__(
        self,
        command: Sequence[str],
        connection: socket.socket,
        files: Sequence[int],
        prepare: Callable[[], None],
    ) -> None:
        _, module, *arguments = command[command.index("-m") :]
        self.pid = os.fork()
        if not self.pid:
            try:
                os.dup2(connection.fileno(), 0)
                # As an exec would: what the parent holds open must end with it.
                for start, end in itertools.pairwise(sorted((2, *files, 1024))):
                    os.closerange(start + 1, end)
                prepare()
                PROGRAMS[module](arguments)
            finally:
                os._exit(1)
        self._code: int | None = None
        self._waiting = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (WITHIN if timeout is None else timeout)
        while not self._ended():
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("engine", timeout or WITHIN)
            time.sleep(0.005)
        return self._code or 0

    def kill(self) -> None:
        if not self._ended():
            os.kill(self.pid, signal.SIGKILL)

    def _ended(self) -> bool:
        with self._waiting:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
            return self._code is not None


def no_preparation() -> None:
    """Change nothing before the server starts."""


def fork_children(prepare: Callable[[], None] = no_preparation) -> None:
    """Let this process fork the engine's, after ``prepare``, and its ranks. Other children are
    started as they are.
    """
    start = process.spawn

    def spawn(
        command: Sequence[str],
        connection: socket.socket,
        files: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Any:
        if not PROGRAMS.keys() & set(command):
            return start(command, connection, files, environment)
        is_engine = engine_process.__name__ in command
        return Fork(command, connection, files, prepare if is_engine else no_preparation)

    process.spawn = spawn


def never_loads() -> None:
    """Make the loading of the weights never end."""
    from fairlead_runtime.models import loading

    loading.load = lambda *_, **__: threading.Event().wait()  # type: ignore[assignment]


def broken_device() -> None:
    """Make every forward pass of the engine raise, after a self-test that passed."""
    from fairlead_runtime.device.step.model_runner import ModelRunner

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    ModelRunner.execute = fail  # type: ignore[method-assign,assignment]


def slow_device(seconds: float = 0.01) -> None:
    """Make every step last at least so long."""
    from fairlead_runtime.device.step.model_runner import ModelRunner

    execute = ModelRunner.execute

    def slow(self: ModelRunner, work: Any) -> Any:
        time.sleep(seconds)
        return execute(self, work)

    ModelRunner.execute = slow  # type: ignore[method-assign]


def held_device(held: Path, streams: int, tokens: int) -> None:
    """Make the device wait, while the file is there, once ``streams`` sequences have ``tokens``
    tokens of output each. Until all are there a step lasts 0.1 s, so that none ends before.
    """
    from fairlead_runtime.device.step.model_runner import ModelRunner

    execute = ModelRunner.execute

    def hold(self: ModelRunner, work: Any) -> Any:
        if held.exists() and len(work.rows) < streams:
            time.sleep(0.1)
        elif all(
            row.start + row.count - len(row.sequence.request.prompt) >= tokens for row in work.rows
        ):
            while held.exists():
                time.sleep(0.001)
        return execute(self, work)

    ModelRunner.execute = hold  # type: ignore[method-assign]


def hanging_device() -> None:
    """Make the third step of the engine never end, as a line of the log says."""
    from fairlead_runtime.device.step.model_runner import ModelRunner

    execute, steps = ModelRunner.execute, itertools.count(1)

    def hang(self: ModelRunner, work: Any) -> Any:
        if next(steps) == 3:
            logging.getLogger("fairlead.test").info("the step hangs")
            threading.Event().wait()
        return execute(self, work)

    ModelRunner.execute = hang  # type: ignore[method-assign]


@contextmanager
def serve(
    model: str,
    *flags: str,
    environ: Mapping[str, str] | None = None,
    prepare: Callable[[], None] = no_preparation,
    prepare_http: Callable[[], None] = no_preparation,
) -> Iterator[Process]:
    """Run ``fairlead serve MODEL FLAGS`` on free ports, without a grace of the drain unless FLAGS
    have one; ``prepare`` runs in the engine's process first, ``prepare_http`` in the HTTP process.
    """
    defaults = ["--port=0", "--admin-port=0", "--drain-grace=0"]
    server = Process(["serve", model, *defaults, *flags], environ or {}, prepare, prepare_http)
    try:
        yield server
    finally:
        server.kill()


def stream_events(response: httpx.Response) -> Iterator[dict[str, Any] | str]:
    """Server-sent events as they arrive: JSON values and the string "[DONE]"."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def _main(
    arguments: list[str],
    environ: Mapping[str, str],
    prepare: Callable[[], None],
    prepare_http: Callable[[], None],
    log: Connection,
) -> None:
    os.dup2(log.fileno(), sys.stderr.fileno())
    log.close()
    os.environ.update(environ, OMP_NUM_THREADS="1")
    from fairlead_runtime.cli import main

    fork_children(prepare)
    prepare_http()
    sys.exit(main(arguments))


def _message(line: str) -> str:
    try:
        found = json.loads(line)
    except ValueError:
        return ""
    return str(found.get("message", "")) if isinstance(found, dict) else ""
