"""A small kubelet: pods of its node run our real runtime as a process, each on an address of its own.

Owns starting, probing, restarting and ending the first container of a pod, and reporting it as a kubelet would.
Only ``--host`` of the command is replaced, by the pod's address. Everything else of a pod (volumes, limits, init
containers) is not played: tests that need those look at the objects.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Self

from cluster.apiclient import ApiError, Object, eventually
from cluster.controlplane import ControlPlane, dying_with
from cluster.nodes import is_ready

PROGRAMS = {"fairlead": [sys.executable, "-m", "fairlead_runtime"]}
BEAT = 0.1
HEARTBEAT = 10.0
_addresses = count(1)


class NoAddressError(RuntimeError):
    """Addresses cannot be added to the loopback device."""


@dataclass(slots=True)
class Running:
    """One pod's process and what was reported about it."""

    address: str
    home: Path
    process: subprocess.Popen[bytes] | None = None
    started: str = ""
    passed: bool = False  # the startup probe
    ready: bool | None = None
    restarts: int = 0
    last: Object = field(default_factory=dict)
    probed: float = 0.0
    retry_at: float = 0.0
    term_sent: float = 0.0


class FakeKubelet:
    """``with FakeKubelet(plane, "node")``: a Ready node that takes pods with ``type: processes`` in their selector."""

    def __init__(
        self, plane: ControlPlane, name: str = "processes", environ: dict[str, str] | None = None
    ) -> None:
        self.name, self.plane = name, plane
        self.environ = environ or {}
        self._pods: dict[str, Running] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.faults: list[str] = []

    def __enter__(self) -> Self:
        self._api = self.plane.api()
        self._register()
        self._thread.start()
        eventually(lambda: is_ready(self._api.get("Node", "", self.name)), 10, "the node is Ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        for one in self._pods.values():
            self._end(one)
        with contextlib.suppress(ApiError):
            self._api.delete("Node", "", self.name)
        self._api.close()
        assert not self.faults, self.faults

    def kill(self, namespace: str, pod: str) -> None:
        """SIGKILL to the process of a pod."""
        uid = self._api.get("Pod", namespace, pod)["metadata"]["uid"]
        process = self._pods[uid].process
        assert process is not None
        process.kill()

    def log(self, uid: str) -> str:
        return (self._pods[uid].home / "log").read_text(errors="replace")

    def _register(self) -> None:
        room = {"cpu": "512", "memory": "8Ti", "pods": "200", "nvidia.com/gpu": "8"}
        labels = {"type": "processes", "kubernetes.io/hostname": self.name}
        body: Object = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name, "labels": labels}}
        # Only pods made for it: others would be run as processes too.
        body["spec"] = {"taints": [{"key": "processes", "effect": "NoSchedule"}]}
        self._api.apply(body, force="true")
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "",
            "lastTransitionTime": _now(),
        }
        status = {
            "capacity": room,
            "allocatable": room,
            "conditions": [{**ready, "lastHeartbeatTime": _now()}],
        }
        self._api.merge("Node", "", self.name, {"status": status}, sub="status")

    def _run(self) -> None:
        beat = time.monotonic()
        while not self._stop.is_set():
            try:
                if time.monotonic() - beat > HEARTBEAT:
                    self._register()
                    beat = time.monotonic()
                pods = self._api.items("Pod", fieldSelector=f"spec.nodeName={self.name}")
                self._turn({pod["metadata"]["uid"]: pod for pod in pods})
            except ApiError as error:
                if error.code not in {404, 409}:  # the pod went or changed meanwhile: seen at the next turn
                    self.faults.append(str(error))
            except OSError:
                pass  # the API server is away: a kubelet goes on
            except Exception as error:  # noqa: BLE001 - reported when the kubelet is stopped
                if "httpx" not in type(error).__module__ and "httpcore" not in type(error).__module__:
                    self.faults.append(repr(error))
            self._stop.wait(BEAT)

    def _turn(self, pods: dict[str, Object]) -> None:
        for uid in [uid for uid in self._pods if uid not in pods]:
            self._end(self._pods.pop(uid))
        for uid, pod in pods.items():
            if uid not in self._pods:
                self._pods[uid] = Running(_address(), self.plane.home / f"pod-{uid}")
            one = self._pods[uid]
            if pod["metadata"].get("deletionTimestamp"):
                self._drain(pod, one)
            else:
                self._keep(pod, one)

    def _keep(self, pod: Object, one: Running) -> None:
        if one.process is None and time.monotonic() >= one.retry_at:
            self._start(pod, one)
            self._report(pod, one)
        elif one.process is not None and one.process.poll() is not None:
            self._ended(one)
            self._report(pod, one)
        elif one.process is not None and time.monotonic() - one.probed >= 0.3:
            one.probed = time.monotonic()
            ready = self._probe(pod, one, "readinessProbe")
            one.passed |= ready
            if ready != one.ready:
                one.ready = ready
                self._report(pod, one)

    def _start(self, pod: Object, one: Running) -> None:
        one.home.mkdir(exist_ok=True)
        (one.home / "termination-log").write_text("")
        container = pod["spec"]["containers"][0]
        environ = {entry["name"]: entry.get("value", "") for entry in container.get("env") or ()}
        environ |= {"PATH": os.environ["PATH"], "HOME": str(one.home), "HF_HOME": str(one.home / "hub")}
        environ |= {"FAIRLEAD_TERMINATION_LOG": str(one.home / "termination-log"), "OMP_NUM_THREADS": "1"}
        arguments = [f"--host={one.address}" if a.startswith("--host=") else a for a in container["args"]]
        with (one.home / "log").open("ab") as out:
            one.process = subprocess.Popen(
                [*PROGRAMS[container["command"][0]], *arguments],
                env={**environ, **self.environ},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=one.home,
                start_new_session=True,
                preexec_fn=dying_with(os.getpid()),  # noqa: PLW1509 - two system calls, no lock taken
            )
        one.started, one.passed, one.ready = _now(), False, False

    def _ended(self, one: Running) -> None:
        assert one.process is not None
        code = one.process.returncode
        text = (one.home / "termination-log").read_text()[-4096:]
        exit_code = code if code >= 0 else 128 - code
        one.last = {"exitCode": exit_code, "reason": "Error" if code else "Completed", "message": text}
        one.last |= {"startedAt": one.started, "finishedAt": _now()}
        one.process, one.ready = None, False
        one.restarts += 1
        one.retry_at = time.monotonic() + min(5.0, 0.5 * 2**one.restarts)

    def _drain(self, pod: Object, one: Running) -> None:
        if one.process is not None and one.process.poll() is None:
            if not one.term_sent:
                one.process.send_signal(signal.SIGTERM)
                one.term_sent = time.monotonic()
                one.ready = False
                self._report(pod, one)
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 30)
            if time.monotonic() - one.term_sent > grace:
                one.process.kill()
            return
        meta = pod["metadata"]
        self._api.delete("Pod", meta["namespace"], meta["name"], gracePeriodSeconds="0")

    def _probe(self, pod: Object, one: Running, name: str) -> bool:
        probe = pod["spec"]["containers"][0][name]["httpGet"]
        ports = {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}
        url = f"http://{one.address}:{ports[probe['port']]}{probe['path']}"
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _report(self, pod: Object, one: Running) -> None:
        meta, now = pod["metadata"], _now()
        state: Object = {"running": {"startedAt": one.started}}
        if one.process is None:
            state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting"}}
        container = {
            "name": pod["spec"]["containers"][0]["name"],
            "image": pod["spec"]["containers"][0]["image"],
            "imageID": "",
            "ready": bool(one.ready),
            "started": one.passed,
            "restartCount": one.restarts,
            "state": state,
            "lastState": {"terminated": one.last} if one.last else {},
        }
        old = {c["type"]: c for c in pod["status"].get("conditions") or ()}
        ready = "True" if one.ready else "False"
        wanted = {"Initialized": "True", "ContainersReady": ready, "Ready": ready}
        conditions = [c for c in old.values() if c["type"] not in wanted]
        for kind, value in wanted.items():
            before = old.get(kind)
            since = before["lastTransitionTime"] if before and before["status"] == value else now
            conditions.append({"type": kind, "status": value, "lastTransitionTime": since})
        status = {
            "phase": "Running",
            "startTime": pod["status"].get("startTime") or now,
            "podIP": one.address,
            "podIPs": [{"ip": one.address}],
            "hostIP": "127.0.0.1",
            "hostIPs": [{"ip": "127.0.0.1"}],
            "conditions": conditions,
            "containerStatuses": [container],
        }
        self._api.merge("Pod", meta["namespace"], meta["name"], {"status": status}, sub="status")

    def _end(self, one: Running) -> None:
        if one.process is not None and one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        _release(one.address)
        shutil.rmtree(one.home, ignore_errors=True)


def _address() -> str:
    """A fresh address on the loopback device; the tests' processes bind to it and to nothing else."""
    number = next(_addresses)
    address = f"10.249.{number // 250}.{number % 250 + 1}"
    done = subprocess.run(
        ["ip", "address", "replace", f"{address}/32", "dev", "lo"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NoAddressError(
            "pods of the tests need addresses of their own: run as root, or in a namespace of your own "
            f"(unshare -rn sh -c 'ip link set lo up; make test'); ip said: {done.stderr.strip()}"
        )
    return address


def _release(address: str) -> None:
    subprocess.run(["ip", "address", "del", f"{address}/32", "dev", "lo"], capture_output=True, check=False)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
