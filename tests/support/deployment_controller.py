"""Kubernetes' Deployment controller, scheduler and kubelet in small, one step at a time.

The arithmetic of a rolling update is that of kube-controller-manager 1.36
(pkg/controller/deployment, rolling.go and recreate.go): scale the new ReplicaSet up to ``replicas +
maxSurge`` pods in all, take unavailable old pods first, then available ones down to ``replicas -
maxUnavailable``. Nodes are one number: how many pods have room. ``on_end`` hears of every available
pod that a rollout takes.
"""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fairlead_operator.resource.kinds import DEPLOYMENT, POD, SERVICE, SLICE, Key, Object, key_of
from support.fake_api_server import FakeApiServer

HASH = "pod-template-hash"
OnEnd = Callable[[Key, int, Object], None]  # deployment, available pods left, the Deployment


def is_ready(pod: Object) -> bool:
    conditions = pod["status"]["conditions"]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def template_hash(deployment: Object) -> str:
    """What makes two ReplicaSets different: every byte of the template."""
    text = json.dumps(deployment["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _stamp(now: datetime) -> str:
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True)
class Nodes:
    """What runs the pods. ``room``: how many fit."""

    server: FakeApiServer
    rng: random.Random
    room: int
    on_end: OnEnd
    bad_images: set[str] = field(default_factory=set)  # their pods never become ready
    _made: int = 0

    # -- the Deployment controller

    def control(self, now: datetime) -> None:
        """One sync of every Deployment."""
        for deployment in self.server.all(DEPLOYMENT):
            self._sync(deployment, now)

    def _sync(self, deployment: Object, now: datetime) -> None:
        spec = deployment["spec"]
        template = template_hash(deployment)
        pods = self._pods(key_of(deployment))
        new = [p for p in pods if p["metadata"]["labels"][HASH] == template]
        old = [p for p in pods if p["metadata"]["labels"][HASH] != template]
        wanted = int(spec["replicas"])
        strategy = spec["strategy"]
        if strategy["type"] == "Recreate":
            for pod in old:
                self._end(deployment, pod)
            if not old:
                self._resize(deployment, new, wanted, template, now)
            return
        surge = int(strategy["rollingUpdate"]["maxSurge"])
        unavailable = int(strategy["rollingUpdate"]["maxUnavailable"])
        if surge == unavailable == 0:
            unavailable = 1
        if not old:
            self._resize(deployment, new, wanted, template, now)
            return
        if len(new) > wanted:
            self._resize(deployment, new, wanted, template, now)
            return
        grow = min(wanted + surge - len(pods), wanted - len(new))
        if grow > 0:
            for _ in range(grow):
                self._create(deployment, template, now)
            return
        self._shrink_old(deployment, new, old, wanted - unavailable)

    def _shrink_old(
        self, deployment: Object, new: list[Object], old: list[Object], least: int
    ) -> None:
        new_unavailable = sum(not is_ready(p) for p in new)
        most = len(new) + len(old) - least - new_unavailable
        if most <= 0:
            return
        for pod in [p for p in old if not is_ready(p)][:most]:
            self._end(deployment, pod)
            old = [p for p in old if p is not pod]
        available = sum(map(is_ready, new)) + sum(map(is_ready, old))
        for pod in [p for p in old if is_ready(p)][: max(0, available - least)]:
            self._end(deployment, pod)

    def _resize(
        self, deployment: Object, pods: list[Object], wanted: int, template: str, now: datetime
    ) -> None:
        for _ in range(wanted - len(pods)):
            self._create(deployment, template, now)
        surplus = sorted(pods, key=is_ready)[: max(0, len(pods) - wanted)]
        for pod in surplus:
            self._end(deployment, pod, scaled_down=True)

    def _create(self, deployment: Object, template: str, now: datetime) -> None:
        self._made += 1
        namespace, name = key_of(deployment)
        body = deployment["spec"]["template"]
        labels = {**body["metadata"]["labels"], HASH: template, "deployment": name}
        conditions = [
            {
                "type": "PodScheduled",
                "status": "False",
                "message": "0/3 nodes are available: 3 Insufficient cpu.",
                "lastTransitionTime": _stamp(now),
            }
        ]
        self.server.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{name}-{self._made}",
                    "namespace": namespace,
                    "labels": labels,
                    "creationTimestamp": _stamp(now),
                },
                "spec": body["spec"],
                "status": {"phase": "Pending", "podIP": "", "conditions": conditions},
            }
        )

    def _end(self, deployment: Object, pod: Object, *, scaled_down: bool = False) -> None:
        namespace, name = key_of(pod)
        self.server.remove(POD, namespace, name)
        if is_ready(pod) and not scaled_down:
            left = sum(map(is_ready, self._pods(key_of(deployment))))
            self.on_end(key_of(deployment), left, deployment)

    def _pods(self, key: Key) -> list[Object]:
        return [
            p
            for p in self.server.all(POD)
            if (p["metadata"]["namespace"], p["metadata"]["labels"]["deployment"]) == key
        ]

    # -- the scheduler and the kubelets

    def schedule(self) -> None:
        """Place what has room, oldest first."""
        pods = self.server.all(POD)
        free = self.room - sum(p["status"]["phase"] == "Running" for p in pods)
        waiting = [p for p in pods if p["status"]["phase"] == "Pending"]
        for pod in sorted(waiting, key=_number)[: max(0, free)]:
            self._status(pod, "Running", [{"type": "PodScheduled", "status": "True"}])

    def start_one(self) -> None:
        """One placed pod becomes ready, unless its template is bad."""
        starting = [
            p
            for p in self.server.all(POD)
            if p["status"]["phase"] == "Running"
            and not is_ready(p)
            and p["spec"]["containers"][0]["image"] not in self.bad_images
        ]
        if starting:
            pod = self.rng.choice(starting)
            conditions = [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True"},
            ]
            self._status(pod, "Running", conditions)

    def kill_one(self) -> None:
        """A pod dies; its ReplicaSet makes another at the next sync."""
        if pods := self.server.all(POD):
            namespace, name = key_of(self.rng.choice(pods))
            self.server.remove(POD, namespace, name)

    def _status(self, pod: Object, phase: str, conditions: list[Any]) -> None:
        status = {"phase": phase, "podIP": "10.0.0.1", "conditions": conditions}
        self.server.put({**pod, "status": status})

    def publish_endpoints(self) -> None:
        """One slice for each Service, with its ready pods."""
        for service in self.server.all(SERVICE):
            namespace, name = key_of(service)
            endpoints = [
                {"conditions": {"ready": True}, "targetRef": {"uid": p["metadata"]["uid"]}}
                for p in self._pods((namespace, name))
                if is_ready(p)
            ]
            meta = {"name": name, "namespace": namespace, "labels": service["metadata"]["labels"]}
            held = self.server.find(SLICE, namespace, name)
            if held is None or held["endpoints"] != endpoints:
                kind = {"apiVersion": SLICE.api_version, "kind": SLICE.name}
                self.server.put({**kind, "metadata": meta, "endpoints": endpoints})


def _number(pod: Object) -> int:
    return int(pod["metadata"]["name"].rsplit("-", 1)[1])
