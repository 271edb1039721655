"""The processes of a pod, seen from the node, and how to kill one."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.harness.apiclient import Object, eventually

PORT = 8000  # of the runtime's OpenAI API


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a container; ``inner`` is its number inside the container."""

    pid: int
    inner: int
    parent: int
    command: str

    @property
    def ended(self) -> bool:
        """Whether it holds no connection any more."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return True
        return bool(re.search(r"^State:\s+[ZX]", status, re.MULTILINE))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        with contextlib.suppress(ProcessLookupError):
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


def engine_process(pod: Object) -> Process:
    return next(process for process in processes(pod) if "engine_process" in process.command)


@dataclass(frozen=True, slots=True)
class Kill:
    """A process of a pod that was killed: when, and how many connections its pod had then;
    ``left_out_at``: when that pod took no request any more, on new connections or on kept ones.
    Times are seconds of the machine's clock.
    """

    at: float
    in_flight: int
    left_out_at: float

    def explains(self, loss: Object) -> bool:
        """Whether the request began before the pod died, or before others knew."""
        return bool(loss["began"] <= self.left_out_at and loss["at"] >= self.at)

    def assert_bounds(self, losses: list[Object]) -> None:
        """No more was lost than was in flight, beside what came until others knew."""
        unexplained = [loss for loss in losses if not self.explains(loss)]
        assert not unexplained, (self, unexplained[:10])
        sent = [loss for loss in losses if loss["sent"] is not None and loss["sent"] < self.at]
        assert len(sent) <= self.in_flight, (self, sent)
        wrong = [loss for loss in losses if loss["what"].startswith("status 500")]
        assert not wrong, "a pod that ends says 503"


def kill(pod: Object, find: Callable[[Object], Process]) -> Kill:
    """Kill a process of a pod that serves; returns when nothing is sent to the pod any more: its
    connections are gone, and the node's rules leave it out.
    """
    address = pod["status"]["podIP"]
    victim, first = find(pod), http_process(pod)
    eventually(lambda: _is_routed(address), 30, f"the rules send connections to {address}")
    first.stop()  # so that what it has in flight can be counted
    at = time.time()  # before the count: what was sent by then has its connection
    in_flight = connections(first, PORT)
    victim.kill()
    first.resume()
    eventually(lambda: first.ended, 30, "the HTTP process ends with the other", every=0.02)
    eventually(lambda: not _is_routed(address), 30, f"the rules leave {address} out", every=0.02)
    return Kill(at, in_flight, time.time())


def _is_routed(address: str) -> bool:
    """Whether the node's rules send connections to a Service there."""
    rules = subprocess.run(
        ["nft", "list", "table", "ip", "kube-proxy"], capture_output=True, text=True, check=True
    ).stdout
    targets = [line for line in rules.splitlines() if "dnat ip to" in line]
    return any(f" {address} . {PORT}" in line for line in targets)
