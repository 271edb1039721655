"""What the API server must accept and refuse: one base object, a change to it, and a part of the
expected message.

Every validation rule of the CRD has at least one accepting and one refusing case; the contract
tests check that against the CRD's own messages. Plain data: the caller has the API server.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REMOVE = object()  # as a value in a change: remove the key


@dataclass(frozen=True)
class Case:
    """``change`` is merged into BASE; ``message`` is part of the refusal, None where the object is
    accepted.
    """

    name: str
    change: Mapping[str, Any] = field(default_factory=dict)
    message: str | None = None
    object_name: str = "demo"


BASE: dict[str, Any] = {
    "apiVersion": "serving.fairlead.dev/v1alpha1",
    "kind": "InferenceDeployment",
    "metadata": {"name": "demo"},
    "spec": {"model": {"source": "demo:"}},
}


def build(case: Case) -> dict[str, Any]:
    """The whole object of a case, without a namespace."""
    body = merge(BASE, case.change)
    return merge(body, {"metadata": {"name": case.object_name}})


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """JSON merge, with REMOVE where JSON merge patch has null (null itself is a value worth
    testing).
    """
    out = dict(base)
    for key, value in change.items():
        if value is REMOVE:
            out.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = merge(out[key], value)
        else:
            out[key] = merge({}, value) if isinstance(value, Mapping) else value
    return out


def _spec(name: str, message: str | None = None, /, **change: Any) -> Case:
    return Case(name, {"spec": change}, message)


def _source(source: str, message: str | None = None) -> Case:
    return _spec(f"source {source[:40]}", message, model={"source": source})


def _toleration(fields: Mapping[str, Any], message: str | None = None) -> Case:
    return _spec(f"the toleration {fields}", message, podTemplate={"tolerations": [fields]})


def _env(name: str, message: str | None = None) -> Case:
    return _spec(f"env {name}", message, podTemplate={"env": [{"name": name, "value": "x"}]})


def _label(key: str, message: str | None = None) -> Case:
    return _spec(f"label {key}", message, podTemplate={"labels": {key: "x"}})


_NAME = "metadata.name must begin with a letter"
_SOURCE = "model.source must be demo:, hf://owner/name, pvc://claim/path or file:///path"
_HUB_NAME = "model.source of a hub model must not contain '--' nor end with '.git'"
_DOTS = "model.source must not contain '..'"
_REVISION = "model.revision must be a commit, branch or tag"
_REPLICAS = "autoscaling.minReplicas must be at most autoscaling.maxReplicas"
_SURGE = "rollout.maxSurge and rollout.maxUnavailable must not both be 0"
_BATCH = "scheduler.maxBatchTokens must be at least scheduler.maxRequests"
_IDLE = "resources.accelerator.count must equal engine.tensorParallel"
_CPU = "engine.tensorParallel must be 1 on a CPU"
_GRAPHS = {"cudaGraphs": {"enabled": "on"}}
_AHEAD = {"asyncBatching": "on"}
_CACHE = "modelCache.type PVC needs modelCache.claimName"
_CLASS = "modelCache.storageClassName is for a claim that the operator makes"
_READ_ONLY = "modelCache.accessModes ReadOnlyMany does not let pods write"
_NO_REVISION = "model.revision is for a hub model"
_TOKEN = "model.tokenSecretRef needs both name and key"
_KEYS = "security.apiKeySecretRef needs both name and key"
_LABELS = "podTemplate.labels must not use keys of"
_ANNOTATIONS = "podTemplate.annotations must not use keys of"
_ENV = "podTemplate.env name must not begin with PYTHON, LD_, HF_ or FAIRLEAD_"

CASES: tuple[Case, ...] = (
    Case("the smallest resource"),
    # -- names
    Case("a name of 40", object_name="a" + "b" * 39),
    Case("a name of one letter", object_name="a"),
    Case("a name of 41", {}, _NAME, "a" * 41),
    Case("a name with a dot", {}, _NAME, "a.b"),
    Case("a name that begins with a digit", {}, _NAME, "1a"),
    # -- model
    *(
        _source(s)
        for s in (
            "hf://Qwen/Qwen2.5-0.5B-Instruct",
            "Qwen/Qwen2.5-0.5B-Instruct",
            "pvc://models/llama/3",
            "file:///models/x",
            "/models/x",
        )
    ),
    *(
        _source(s, _SOURCE)
        for s in (
            "demo",
            "http://evil/x",
            "s3://bucket/x",
            "hf://a",
            "hf://a/b/c",
            "file://x",
            "pvc://Claim/x",
            "hf://a/b;rm",
            "--help",
            "x y/z",
            "demo:\nx",
        )
    ),
    *(_source(s, _SOURCE) for s in ("hf://a-/b", "a/b.", "a/_b", "a/" + "b" * 97)),
    *(_source(s, _HUB_NAME) for s in ("hf://a--b/c", "a/b.git")),
    *(_source(s) for s in ("file:///models/a--b", "/models/b.git", "c/" + "b" * 96)),
    *(_source(s, _DOTS) for s in ("file:///models/../etc", "pvc://c/..", "hf://a../b")),
    _source("", "spec.model.source"),
    _source("hf://a/" + "b" * 600, "Too long"),
    _spec("no source", "spec.model.source: Required value", model={"source": REMOVE}),
    _spec("a commit", model={"source": "hf://a/b", "revision": "a" * 40}),
    _spec("a branch with a slash", model={"source": "a/b", "revision": "refs/pr/1"}),
    _spec("a revision that climbs", _REVISION, model={"source": "a/b", "revision": "a/../b"}),
    _spec("a revision that is a flag", _REVISION, model={"source": "a/b", "revision": "-x"}),
    *(
        _spec(f"a revision of {source}", _NO_REVISION, model={"source": source, "revision": "v1"})
        for source in ("demo:", "pvc://models/llama/3", "file:///models/x", "/models/x")
    ),
    _spec("a token by reference", model={"tokenSecretRef": {"name": "hub", "key": "token"}}),
    _spec("a token without its key", _TOKEN, model={"tokenSecretRef": {"name": "hub"}}),
    _spec("a token without its name", _TOKEN, model={"tokenSecretRef": {"key": "token"}}),
    # -- replicas
    _spec("autoscaling with all defaults", autoscaling={}),
    _spec("one replica exactly", autoscaling={"minReplicas": 3, "maxReplicas": 3}),
    _spec("min above max", _REPLICAS, autoscaling={"minReplicas": 3, "maxReplicas": 2}),
    _spec("min above the default max", _REPLICAS, autoscaling={"minReplicas": 9}),
    _spec(
        "scale to zero by the operator",
        "spec.autoscaling.minReplicas",
        autoscaling={"minReplicas": 0},
    ),
    _spec("no replicas", replicas=0),
    _spec("too many replicas", "spec.replicas", replicas=1001),
    # -- rollout
    _spec("unavailable instead of surge", rollout={"maxSurge": 0, "maxUnavailable": 1}),
    _spec("neither surge nor unavailable", _SURGE, rollout={"maxSurge": 0}),
    _spec("an unknown strategy", "spec.rollout.strategy", rollout={"strategy": "Canary"}),
    # -- scheduler and cache
    _spec("as many tokens as requests", scheduler={"maxBatchTokens": 64, "maxRequests": 64}),
    _spec(
        "fewer tokens than requests", _BATCH, scheduler={"maxBatchTokens": 63, "maxRequests": 64}
    ),
    _spec("fewer tokens than the default requests", _BATCH, scheduler={"maxBatchTokens": 100}),
    _spec("a block of 256", cache={"blockSize": 256}),
    _spec("a block of 4", "spec.cache.blockSize", cache={"blockSize": 4}),
    _spec("a block of 24", "spec.cache.blockSize", cache={"blockSize": 24}),
    _spec("more than all memory", "spec.cache.maxMemoryPercent", cache={"maxMemoryPercent": 1.5}),
    _spec(
        "null takes the default",
        cache={"numBlocks": None, "blockSize": None},
        engine={"maxModelLen": None},
    ),
    # -- accelerators
    _spec("one of one", engine={"tensorParallel": 1}, resources={"accelerator": {"count": 1}}),
    _spec("one of two", _IDLE, resources={"accelerator": {"count": 2}}),
    _spec("two of one", _IDLE, engine={"tensorParallel": 2}),
    _spec("a CPU", engine={"tensorParallel": 1}, resources={"accelerator": {"count": 0}}),
    _spec(
        "two on a CPU", _CPU, engine={"tensorParallel": 2}, resources={"accelerator": {"count": 0}}
    ),
    _spec("a quantity as a number", resources={"cpu": 4, "memory": "1.5Gi"}),
    _spec("a quantity that is none", "spec.resources.memory", resources={"memory": "lots"}),
    _spec("a negative quantity", "spec.resources.sharedMemory", resources={"sharedMemory": "-1Gi"}),
    # -- values that are not supported yet
    _spec("supported switches", engine={"asyncBatching": "off", "cudaGraphs": {"enabled": "off"}}),
    _spec("no quantization", engine={"quantization": "none"}, cache={"dtype": "auto"}),
    _spec("no graph kept", engine={"cudaGraphs": {"maxCachedGraphs": 0}}),
    _spec("deterministic in float32", engine={"deterministic": True, "dtype": "float32"}),
    _spec("deterministic in the checkpoint's type", engine={"deterministic": True}),
    _spec("two of two", engine={"tensorParallel": 2}, resources={"accelerator": {"count": 2}}),
    _spec(
        "three of three",
        "engine.tensorParallel other than 1, 2, 4 and 8 is not supported yet",
        engine={"tensorParallel": 3},
        resources={"accelerator": {"count": 3}},
    ),
    *(
        _spec(
            f"{method} weights with {accelerators} accelerators in {dtype}",
            "engine.quantization fp8 and int4 on a CPU or in float32 is not supported yet",
            engine={"quantization": method, "dtype": dtype},
            resources={"accelerator": {"count": accelerators}},
        )
        for method, accelerators, dtype in (
            ("fp8", 0, "bfloat16"),
            ("fp8", 1, "float32"),
            ("int4", 0, "auto"),
        )
    ),
    *(
        _spec(
            f"{method} weights with {accelerators} accelerators in {dtype}",
            engine={"quantization": method, "dtype": dtype},
            resources={"accelerator": {"count": accelerators}},
        )
        for method, accelerators, dtype in (
            ("int8", 0, "bfloat16"),
            ("int8", 1, "auto"),
            ("fp8", 1, "auto"),
            ("fp8", 1, "float16"),
            ("int4", 1, "auto"),
        )
    ),
    *(
        _spec(
            f"deterministic in {dtype} with int8 weights",
            engine={"deterministic": True, "dtype": dtype, "quantization": "int8"},
        )
        for dtype in ("bfloat16", "float16")
    ),
    _spec(
        "deterministic over two accelerators",
        "engine.deterministic true beside tensorParallel above 1",
        engine={"deterministic": True, "tensorParallel": 2},
        resources={"accelerator": {"count": 2}},
    ),
    _spec(
        "deterministic with fp8 weights",
        "engine.deterministic true beside tensorParallel above 1",
        engine={"deterministic": True, "quantization": "fp8", "dtype": "bfloat16"},
    ),
    _spec("an fp8 cache", cache={"dtype": "fp8"}),
    _spec(
        "steps ahead on a CPU",
        "engine.asyncBatching 'on'",
        engine={"asyncBatching": "on"},
        resources={"accelerator": {"count": 0}},
    ),
    _spec(
        "steps ahead in float32 on a GPU",
        engine={"asyncBatching": "on", "dtype": "float32"},
        resources={"accelerator": {"count": 1}},
    ),
    _spec(
        "steps ahead on a GPU",
        engine={"asyncBatching": "on", "dtype": "bfloat16"},
        resources={"accelerator": {"count": 1}},
    ),
    _spec(
        "graphs on a CPU",
        "engine.cudaGraphs.enabled 'on'",
        engine={"cudaGraphs": {"enabled": "on"}},
        resources={"accelerator": {"count": 0}},
    ),
    _spec(
        "graphs in float32 on a GPU",
        engine={"cudaGraphs": {"enabled": "on"}, "dtype": "float32"},
        resources={"accelerator": {"count": 1}},
    ),
    _spec(
        "graphs on a GPU",
        engine={
            "cudaGraphs": {"enabled": "on", "qPaddingInterval": 32, "maxCachedGraphs": 8},
        },
        resources={"accelerator": {"count": 1}},
    ),
    *(
        _spec(
            f"{what} beside {beside}",
            f"{what} 'on' on a CPU or beside",
            engine={**asked, **more},
            resources={"accelerator": {"count": count}},
        )
        for what, asked, beside, more, count in (
            ("engine.cudaGraphs.enabled", _GRAPHS, "two accelerators", {"tensorParallel": 2}, 2),
            ("engine.cudaGraphs.enabled", _GRAPHS, "deterministic", {"deterministic": True}, 1),
            ("engine.asyncBatching", _AHEAD, "deterministic", {"deterministic": True}, 1),
        )
    ),
    _spec(
        "steps ahead over two accelerators",
        engine={**_AHEAD, "tensorParallel": 2},
        resources={"accelerator": {"count": 2}},
    ),
    # -- cache volume, keys
    _spec("an existing claim", modelCache={"type": "PVC", "claimName": "weights"}),
    _spec("a new claim", modelCache={"type": "PVC", "size": "50Gi"}),
    _spec("a claim without name or size", _CACHE, modelCache={"type": "PVC"}),
    _spec("a shared claim", modelCache={"accessModes": ["ReadWriteMany", "ReadOnlyMany"]}),
    _spec(
        "a claim of a storage class",
        modelCache={"type": "PVC", "size": "1Gi", "storageClassName": "fast"},
    ),
    _spec(
        "a storage class for a claim that exists",
        _CLASS,
        modelCache={"type": "PVC", "claimName": "weights", "storageClassName": "fast"},
    ),
    _spec("a read-only source", modelCache={"accessModes": ["ReadOnlyMany"]}),
    _spec(
        "a read-only cache",
        _READ_ONLY,
        modelCache={"type": "PVC", "claimName": "weights", "accessModes": ["ReadOnlyMany"]},
    ),
    _spec(
        "an access mode twice",
        "spec.modelCache.accessModes",
        modelCache={"accessModes": ["ReadWriteMany", "ReadWriteMany"]},
    ),
    _spec(
        "an unknown access mode",
        "spec.modelCache.accessModes",
        modelCache={"accessModes": ["ReadWrite"]},
    ),
    _spec("API keys", security={"apiKeySecretRef": {"name": "keys", "key": "keys"}}),
    _spec("API keys without a key", _KEYS, security={"apiKeySecretRef": {"name": "keys"}}),
    # -- labels and annotations
    _label("team"),
    _label("example.com/team"),
    _label("app.kubernetes.io/part-of"),
    _label("app.kubernetes.io/version"),
    *(
        _label(k, _LABELS)
        for k in (
            "app.kubernetes.io/managed-by",
            "app.kubernetes.io/name",
            "app.kubernetes.io/instance",
            "app.kubernetes.io/component",
            "serving.fairlead.dev/name",
            "pod-security.kubernetes.io/enforce",
            "topology.k8s.io/x",
            "sidecar.istio.io/inject",
            "azure.workload.identity/use",
        )
    ),
    _spec("an annotation", podTemplate={"annotations": {"prometheus.io/scrape": "true"}}),
    _spec(
        "an annotation that asks for a cloud identity",
        _ANNOTATIONS,
        podTemplate={"annotations": {"eks.amazonaws.com/role-arn": "x"}},
    ),
    _spec(
        "safe-to-evict",
        podTemplate={"annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}},
    ),
    _label("cluster-autoscaler.kubernetes.io/safe-to-evict", _LABELS),
    # -- volumes, affinity, ports
    *(
        _spec(f"the volume {volume}", message, podTemplate={"volumes": [volume]})
        for volume, message in (
            ({"name": "a", "emptyDir": {}}, None),
            ({"name": "a", "projected": {"sources": [{"secret": {"name": "s"}}]}}, None),
            ({"name": "a"}, "must have exactly one of emptyDir"),
            (
                {"name": "a", "emptyDir": {}, "configMap": {"name": "c"}},
                "must have exactly one of emptyDir",
            ),
            ({"name": "tmp", "emptyDir": {}}, "name must not be one of the operator's"),
            (
                {"name": "a", "projected": {"sources": [{}]}},
                "projected sources must have a configMap or a secret each",
            ),
        )
    ),
    *(
        _spec(
            f"a mount of {name} at {path}",
            message,
            podTemplate={
                "volumes": [{"name": "a", "emptyDir": {}}],
                "volumeMounts": [{"name": name, "mountPath": path}],
            },
        )
        for name, path, message in (
            ("a", "/mnt/a/b", None),
            ("b", "/mnt/b", "volumeMounts name must be one of podTemplate.volumes"),
            ("a", "/usr/lib/python3", "spec.podTemplate.volumeMounts[0].mountPath"),
            ("a", "/mnt/../usr", "spec.podTemplate.volumeMounts[0].mountPath"),
        )
    ),
    _spec("a port", security={"egressPorts": [15012]}),
    _spec("a port that is none", "spec.security.egressPorts", security={"egressPorts": [0]}),
    # -- tolerations
    *(
        _toleration(fields, message)
        for fields, message in (
            ({"operator": "Exists"}, None),
            ({"key": "gpu", "operator": "Exists", "value": ""}, None),
            ({"key": "gpu", "value": "x"}, None),
            ({"key": "gpu", "effect": "NoExecute", "tolerationSeconds": 5}, None),
            ({"key": "gpu", "operator": "Exists", "value": "x"}, "must not have a value"),
            ({"operator": "Equal", "value": "x"}, "without key must have operator Exists"),
            ({}, "without key must have operator Exists"),
            ({"key": "gpu", "tolerationSeconds": 5}, "must have effect NoExecute"),
            (
                {"key": "gpu", "effect": "NoSchedule", "tolerationSeconds": 5},
                "must have effect NoExecute",
            ),
        )
    ),
    # -- environment
    *(_env(n) for n in ("OMP_NUM_THREADS", "MY_PYTHON", "SHELF_HF_", "proxy")),
    *(
        _env(n, _ENV)
        for n in ("PYTHONPATH", "pythonStartup", "LD_PRELOAD", "Ld_Preload", "HF_TOKEN", "hf_home")
    ),
    *(
        _env(n, _ENV)
        for n in ("FAIRLEAD_X", "Fairlead_x", "HTTPS_PROXY", "https_proxy", "no_Proxy")
    ),
    _env("A-B", "spec.podTemplate.env[0].name"),
    _spec(
        "one name twice",
        "Duplicate value",
        podTemplate={"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
    ),
    # -- other refusals by the schema
    _spec("an unknown dtype", "spec.engine.dtype", engine={"dtype": "int4"}),
    _spec("a switch as a boolean", "spec.engine.asyncBatching", engine={"asyncBatching": True}),
    _spec(
        "a service account that is a path",
        "spec.podTemplate.serviceAccountName",
        podTemplate={"serviceAccountName": "../x"},
    ),
    _spec("an image with a space", "spec.engine.image", engine={"image": "a b"}),
    _spec(
        "too many labels",
        "spec.podTemplate.labels",
        podTemplate={"labels": {f"k{i}": "v" for i in range(33)}},
    ),
)
