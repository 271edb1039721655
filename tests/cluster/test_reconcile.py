"""One resource on the real control plane: children, their repair, foreign objects, status."""

import functools
import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness.apiclient import Api, ApiError, Object, eventually
from cluster.harness.controlplane import ControlPlane
from cluster.harness.kubectl import kubectl
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import (
    CHILDREN,
    KIND,
    await_reason,
    condition,
    current,
    idep,
    owned_by,
    status,
)
from support.full import LONG_FORM

pytestmark = [pytest.mark.cluster("kubectl"), pytest.mark.usefixtures("crd", "nodes")]
EMPTY: Object = {"metadata": {}}


@pytest.fixture(scope="module", autouse=True)
def operator(plane: ControlPlane, api: Api, crd: Object) -> Iterator[OperatorProcess]:
    """One operator for the whole cluster, while this module runs."""
    with OperatorProcess(plane, ()) as started:
        yield started
        assert not started.tracebacks()


def children(api: Api, namespace: str, name: str = "chat") -> dict[str, Object]:
    bodies = {kind: api.find(kind, namespace, name) for kind in CHILDREN}
    return {kind: body for kind, body in bodies.items() if body is not None}


def create_with_children(api: Api, namespace: str, name: str = "chat", **spec: Any) -> Object:
    """A resource whose children exist and whose status is current."""
    body = api.create(idep(namespace, name, **spec))
    eventually(
        lambda: len(children(api, namespace, name)) == (4 if spec.get("replicas", 1) > 1 else 3),
        10,
        "children",
    )
    eventually(lambda: current(api, namespace, name), 10, "the status is current")
    return body


def test_a_resource_becomes_its_children_within_seconds(api: Api, namespace: str) -> None:
    began = time.monotonic()
    owner = create_with_children(api, namespace, replicas=2)
    assert time.monotonic() - began < 5 or not LONG_FORM
    for kind, body in children(api, namespace).items():
        assert owned_by(body, owner), kind
        assert body["metadata"]["labels"]["serving.fairlead.dev/name"] == "chat"
        managers = [
            m["manager"] for m in body["metadata"]["managedFields"] if m["operation"] == "Apply"
        ]
        assert managers == ["fairlead-operator"], kind
    seen = status(api, namespace)
    assert seen["desiredReplicas"] == 2
    assert seen["url"] == f"http://chat.{namespace}.svc"
    assert {c["type"] for c in seen["conditions"]} == {
        "Ready",
        "Planned",
        "Progressing",
        "Available",
        "AutoscalingActive",
    }
    assert "finalizers" not in api.get(KIND, namespace, "chat")["metadata"]
    assert "annotations" not in api.get(KIND, namespace, "chat")["metadata"]


def test_capacity_is_planned_before_any_pod_exists(api: Api, namespace: str) -> None:
    create_with_children(api, namespace, paused=False)

    def planned() -> Object | None:
        seen = status(api, namespace)
        return seen if condition(seen, "Planned").get("status") == "True" else None

    seen = eventually(planned, 10, "Planned is True")
    assert seen["capacity"]["fits"] is True
    assert (
        seen["capacity"]["planned"]["concurrentTokens"]
        == 16 * seen["capacity"]["planned"]["numBlocks"]
        > 0
    )


def test_scaling_and_other_changes_of_the_spec_reach_the_children(api: Api, namespace: str) -> None:
    create_with_children(api, namespace)
    api.call(
        "PATCH",
        f"/apis/serving.fairlead.dev/v1alpha1/namespaces/{namespace}/inferencedeployments/chat/scale",
        {"spec": {"replicas": 3}},
        "application/merge-patch+json",
    )
    eventually(
        lambda: api.get("Deployment", namespace, "chat")["spec"]["replicas"] == 3,
        5,
        "three replicas",
    )
    eventually(
        lambda: api.find("PodDisruptionBudget", namespace, "chat"), 5, "a budget for several pods"
    )
    patch = {"spec": {"replicas": 1, "service": {"port": 81}, "security": {"networkPolicy": False}}}
    api.merge(KIND, namespace, "chat", patch)
    eventually(
        lambda: set(children(api, namespace)) == {"Deployment", "Service"},
        5,
        "unwanted children are deleted",
    )
    eventually(
        lambda: api.get("Service", namespace, "chat")["spec"]["ports"][0]["port"] == 81,
        5,
        "the port",
    )


def test_a_scale_without_effect_gets_an_event(
    plane: ControlPlane, api: Api, namespace: str
) -> None:
    create_with_children(
        api, namespace, replicas=2, autoscaling={"minReplicas": 2, "maxReplicas": 3}
    )
    eventually(
        lambda: status(api, namespace).get("autoscaling"), 10, "the operator has taken the count"
    )
    kubectl(plane, "scale", "idep/chat", "--replicas=5", "-n", namespace)
    eventually(lambda: "ScaleIgnored" in event_reasons(api, namespace), 5, "an Event")
    assert api.get("Deployment", namespace, "chat")["spec"]["replicas"] == 2
    text = kubectl(plane, "describe", "idep/chat", "-n", namespace)
    assert (
        "spec.replicas 2 → 5 has no effect while spec.autoscaling is set: "
        "set autoscaling.minReplicas" in text
    )
    api.merge(KIND, namespace, "chat", {"spec": {"autoscaling": None}})
    eventually(
        lambda: api.get("Deployment", namespace, "chat")["spec"]["replicas"] == 5,
        5,
        "the Deployment follows spec.replicas",
    )
    eventually(lambda: "ScalingHandedOver" in event_reasons(api, namespace), 5, "an Event")


def event_reasons(api: Api, namespace: str) -> list[str]:
    """Reasons of the Events about resources."""
    return [
        e["reason"] for e in api.items("Event", namespace) if e["involvedObject"]["kind"] == KIND
    ]


def leaves(fields: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths that a managedFields entry owns as a whole."""
    inner = {key: value for key, value in fields.items() if key != "."}
    if not inner:
        yield path
    for key, value in inner.items():
        yield from leaves(value, (*path, key))


def pointer(body: Any, path: tuple[str, ...]) -> str:
    """The JSON pointer of a managed field in this object."""
    parts = []
    for step in path:
        kind, _, name = step.partition(":")
        if kind == "f":
            parts.append(name.replace("~", "~0").replace("/", "~1"))
            body = body[name]
        elif kind == "k":
            wanted = json.loads(name)
            index = next(
                i for i, item in enumerate(body) if all(item.get(k) == v for k, v in wanted.items())
            )
            parts.append(str(index))
            body = body[index]
        else:
            index = body.index(json.loads(name))
            parts.append(str(index))
            body = body[index]
    return "/" + "/".join(parts)


def value_at(body: Any, path: str) -> Any:
    for part in path.lstrip("/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        body = body[int(key)] if isinstance(body, list) else body[key]
    return body


def other(value: Any) -> Any:
    """A value of the same type that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return value[:-1]
    if isinstance(value, dict):
        return {}
    return value + "x"


@pytest.mark.timeout(900)
def test_drift_in_any_managed_field_is_repaired_and_foreign_fields_are_kept(
    api: Api, namespace: str
) -> None:
    """Changes, then removes, every field that the API server lists as ours, one after the other.

    No node takes the pods: a rollout for each change would be none of the operator's work.
    """
    create_with_children(
        api, namespace, replicas=2, podTemplate={"nodeSelector": {"nowhere": "true"}}
    )
    for kind in CHILDREN:
        api.merge(
            kind,
            namespace,
            "chat",
            {"metadata": {"annotations": {"theirs": "1"}, "labels": {"theirs": "1"}}},
        )
    eventually(lambda: current(api, namespace), 5, "settled")
    cases = slowest = 0.0
    for kind in CHILDREN:
        first = api.get(kind, namespace, "chat")
        entry = next(
            m for m in first["metadata"]["managedFields"] if m["manager"] == "fairlead-operator"
        )
        # An empty egress is owned but not stored.
        paths = sorted(p for p in leaves(entry["fieldsV1"]) if "f:egress" not in p)
        for number, path in enumerate(paths):
            for operation in ("replace", "remove"):
                if not LONG_FORM and (number + (operation == "remove")) % 2:
                    continue
                body = api.get(kind, namespace, "chat")
                at = pointer(body, path)
                rendered = value_at(body, at)
                patch: Object = {"op": operation, "path": at}
                if operation == "replace":
                    patch["value"] = other(rendered)
                try:
                    after = api.json_patch(kind, namespace, "chat", [patch])
                except ApiError as error:
                    if error.code not in {400, 403, 422}:
                        raise
                    continue  # the API server does not let this field change
                if after["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"]:
                    continue  # restored by defaulting: no drift
                began = time.monotonic()
                eventually(
                    functools.partial(_restored, api, namespace, kind, path, rendered),
                    10,
                    f"{kind}{at} restored",
                )
                slowest = max(slowest, time.monotonic() - began)
                cases += 1
        kept = api.get(kind, namespace, "chat")["metadata"]
        assert kept["labels"]["theirs"] == kept["annotations"]["theirs"] == "1"
    print(f"{cases:.0f} drifts repaired, the slowest in {slowest:.2f} s")
    assert cases >= 60


def _restored(api: Api, namespace: str, kind: str, path: tuple[str, ...], rendered: Any) -> bool:
    try:
        body = api.get(kind, namespace, "chat")
        return bool(value_at(body, pointer(body, path)) == rendered)
    except (ApiError, KeyError, IndexError, StopIteration):
        return False


@pytest.mark.parametrize("kind", CHILDREN)
def test_a_deleted_child_comes_back(api: Api, namespace: str, kind: str) -> None:
    owner = create_with_children(api, namespace, replicas=2)
    uid = api.get(kind, namespace, "chat")["metadata"]["uid"]
    api.delete(kind, namespace, "chat", propagationPolicy="Background")

    def back() -> bool:
        child = api.find(kind, namespace, "chat")
        return child is not None and child["metadata"]["uid"] != uid and owned_by(child, owner)

    eventually(back, 10, f"the {kind} is back")


def test_an_unchanged_resource_costs_no_write(
    api: Api, namespace: str, operator: OperatorProcess
) -> None:
    """Passes in a row, each woken by a change that is none of ours: a hundred in the long form.

    What comes late (a condition of the Deployment, say) may end a row; then another one begins. The
    server stores some of these values in another form: they are not sent again.
    """
    scratch: Object = {
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/mnt/scratch", "readOnly": False}],
    }
    sizes = {"cpu": "999.5m", "memory": "4.001Gi"}
    create_with_children(api, namespace, podTemplate=scratch, resources=sizes)
    eventually(lambda: status(api, namespace).get("readyReplicas") == 1, 20, "the pod is ready")
    kinds = list(children(api, namespace))

    def versions() -> list[Any]:
        applied = operator.metric("fairlead_operator_api_calls_total", verb="apply")
        bodies = [api.get(kind, namespace, "chat") for kind in kinds]
        return [applied, *(body["metadata"]["resourceVersion"] for body in bodies)]

    passes = 100 if LONG_FORM else 40

    def passes_write_nothing() -> bool:
        before = versions()
        quiet = all(_pass_writes_nothing(api, namespace, operator) for _ in range(passes))
        return quiet and versions() == before

    assert any(passes_write_nothing() for _ in range(5))


def _pass_writes_nothing(api: Api, namespace: str, operator: OperatorProcess) -> bool:
    """Wake a pass by an annotation; whether the resource stays as the annotation left it."""
    passes = operator.metric("fairlead_operator_reconciles_total")
    annotation = {"metadata": {"annotations": {"n": secrets.token_hex(4)}}}
    mine = api.merge(KIND, namespace, "chat", annotation)
    eventually(lambda: operator.metric("fairlead_operator_reconciles_total") > passes, 10, "a pass")
    seen = api.get(KIND, namespace, "chat")["metadata"]["resourceVersion"]
    return bool(seen == mine["metadata"]["resourceVersion"])


def test_a_foreign_object_with_our_name_is_reported_and_not_touched(
    api: Api, namespace: str
) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat", "namespace": namespace},
        "spec": {"ports": [{"port": 80}]},
    }
    before = api.create(theirs)
    api.create(idep(namespace))
    seen = await_reason(api, namespace, "Conflict", 3)
    assert seen["blockers"][0]["object"] == "Service/chat"
    assert "belongs to no controller" in seen["blockers"][0]["message"]
    after = api.get("Service", namespace, "chat")
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    api.delete("Service", namespace, "chat")
    owner = api.get(KIND, namespace, "chat")
    eventually(
        lambda: owned_by(api.find("Service", namespace, "chat") or EMPTY, owner),
        15,
        "a Service of ours",
    )


@pytest.mark.usefixtures("collector")
def test_a_child_without_its_owner_reference_is_adopted_and_a_lookalike_is_not(
    api: Api, namespace: str
) -> None:
    owner = create_with_children(api, namespace, replicas=2)
    uids = {kind: body["metadata"]["uid"] for kind, body in children(api, namespace).items()}
    for kind in CHILDREN:
        api.json_patch(
            kind, namespace, "chat", [{"op": "remove", "path": "/metadata/ownerReferences"}]
        )
    eventually(
        lambda: all(owned_by(body, owner) for body in children(api, namespace).values()),
        10,
        "owned again",
    )
    assert {
        kind: body["metadata"]["uid"] for kind, body in children(api, namespace).items()
    } == uids
    assert "Conflict" not in _codes(api, namespace)

    # A deletion that orphans the children: they belonged to the old resource, not to the new one.
    api.delete(KIND, namespace, "chat", propagationPolicy="Orphan")
    eventually(
        lambda: api.find(KIND, namespace, "chat") is None,
        20,
        "the resource is gone, its children remain",
    )
    versions = {
        kind: body["metadata"]["resourceVersion"] for kind, body in children(api, namespace).items()
    }
    assert set(versions) == set(CHILDREN)
    api.create(idep(namespace, replicas=2))
    seen = await_reason(api, namespace, "Conflict", 5)
    assert len([b for b in seen["blockers"] if b["code"] == "Conflict"]) == 4
    for kind, body in children(api, namespace).items():
        assert body["metadata"]["resourceVersion"] == versions[kind], kind
        assert "ownerReferences" not in body["metadata"]


def test_a_paused_resource_keeps_its_status_current_and_its_children_as_they_are(
    api: Api, namespace: str
) -> None:
    create_with_children(api, namespace)
    api.merge(KIND, namespace, "chat", {"spec": {"paused": True, "replicas": 5}})
    eventually(lambda: status(api, namespace).get("desiredReplicas") == 5, 5, "the status follows")
    assert api.get("Deployment", namespace, "chat")["spec"]["replicas"] == 1
    api.merge(KIND, namespace, "chat", {"spec": {"paused": False}})
    eventually(
        lambda: api.get("Deployment", namespace, "chat")["spec"]["replicas"] == 5,
        5,
        "five replicas",
    )


def test_what_the_chart_does_not_allow_is_not_written(api: Api, namespace: str) -> None:
    create_with_children(api, namespace)
    revision = api.get("Deployment", namespace, "chat")["spec"]["template"]
    for change in (
        {"engine": {"image": "evil:1"}},
        {"podTemplate": {"serviceAccountName": "admin"}},
        {"podTemplate": {"priorityClassName": "system-node-critical"}},
        {"model": {"trustRemoteCode": True}},
    ):
        api.merge(KIND, namespace, "chat", {"spec": change})
        await_reason(api, namespace, "NotAllowed", 3)
        assert api.get("Deployment", namespace, "chat")["spec"]["template"] == revision
        undo = {
            "engine": {"image": ""},
            "podTemplate": {"serviceAccountName": "", "priorityClassName": ""},
        }
        api.merge(KIND, namespace, "chat", {"spec": {**undo, "model": {"trustRemoteCode": False}}})
        eventually(lambda: "NotAllowed" not in _codes(api, namespace), 5, "allowed again")


def _codes(api: Api, namespace: str) -> list[str]:
    return [b["code"] for b in status(api, namespace).get("blockers") or ()]


def test_an_exceeded_quota_is_reported_within_three_seconds(api: Api, namespace: str) -> None:
    hard = {"pods": "1"}
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q", "namespace": namespace},
    }
    api.create({**quota, "spec": {"hard": hard}})
    eventually(
        lambda: (api.get("ResourceQuota", namespace, "q").get("status") or {}).get("hard"),
        10,
        "the quota",
    )
    began = time.monotonic()
    api.create(idep(namespace, replicas=3))
    await_reason(api, namespace, "QuotaExceeded", 3)
    api.create(idep(namespace, "gpu", resources={"accelerator": {"count": 1}}))
    print(f"quota named after {time.monotonic() - began:.2f} s")
    events = [e for e in api.items("Event", namespace) if e["involvedObject"]["kind"] == KIND]
    assert any(e["reason"] == "QuotaExceeded" and e["type"] == "Warning" for e in events)


def test_a_lack_of_accelerators_is_reported_within_three_seconds(api: Api, namespace: str) -> None:
    api.create(
        idep(namespace, resources={"accelerator": {"count": 1, "resourceName": "amd.com/gpu"}})
    )
    seen = await_reason(api, namespace, "InsufficientAccelerator", 3)
    assert "Insufficient amd.com/gpu" in seen["blockers"][0]["message"]
    assert "Free or add accelerators" in condition(seen, "Ready")["message"]


def test_a_missing_claim_is_reported_within_three_seconds(api: Api, namespace: str) -> None:
    api.create(idep(namespace, model={"source": "pvc://weights/llama"}))
    await_reason(api, namespace, "VolumeMissing", 3)


def test_deleting_the_resource_removes_everything(api: Api, namespace: str) -> None:
    create_with_children(api, namespace, replicas=2)
    api.delete(KIND, namespace, "chat")
    eventually(
        lambda: not children(api, namespace) and not api.items("Pod", namespace), 10, "all is gone"
    )


def test_a_recreated_resource_gets_new_children(api: Api, namespace: str) -> None:
    create_with_children(api, namespace, replicas=2)
    for _ in range(3):
        api.delete(KIND, namespace, "chat")
        owner = api.create(idep(namespace, replicas=2))
        eventually(
            lambda o=owner: (
                len(children(api, namespace)) == 4  # type: ignore[misc]
                and all(owned_by(body, o) for body in children(api, namespace).values())
            ),
            30,
            "children of the new resource",
        )
    eventually(lambda: len(api.items("Pod", namespace)) == 2, 20, "two pods and no orphans")


def test_a_rollout_without_room_in_the_quota_replaces_pods_one_by_one(
    api: Api, namespace: str
) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q", "namespace": namespace},
    }
    api.create({**quota, "spec": {"hard": {"requests.nvidia.com/gpu": "2"}}})
    eventually(
        lambda: (api.get("ResourceQuota", namespace, "q").get("status") or {}).get("hard"),
        60,
        "the quota",
    )
    accelerator: Object = {"resources": {"accelerator": {"count": 1}}}
    create_with_children(api, namespace, **accelerator)
    eventually(lambda: _used(api, namespace) == "1", 60, "one accelerator in use")
    _change(api, namespace, "1")
    eventually(
        lambda: status(api, namespace)["rollout"]["strategyChosen"] == "Surge", 60, "a surge"
    )
    assert _limits(api, namespace) == {"maxSurge": 1, "maxUnavailable": 0}
    eventually(lambda: status(api, namespace)["rollout"]["phase"] == "Complete", 60, "rolled out")
    api.merge(KIND, namespace, "chat", {"spec": {"replicas": 2}})
    eventually(lambda: _used(api, namespace) == "2", 60, "both in use")
    _change(api, namespace, "2")
    eventually(
        lambda: _limits(api, namespace) == {"maxSurge": 0, "maxUnavailable": 1}, 60, "one by one"
    )
    rollout = status(api, namespace)["rollout"]
    assert rollout["strategyChosen"] == "OneByOne"
    assert "the quota leaves 0" in rollout["why"]


def test_once_a_pod_serves_from_a_filled_cache_no_pod_has_egress(api: Api, namespace: str) -> None:
    hub: Object = {"model": {"source": "owner/name", "revision": "0" * 40}}
    create_with_children(api, namespace, modelCache={"type": "PVC", "claimName": "weights"}, **hub)

    def egress() -> list[Object]:
        rules: list[Object] = (
            api.get("NetworkPolicy", namespace, "chat")["spec"].get("egress") or []
        )
        return rules

    assert egress(), "the weights come from a hub"
    size: Object = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = f"weights-{namespace}"[:60].rstrip("-")
    backing = {"capacity": {"storage": "1Gi"}, "nfs": {"server": "nfs.test", "path": "/"}}
    meta: Object = {"name": volume}
    api.create(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": meta,
            "spec": {**size, **backing},
        }
    )
    claim = {**size, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": volume}
    meta = {"name": "weights", "namespace": namespace}
    api.create(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": claim}
    )
    eventually(lambda: not egress(), 30, "closed once a pod serves")
    api.merge(KIND, namespace, "chat", {"spec": {"model": {"revision": "1" * 40}}})
    eventually(egress, 5, "open for another commit")
    api.delete("PersistentVolume", "", volume)


def _used(api: Api, namespace: str) -> str:
    seen = api.get("ResourceQuota", namespace, "q").get("status") or {}
    return str((seen.get("used") or {}).get("requests.nvidia.com/gpu"))


def _change(api: Api, namespace: str, mark: str) -> None:
    env = [{"name": "MARK", "value": mark}]
    api.merge(KIND, namespace, "chat", {"spec": {"podTemplate": {"env": env}}})
    eventually(lambda: current(api, namespace), 10, "the status is current")


def _limits(api: Api, namespace: str) -> Object:
    limits: Object = api.get("Deployment", namespace, "chat")["spec"]["strategy"]["rollingUpdate"]
    return limits


def test_a_model_that_does_not_fit_is_reported_with_the_fix_before_any_pod_runs(
    api: Api, namespace: str
) -> None:
    nowhere = {"nodeSelector": {"type": "nowhere"}}
    api.create(idep(namespace, resources={"memory": "1Gi"}, podTemplate=nowhere))
    seen = await_reason(api, namespace, "DoesNotFit", 3)
    assert "set" in condition(seen, "Planned")["message"]
    assert condition(seen, "Planned")["status"] == "False"
    assert api.find("Deployment", namespace, "chat"), (
        "the estimate may be wrong, so the Deployment exists"
    )
