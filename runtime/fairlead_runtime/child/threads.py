"""The priority of one thread among those of its process, and of a process among all."""

import contextlib
import os
import threading


def be_nicer(by: int) -> None:
    """Give this thread a lower priority; on Linux each thread has its own."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + by)


def be_idle() -> None:
    """Let this thread run only in time that no other thread wants."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    # A sandbox may forbid it; the lowest priority is then what remains.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
