"""Random changes of a spec: each sets one to three fields of the CRD's schema to other values.

Most values are valid, some break a bound, a type or a rule. This module does not know which: the
operator and the API server each judge the resource, and must agree.
"""

import random
import re
from collections.abc import Iterator
from typing import Any

from cluster.harness.apiclient import Object
from support.crd import SPEC

# Strings that some pattern of the schema accepts, and some that none accepts.
WORDS = (
    "a", "x-1", "1Gi", "16Gi", "1.2Ti", "1.5m", "2", "nvidia.com/gpu", "amd.com/gpu",
    "registry.test/a:1", "", "a b", "lots", "-1", "-x", "a/../b", "A_b",
)  # fmt: skip
SPECIAL: dict[str, tuple[Any, ...]] = {
    # Few pods: the test is about specs.
    "replicas": (0, 1, 2, 3, -1, 1001),
    "autoscaling.minReplicas": (1, 2, 0, 1001),
    "autoscaling.maxReplicas": (1, 2, 3, 0, 1001),
    "autoscaling": (None, {}, {"minReplicas": 3, "maxReplicas": 2}),
    "model.source": (
        "demo:",
        "hf://owner/name",
        "owner/name",
        "pvc://claim/a/b",
        "/models/x",
        "http://x",
        "a",
        "/../x",
    ),
    "model.revision": ("main", "a" * 40, "refs/pr/1", "", "-x", "a/../b"),
    "model.tokenSecretRef": ({"name": "hub", "key": "token"}, {"name": "hub", "key": ""}, None),
    "security.apiKeySecretRef": (
        {"name": "keys", "key": "list"},
        {"name": "", "key": "list"},
        None,
    ),
    "modelCache": (
        {"type": "PVC", "claimName": "weights"},
        {"type": "PVC", "claimName": "", "size": ""},
        None,
    ),
    "podTemplate.labels": (
        {"team": "a"},
        {"team": "no label value"},
        {"app": "x"},
        {"k8s.io/x": "y"},
        None,
    ),
    "podTemplate.annotations": (
        {"description": "a b"},
        {"a.b/c": "x"},
        {"x.amazonaws.com/role": "y"},
        None,
    ),
    "podTemplate.nodeSelector": ({"type": "nowhere"}, {"type": "nowhere", "zone": "a"}),
    "podTemplate.env": (
        [{"name": "A", "value": "1"}],
        [{"name": "A", "value": "2"}, {"name": "B"}],
        [{"name": "A"}, {"name": "A"}],
        [{"name": "LD_PRELOAD"}],
        [],
    ),
    "podTemplate.tolerations": (
        [{"operator": "Exists"}],
        [{"operator": "Exists", "value": "x"}],
        [{"effect": "x"}],
    ),
    "podTemplate.topologySpread": (
        [{"topologyKey": "zone"}],
        [{"topologyKey": "a"}, {"topologyKey": "b"}],
        [{}],
    ),
    "modelCache.accessModes": (["ReadWriteMany"], ["ReadOnlyMany"], ["x"], []),
    "security.egressPorts": ([15012], [0], [1, 1], []),
    "service.annotations": ({"metallb.io/pool": "a"}, {"example.com/x": "y"}, None),
    "podTemplate.affinity": (
        {"nodeAffinity": {}},
        {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}},
        None,
    ),
    "podTemplate.volumes": (
        [{"name": "a", "emptyDir": {}}],
        [{"name": "a", "persistentVolumeClaim": {"claimName": "c", "readOnly": False}}],
        [{"name": "a"}],
        [],
    ),
    "podTemplate.volumeMounts": (
        [{"name": "b", "mountPath": "/mnt/b"}],
        [{"name": "shm", "mountPath": "/mnt/b", "readOnly": False}],
        [],
    ),
    "podTemplate.imagePullSecrets": ([{"name": "pull"}], [{"name": ""}], []),
}


def fields() -> list[tuple[str, Object]]:
    """Every field of the spec by its dotted path, with its schema; lists and free maps are one
    field.
    """

    def walk(node: Object, path: str) -> Iterator[tuple[str, Object]]:
        if path in SPECIAL or not node.get("properties"):
            yield path, node
        for key, child in (node.get("properties") or {}).items():
            yield from walk(child, f"{path}.{key}".lstrip("."))

    return [(path, node) for path, node in walk(SPEC, "") if path]


def mutation(rng: random.Random, all_fields: list[tuple[str, Object]]) -> Object:
    """A JSON merge patch of the spec."""
    patch: Object = {}
    for path, schema in rng.sample(all_fields, rng.choice((1, 1, 2, 3))):
        *parents, last = path.split(".")
        place = patch
        for parent in parents:
            inner = place.setdefault(parent, {})
            if not isinstance(inner, dict):
                break
            place = inner
        else:
            place[last] = _value(rng, path, schema)
    if rng.random() < 0.05:
        patch["replica"] = 2  # a misspelt field
    return patch


def _value(rng: random.Random, path: str, schema: Object) -> Any:
    if path in SPECIAL:
        return rng.choice(SPECIAL[path])
    invalid = rng.random() < 0.15
    if "enum" in schema:
        return "Nonsense" if invalid else rng.choice(schema["enum"])
    if schema.get("type") == "boolean":
        return "yes" if invalid else rng.choice((True, False))
    if schema.get("type") in {"integer", "number"}:
        low, high = schema.get("minimum", 0), schema.get("maximum", 1_000_000)
        valid = (low, high, schema.get("default", low), None)
        return rng.choice((low - 1, high + 1, "many")) if invalid else rng.choice(valid)
    pattern = schema.get("pattern", "")
    fitting = [word for word in WORDS if re.search(pattern, word)]
    return rng.choice(WORDS) if invalid or not fitting else rng.choice(fitting)


def patched(body: Any, patch: Object) -> Object:
    """JSON merge patch: what the API server is asked to store."""
    out = dict(body) if isinstance(body, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, dict):
            out[key] = patched(out.get(key), value)
        else:
            out[key] = value
    return out
