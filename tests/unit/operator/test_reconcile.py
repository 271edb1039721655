"""One pass over one resource with a played API server: what it remembers of a decision, and what it
tells the user, when the write succeeds and when it does not.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from fairlead_operator.cluster.cache import Store
from fairlead_operator.cluster.client import Cluster
from fairlead_operator.decide.children.podtemplate import pod_template
from fairlead_operator.decide.pods.load import Load, Sample
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.scale.autoscale import TICK
from fairlead_operator.errors import ApiError
from fairlead_operator.reconcile import PROGRESS_SECONDS, Reconciler
from fairlead_operator.resource.kinds import (
    DEPLOYMENT,
    POD,
    RESOURCE,
    REVISION_LABEL,
    Key,
    Kind,
    key_of,
)
from support.operator_bodies import SETTINGS, Object, pod, resource, resource_body

KEY: Key = ("ns", "chat")
START = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
SCALED: Object = {
    "autoscaling": {"minReplicas": 1, "maxReplicas": 8, "targetPerReplica": 10},
    "podTemplate": {"priorityClassName": "high"},
}
ALLOWING = replace(SETTINGS, allowed_priority_classes=("high",))


class PlayedCluster:
    """The API server as ``Reconciler`` sees it: a store, and errors on request."""

    def __init__(self, **spec: Any) -> None:
        self.store = Store()
        self.version = 0
        self.error: Callable[[Kind], ApiError | None] = lambda _: None
        self.event_error: ApiError | None = None
        self.status_error: ApiError | None = None
        self.events: list[tuple[str, str]] = []
        self.put(RESOURCE, resource_body(**spec))

    def put(self, kind: Kind, body: Object) -> Object:
        self.version += 1
        meta = body["metadata"] | {"resourceVersion": str(self.version)}
        self.store.put(kind, {**body, "metadata": meta})
        return {**body, "metadata": meta}

    @property
    def status(self) -> Object:
        body = self.store.get(RESOURCE, KEY)
        assert body is not None
        return cast("Object", body["status"])

    @property
    def replicas(self) -> int:
        body = self.store.get(DEPLOYMENT, KEY)
        assert body is not None
        return int(body["spec"]["replicas"])

    async def get(self, kind: Kind, key: Key) -> Object | None:
        return self.store.get(kind, key)

    async def apply(self, kind: Kind, manifest: Object, uid: str | None) -> Object:
        if (error := self.error(kind)) is not None:
            raise error
        name = manifest["metadata"]["name"]
        meta = manifest["metadata"] | {"uid": uid or f"uid-of-{kind.name}-{name}", "generation": 1}
        entry = {"manager": "fairlead-operator", "operation": "Apply"}
        return self.put(kind, {**manifest, "metadata": meta | {"managedFields": [entry]}})

    async def patch(self, kind: Kind, body: Object, operations: Any) -> None:
        raise AssertionError(f"patched {kind.name} {key_of(body)}: {operations}")

    async def delete(self, kind: Kind, body: Object) -> None:
        raise AssertionError(f"deleted {kind.name} {key_of(body)}")

    async def set_status(self, body: Object, status: Object) -> None:
        if self.status_error is not None:
            raise self.status_error
        self.put(RESOURCE, {**body, "status": status})

    async def post_event(self, kind: Kind, event: Object) -> None:
        if self.event_error is not None:
            raise self.event_error
        self.events.append((event["reason"], event["message"]))


class Run:
    """Passes over a resource whose one pod serves 35 requests, where 10 are wanted."""

    def __init__(self, **spec: Any) -> None:
        self.cluster = PlayedCluster(**spec)
        self.clock = 1000.0
        self.results = ProbeResults(complete=True)
        self.settings = ALLOWING
        template = pod_template(resource(**spec), ALLOWING)
        self.revision = str(template["metadata"]["labels"][REVISION_LABEL])
        self.pod = pod(ready=True, revision=self.revision)
        self.start_operator()

    def start_operator(self) -> None:
        self.reconciler = Reconciler(
            cast("Cluster", self.cluster),
            lambda *_: self.results,
            self.settings,
            now=lambda: START + timedelta(seconds=self.clock),
            clock=lambda: self.clock,
        )

    def step(self, seconds: float = TICK) -> None:
        """One pass, a tick later, on a fresh sample."""
        self.clock += seconds
        if self.cluster.store.get(POD, key_of(self.pod)):
            sample = Sample(Load(10, 25), self.clock)
            self.results = ProbeResults(complete=True, samples={"uid-of-chat-1": sample})
        asyncio.run(cast("Any", self.reconciler(KEY)))

    def steps_that_fail(self, count: int) -> None:
        for _ in range(count):
            with pytest.raises(ApiError):
                self.step()

    def start_pod(self) -> None:
        self.pod = self.cluster.put(POD, self.pod)

    @property
    def scale_events(self) -> list[str]:
        return [reason for reason, _ in self.cluster.events if reason.startswith("Scaled")]

    @property
    def decisions(self) -> list[tuple[int, int]]:
        """(from, to) of each entry in the status, newest first."""
        entries = self.cluster.status["autoscaling"].get("decisions", ())
        return [(entry["from"], entry["to"]) for entry in entries]


@pytest.fixture
def run() -> Run:
    """A resource with its children and a decision to hold, whose pod has just become busy."""
    run = Run(**SCALED)
    run.step()
    run.step()
    assert (run.decisions, run.cluster.replicas) == ([(1, 1)], 1)
    run.start_pod()
    return run


def check_scaled_once(run: Run) -> None:
    run.step()
    assert run.cluster.replicas == 4
    for _ in range(3):
        run.step()
    assert run.scale_events == ["ScaledUp"]
    assert run.decisions[-2:] == [(1, 4), (1, 1)]
    assert [entry for entry in run.decisions if entry[0] == 1] == [(1, 4), (1, 1)]


def test_a_decision_that_is_written_is_told_once(run: Run) -> None:
    check_scaled_once(run)


def test_nothing_is_decided_where_the_resource_is_not_allowed(run: Run) -> None:
    run.settings = SETTINGS
    run.start_operator()
    for _ in range(8):
        run.step()
    assert run.cluster.status["conditions"][0]["reason"] == "NotAllowed"
    assert (run.decisions, run.scale_events, run.cluster.replicas) == ([(1, 1)], [], 1)
    assert run.cluster.status["desiredReplicas"] == 1
    run.settings = ALLOWING
    run.start_operator()
    check_scaled_once(run)


@pytest.mark.parametrize("code", [403, 422])
def test_a_refused_write_is_no_decision(run: Run, code: int) -> None:
    run.cluster.error = lambda _: ApiError(code, "Refused", "no")
    for _ in range(8):
        run.step()
    assert run.cluster.status["blockers"][0]["code"] == "WriteRefused"
    assert (run.decisions, run.scale_events, run.cluster.replicas) == ([(1, 1)], [], 1)
    run.cluster.error = lambda _: None
    check_scaled_once(run)


@pytest.mark.parametrize("code", [0, 409, 500])
def test_a_write_that_fails_is_no_decision(run: Run, code: int) -> None:
    run.cluster.error = lambda _: ApiError(code, "Failed", "no")
    run.steps_that_fail(8)
    assert (run.decisions, run.scale_events, run.cluster.replicas) == ([(1, 1)], [], 1)
    run.cluster.error = lambda _: None
    check_scaled_once(run)


@pytest.mark.parametrize("part", ["event_error", "status_error"])
def test_a_decision_that_is_written_is_told_once_whatever_fails_afterwards(
    run: Run, part: str
) -> None:
    setattr(run.cluster, part, ApiError(500, "Failed", "no"))
    run.steps_that_fail(1)
    assert run.cluster.replicas == 4
    run.clock -= TICK  # the retry comes before the next tick
    run.steps_that_fail(1)
    assert run.cluster.replicas == 4
    setattr(run.cluster, part, None)
    run.clock -= TICK
    check_scaled_once(run)


def test_what_drained_is_counted_once_while_its_pod_is_in_the_store(run: Run) -> None:
    message = '{"code": "Drained", "finished": 3, "aborted": 1}'
    end = {"name": "runtime", "state": {"terminated": {"exitCode": 0, "message": message}}}
    gone = pod(deleting=True, container=end, revision=run.revision)
    gone["status"]["phase"] = "Succeeded"
    gone = run.cluster.put(POD, gone)
    run.reconciler.count_drained(KEY, gone)
    run.step()
    run.reconciler.count_drained(KEY, gone)
    run.step()
    rollout = run.cluster.status["rollout"]
    assert (rollout["drained"], rollout["aborted"]) == (3, 1)


def test_a_deletion_that_is_refused_is_a_blocker_in_a_status_that_is_written(run: Run) -> None:
    async def refuse(kind: Kind, body: Object) -> None:
        raise ApiError(403, "Forbidden", f"may not delete {kind.plural} {body['metadata']['name']}")

    run.cluster.delete = refuse  # type: ignore[method-assign]
    body = run.cluster.store.get(RESOURCE, KEY)
    assert body is not None
    spec = body["spec"] | {"security": {"networkPolicy": False}}
    run.cluster.put(RESOURCE, {**body, "spec": spec})
    run.step()
    (refused,) = [b for b in run.cluster.status["blockers"] if b["code"] == "WriteRefused"]
    assert refused["object"] == "NetworkPolicy/chat"
    assert refused["message"] == "may not delete networkpolicies chat"
    assert run.cluster.replicas == 4, "the other writes went on"


def test_the_steps_of_a_rollout_are_written_at_intervals_and_its_milestones_at_once() -> None:
    run = Run(replicas=2)
    run.step()
    write, written = run.cluster.set_status, list[int]()

    async def counted(body: Object, status: Object) -> None:
        written.append(status["replicas"])
        await write(body, status)

    run.cluster.set_status = counted  # type: ignore[method-assign]
    again = []
    for count in (1, 2):
        run.cluster.put(POD, pod(f"chat-{count}", revision=run.revision))
        run.clock += 1
        again.append(asyncio.run(run.reconciler(KEY)))
    assert (written, again) == ([], [PROGRESS_SECONDS - 1, PROGRESS_SECONDS - 2])
    run.clock += PROGRESS_SECONDS - 2
    asyncio.run(run.reconciler(KEY))
    assert written == [2]
    run.cluster.put(POD, pod("chat-3", revision="another"))
    asyncio.run(run.reconciler(KEY))
    assert written == [2, 3], "the phase is Rolling now"


def test_an_older_definition_that_drops_a_field_of_the_status_costs_one_write(run: Run) -> None:
    written: list[Object] = []

    async def pruning(body: Object, status: Object) -> None:
        written.append(status)
        kept = {name: value for name, value in status.items() if name != "drainingReplicas"}
        run.cluster.put(RESOURCE, {**body, "status": kept})

    run.cluster.set_status = pruning  # type: ignore[method-assign]
    for _ in range(3):
        run.step()
    settled = len(written)
    run.step(0)
    run.step(0)
    assert len(written) == settled
