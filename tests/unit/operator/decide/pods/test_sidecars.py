"""Containers that others inject into the pods, before or after ours, change no reading of ours."""

import copy
import json
from typing import Any

import pytest

from fairlead_operator.decide.pods import downloads, drains
from fairlead_operator.decide.pods.blockers import Blocker, find
from fairlead_operator.decide.pods.startup import startup
from support.operator_bodies import Object, pod

DRAINED = json.dumps({"code": "Drained", "finished": 3, "aborted": 1})
RUNNING: Object = {"running": {"startedAt": "2026-01-01T00:00:01Z"}}
OTHER_END: Object = {"terminated": {"exitCode": 0, "message": '{"code": "Drained"}'}}


def with_injected(body: Object, place: str, **status: Any) -> Object:
    """The pod with a sidecar and an init container of others, before or after the operator's."""
    body = copy.deepcopy(body)
    other: Object = {"name": "proxy", "restartCount": 1, "started": True, "state": RUNNING}
    for field in ("containerStatuses", "initContainerStatuses"):
        ours = body["status"].get(field) or []
        one = other | status
        body["status"][field] = [one, *ours] if place == "before" else [*ours, one]
    return body


def reasons(body: Object, progress: str = "") -> list[Blocker]:
    return find(
        revision="new",
        pods=[body],
        deployment=None,
        events=[],
        surging=True,
        downloads={body["metadata"]["uid"]: progress},
    )


pytestmark = pytest.mark.parametrize("place", ["before", "after"])


def test_the_drain_is_read_from_the_runtime(place: str) -> None:
    end = {"name": "runtime", "state": {"terminated": {"exitCode": 0, "message": DRAINED}}}
    body = with_injected(pod(container=end, deleting=True), place, state=OTHER_END)
    assert drains.read(body) == (3, 1)
    assert drains.read(with_injected(pod(deleting=True), place, state=OTHER_END)) is None


def test_a_pod_downloads_only_while_the_fetch_container_runs(place: str) -> None:
    fetch = {"name": "fetch", "state": {"running": {}}}
    assert len(downloads.fetching([with_injected(pod(init=fetch), place)])) == 1
    runtime = {"name": "runtime", "state": {"running": {}}}
    over = {"name": "fetch", "state": {"terminated": {"exitCode": 0}}}
    for body in (pod(container=runtime), pod(container=runtime, init=over)):
        assert downloads.fetching([with_injected(body, place)]) == []


def test_the_stage_of_a_start_is_the_runtimes(place: str) -> None:
    runtime = {"name": "runtime", "state": {"running": {}}}
    (reason,) = reasons(with_injected(pod(container=runtime), place))
    assert (reason.code, reason.message) == ("Starting", "the runtime loads and tests the model")
    (reason,) = reasons(with_injected(pod(), place))
    assert (reason.code, reason.message) == ("Starting", "the pod is being set up")
    fetch = {"name": "fetch", "started": True, "state": {"running": {}}}
    (reason,) = reasons(with_injected(pod(init=fetch), place), "10 % of the weights are there")
    assert (reason.code, reason.message) == ("FetchingWeights", "10 % of the weights are there")


def test_the_runtimes_failure_comes_before_that_of_an_injected_container(place: str) -> None:
    line = json.dumps({"code": "ModelNotFound", "message": "no such model", "hint": "h"})
    ours = {"name": "runtime", "state": {"terminated": {"exitCode": 2, "message": line}}}
    theirs = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    (reason,) = reasons(with_injected(pod(container=ours), place, state=theirs))
    assert reason.code == "ModelNotFound"


def test_an_injected_container_that_fails_is_named(place: str) -> None:
    runtime = {"name": "runtime", "started": True, "state": {"running": {}}}
    theirs = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    (reason,) = reasons(with_injected(pod(container=runtime), place, state=theirs))
    assert (reason.code, reason.message) == (
        "CrashLoop",
        "container proxy: exit code 137: OOMKilled",
    )


def test_the_parts_of_a_start_are_the_operators_containers(place: str) -> None:
    def state(begin: int, end: int) -> Object:
        times = {"startedAt": f"2026-01-01T00:00:{begin:02}Z"}
        return {"terminated": times | {"finishedAt": f"2026-01-01T00:00:{end:02}Z"}}

    fetch = {"name": "fetch", "restartCount": 0, "state": state(7, 47)}
    started = {"running": {"startedAt": "2026-01-01T00:00:48Z"}}
    body = pod(
        ready=True,
        conditions=[
            {
                "type": "PodScheduled",
                "status": "True",
                "lastTransitionTime": "2026-01-01T00:00:02Z",
            }
        ],
        container={"name": "runtime", "restartCount": 0, "state": started},
        init=fetch,
    )
    measured = {"uid-of-chat-1": {"weights": 3.2}}
    expected = {"scheduled": 2, "imagePulled": 5, "weightsFetched": 40, "weights": 3.2}
    assert startup([with_injected(body, place)], measured, {}) == expected
