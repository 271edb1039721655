"""The processes of a pod, seen from the node, and how to kill one."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from cluster.harness.apiclient import Object


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a container; ``inner`` is its number inside the container."""

    pid: int
    inner: int
    parent: int
    command: str

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def processes(pod: Object) -> list[Process]:
    """The processes of all containers of a pod but the one that holds its namespaces."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            groups = (folder / "cgroup").read_text()
            if f"pod{pod['metadata']['uid']}" not in groups:
                continue
            fields = dict(
                line.split(":", 1) for line in (folder / "status").read_text().splitlines()
            )
            command = (folder / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue  # it ended
        if not command.startswith("/pause"):
            inner = int(fields["NSpid"].split()[-1])
            found.append(Process(int(folder.name), inner, int(fields["PPid"]), command))
    return sorted(found, key=lambda process: process.pid)


def connections(process: Process, port: int) -> int:
    """How many connections to this port the network namespace of the process has open."""
    wanted = f":{port:04X}"
    count = 0
    for name in ("tcp", "tcp6"):
        lines = Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()[1:]
        rows = [line.split() for line in lines]
        count += sum(row[1].endswith(wanted) and row[3] == "01" for row in rows)
    return count


def http_process(pod: Object) -> Process:
    """The process that takes a runtime's connections: the container's first."""
    return next(process for process in processes(pod) if process.inner == 1)
