"""A process that another one of the same pod has started: its socket to that one, and its end."""

import ctypes
import logging
import os
import signal
import socket
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
FAILED = 4  # the exit code when the engine gave up, or the other process sent no message


def parent_socket() -> socket.socket:
    """The socket to the parent, which was the standard input. The parent decides when this process
    ends: signals that end a pod do not.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # A program that this process starts would inherit the standard input, and keep it open.
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return connection


def end_with(parent: int) -> None:
    """Let the kernel end this process with the thread that started it, whatever both are doing."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        leave(0)


def leave(code: int) -> NoReturn:
    """End at once: a step that hangs must not hold the process."""
    logging.shutdown()
    os._exit(code)
