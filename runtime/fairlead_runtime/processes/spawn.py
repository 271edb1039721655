"""Start the engine's process.

It is started before the HTTP process imports what it serves with: both import for a second or
more, side by side where there are two CPUs. So this module imports next to nothing.
"""

import os
import resource

from fairlead_runtime.child.process import Child, command_of
from fairlead_runtime.settings.terminal import chosen

MODULE = "fairlead_runtime.processes.engine_process"


def engine(level: int) -> Child:
    """The engine's process, which lives as long as this context; it logs from ``level`` on, in this
    process's form. It imports, then waits for the message that says what to load.

    Call it in the main thread: Linux ends the process with the thread that started it.
    """
    # A core file would hold prompts and keys; the engine's process inherits the limit.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return Child(command_of(MODULE, os.getpid(), level, chosen()))
