"""The life of resources in the fault tests: create, update, scale, roll out, delete.

Owns what "converged" means there. Reads with the administrator's client, never through the proxy.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.harness.apiclient import Api, Object, eventually
from cluster.harness.resources import CHILDREN, KIND, idep

Key = tuple[str, str]  # namespace, name
BUDGET = "PodDisruptionBudget"
# Kubernetes' garbage collector learns of a new CRD every 30 s only; the operator has no part in
# deletion.
COLLECTED_SECONDS = 60.0
LOOKS = 0.2  # seconds between two: each lists six kinds


class Wanted(NamedTuple):
    """What the newest spec asks for."""

    replicas: int
    mark: str
    port: int


World = Mapping[str, Mapping[Key, Object]]  # by kind


def world_of(api: Api, namespace: str = "") -> World:
    """All resources and children, from one list per kind."""
    return {
        kind: {
            (b["metadata"]["namespace"], b["metadata"]["name"]): b
            for b in api.items(kind, namespace)
        }
        for kind in (KIND, *CHILDREN)
    }


def missing(world: World, key: Key, wanted: Wanted) -> str:
    """Why a resource has not converged; "" when it has."""
    body = world[KIND].get(key)
    if body is None:
        return "the resource"
    for kind in CHILDREN:
        if (key in world[kind]) != (kind != BUDGET or wanted.replicas > 1):
            return kind
    status = body.get("status") or {}
    deployment, service = world["Deployment"][key], world["Service"][key]
    template = deployment["spec"]["template"]
    environ = {v["name"]: v.get("value") for v in template["spec"]["containers"][0]["env"]}
    facts = {
        "replicas": deployment["spec"]["replicas"] == wanted.replicas,
        "template": environ.get("MARK") == wanted.mark,
        "port": service["spec"]["ports"][0]["port"] == wanted.port,
        "observedGeneration": status.get("observedGeneration") == body["metadata"]["generation"],
        "targetRevision": status.get("targetRevision")
        == template["metadata"]["labels"]["serving.fairlead.dev/revision"],
        "desiredReplicas": status.get("desiredReplicas") == wanted.replicas,
    }
    return ", ".join(fact for fact, holds in facts.items() if not holds)


def snapshot(api: Api, key: Key) -> str:
    """All objects of one resource: names, labels, owners and specs, without values that differ per
    creation.
    """
    namespace, name = key
    uid = api.get(KIND, namespace, name)["metadata"]["uid"]
    objects = []
    for kind in (*CHILDREN, "PersistentVolumeClaim", "ReplicaSet"):
        for body in api.items(kind, namespace):
            meta = body["metadata"]
            if not re.match(rf"{name}(-|$)", meta["name"]):
                continue
            owners = [
                (o["kind"], o["name"], o.get("controller"))
                for o in meta.get("ownerReferences") or ()
            ]
            spec = {
                k: v for k, v in body["spec"].items() if not k.startswith(("clusterIP", "replicas"))
            }
            if kind == "ReplicaSet":  # named by the template's hash; their order does not matter
                meta = {"name": name, "labels": meta["labels"]}
            text = json.dumps([kind, meta["name"], meta["labels"], owners, spec], sort_keys=True)
            text = text.replace(uid, "UID").replace(namespace, "NAMESPACE")
            text = re.sub(rf"\b{name}\b", "NAME", text)
            # Hashes of templates that hold the uid.
            objects.append(
                re.sub(r'("[^"]*(?:revision|pod-template-hash)"): "[^"]+"', r'\1: "HASH"', text)
            )
    return "\n".join(sorted(objects))


@dataclass(slots=True)
class Lifecycle:
    """Plays the life of some resources side by side; every step must converge within ``within``
    seconds.

    ``while_waiting`` is called in every wait (to restart a killed operator), ``explain`` adds to
    the message of a failed step. ``shrinking`` is true while the operator may delete a budget, the
    only deletion that the steps cause.
    """

    api: Api
    keys: Sequence[Key]
    within: float = 30.0
    while_waiting: Callable[[], None] = lambda: None
    explain: Callable[[], str] = lambda: ""
    pods: Object = field(default_factory=lambda: {"nodeSelector": {"nowhere": "true"}})
    shrinking: bool = False
    slowest: float = 0.0
    step_began: float = field(default_factory=time.monotonic)
    _foreign: dict[Key, str] = field(default_factory=dict)

    def run(self) -> dict[Key, str]:
        """Run every step; returns each resource's snapshot before its deletion."""
        self.create()
        self.change()
        snapshots = {key: snapshot(self.api, key) for key in self.keys}
        self.delete()
        return snapshots

    def create(self) -> None:
        for namespace, name in self.keys:
            foreign = self.api.create(_foreign(namespace, name))
            self._foreign[namespace, name] = foreign["metadata"]["resourceVersion"]
            template = {**self.pods, "env": [{"name": "MARK", "value": "1"}]}
            self.api.create(
                idep(namespace, name, replicas=2, podTemplate=template, service={"port": 80})
            )
        self.settle("created", Wanted(2, "1", 80))

    def change(self) -> None:
        self.patch({"service": {"port": 81}})
        self.settle("updated", Wanted(2, "1", 81))
        self.shrinking = True
        self.patch({"replicas": 1})
        self.settle("scaled down", Wanted(1, "1", 81))
        self.shrinking = False
        self.patch({"replicas": 3})
        self.settle("scaled up", Wanted(3, "1", 81))
        self.patch({"podTemplate": {"env": [{"name": "MARK", "value": "2"}]}})
        self.settle("rolled out", Wanted(3, "2", 81))
        eventually(self._two_revisions, self.within, "two revisions", LOOKS)

    def delete(self) -> None:
        """Delete the resources; afterwards only foreign objects remain, unchanged."""
        for namespace, name in self.keys:
            self.api.delete(KIND, namespace, name)
        eventually(self._gone, COLLECTED_SECONDS, "nothing is left", LOOKS)
        for (namespace, name), version in self._foreign.items():
            now = self.api.get("Service", namespace, f"{name}-theirs")
            assert now["metadata"]["resourceVersion"] == version, "a foreign object was touched"

    def patch(self, spec: Object) -> None:
        for namespace, name in self.keys:
            self.api.merge(KIND, namespace, name, {"spec": spec})

    def settle(self, what: str, wanted: Wanted) -> None:
        began = self.step_began = time.monotonic()
        late: dict[Key, str] = {}

        def look() -> bool:
            self.while_waiting()
            world = world_of(self.api, self._scope())
            late.clear()
            late.update({key: why for key in self.keys if (why := missing(world, key, wanted))})
            return not late

        try:
            eventually(look, self.within, what, LOOKS)
        except AssertionError as error:
            raise AssertionError(
                f"not {what} within {self.within} s: {late}\n{self.explain()}"
            ) from error
        self.slowest = max(self.slowest, time.monotonic() - began)

    def _scope(self) -> str:
        """The only namespace, or "" for all."""
        namespaces = {namespace for namespace, _ in self.keys}
        return namespaces.pop() if len(namespaces) == 1 else ""

    def _two_revisions(self) -> bool:
        self.while_waiting()
        owners = [b["metadata"] for b in self.api.items("ReplicaSet", self._scope())]
        names = [(m["namespace"], m["labels"].get("serving.fairlead.dev/name")) for m in owners]
        return all(names.count(key) == 2 for key in self.keys)

    def _gone(self) -> bool:
        self.while_waiting()
        world = world_of(self.api, self._scope())
        if any(key in world[kind] for kind in world for key in self.keys):
            return False
        remaining = [
            b["metadata"]
            for kind in ("ReplicaSet", "Pod")
            for b in self.api.items(kind, self._scope())
        ]
        names = {
            (m["namespace"], (m.get("labels") or {}).get("serving.fairlead.dev/name"))
            for m in remaining
        }
        return not names & set(self.keys)


def _foreign(namespace: str, name: str) -> Object:
    """A foreign object with all of our labels."""
    labels = {"app.kubernetes.io/managed-by": "fairlead", "serving.fairlead.dev/name": name}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-theirs", "namespace": namespace, "labels": labels},
        "spec": {"ports": [{"port": 80}], "clusterIP": "None"},
    }
