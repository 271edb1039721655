"""Which differences lead to a write: drift in what we render does, additions of others do not."""

import copy
import json

import pytest

from fairlead_operator.decide.children.diff import diff, differences
from fairlead_operator.decide.children.manifests import SURGE, render
from support.operator_bodies import SETTINGS, Object, resource

HUB: Object = {
    "model": {"source": "owner/name", "tokenSecretRef": {"name": "hub", "key": "token"}},
    "security": {"apiKeySecretRef": {"name": "keys", "key": "list"}},
    "resources": {"accelerator": {"count": 1}},
    "podTemplate": {
        "labels": {"team": "x"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "topologySpread": [{"topologyKey": "zone"}],
    },
    "replicas": 2,
}


def stored_children() -> list[Object]:
    """As the API server stores them: with uids, and defaults here and there."""
    stored = copy.deepcopy(render(resource(**HUB), SETTINGS, 2, SURGE))
    for index, body in enumerate(stored):
        body["metadata"] |= {"uid": f"uid-{index}", "resourceVersion": "7"}
    deployment = next(b for b in stored if b["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    pod |= {"dnsPolicy": "ClusterFirst", "restartPolicy": "Always"}
    pod["containers"][0] |= {
        "imagePullPolicy": "IfNotPresent",
        "terminationMessagePath": "/dev/termination-log",
    }
    pod["containers"][0]["readinessProbe"]["successThreshold"] = 1
    return stored


def wanted() -> list[Object]:
    return render(resource(**HUB), SETTINGS, 2, SURGE)


def test_defaults_of_the_server_are_not_a_difference() -> None:
    writes = diff(wanted(), stored_children(), "uid-1")
    assert (writes.apply, writes.delete, writes.conflicts) == ((), (), ())


def leaves(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for index, inner in enumerate(value) for leaf in leaves(inner, (*path, index))]
    return [path]


def with_change(body: Object, path: tuple[object, ...]) -> Object:
    out = copy.deepcopy(body)
    inner: object = out
    for step in path[:-1]:
        inner = inner[step]  # type: ignore[index]
    old = inner[path[-1]]  # type: ignore[index]
    inner[path[-1]] = (  # type: ignore[index]
        not old
        if isinstance(old, bool)
        else old + 1
        if isinstance(old, int)
        else f"{old}-drift"
        if old
        else ["drift"]
    )
    return out


IDENTITY = {("kind",), ("apiVersion",), ("metadata", "name"), ("metadata", "namespace")}


def test_a_change_of_any_rendered_value_is_found_and_repaired_by_one_apply() -> None:
    cases = 0
    for index, body in enumerate(wanted()):
        for path in leaves(body):
            if path in IDENTITY or "ownerReferences" in path:
                continue
            stored = stored_children()
            stored[index] = with_change(stored[index], path)
            if stored[index] == stored_children()[index]:
                continue
            cases += 1
            writes = diff(wanted(), stored, "uid-1")
            assert [a.manifest["kind"] for a in writes.apply] == [body["kind"]], (
                body["kind"],
                path,
            )
            assert writes.apply[0].uid == stored[index]["metadata"]["uid"]
    assert cases >= 100


def test_foreign_labels_annotations_and_sidecars_are_left_alone() -> None:
    stored = stored_children()
    for body in stored:
        body["metadata"]["labels"]["theirs"] = "1"
        body["metadata"].setdefault("annotations", {})["theirs"] = "1"
        if body["kind"] == "Deployment":
            pod = body["spec"]["template"]["spec"]
            pod["containers"].append({"name": "sidecar", "image": "x"})
            pod["containers"][0]["env"].insert(0, {"name": "THEIRS", "value": "1"})
            pod["volumes"].insert(0, {"name": "theirs", "emptyDir": {}})
    assert diff(wanted(), stored, "uid-1").apply == ()


def test_a_foreign_key_in_a_selector_is_drift() -> None:
    stored = stored_children()
    for body in stored:
        if body["kind"] == "Service":
            body["spec"]["selector"]["theirs"] = "1"
        if body["kind"] == "NetworkPolicy":
            body["spec"]["ingress"].append({})
    assert {a.manifest["kind"] for a in diff(wanted(), stored, "uid-1").apply} == {
        "Service",
        "NetworkPolicy",
    }


def test_a_foreign_object_is_a_conflict_and_never_touched() -> None:
    stored = stored_children()
    stored[0]["metadata"]["ownerReferences"][0]["uid"] = "another"
    stored[1]["metadata"]["ownerReferences"] = []
    writes = diff(wanted(), stored, "uid-1")
    assert len(writes.conflicts) == 2
    assert not writes.apply
    assert not writes.delete


def unowned(index: int, **metadata: object) -> tuple[list[Object], Object]:
    """The stored objects, one without its owner reference and with this ``metadata``."""
    stored = stored_children()
    body = stored[index]
    del body["metadata"]["ownerReferences"]
    body["metadata"]["managedFields"] = [{"manager": "fairlead-operator", "operation": "Apply"}]
    body["metadata"] |= metadata
    return stored, body


@pytest.mark.parametrize("index", range(4))
def test_an_object_that_lost_its_owner_reference_is_ours_by_labels_and_history(index: int) -> None:
    stored, body = unowned(index)
    writes = diff(wanted(), stored, "uid-1")
    assert [one.manifest["kind"] for one in writes.apply] == [body["kind"]]
    assert (writes.apply[0].uid, writes.apply[0].reason) == (
        body["metadata"]["uid"],
        "metadata.ownerReferences",
    )
    assert writes.conflicts == ()
    unwanted = [one for one in wanted() if one["kind"] != body["kind"]]
    assert [gone.body for gone in diff(unwanted, stored, "uid-1").delete] == [body]


@pytest.mark.parametrize(
    "metadata",
    [
        {"managedFields": []},
        {"managedFields": [{"manager": "kubectl", "operation": "Apply"}]},
        {"managedFields": [{"manager": "fairlead-operator", "operation": "Update"}]},
        {
            "labels": {
                "serving.fairlead.dev/name": "chat",
                "app.kubernetes.io/managed-by": "fairlead",
            }
        },
        {
            "labels": {
                "serving.fairlead.dev/uid": "uid-0",
                "app.kubernetes.io/managed-by": "fairlead",
            }
        },
        {"labels": {"serving.fairlead.dev/uid": "uid-1", "app.kubernetes.io/managed-by": "Helm"}},
        {"ownerReferences": [{"kind": "Other", "name": "x", "uid": "uid-9", "controller": True}]},
    ],
)
def test_without_any_one_of_these_marks_the_object_is_foreign(metadata: Object) -> None:
    stored, body = unowned(1, **metadata)
    writes = diff(wanted(), stored, "uid-1")
    assert [one.kind for one in writes.conflicts] == [body["kind"]]
    assert (writes.apply, writes.delete) == ((), ())


def test_only_unwanted_objects_of_ours_are_deleted() -> None:
    fewer = [one for one in wanted() if one["kind"] not in {"NetworkPolicy", "PodDisruptionBudget"}]
    stored = stored_children()
    for body in stored:
        if body["kind"] == "PodDisruptionBudget":
            body["metadata"]["ownerReferences"][0]["uid"] = "another"
    writes = diff(fewer, stored, "uid-1")
    assert [d.body["kind"] for d in writes.delete] == ["NetworkPolicy"]


def test_a_claim_is_never_deleted_before_its_resource() -> None:
    cached = resource(model={"source": "a/b"}, modelCache={"type": "PVC", "size": "1Gi"})
    (claim,) = [c for c in render(cached, SETTINGS, 1, SURGE) if "Claim" in c["kind"]]
    claim["metadata"]["uid"] = "uid-of-the-claim"
    writes = diff(render(resource(), SETTINGS, 1, SURGE), [claim], "uid-1")
    assert writes.delete == ()


def test_an_object_that_is_being_deleted_gets_no_write() -> None:
    stored = stored_children()
    for body in stored:
        body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        body["spec"] = {}
    writes = diff(wanted(), stored, "uid-1")
    assert (writes.apply, writes.delete) == ((), ())


@pytest.mark.parametrize(
    ("want", "have", "same"),
    [
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1024Mi"}}, True),
        ({"limits": {"cpu": "0.5"}}, {"limits": {"cpu": "500m"}}, True),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1G"}}, False),
        ({"sizeLimit": "1Gi"}, {"sizeLimit": "1073741824"}, True),
        ({"image": "1Gi"}, {"image": "1024Mi"}, False),
        ({"egress": []}, {}, True),
        ({"egress": []}, {"egress": [{}]}, False),
        ({"emptyDir": {}}, {"emptyDir": {}}, True),
        ({"args": ["a", "b"]}, {"args": ["b", "a"]}, False),
        ({"args": ["a"]}, {"args": ["a", "b"]}, False),
        ({"a": {"b": 1}}, {"a": None}, False),
        # A flag of a mount or a claim is not stored while it is false; all others are.
        ({"readOnly": False}, {}, True),
        ({"readOnly": False}, {"readOnly": True}, False),
        ({"readOnly": True}, {}, False),
        ({"optional": False}, {}, False),
        ({"automountServiceAccountToken": False}, {}, False),
        ({"labelSelector": {"matchLabels": {}}}, {"labelSelector": {}}, True),
        ({"labelSelector": {"matchLabels": {}}}, {}, False),
        ({"emptyDir": {}}, {}, False),
        # Quantities of resources in the forms that the server stores.
        ({"limits": {"memory": "1.2Ti"}}, {"limits": {"memory": "1319413953331200m"}}, True),
        ({"limits": {"memory": "1.2Ti"}}, {"limits": {"memory": "1319413953331300m"}}, False),
        ({"limits": {"memory": "1.5Ti"}}, {"limits": {"memory": "1536Gi"}}, True),
        ({"requests": {"cpu": "1.5m"}}, {"requests": {"cpu": "2m"}}, True),
        ({"requests": {"cpu": "1.5m"}}, {"requests": {"cpu": "3m"}}, False),
        ({"sizeLimit": "9999Pi"}, {"sizeLimit": "9223372036854775807"}, True),
        ({"sizeLimit": "9999P"}, {"sizeLimit": "9223372036854775807"}, False),
        ({"limits": {"memory": "2k"}}, {"limits": {"memory": "2e3"}}, True),
    ],
)
def test_values_are_compared_as_the_server_reads_them(
    want: Object, have: Object, *, same: bool
) -> None:
    assert (differences(want, have) == []) is same


@pytest.mark.parametrize("map_name", ["annotations", "labels", "nodeSelector", "matchLabels"])
def test_an_empty_value_of_a_map_is_stored_so_its_loss_is_a_difference(map_name: str) -> None:
    want: Object = {map_name: {"a.b/c": "", "d": "1"}}
    assert differences(want, {map_name: {"a.b/c": "", "d": "1", "theirs": ""}}) == []
    assert differences(want, {map_name: {"d": "1"}}) == [f"{map_name}.a.b/c"]
    assert differences(want, {map_name: {"a.b/c": "", "d": "2"}}) == [f"{map_name}.d"]


def test_an_empty_string_equals_a_missing_value_and_another_value_does_not() -> None:
    """The server stores no empty value of a variable: applying it again would change nothing."""
    env: Object = {"podTemplate": {"env": [{"name": "EMPTY"}]}}
    desired = render(resource(**env), SETTINGS, 1, SURGE)
    stored = copy.deepcopy(desired)
    deployment = next(b for b in stored if b["kind"] == "Deployment")
    (variable,) = [
        one
        for one in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
        if one["name"] == "EMPTY"
    ]
    deployment["metadata"]["uid"] = "d"
    del variable["value"]
    assert diff(desired, stored, "uid-1").apply == ()
    variable["value"] = "drift"
    assert len(diff(desired, stored, "uid-1").apply) == 1


def test_rendering_is_stable_and_serialisable() -> None:
    assert json.dumps(wanted()) == json.dumps(wanted())


def test_a_claim_is_written_once_and_its_data_outlives_every_change() -> None:
    cached: Object = {"model": {"source": "owner/name"}, "modelCache": {"type": "PVC"}}
    first = render(
        resource(**cached | {"modelCache": {"type": "PVC", "size": "50Gi"}}), SETTINGS, 1, SURGE
    )
    grown = render(
        resource(**cached | {"modelCache": {"type": "PVC", "size": "90Gi"}}), SETTINGS, 1, SURGE
    )
    claims = [one for one in first if one["kind"] == "PersistentVolumeClaim"]
    assert [one.reason for one in diff(claims, [], "uid-1").apply] == ["missing"]
    for index, body in enumerate(first):
        body["metadata"] |= {"uid": f"uid-{index}", "resourceVersion": "7"}
    assert "spec.resources.requests.storage" in differences(grown[0], first[0])
    assert diff(grown, first, "uid-1").apply == ()
