"""One of our programs in a process of its own, as its parent sees it: its start and its end.

The socket to it has no name, so no other process can connect and no file is left behind. It is the
program's standard input: its end ends the program. Imports next to nothing: the HTTP process starts
the engine's before it imports what it serves with.
"""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Self

OUT_OF_MEMORY = "as the kernel does when memory runs out"  # of a process that ended by SIGKILL


def command_of(module: str, *arguments: object) -> tuple[str, ...]:
    """The command that runs one of our modules by this interpreter."""
    # -P: the working directory is no place for modules.
    return (sys.executable, "-P", "-m", module, *map(str, arguments))


def spawn(
    command: Sequence[str],
    connection: socket.socket,
    files: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a process with its end of the socket."""
    return subprocess.Popen(  # noqa: S603 - this interpreter and our own module
        command, stdin=connection.fileno(), pass_fds=files, env=environment
    )


class Child:
    """``files`` are descriptors that the process inherits. Raises OSError when it cannot start.

    Linux ends a program that calls ``life.end_with`` with the thread that makes this. Leaving it as
    a context kills the process.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        files: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = command[-1]
        self.connection, inherited = socket.socketpair()
        with inherited:
            try:
                self._process = spawn(command, inherited, files, environment)
            except OSError:
                self.connection.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()
        self.connection.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def hang_up(self) -> None:
        """End the connection, upon which the program ends, and whatever waits for it here."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def reap(self, patience: float) -> str:
        """Words for how the process has ended; it is killed after ``patience`` seconds."""
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return ending(code)


def ending(code: int) -> str:
    """Words for how a process with this exit code, negative for a signal, has ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = f", {OUT_OF_MEMORY}" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
