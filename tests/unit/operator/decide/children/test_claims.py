"""What a claim allows, how that is known, and what it rules out."""

from datetime import UTC, datetime
from typing import Any

import pytest

from fairlead_operator.decide.children.claims import (
    claim_blockers,
    mounted_claim,
    new_claim_blockers,
)
from fairlead_operator.decide.children.manifests import SURGE, render
from fairlead_operator.decide.children.rollout import choose
from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.decide.status import Findings, status_of
from support.operator_bodies import SETTINGS, Object, deployment, pod, resource

MADE: Object = {"model": {"source": "a/b"}, "modelCache": {"type": "PVC", "size": "50Gi"}}
NAMED: Object = {"model": {"source": "a/b"}, "modelCache": {"type": "PVC", "claimName": "w"}}
SOURCE: Object = {"model": {"source": "pvc://weights/llama"}}
ONCE, MANY = ["ReadWriteOnce"], ["ReadWriteMany"]
NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)


def with_modes(base: Object, modes: list[str]) -> Object:
    return {**base, "modelCache": {**base.get("modelCache", {}), "accessModes": modes}}


def live_claim(modes: list[str]) -> Object:
    return {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "chat-model-cache"},
        "spec": {"accessModes": modes},
    }


def seen(*pods: Object, children: tuple[Object, ...] = ()) -> Snapshot:
    return Snapshot(children=children, pods=pods, slices=(), quotas=(), events=())


@pytest.mark.parametrize(
    ("spec", "modes", "known"),
    [
        (MADE, "ReadWriteOnce", "Declared"),
        (with_modes(MADE, MANY), "ReadWriteMany", "Declared"),
        (NAMED, "ReadWriteMany", "Assumed"),
        (with_modes(NAMED, ONCE), "ReadWriteOnce", "Declared"),
        (SOURCE, "ReadWriteMany", "Assumed"),
        (with_modes(SOURCE, ["ReadOnlyMany"]), "ReadOnlyMany", "Declared"),
    ],
)
def test_what_a_claim_allows_is_declared_or_assumed(spec: Object, modes: str, known: str) -> None:
    claim = mounted_claim(resource(**spec), ())
    assert claim is not None
    assert (claim.modes, claim.known) == ((modes,), known)
    assert claim.shared is (modes != "ReadWriteOnce")
    status = status_of(resource(**spec), seen(), Findings(1, "new", "Surge", ""), {}, NOW)
    (said,) = [c for c in status["conditions"] if c["type"] == "ClaimShared"]
    assert (said["status"], said["reason"]) == (str(claim.shared), known)
    assert modes in said["message"]
    assert ("assumed" in said["message"]) is (known == "Assumed")


def test_a_claim_that_exists_is_what_it_is() -> None:
    claim = mounted_claim(resource(**with_modes(MADE, MANY)), [live_claim(ONCE)])
    assert claim is not None
    assert (claim.modes, claim.known) == (("ReadWriteOnce",), "Observed")


@pytest.mark.parametrize("source", ["demo:", "file:///opt/model"])
def test_no_claim_is_made_where_nothing_is_downloaded(source: str) -> None:
    one = resource(model={"source": source}, modelCache={"type": "PVC", "size": "1Gi"})
    kinds = {child["kind"] for child in render(one, SETTINGS, 1, SURGE)}
    assert "PersistentVolumeClaim" not in kinds
    assert mounted_claim(one, ()) is None


def test_the_claim_has_its_modes_and_storage_class() -> None:
    spec = with_modes(MADE, MANY)
    spec["modelCache"]["storageClassName"] = "fast"
    (claim,) = [c for c in render(resource(**spec), SETTINGS, 1, SURGE) if "Claim" in c["kind"]]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "50Gi"}},
        "storageClassName": "fast",
    }


@pytest.mark.parametrize(
    ("spec", "blocked"),
    [
        ({**MADE, "replicas": 2}, True),
        ({**MADE, "autoscaling": {"minReplicas": 1, "maxReplicas": 2}}, True),
        (MADE, False),
        ({**with_modes(MADE, MANY), "replicas": 2}, False),
        ({**with_modes(NAMED, ONCE), "replicas": 2}, False),
    ],
)
def test_a_claim_that_could_not_serve_all_pods_is_not_made(spec: Object, *, blocked: bool) -> None:
    found = new_claim_blockers(resource(**spec), seen())
    assert [b.code for b in found] == ["ClaimNotShared"] * blocked
    assert all("modelCache.accessModes" in b.hint for b in found)
    assert not new_claim_blockers(resource(**spec), seen(children=(live_claim(ONCE),)))


def test_pods_that_wait_for_a_claim_of_another_node_are_explained() -> None:
    def codes(*pods: Object, replicas: int = 2, **spec: Any) -> list[str]:
        one = resource(**with_modes(NAMED, ONCE), **spec)
        return [b.code for b in claim_blockers(one, seen(*pods), "new", replicas)]

    ready, waiting = pod(ready=True), pod("chat-2")
    assert codes(ready, waiting) == ["ClaimNotShared"]
    assert codes(ready, pod("chat-2", ready=True)) == [], "one node has room for both"
    old = pod("chat-3", revision="old", ready=True)
    assert codes(waiting, old, replicas=1, rollout={"strategy": "Surge"}) == ["SurgeBlocked"]
    assert codes(waiting, old, replicas=1) == []
    assert not claim_blockers(resource(**NAMED), seen(ready, waiting), "new", 2)


def test_a_rollout_over_a_claim_of_one_node_replaces_one_pod_at_a_time() -> None:
    old = pod("chat-3", revision="old", ready=True)
    around = seen(old, children=(deployment("old"),))
    for spec, chosen in (
        (with_modes(NAMED, ONCE), "OneByOne"),
        (NAMED, "Surge"),
        (with_modes(SOURCE, ["ReadWriteOncePod"]), "OneByOne"),
    ):
        choice = choose(resource(**spec), around, "new", 1, {}, NOW)
        assert choice.strategy == chosen
        assert ("claim" in choice.message) is (chosen == "OneByOne")
    settled = seen(pod(ready=True), children=(deployment("new"),))
    assert (
        choose(resource(**with_modes(NAMED, ONCE)), settled, "new", 1, {}, NOW).strategy == "Surge"
    )
