"""One pass over one resource with a played API server: what it remembers of a decision, and what it
tells the user, when the write succeeds and when it does not.
"""

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from fairlead_operator.cluster.cache import Store
from fairlead_operator.decide.children.podtemplate import pod_template
from fairlead_operator.decide.pods.load import Load, Sample
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.scale.autoscale import TICK
from fairlead_operator.errors import ApiError
from fairlead_operator.reconcile import PROGRESS_SECONDS, Reconciler
from fairlead_operator.resource.kinds import (
    DEPLOYMENT,
    MANAGED_LABEL,
    POD,
    RESOURCE,
    REVISION_LABEL,
    SERVICE,
    Key,
    Kind,
    key_of,
)
from support.fake_api_server import KINDS, FakeApiServer, FakeCluster, Name
from support.operator_bodies import SETTINGS, Object, pod, resource, resource_body

KEY: Key = ("ns", "chat")
START = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
SCALED: Object = {
    "autoscaling": {"minReplicas": 1, "maxReplicas": 8, "targetPerReplica": 10},
    "podTemplate": {"priorityClassName": "high"},
}
ALLOWING = replace(SETTINGS, allowed_priority_classes=("high",))


class PlayedCluster(FakeCluster):
    """The API server in memory as ``Reconciler`` sees it, with errors on request."""

    def __init__(self, **spec: Any) -> None:
        self.server = FakeApiServer()
        super().__init__(self.server, Store())
        self.error: Callable[[Kind], ApiError | None] = lambda _: None
        self.event_error: ApiError | None = None
        self.status_error: ApiError | None = None
        self.put(RESOURCE, resource_body(**spec))
        self.server.on_request = self._fail

    def _fail(self, verb: str, name: Name) -> None:
        error = None
        if verb == "post":
            error = self.event_error
        elif verb == "patch":
            kind = KINDS[name[0]]
            error = self.status_error if kind is RESOURCE else self.error(kind)
        if error is not None:
            raise error

    def put(self, kind: Kind, body: Object) -> Object:
        """What somebody else writes, seen by the operator at once."""
        stored = self.server.put(body)
        self.store.put(kind, copy.deepcopy(stored))
        return stored

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(event["reason"], event["message"]) for event in self.server.events]

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
            self.cluster,
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


def test_a_child_that_lost_our_label_gets_it_back_when_a_list_came_before_the_watch(
    run: Run,
) -> None:
    """The list shows no such Service, at a version above the Service's own."""
    service = copy.deepcopy(run.cluster.server.find(SERVICE, *KEY))
    assert service is not None
    del service["metadata"]["labels"][MANAGED_LABEL]
    run.cluster.server.put(service)
    run.cluster.store.replace(SERVICE, "", [], run.cluster.server.version)
    with pytest.raises(ApiError, match="is ours and was not seen yet"):
        run.step()
    run.step()
    restored = run.cluster.server.find(SERVICE, *KEY)
    assert restored is not None
    assert MANAGED_LABEL in restored["metadata"]["labels"]


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

    run.cluster.set_status = counted  # type: ignore[method-assign,assignment]
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

    run.cluster.set_status = pruning  # type: ignore[method-assign,assignment]
    for _ in range(3):
        run.step()
    settled = len(written)
    run.step(0)
    run.step(0)
    assert len(written) == settled
