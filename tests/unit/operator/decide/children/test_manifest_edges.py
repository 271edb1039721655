"""Fields of children that depend on two settings at once, and the volumes of both containers."""

from datetime import UTC, datetime
from typing import Any

import pytest

from fairlead_operator.decide.children.manifests import SURGE, keeps_weights, max_replicas, render
from fairlead_operator.decide.children.rollout import choose
from fairlead_operator.decide.pods.observed import Snapshot
from support.operator_bodies import SETTINGS, Object, deployment, resource

CACHE: Object = {"model": {"source": "owner/name"}, "modelCache": {"type": "PVC", "size": "50Gi"}}
SECRETS: Object = {
    "model": {"source": "owner/name", "tokenSecretRef": {"name": "hub", "key": "token"}},
    "security": {"apiKeySecretRef": {"name": "keys", "key": "list"}},
}


def children(**spec: Any) -> dict[str, Object]:
    return {one["kind"]: one for one in render(resource(**spec), SETTINGS, 1, SURGE)}


def pod_spec(**spec: Any) -> Object:
    body: Object = children(**spec)["Deployment"]["spec"]["template"]["spec"]
    return body


def mounts(container: Object) -> dict[str, tuple[str, bool]]:
    return {
        m["name"]: (m["mountPath"], m.get("readOnly", False)) for m in container["volumeMounts"]
    }


def test_the_disruption_budget_lets_one_pod_go_at_a_time() -> None:
    budget = children(replicas=3)["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == children()["Deployment"]["spec"]["selector"]


@pytest.mark.parametrize(
    ("revision", "kept"),
    [("a" * 40, True), ("a" * 41, False), ("a" * 40 + "-x", False), ("a" * 39, False)],
)
def test_only_a_whole_commit_keeps_its_weights(revision: str, *, kept: bool) -> None:
    source = {"source": "owner/name", "revision": revision}
    assert keeps_weights(resource(**(CACHE | {"model": source}))) is kept


def test_each_container_mounts_what_it_needs_and_no_more() -> None:
    pod = pod_spec(**SECRETS)
    fetch, runtime = pod["initContainers"][0], pod["containers"][0]
    assert mounts(fetch) == {
        "tmp": ("/tmp", False),
        "models": ("/models", False),
        "hub-token": ("/var/run/fairlead/hub-token", True),
    }
    assert mounts(runtime) == {
        "tmp": ("/tmp", False),
        "shm": ("/dev/shm", False),
        "models": ("/models", True),
        "api-keys": ("/var/run/fairlead/api-keys", True),
    }
    assert {v["name"] for v in pod["volumes"]} == {*mounts(fetch), *mounts(runtime)}


def test_every_volume_of_a_pod_with_secrets_has_its_source() -> None:
    volumes = {v.pop("name"): v for v in pod_spec(**SECRETS)["volumes"]}
    assert volumes["tmp"] == {"emptyDir": {"sizeLimit": "1Gi"}}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert volumes["models"] == {"emptyDir": {"sizeLimit": "32Gi"}}
    assert volumes["hub-token"]["secret"]["secretName"] == "hub"
    assert volumes["api-keys"]["secret"]["secretName"] == "keys"
    assert volumes["hub-token"]["secret"]["items"] == [{"key": "token", "path": "token"}]


def test_a_models_claim_is_mounted_in_the_runtime_only_and_nothing_is_fetched() -> None:
    pod = pod_spec(model={"source": "pvc://weights/llama"})
    (runtime,) = pod["containers"]
    assert mounts(runtime)["model"] == ("/model", True)
    assert "models" not in {v["name"] for v in pod["volumes"]}


def test_only_the_runtime_asks_for_accelerators() -> None:
    pod = pod_spec(
        model={"source": "owner/name"},
        resources={"accelerator": {"count": 1}, "memory": "8Gi", "cpu": "3"},
    )
    fetch, runtime = pod["initContainers"][0], pod["containers"][0]
    assert "nvidia.com/gpu" not in fetch["resources"]["limits"]
    assert runtime["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert runtime["resources"]["requests"]["nvidia.com/gpu"] == "1"
    assert fetch["resources"]["requests"]["cpu"] == runtime["resources"]["requests"]["cpu"] == "3"
    assert "cpu" not in runtime["resources"]["limits"]


def test_without_accelerators_no_node_is_selected_for_them() -> None:
    pod = pod_spec(resources={"accelerator": {"count": 0, "nodeSelector": {"gpu": "h200"}}})
    assert "nodeSelector" not in pod
    assert all(t["key"] != "nvidia.com/gpu" for t in pod["tolerations"])


def test_the_users_variables_never_replace_ours() -> None:
    pod = pod_spec(
        podTemplate={"env": [{"name": "HOME", "value": "/x"}, {"name": "A", "value": "1"}]}
    )
    names = {v["name"]: v["value"] for v in pod["containers"][0]["env"]}
    assert (names["HOME"], names["A"]) == ("/tmp", "1")


# -- room for an extra pod


@pytest.mark.parametrize(
    ("used", "chosen"),
    [(3, "Surge"), (4, "OneByOne")],
)
def test_an_extra_pod_needs_its_accelerator(used: int, chosen: str) -> None:
    quota = {
        "status": {
            "hard": {"requests.nvidia.com/gpu": "4"},
            "used": {"requests.nvidia.com/gpu": str(used)},
        }
    }
    seen = Snapshot((deployment("old"),), (), (), (quota,), ())
    one = resource(resources={"accelerator": {"count": 1}})
    choice = choose(one, seen, "new", 1, {}, datetime(2026, 1, 1, tzinfo=UTC))
    assert choice.strategy == chosen, choice.message


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ({"replicas": 3}, 3),
        ({"replicas": 1, "autoscaling": {"minReplicas": 1, "maxReplicas": 4}}, 4),
        ({"replicas": 9, "autoscaling": {"minReplicas": 1, "maxReplicas": 2}}, 2),
    ],
)
def test_the_autoscaler_bounds_the_pods_where_there_is_one(spec: Object, most: int) -> None:
    assert max_replicas(resource(**spec)) == most
