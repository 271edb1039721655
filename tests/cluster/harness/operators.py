"""The operator as a real process beside the control plane, with its log, its metrics and its
memory.
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cluster.harness.apiclient import eventually
from cluster.harness.controlplane import ControlPlane, end, end_with_parent, free_ports


@dataclass(slots=True)
class OperatorProcess:
    """``with OperatorProcess(plane, ("ns",)) as operator``: runs inside the block.

    ``server`` is the API server's address (a proxy), ``token`` gives its rights (default: the
    administrator's), ``identity`` is its name in the Lease, ``arguments`` replace the namespaces,
    ``intervals`` are seconds in place of those in its modules, by "module.NAME".
    """

    plane: ControlPlane
    namespaces: tuple[str, ...]
    identity: str = "operator-0"
    server: str = ""
    token: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    wait: bool = True
    arguments: tuple[str, ...] = ()
    intervals: dict[str, float] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    port: int = 0
    log: Path = Path()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.port = free_ports(1)[0]
        self.log = self.plane.home / f"operator-{self.identity}-{self.port}.log"
        environ = {
            **os.environ,
            "KUBECONFIG": str(self.plane.kubeconfig(server=self.server, token=self.token)),
            "POD_NAME": self.identity,
            "FAIRLEAD_RUNTIME_IMAGE": "registry.test/fairlead-runtime:1",
            "HF_ENDPOINT": "http://127.0.0.1:9",  # no test may reach a hub
            **self.environ,
        }
        scope = [f"--namespace={name}" for name in self.namespaces] or [
            "--all-namespaces",
            "--lease-namespace=default",
        ]
        scope = list(self.arguments) or scope
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, *self._program(), *scope, f"--probe-port={self.port}"],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent(os.getpid()),  # noqa: PLW1509 - two system calls, no lock taken
            )
        if self.wait:
            eventually(self.ready, 20, f"the operator is ready; its log:\n{self.tail()}")

    def _program(self) -> list[str]:
        if not self.intervals:
            return ["-m", "fairlead_operator"]
        lines = ["import runpy"]
        for place, seconds in self.intervals.items():
            lines += [f"import {place.rpartition('.')[0]}", f"{place} = {seconds}"]
        lines.append("runpy.run_module('fairlead_operator', run_name='__main__', alter_sys=True)")
        return ["-c", "\n".join(lines)]

    @property
    def running(self) -> "subprocess.Popen[bytes]":
        assert self.process is not None
        return self.process

    def ready(self) -> bool:
        assert self.running.poll() is None, self.tail()
        return self.probe("/readyz")[0] == 200

    def probe(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""
        except OSError:
            return 0, ""

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        total = 0.0
        for line in self.probe("/metrics")[1].splitlines():
            match = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(
                f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()
            ):
                total += float(match[2])
        return total

    def by_label(self, name: str, label: str) -> Counter[str]:
        """A metric's series, summed by the values of ``label``."""
        pattern = rf'^{re.escape(name)}\{{.*?{label}="([^"]*)".*\}} (\S+)$'
        totals: Counter[str] = Counter()
        for value, number in re.findall(pattern, self.probe("/metrics")[1], re.MULTILINE):
            totals[value] += int(float(number))
        return totals

    def memory_bytes(self) -> int:
        return self._memory("VmRSS")

    def peak_memory_bytes(self) -> int:
        """Resident memory at its highest so far."""
        return self._memory("VmHWM")

    def _memory(self, name: str) -> int:
        text = Path(f"/proc/{self.running.pid}/status").read_text()
        match = re.search(rf"{name}:\s+(\d+) kB", text)
        assert match
        return int(match[1]) * 1024

    def kill(self) -> None:
        """SIGKILL, like the loss of a node."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None:
            end(self.process, patience=10)

    def tail(self, characters: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-characters:] if self.log.is_file() else ""

    def tracebacks(self) -> list[str]:
        """Log lines with a traceback, or that are not JSON."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [
            line
            for line in lines
            if '"traceback"' in line or "Traceback" in line or not _is_json(line)
        ]


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
