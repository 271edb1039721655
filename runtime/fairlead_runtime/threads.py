"""The priority of one thread among those of its process."""

import os
import threading


def be_nicer(by: int) -> None:
    """Give this thread a lower priority; on Linux each thread has its own."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + by)
