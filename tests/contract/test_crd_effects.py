"""No field of the custom resource is without effect: another value changes an object that the
operator writes, the status or the autoscaler's policy, or it is refused with the resource.

A real reconcile of each changed resource runs on an API server in memory. The annotations of the
Deployment do not count: they hold a hash of the whole spec.
"""

import asyncio
import copy
import dataclasses
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fairlead_operator.cluster.cache import Store
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.scale.autoscale import Policy
from fairlead_operator.decide.scale.target import target_of
from fairlead_operator.reconcile import Reconciler
from fairlead_operator.resource.fields import ResourceError
from fairlead_operator.resource.kinds import DEPLOYMENT, RESOURCE, Object
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_runtime.settings.supported import IN_RESOURCE
from support.crd import SPEC, nodes
from support.fake_api_server import FakeApiServer, FakeCluster
from support.operator_bodies import AFFINITY, SETTINGS, VOLUMES, merged, resource_body

CONFIG = json.loads(
    (Path(__file__).parents[2] / "runtime/fairlead_runtime/demo/config.json").read_text()
)
ALLOWING = dataclasses.replace(
    SETTINGS,
    allowed_images=(".*",),
    allowed_service_accounts=(".*",),
    allowed_priority_classes=(".*",),
    allowed_labels=(".*",),
    allowed_annotations=(".*",),
    allowed_service_annotations=(".*",),
    allow_remote_code=True,
    create_model_cache=True,
)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LEAVES = [
    (path, node)
    for path, node in nodes(SPEC)
    if not {"properties", "items", "additionalProperties"} & set(node)
]
REFUSED = {limit.path for limit in IN_RESOURCE}
# Has one value so far. Its unit test replaces what that value measures.
ONE_VALUE = {"autoscaling.signal"}
LABELLED: Object = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"team": "x"}}}
EXPRESSION = {"key": "tier", "operator": "In", "values": ["gold"]}
POD_TERM = merged(LABELLED, {"labelSelector": {"matchExpressions": [EXPRESSION]}})
ALL_PODS: Object = {
    "requiredDuringSchedulingIgnoredDuringExecution": [POD_TERM],
    "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": POD_TERM}],
}
PREFERRED_NODES = [{"weight": 1, "preference": {"matchExpressions": [EXPRESSION]}}]
FILES: Object = {"items": [{"key": "a", "path": "b"}], "optional": True}
# Together these resources have every field.
EVERYTHING: Object = {
    "autoscaling": {},
    "service": {"annotations": {"example.com/x": "y"}},
    "security": {"apiKeySecretRef": {"name": "keys", "key": "list"}, "egressPorts": [15012]},
    "podTemplate": {
        "labels": {"team": "x"},
        "annotations": {"note": "y"},
        "nodeSelector": {"zone": "a"},
        "tolerations": [
            {"key": "gpu", "operator": "Equal", "value": "x", "effect": "NoExecute"},
            {"key": "gpu", "operator": "Exists"},
        ],
        "topologySpread": [{"topologyKey": "zone"}],
        "imagePullSecrets": [{"name": "pull"}],
        "env": [{"name": "A", "value": "1"}],
        "affinity": merged(
            AFFINITY,
            {
                "nodeAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": PREFERRED_NODES
                },
                "podAffinity": ALL_PODS,
                "podAntiAffinity": ALL_PODS,
            },
        ),
        "volumes": [
            *VOLUMES,
            {"name": "x", "emptyDir": {}},
            {"name": "files", "configMap": {"name": "c", **FILES}},
            {"name": "keys", "secret": {"secretName": "s", **FILES}},
            {
                "name": "all",
                "projected": {
                    "sources": [
                        {"configMap": {"name": "c", **FILES}},
                        {"secret": {"name": "s", **FILES}},
                    ]
                },
            },
        ],
        "volumeMounts": [{"name": "data", "mountPath": "/mnt/data"}],
    },
}
HUB: Object = {
    "model": {
        "source": "hf://owner/name",
        "revision": "abc",
        "tokenSecretRef": {"name": "hub", "key": "token"},
    },
    "resources": {"accelerator": {"count": 1, "memory": "80Gi", "nodeSelector": {"gpu": "a"}}},
    "modelCache": {"type": "PVC", "size": "1Gi", "accessModes": ["ReadWriteOnce"]},
}
NAMED_CLAIM: Object = {**HUB, "modelCache": {"type": "PVC", "claimName": "weights"}}
BASES: tuple[Object, ...] = ({}, EVERYTHING, HUB, NAMED_CLAIM)


def with_defaults(schema: Object, value: Any) -> Any:
    """The value with the schema's defaults, as the API server stores it."""
    if isinstance(value, list):
        return [with_defaults(schema["items"], item) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    filled = dict(value)
    for name, child in schema["properties"].items():
        if name not in filled and "default" in child:
            filled[name] = copy.deepcopy(child["default"])
        if name in filled:
            filled[name] = with_defaults(child, filled[name])
    return filled


def places(value: Any, path: str) -> Iterator[tuple[Any, Any]]:
    """Each container in ``value`` that has, or may have, the field of this path, and its key."""
    if path.startswith(("[]", "{}")):
        keys = range(len(value)) if path.startswith("[]") else list(value)
        inner = path[2:].removeprefix(".")
        for key in keys:
            yield from places(value[key], inner) if inner else [(value, key)]
        return
    cut = min((at for at in (path.find(c) for c in ".[{") if at >= 0), default=-1)
    if cut < 0:
        yield value, path
    elif isinstance(value, dict) and path[:cut] in value:
        yield from places(value[path[:cut]], path[cut:].removeprefix("."))


def others(node: Object, value: Any) -> Iterator[Any]:
    """Other values of a field that has ``value``; not every one is valid."""
    kind = node.get("type")
    words: list[Any] = node.get("enum", [])
    if kind == "boolean":
        words = [not value]
    elif kind in ("integer", "number") and not words:
        words = [(value or 0) + 1, (value or 0) / 2, node["minimum"], node["maximum"]]
    elif not words:
        words = [f"{value or ''}x", "x", "3Gi", "3", "hf://other/name", "example.com/x", "/mnt/x"]
    yield from (word for word in words if word != value)


def variants(body: Object, path: str, node: Object) -> Iterator[Object]:
    """The body with another value in one of the places of the field; not every one is valid."""
    for number, (container, key) in enumerate(places(body["spec"], path)):
        value = container[key] if isinstance(container, list) else container.get(key)
        for other in others(node, value):
            changed = copy.deepcopy(body)
            inner, _ = list(places(changed["spec"], path))[number]
            inner[key] = other
            yield changed


def outcome(body: Object) -> str:
    """Everything that follows from a resource."""
    server = FakeApiServer()
    server.put(body)
    store = Store()
    server.sync(store, 0)
    results = ProbeResults(complete=True, config=CONFIG)
    reconcile = Reconciler(
        FakeCluster(server, store), lambda *_: results, ALLOWING, lambda: NOW, lambda: 0.0
    )
    asyncio.run(reconcile(("ns", "chat")))
    follows: list[Any] = []
    if scaling := InferenceDeployment.from_body(body).spec.autoscaling:
        follows.append(Policy.of(scaling, target_of(scaling.target_per_replica, 1, 0, None)))
    for (plural, *_), made in sorted(server.objects.items()):
        if plural == DEPLOYMENT.plural:
            del made["metadata"]["annotations"]
        shown = made.get("status") if plural == RESOURCE.plural else {**made, "metadata": {}}
        follows.append([plural, shown, made["metadata"].get("annotations")])
    return json.dumps(follows, default=str)


@pytest.fixture(scope="module")
def bodies() -> list[tuple[Object, str]]:
    """Each base with the defaults, and what follows from it."""
    every = [with_defaults({"properties": {"spec": SPEC}}, resource_body(**b)) for b in BASES]
    return [(body, outcome(body)) for body in every]


@pytest.mark.parametrize(("path", "node"), LEAVES, ids=[path for path, _ in LEAVES])
def test_another_value_of_a_field_has_an_effect(
    path: str, node: Object, bodies: list[tuple[Object, str]]
) -> None:
    if path in ONE_VALUE:
        assert len(node["enum"]) == 1
        return
    accepted = 0
    for body, before in bodies:
        for changed in variants(body, path, node):
            try:
                InferenceDeployment.from_body(changed)
            except ResourceError:
                continue
            accepted += 1
            if outcome(changed) != before:
                return
    assert not accepted, f"{accepted} other values of {path} change nothing: no code reads it"
    assert path in REFUSED, f"no resource of this test can have another {path}: add one to BASES"
