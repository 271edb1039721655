"""Every code of a blocker by the state that leads to it, beyond the common ones of
``test_blockers``.
"""

import json
from typing import Any

import pytest

from fairlead_operator.decide.judge import judge
from fairlead_operator.decide.pods.blockers import NORMAL, Blocker, find
from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.status import Capacity
from support.operator_bodies import Object, deployment, event, pod, resource


def reasons(*pods: Object, live: Object | None = None, **given: Any) -> list[Blocker]:
    found: Any = {"events": [], "surging": True, **given}
    return find(revision="new", pods=pods, deployment=live, **found)


def codes(*pods: Object, **given: Any) -> list[str]:
    return [one.code for one in reasons(*pods, **given)]


@pytest.mark.parametrize("container", ["init", "container"])
@pytest.mark.parametrize(
    "code",
    [
        "InvalidSource",
        "ModelNotFound",
        "HubUnreachable",
        "NoSpace",
        "NoSafetensors",
        "BadWeights",
        "BadModelFiles",
        "RemoteCodeRefused",
        "UnsupportedModel",
        "OutOfMemory",
    ],
)
def test_a_refusal_of_the_runtime_keeps_its_code(code: str, container: str) -> None:
    line = json.dumps({"code": code, "message": "m", "hint": "h"})
    state = {
        "name": "fetch" if container == "init" else "runtime",
        "state": {"terminated": {"exitCode": 2, "message": line}},
    }
    (one,) = reasons(pod(init=state) if container == "init" else pod(container=state))
    assert (one.code, one.message, one.hint) == (code, "m", "h")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("pods is forbidden: exceeded quota: q, requested: pods=1", "QuotaExceeded"),
        ("pods is forbidden: failed quota: q: must specify cpu for: runtime", "QuotaExceeded"),
        ("pods is forbidden: violates PodSecurity restricted:latest", "PodsRefused"),
    ],
)
def test_a_refused_replica_is_the_quotas_or_the_namespaces(message: str, code: str) -> None:
    live = deployment()
    failure = {"type": "ReplicaFailure", "status": "True", "message": message}
    live["status"] = {"conditions": [failure]}
    assert codes(live=live) == [code]
    failure["status"] = "False"
    assert codes(live=live) == []


def test_the_last_mount_failure_is_the_one_that_counts() -> None:
    one = pod(container={"name": "runtime", "state": {"waiting": {"reason": "ContainerCreating"}}})
    early = event(one, "FailedMount", 'MountVolume.SetUp failed: secret "keys" not found')
    late = event(one, "FailedAttachVolume", "Multi-Attach error for volume")
    (found,) = reasons(one, events=[early, late])
    assert (found.code, found.message) == ("VolumePending", "Multi-Attach error for volume")


def test_a_mount_failure_of_a_container_that_started_is_over() -> None:
    one = pod(container={"name": "runtime", "started": True, "state": {"running": {}}})
    assert codes(one, events=[event(one, "FailedMount", "timed out")]) == ["Starting"]


def test_before_the_first_new_pod_a_rollout_is_the_reason() -> None:
    old = pod(revision="old", ready=True)
    assert codes(old) == ["RollingOut"]
    assert codes(old, pod("chat-2")) == ["Starting"]
    assert codes(old, pod("chat-2", ready=True)) == []
    assert "RollingOut" in NORMAL


def test_of_equal_reasons_the_first_pod_is_named() -> None:
    ended = {"name": "runtime", "state": {"terminated": {"exitCode": 1}}}
    pods = [pod(f"chat-{number}", container=ended) for number in (2, 1, 3)]
    (one,) = reasons(*pods)
    assert one.object == "Pod/chat-1"


def test_at_most_sixteen_reasons_are_kept_and_they_are_the_gravest() -> None:
    pods = [
        pod(f"chat-{n:02}", container={"name": "runtime", "state": {"terminated": {"exitCode": n}}})
        for n in range(1, 30)
    ]
    pull = {"name": "runtime", "state": {"waiting": {"reason": "ErrImagePull", "message": "gone"}}}
    found = codes(*pods, pod("chat-zz", container=pull))
    assert found == ["ImagePullBackOff", *["ProcessEnded"] * 15]


# -- the blockers of a whole pass


def judged(*pods: Object, replicas: int = 1, **results: Any) -> list[tuple[str, str]]:
    endpoints = [
        {"conditions": {"ready": True}, "targetRef": {"uid": p["metadata"]["uid"]}}
        for p in pods
        if any(c["type"] == "Ready" for c in p["status"]["conditions"])
    ]
    seen = Snapshot((deployment(),), pods, ({"endpoints": endpoints},), (), ())
    planned = results.pop("planned", Capacity())
    found = judge(resource(), seen, ProbeResults(**results), "new", replicas, planned, (), {})
    return [(one.code, one.message) for one in found]


def test_no_replicas_is_the_reason_when_none_are_wanted() -> None:
    assert judged(pod(), replicas=0) == [("NoReplicas", "spec.replicas is 0")]


def test_a_ready_pod_whose_canary_failed_is_a_fault() -> None:
    one = pod(ready=True)
    uid = one["metadata"]["uid"]
    assert judged(one, canary_failures={uid: "no token in 10 s"}) == [
        ("CanaryFailed", "no token in 10 s")
    ]
    assert judged(one, canaries=frozenset({uid})) == []
    assert judged(one) == [("Starting", "waiting for the first token of a ready pod")]
    assert judged() == [("Starting", "no pod is in the Service's endpoints yet")]


def test_a_plan_without_room_blocks_until_a_pod_is_ready() -> None:
    tight = Capacity({"fits": False, "message": "needs 20 GiB"})
    assert judged(planned=tight) == [("DoesNotFit", "needs 20 GiB")]
    one = pod(ready=True)
    canaries = frozenset({one["metadata"]["uid"]})
    assert judged(one, planned=tight, canaries=canaries) == []
