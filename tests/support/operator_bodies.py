"""Bodies for operator tests, as plain dicts: a resource, pods in chosen states, events."""

from collections.abc import Mapping
from typing import Any

from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings

Object = dict[str, Any]

SETTINGS = Settings(runtime_image="registry.test/fairlead-runtime:1", lease_namespace="ns")

AFFINITY: Object = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}
            ]
        }
    },
    "podAntiAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 10,
                "podAffinityTerm": {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {"matchLabels": {"team": "x"}},
                },
            }
        ]
    },
}
VOLUMES: list[Object] = [
    {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}},
    {"name": "config", "configMap": {"name": "c", "items": [{"key": "a", "path": "b/c"}]}},
    {"name": "secret", "secret": {"secretName": "s", "optional": True}},
    {"name": "data", "persistentVolumeClaim": {"claimName": "d", "readOnly": True}},
    {"name": "both", "projected": {"sources": [{"configMap": {"name": "c"}}]}},
]


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> Object:
    out = dict(base)
    for key, value in change.items():
        inner = out.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            out[key] = merged(inner, value)
        else:
            out[key] = value
    return out


def resource_body(name: str = "chat", **spec: Any) -> Object:
    """A CPU resource on the demo model; ``spec`` is merged in."""
    base = {"model": {"source": "demo:"}, "resources": {"accelerator": {"count": 0}}}
    return {
        "apiVersion": "serving.fairlead.dev/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": name, "namespace": "ns", "uid": "uid-1", "generation": 1},
        "spec": merged(base, spec),
    }


def resource(name: str = "chat", **spec: Any) -> InferenceDeployment:
    return InferenceDeployment.from_body(resource_body(name, **spec))


def pod(
    name: str = "chat-1",
    *,
    revision: str = "new",
    ready: bool = False,
    conditions: list[Object] | None = None,
    container: Object | None = None,
    init: Object | None = None,
    limits: Mapping[str, str] | None = None,
    deleting: bool = False,
) -> Object:
    """A pod of the resource above. ``container`` and ``init`` are container statuses."""
    meta: Object = {
        "name": name,
        "namespace": "ns",
        "uid": f"uid-of-{name}",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {
            "serving.fairlead.dev/name": "chat",
            "serving.fairlead.dev/uid": "uid-1",
            "serving.fairlead.dev/revision": revision,
        },
    }
    if deleting:
        meta["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    states = list(conditions or ())
    if ready:
        states.append({"type": "Ready", "status": "True"})
    status: Object = {"phase": "Running", "podIP": "10.0.0.1", "conditions": states}
    if container is not None:
        status["containerStatuses"] = [container]
    if init is not None:
        status["initContainerStatuses"] = [init]
    spec = {"containers": [{"name": "runtime", "resources": {"limits": dict(limits or {})}}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": status}


def unscheduled(message: str) -> list[Object]:
    return [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    ]


def event(of: Object, reason: str, message: str) -> Object:
    about = {"kind": "Pod", "name": of["metadata"]["name"], "uid": of["metadata"]["uid"]}
    return {
        "metadata": {"name": f"e-{reason}"},
        "involvedObject": about,
        "reason": reason,
        "message": message,
    }


def deployment(
    revision: str = "new", *, strategy: str = "RollingUpdate", replicas: int = 1
) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "chat", "namespace": "ns", "uid": "uid-of-deployment"},
        "spec": {
            "replicas": replicas,
            "strategy": {"type": strategy},
            "template": {"metadata": {"labels": {"serving.fairlead.dev/revision": revision}}},
        },
        "status": {},
    }


# The config.json of Qwen2.5-0.5B, as far as capacity needs it.
QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
