"""One pod played by processes: its init containers in order, then its first container, on its own
address.

Owns the processes, the pod's folder with its emptyDir volumes, the restarts, and the pod's status
as a kubelet would report it. Of a command only ``--host`` and ``--device`` are replaced
(``played_arguments``), and a path of the environment in a mounted volume, by the volume's folder.
Limits, accelerators and other volumes are not played: tests that need those read the objects.
"""

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cluster.harness.addresses import release
from cluster.harness.apiclient import Object
from cluster.harness.controlplane import end_with_parent

Programs = Mapping[str, Sequence[str]]  # first word of a container's command → the command to run


@dataclass(slots=True)
class ContainerState:
    """Starts, restarts and last end of one container."""

    started: str = ""
    restarts: int = 0
    end: Object = field(default_factory=dict)  # the last one


@dataclass(slots=True)
class PodProcess:
    """One pod: the process of the container that runs now, and the status last reported."""

    address: str
    home: Path
    stage: int = (
        0  # index of the container that runs: init containers in order, then the first container
    )
    container_states: list[ContainerState] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    startup_passed: bool = False  # the startup probe
    ready: bool = False
    probed_at: float = 0.0
    retry_at: float = 0.0
    term_sent: float = 0.0
    finished: bool = False  # it ended because the pod was deleted
    reported: Object = field(default_factory=dict)  # the last status that was written

    def start(self, pod: Object, programs: Programs, environ: Mapping[str, str]) -> None:
        """Run the container whose turn it is."""
        self.home.mkdir(exist_ok=True)
        container = containers(pod)[self.stage]
        self.container_states += [
            ContainerState() for _ in containers(pod)[len(self.container_states) :]
        ]
        termination_log = self.home / f"termination-log-{self.stage}"
        termination_log.write_text("")
        ours = {
            "PATH": os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
            "FAIRLEAD_TERMINATION_LOG": str(termination_log),
        }
        with (self.home / "log").open("ab") as out:
            self.process = subprocess.Popen(
                [
                    *programs[container["command"][0]],
                    *played_arguments(container, self.address),
                ],
                env={**self._environment(pod, container), **ours, **environ},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                start_new_session=True,
                preexec_fn=end_with_parent(os.getpid()),  # noqa: PLW1509 - two system calls, no lock taken
            )
        self.container_states[self.stage].started = now()
        self.startup_passed, self.ready = False, False

    def _environment(self, pod: Object, container: Object) -> dict[str, str]:
        """The container's environment; a path below a mount is in that volume, any other does not
        exist.
        """
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
        folders = {}
        for mount in container.get("volumeMounts") or ():
            if "emptyDir" in volumes[mount["name"]]:
                folders[mount["mountPath"]] = self.home / "volumes" / mount["name"]
                folders[mount["mountPath"]].mkdir(parents=True, exist_ok=True)
        environ = {entry["name"]: entry.get("value", "") for entry in container.get("env") or ()}
        for name in ("HOME", "HF_HOME"):
            if name in environ:
                environ[name] = str(folders.get(environ[name], self.home / "not-mounted" / name))
        return environ

    def check_end(self) -> bool:
        """Record the end of the process, if it ended; then the next container runs, or a retry."""
        if self.process is None or self.process.poll() is None:
            return False
        life, code = self.container_states[self.stage], self.process.returncode
        text = (self.home / f"termination-log-{self.stage}").read_text()[-4096:]
        life.end = {
            "exitCode": code if code >= 0 else 128 - code,
            "reason": "Error" if code else "Completed",
            "message": text,
            "startedAt": life.started,
            "finishedAt": now(),
        }
        self.process, self.ready = None, False
        if code == 0 and self.stage + 1 < len(self.container_states):
            self.stage += 1
        else:
            life.restarts += 1
            self.retry_at = time.monotonic() + min(5.0, 0.5 * 2**life.restarts)
        return True

    def end_within(self, seconds: float) -> bool:
        """SIGTERM, then SIGKILL ``seconds`` later; True once nothing runs. Call it until then."""
        if self.process is None or self.process.poll() is not None:
            self.finished |= self.check_end()
            return True
        if not self.term_sent:
            self.process.send_signal(signal.SIGTERM)
            self.term_sent, self.ready = time.monotonic(), False
        elif time.monotonic() - self.term_sent > seconds:
            self.process.kill()
        return False

    def remove(self) -> None:
        """End the process and remove the address and the folder."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        release(self.address)
        shutil.rmtree(self.home, ignore_errors=True)

    def probe(self, pod: Object, name: str) -> bool:
        """Run the container's probe of this name; False while an init container runs."""
        container = containers(pod)[self.stage]
        if name not in container:
            return False
        wanted = container[name]["httpGet"]
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        url = f"http://{self.address}:{ports[wanted['port']]}{wanted['path']}"
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def status(self, pod: Object) -> Object:
        """The pod's status."""
        inits = pod["spec"].get("initContainers") or ()
        statuses = list(self._statuses(pod))
        started = self.stage >= len(inits)
        ready = self.ready
        facts = {
            "PodReadyToStartContainers": True,
            "Initialized": started,
            "ContainersReady": ready,
            "Ready": ready,
        }
        return {
            "phase": "Running" if started else "Pending",
            "startTime": pod["status"].get("startTime") or now(),
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "hostIP": "127.0.0.1",
            "hostIPs": [{"ip": "127.0.0.1"}],
            "conditions": conditions(pod, facts),
            "initContainerStatuses": statuses[: len(inits)],
            "containerStatuses": statuses[len(inits) :],
        }

    def _statuses(self, pod: Object) -> Iterator[Object]:
        inits = len(pod["spec"].get("initContainers") or ())
        for index, container in enumerate(containers(pod)):
            life = self.container_states[index]
            runs = index == self.stage and self.process is not None
            done = index < self.stage or (index == self.stage and self.finished)
            if done:
                state = {"terminated": life.end}
            elif runs:
                state = {"running": {"startedAt": life.started}}
            elif index == self.stage and life.end:
                state = {
                    "waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting"}
                }
            else:
                state = {"waiting": {"reason": "PodInitializing"}}
            yield {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": done if index < inits else self.ready and runs,
                # A container without a startup probe counts as started as long as it runs.
                "started": runs and (self.startup_passed if index >= inits else True),
                "restartCount": life.restarts,
                "state": state,
                "lastState": {"terminated": life.end} if life.end and not done else {},
            }


def containers(pod: Object) -> list[Object]:
    """The containers that are played, in the order in which they run."""
    return [*(pod["spec"].get("initContainers") or ()), pod["spec"]["containers"][0]]


def played_arguments(container: Object, address: str) -> list[str]:
    """The container's arguments for a process of this machine: it listens on the pod's address,
    and a pod with an accelerator runs on the CPU.
    """
    played = {"--host": f"--host={address}", "--device": "--device=cpu"}
    return [played.get(a.partition("=")[0], a) for a in container.get("args", ())]


def conditions(pod: Object, facts: Mapping[str, bool]) -> list[Object]:
    """The pod's conditions, updated; a time changes only with its value."""
    old = {c["type"]: c for c in pod["status"].get("conditions") or ()}
    merged = [c for c in old.values() if c["type"] not in facts]
    for kind, fact in facts.items():
        value = "True" if fact else "False"
        before = old.get(kind)
        since = before["lastTransitionTime"] if before and before["status"] == value else now()
        merged.append({"type": kind, "status": value, "lastTransitionTime": since})
    return merged


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
