"""A small kubelet: pods of its node run our real runtime as a process, each on its own address.

Owns the node and the loop over its pods: start, probe, restart, drain, report. ``podprocess`` plays
one pod.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from cluster.harness import addresses
from cluster.harness.apiclient import ApiError, Object, eventually
from cluster.harness.controlplane import ControlPlane
from cluster.harness.nodes import is_ready
from cluster.harness.podprocess import PodProcess, Programs, now

RUNTIME: Programs = {"fairlead": [sys.executable, "-m", "fairlead_runtime"]}
STANDIN: Programs = {"fairlead": [sys.executable, str(Path(__file__).with_name("idle_pod.py"))]}
BEAT = 0.1
HEARTBEAT = 10.0
PROBE_EVERY = 0.3


class FakeKubelet:
    """``with FakeKubelet(plane, "node")``: a Ready node that takes pods with ``type: processes`` in
    their selector.
    """

    def __init__(
        self,
        plane: ControlPlane,
        name: str = "processes",
        environ: Mapping[str, str] | None = None,
        programs: Programs = RUNTIME,
    ) -> None:
        self.name, self.plane = name, plane
        self._environ, self._programs = environ or {}, programs
        self._pods: dict[str, PodProcess] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.errors: list[str] = []

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
            one.remove()
        with contextlib.suppress(ApiError):
            self._api.delete("Node", "", self.name)
        self._api.close()
        assert not self.errors, self.errors

    def kill(self, namespace: str, pod: str) -> None:
        """SIGKILL to the process of a pod."""
        uid = self._api.get("Pod", namespace, pod)["metadata"]["uid"]
        process = self._pods[uid].process
        assert process is not None
        process.kill()

    def log(self, uid: str) -> str:
        return (self._pods[uid].home / "log").read_text(errors="replace")

    def _register(self) -> None:
        capacity = {"cpu": "512", "memory": "8Ti", "pods": "200", "nvidia.com/gpu": "8"}
        labels = {"type": "processes", "kubernetes.io/hostname": self.name}
        body: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels},
        }
        # Only pods for this node: it would run others as processes too.
        body["spec"] = {"taints": [{"key": "processes", "effect": "NoSchedule"}]}
        self._api.apply(body, force="true")
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "",
            "lastTransitionTime": now(),
        }
        status = {
            "capacity": capacity,
            "allocatable": capacity,
            "conditions": [{**ready, "lastHeartbeatTime": now()}],
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
                self._sync({pod["metadata"]["uid"]: pod for pod in pods})
            except ApiError as error:
                if error.code not in {
                    404,
                    409,
                }:  # the pod is gone or changed: the next loop sees it
                    self.errors.append(str(error))
            except OSError:
                pass  # the API server is unreachable: a kubelet continues
            except Exception as error:  # noqa: BLE001 - reported when the kubelet is stopped
                if (
                    "httpx" not in type(error).__module__
                    and "httpcore" not in type(error).__module__
                ):
                    self.errors.append(repr(error))
            self._stop.wait(BEAT)

    def _sync(self, pods: dict[str, Object]) -> None:
        for uid in [uid for uid in self._pods if uid not in pods]:
            self._pods.pop(uid).remove()
        for uid, pod in pods.items():
            if uid not in self._pods:
                self._pods[uid] = PodProcess(addresses.take(), self.plane.home / f"pod-{uid}")
            one = self._pods[uid]
            if pod["metadata"].get("deletionTimestamp"):
                self._drain(pod, one)
            else:
                self._sync_running(pod, one)

    def _sync_running(self, pod: Object, one: PodProcess) -> None:
        if one.process is None and time.monotonic() >= one.retry_at:
            one.start(pod, self._programs, self._environ)
        elif (
            not one.check_end()
            and one.process is not None
            and time.monotonic() - one.probed_at >= PROBE_EVERY
        ):
            one.probed_at = time.monotonic()
            one.ready = one.probe(pod, "readinessProbe")
            one.startup_passed |= one.ready
        self._report(pod, one)

    def _drain(self, pod: Object, one: PodProcess) -> None:
        meta = pod["metadata"]
        if one.end_within(meta.get("deletionGracePeriodSeconds", 30)):
            self._report(
                pod, one
            )  # a kubelet reports the end of the container before it deletes the pod
            self._api.delete("Pod", meta["namespace"], meta["name"], gracePeriodSeconds="0")
        else:
            self._report(pod, one)

    def _report(self, pod: Object, one: PodProcess) -> None:
        """Write the status if it differs from the last one written or a controller changed it. A
        failed write is repeated.
        """
        if not one.container_states:  # nothing of the pod ran here: it remains from an earlier node
            return
        meta, status = pod["metadata"], one.status(pod)
        if status != one.reported or is_ready(pod) != one.ready:
            self._api.merge(
                "Pod", meta["namespace"], meta["name"], {"status": status}, sub="status"
            )
            one.reported = status
