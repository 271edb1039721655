"""Requests that a deleted pod finished or aborted: what its end says, and their sum by revision."""

import json
from typing import Any

import pytest

from fairlead_operator.decide.pods.drains import LARGEST, DrainCounts, DrainedRequests, read
from support.operator_bodies import Object, pod


def ended(line: Any, *, deleting: bool = True) -> Object:
    message = line if isinstance(line, str) else json.dumps(line)
    state = {"terminated": {"exitCode": 0, "message": message}}
    return pod(deleting=deleting, container={"name": "runtime", "state": state})


def test_a_deleted_pod_says_how_its_requests_ended() -> None:
    line = {"code": "Drained", "finished": 3, "aborted": 1}
    assert read(ended(line)) == DrainedRequests(3, 1)
    assert read(ended(line, deleting=False)) is None, "it ended by itself"
    running = pod(deleting=True, container={"name": "runtime", "state": {"running": {}}})
    assert read(running) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no JSON",
        "[" * 4096,
        [1],
        {"code": "OutOfMemory", "finished": 3, "aborted": 1},
        {"code": "Drained", "finished": 3},
        {"code": "Drained", "finished": -1, "aborted": 1},
        {"code": "Drained", "finished": True, "aborted": 1},
        {"code": "Drained", "finished": 1.5, "aborted": 1},
        {"code": "Drained", "finished": 0, "aborted": LARGEST + 1},
    ],
)
def test_an_end_that_says_nothing_valid_counts_nothing(line: Any) -> None:
    assert read(ended(line)) is None


def test_a_pod_counts_once_and_its_count_outlives_it() -> None:
    counts = (
        DrainCounts("new").plus("uid-1", DrainedRequests(3, 1)).plus("uid-1", DrainedRequests(3, 1))
    )
    assert counts.total == DrainedRequests(3, 1)
    gone = counts.of_pods(frozenset({"uid-2"}))
    assert (gone.total, gone.pods) == (DrainedRequests(3, 1), frozenset())
    assert counts.of_pods(frozenset({"uid-1", "uid-2"})) == counts
    assert gone.plus("uid-2", DrainedRequests(1, 0)).total == DrainedRequests(4, 1)


def test_another_revision_starts_at_zero_and_knows_the_pods_that_ended() -> None:
    counts = DrainCounts("new").plus("uid-1", DrainedRequests(3, 1))
    assert counts.since("new") == counts
    newer = counts.since("newer")
    assert (newer.revision, newer.total) == ("newer", DrainedRequests())
    assert newer.plus("uid-1", DrainedRequests(3, 1)) == newer


def test_a_new_operator_goes_on_from_the_status() -> None:
    status = {"targetRevision": "new", "rollout": {"drained": 3, "aborted": 1}}
    assert DrainCounts.of_status(status) == DrainCounts("new", DrainedRequests(3, 1))
    assert DrainCounts.of_status({}) == DrainCounts("")
