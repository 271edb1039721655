"""Counts, phases and reasons of a status where two pods or two revisions differ."""

from datetime import UTC, datetime
from typing import Any

import pytest

from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.scale.autoscale import Decision, History
from fairlead_operator.decide.scale.scaling import DECISIONS, Scaling, scale
from fairlead_operator.decide.scale.state import ScalingMemory
from fairlead_operator.decide.status import Findings, status_of
from support.operator_bodies import Object, deployment, pod, resource

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)


def seen(*pods: Object, live: Object | None = None) -> Snapshot:
    ready = [
        {"conditions": {"ready": True}, "targetRef": {"uid": p["metadata"]["uid"]}}
        for p in pods
        if any(c["type"] == "Ready" for c in p["status"]["conditions"])
    ]
    return Snapshot((live,) if live else (), pods, ({"endpoints": ready},), (), ())


def status(*pods: Object, desired: int = 1, **spec: Any) -> Object:
    canaries = frozenset(p["metadata"]["uid"] for p in pods)
    findings = Findings(desired, "new", "Surge", "", canaries=canaries)
    return status_of(resource(**spec), seen(*pods), findings, {}, NOW)


def condition(body: Object, kind: str) -> tuple[str, str, str]:
    one = next(c for c in body["conditions"] if c["type"] == kind)
    return one["status"], one["reason"], one["message"]


NEW, OTHER = pod(ready=True), pod("chat-2", ready=True)
OLD = pod("chat-0", revision="old", ready=True)


def test_the_current_revision_is_the_target_as_soon_as_one_of_its_pods_is_ready() -> None:
    assert status(OLD, NEW)["currentRevision"] == status(NEW, OLD)["currentRevision"] == "new"
    assert status(OLD)["currentRevision"] == "old"
    assert "currentRevision" not in status(pod())


@pytest.mark.parametrize(
    ("pods", "desired", "phase"),
    [
        ((NEW, OTHER), 2, "Complete"),
        ((NEW,), 2, "Starting"),
        ((NEW, pod("chat-2")), 2, "Starting"),
        ((NEW, OLD), 1, "Rolling"),
        ((), 0, "Stopped"),
    ],
)
def test_a_rollout_is_complete_when_every_desired_pod_serves(
    pods: tuple[Object, ...], desired: int, phase: str
) -> None:
    assert status(*pods, desired=desired)["rollout"]["phase"] == phase


@pytest.mark.parametrize(
    ("pods", "desired", "expected"),
    [
        ((NEW, OTHER), 2, ("True", "EnoughPods", "2 of 2 pods are ready")),
        ((NEW,), 2, ("False", "TooFewPods", "1 of 2 pods are ready")),
        ((NEW, OLD), 1, ("True", "EnoughPods", "2 of 1 pods are ready")),
        ((), 0, ("False", "TooFewPods", "0 of 0 pods are ready")),
    ],
)
def test_available_means_that_as_many_pods_are_ready_as_desired(
    pods: tuple[Object, ...], desired: int, expected: tuple[str, str, str]
) -> None:
    assert condition(status(*pods, desired=desired), "Available") == expected


def test_progressing_names_the_phase_when_nothing_blocks() -> None:
    assert condition(status(NEW), "Progressing") == ("False", "Complete", "revision new")
    rolling = condition(status(NEW, OLD), "Progressing")
    assert rolling == ("True", "Rolling", "revision new")


def test_ready_counts_the_pods_that_serve() -> None:
    body = status(NEW, OTHER, desired=3)
    assert condition(body, "Ready") == (
        "True",
        "Serving",
        "2 of 3 pods of revision new serve; a canary token went through",
    )


def test_the_url_leaves_out_the_default_port_only() -> None:
    assert status(service={"port": 80})["url"] == "http://chat.ns.svc"
    assert status(service={"port": 8080})["url"] == "http://chat.ns.svc:8080"


# -- the list of decisions


def test_only_the_newest_decisions_are_kept() -> None:
    memory = ScalingMemory.first({}, 0.0)
    spec: Object = {"autoscaling": {"minReplicas": 1, "maxReplicas": 50, "targetPerReplica": 10}}
    results = ProbeResults(complete=True)
    made: list[int] = []
    clock = 1000.0
    for number in range(2 * DECISIONS):
        # Without a ready pod the count of the Deployment is held: each count is a new decision.
        live = deployment(replicas=number + 1)
        one: Scaling = scale(resource(**spec), seen(live=live), memory, results, 0, NOW, clock)
        assert one.status is not None
        made.append(one.replicas)
        memory, clock = one.memory, clock + 10.0
        kept = [entry["to"] for entry in one.status["decisions"]]
        assert kept == list(reversed(made))[:DECISIONS]


def test_a_decision_without_a_limit_names_none() -> None:
    assert Decision(1, History(), (), "", {}).limited_by == ""
