"""Start the engine's process.

It is started before the HTTP process imports what it serves with: both import for a second or
more, side by side where there are two CPUs. So this module imports next to nothing.
"""

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MODULE = "fairlead_runtime.processes.engine_process"


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine's process and this process's end of the socket to it."""

    child: "subprocess.Popen[bytes]"
    connection: socket.socket


@contextmanager
def engine(level: int) -> Iterator[Engine]:
    """The engine's process while the block runs; it logs from ``level`` on. It imports, then waits
    for the message that says what to load.

    Both processes are joined by a pair of sockets that have no name: no other process can connect,
    and no file is left behind. Call it in the main thread: Linux ends the process with the thread
    that started it.
    """
    # A core file would hold prompts and keys; the engine's process inherits the limit.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    http_end, engine_end = socket.socketpair()
    with http_end:
        with engine_end:
            child = spawn(engine_end, level)
        try:
            yield Engine(child, http_end)
        finally:
            child.kill()
            child.wait()


def spawn(connection: socket.socket, level: int) -> "subprocess.Popen[bytes]":
    """Start the process with its end of the socket and a level of logging."""
    arguments = (connection.fileno(), os.getpid(), level)
    return subprocess.Popen(  # noqa: S603 - our own interpreter and module
        # -P: the working directory is no place for modules.
        [sys.executable, "-P", "-m", MODULE, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        pass_fds=[connection.fileno()],
    )
