"""Why a resource is not ready, in order: what Kubernetes and the runtime report, and the fix."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from fairlead_operator.decide.pods import blockers
from fairlead_operator.decide.pods.blockers import CODES, Blocker, find, printable, termination
from support.operator_bodies import Object, deployment, event, pod, unscheduled


def codes(*pods: Object, **given: Any) -> list[str]:
    return [one.code for one in reasons(*pods, **given)]


def reasons(
    *pods: Object,
    live: Object | None = None,
    events: list[Object] | None = None,
    surging: bool = True,
    downloads: Mapping[str, str] | None = None,
) -> list[Blocker]:
    return find(
        revision="new",
        pods=pods,
        deployment=live,
        events=events or [],
        surging=surging,
        downloads=downloads,
    )


def waiting(reason: str, message: str = "") -> Object:
    return {"name": "runtime", "state": {"waiting": {"reason": reason, "message": message}}}


def ended(code: int, reason: str = "Error", message: str = "") -> Object:
    last = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {
        "name": "runtime",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": last,
    }


def line(code: str) -> str:
    """The runtime's termination message."""
    return json.dumps({"code": code, "message": "m", "hint": "h"})


GPU = {"nvidia.com/gpu": "1"}


@pytest.mark.parametrize(
    ("one", "code"),
    [
        (
            pod(limits=GPU, conditions=unscheduled("0/3 nodes: 3 Insufficient nvidia.com/gpu.")),
            "InsufficientAccelerator",
        ),
        (pod(conditions=unscheduled("0/3 nodes: 3 Insufficient memory.")), "Unschedulable"),
        (pod(conditions=unscheduled('persistentvolumeclaim "weights" not found')), "VolumeMissing"),
        (
            pod(conditions=unscheduled("pod has unbound immediate PersistentVolumeClaims")),
            "VolumePending",
        ),
        (pod(container=waiting("ImagePullBackOff", "Back-off pulling image")), "ImagePullBackOff"),
        (pod(container=waiting("ErrImageNeverPull")), "ImagePullBackOff"),
        (
            pod(container=waiting("CreateContainerConfigError", 'secret "keys" not found')),
            "SecretMissing",
        ),
        (
            pod(container=waiting("CreateContainerConfigError", 'configmap "roots" not found')),
            "ConfigMapMissing",
        ),
        (pod(container=ended(137, "OOMKilled")), "OutOfMemory"),
        (pod(container=ended(1)), "CrashLoop"),
        (pod(container=ended(2, message="noise\n" + line("InvalidConfig"))), "InvalidConfig"),
        (pod(container=ended(3, message=line("SelfTestFailed"))), "SelfTestFailed"),
        (pod(container=ended(2, message=line("Newer"))), "RuntimeRefused"),
        (pod(init=ended(2, message=line("WeightsUnauthorized"))), "WeightsUnauthorized"),
        (pod(init={"name": "fetch", "state": {"running": {}}}), "FetchingWeights"),
        (pod(container={"name": "runtime", "state": {"running": {}}}), "Starting"),
        (pod(), "Starting"),
    ],
)
def test_each_state_of_a_pod_has_its_reason(one: Object, code: str) -> None:
    assert codes(one) == [code]


def test_ready_pods_and_deleted_pods_block_nothing() -> None:
    assert codes(pod(ready=True), pod("chat-2", deleting=True, container=ended(1))) == []


def test_the_runtimes_own_words_and_hint_are_passed_on() -> None:
    end = json.dumps(
        {"code": "ModelNotFound", "message": "no such model", "hint": "check the name"}
    )
    (found,) = reasons(pod(container=ended(2, message=end)))
    assert (found.message, found.hint, found.object) == (
        "no such model",
        "check the name",
        "Pod/chat-1",
    )


def test_events_give_reasons_that_the_pods_status_lacks() -> None:
    one = pod(container={"name": "runtime", "state": {"waiting": {"reason": "ContainerCreating"}}})
    mount = event(one, "FailedMount", 'MountVolume.SetUp failed: secret "keys" not found')
    assert codes(one, events=[mount]) == ["SecretMissing"]
    running = pod(container={"name": "runtime", "started": True, "state": {"running": {}}})
    probe = event(running, "Unhealthy", "Readiness probe failed: 503")
    assert codes(running, events=[probe]) == ["ProbeFailed"]
    before = event(running, "Unhealthy", "Startup probe failed: HTTP probe failed: 503")
    assert codes(running, events=[before]) == ["Starting"], "the start is over, not the serving"
    assert codes(running, events=[probe, before]) == ["ProbeFailed"]
    foreign = event(pod("other"), "Unhealthy", "x")
    assert codes(running, events=[foreign]) == ["Starting"]


def test_the_deployment_gives_quota_and_deadline() -> None:
    live = deployment()
    full = {
        "type": "ReplicaFailure",
        "status": "True",
        "message": "pods is forbidden: exceeded quota: q",
    }
    late = {
        "type": "Progressing",
        "status": "False",
        "reason": "ProgressDeadlineExceeded",
        "message": "late",
    }
    live["status"] = {"conditions": [late, full]}
    assert codes(live=live) == ["QuotaExceeded", "ProgressDeadlineExceeded"]


def test_a_surge_that_finds_no_accelerator_says_so() -> None:
    stuck = pod("chat-2", limits=GPU, conditions=unscheduled("Insufficient nvidia.com/gpu"))
    old = pod(revision="old", ready=True)
    assert codes(old, stuck) == ["SurgeBlocked"]
    assert codes(old, stuck, surging=False) == ["InsufficientAccelerator"]
    nowhere = (
        "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. no new claims to deallocate, "
        "preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling."
    )
    never = pod("chat-2", limits=GPU, conditions=unscheduled(nowhere))
    assert codes(old, never) == ["InsufficientAccelerator"], "no room for a surge would help"


def test_while_only_old_pods_serve_that_is_the_reason() -> None:
    assert codes(pod(revision="old", ready=True)) == ["RollingOut"]
    assert codes(pod(revision="old", ready=True), pod("chat-2")) == ["Starting"]


def test_the_same_reason_of_many_pods_is_one_blocker_and_the_gravest_comes_first() -> None:
    same = [pod(f"chat-{i}", container=ended(1)) for i in range(30)]
    worse = pod("chat-x", container=waiting("ErrImagePull", "gone"))
    assert codes(*same, worse) == ["ImagePullBackOff", "CrashLoop"]


def test_text_from_outside_is_cut_and_made_printable() -> None:
    assert printable("a\x1b[31mb\r\n\tc\u202ed") == "a [31mb c d"
    assert len(printable("x" * 5000)) == 1024


@pytest.mark.parametrize(
    "text",
    ["", "not json", "[]", '{"code": 5}', '{"message": "x"}', '"x"', "[" * 4096],
    ids=lambda text: text[:20],
)
def test_a_termination_message_of_another_form_has_no_code(text: str) -> None:
    assert termination(text) is None


def test_every_code_has_a_hint() -> None:
    assert all(hint.endswith(".") for hint in CODES.values())


def test_a_download_that_runs_again_keeps_its_failure_as_the_reason_until_it_moves() -> None:
    last = {
        "terminated": {
            "exitCode": 2,
            "message": '{"code": "HubUnreachable", "message": "m", "hint": "h"}',
        }
    }
    one = pod(init={"name": "fetch", "started": True, "state": {"running": {}}, "lastState": last})
    assert codes(one) == ["HubUnreachable"]
    (moving,) = reasons(one, downloads={one["metadata"]["uid"]: "10 % of the weights are there"})
    assert (moving.code, moving.message) == ("FetchingWeights", "10 % of the weights are there")


def ended_once(code: int, restarts: int = 1, waiting: str = "") -> Object:
    state: Object = {"waiting": {"reason": waiting}} if waiting else {"running": {}}
    last = {"terminated": {"exitCode": code, "reason": "Error"}}
    return {"name": "runtime", "restartCount": restarts, "state": state, "lastState": last}


@pytest.mark.parametrize(
    ("container", "code"),
    [
        (ended_once(137), "ProcessKilled"),
        (ended_once(1), "ProcessEnded"),
        (ended_once(137, restarts=3), "CrashLoop"),
        (ended_once(1, waiting="CrashLoopBackOff"), "CrashLoop"),
    ],
)
def test_only_repeated_ends_are_a_loop(container: Object, code: str) -> None:
    assert codes(pod(container=container)) == [code]


def failed(name: str, reason: str, created: str) -> Object:
    one = pod(name)
    one["metadata"]["creationTimestamp"] = created
    one["status"] = {"phase": "Failed", "reason": reason, "message": "low on ephemeral-storage"}
    return one


def test_a_pod_that_its_node_ended_or_refused_is_named_while_one_is_missing() -> None:
    evicted = failed("chat-0", "Evicted", "2026-01-01T00:00:00Z")
    refused = failed("chat-9", "UnexpectedAdmissionError", "2026-01-01T00:00:05Z")
    (newest,) = blockers.failed_pod_blockers([evicted, refused], [pod()], "new", 1)
    assert (newest.code, newest.object) == ("NodeRefused", "Pod/chat-9")
    (only,) = blockers.failed_pod_blockers([evicted], [pod()], "new", 1)
    assert only.code == "Evicted"
    assert "low on ephemeral-storage" in only.message
    assert "modelCache.size" in only.hint
    assert not blockers.failed_pod_blockers([evicted], [pod(ready=True)], "new", 1)
    assert not blockers.failed_pod_blockers([evicted], [pod()], "newer", 1)
    later = pod("chat-2", ready=True)
    later["metadata"]["creationTimestamp"] = "2026-01-01T00:01:00Z"
    assert not blockers.failed_pod_blockers([evicted], [later, pod()], "new", 2)
