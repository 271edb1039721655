"""Several releases of the operator see one resource: one serves it, and the others leave it alone.

The real reconcile of each release runs on one API server in memory, with a store of its own that is
as old as the test lets it be.
"""

import asyncio
import contextlib
import dataclasses
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fairlead_operator.cluster.cache import Store
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.release import ANSWER_SECONDS, RETRY_SECONDS
from fairlead_operator.errors import ApiError
from fairlead_operator.memory import Memory
from fairlead_operator.probe.prober import Prober
from fairlead_operator.reconcile import Reconciler
from fairlead_operator.resource.kinds import DEPLOYMENT, RESOURCE, Key, Object
from support.fake_api_server import FakeApiServer, FakeCluster
from support.full import LONG_FORM
from support.operator_bodies import SETTINGS, resource_body

KEY: Key = ("ns", "chat")
START = datetime(2026, 1, 1, tzinfo=UTC)
SEEDS = range(1000 if LONG_FORM else 8)
RESYNC = 30.0  # seconds between two passes of a release that runs
Written = list[tuple[str, Any]]


class Cluster:
    """One resource on one API server, and a clock for all."""

    def __init__(self) -> None:
        self.server = FakeApiServer()
        self.seconds = 0.0
        body = resource_body()
        del body["metadata"]["uid"]
        self.server.put(body)

    @property
    def told(self) -> list[str]:
        """The messages of the Events that say who serves the resource."""
        return [e["message"] for e in self.server.events if e["reason"] == "ServedByAnother"]

    @property
    def body(self) -> Object:
        found = self.server.find(RESOURCE, *KEY)
        assert found is not None
        return found

    @property
    def status(self) -> Object:
        status: Object = self.body.get("status") or {}
        return status

    @property
    def image(self) -> str:
        deployment = self.server.find(DEPLOYMENT, *KEY)
        assert deployment is not None
        return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])

    def edit(self, replicas: int) -> None:
        self.server.put({**self.body, "spec": self.body["spec"] | {"replicas": replicas}})


class Release:
    """One release, with a default image that tells its writes from those of another."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.settings = dataclasses.replace(
            SETTINGS, lease_namespace=name, runtime_image=f"registry.test/{name}:1"
        )
        self.start()

    def start(self) -> None:
        """A new process of the release."""
        self.store, self.seen = Store(), 0
        self.reconcile = Reconciler(
            FakeCluster(self.cluster.server, self.store),
            lambda *_: ProbeResults(complete=True),
            self.settings,
            lambda: START + timedelta(seconds=self.cluster.seconds),
            lambda: self.cluster.seconds,
        )
        self.sync()

    def sync(self) -> None:
        self.seen = self.cluster.server.sync(self.store, self.seen)

    def look(self, *, sync: bool = True) -> Written:
        """One pass; what it wrote."""
        if sync:
            self.sync()
        before = len(self.cluster.server.writes)
        asyncio.run(self.reconcile(KEY))
        return self.cluster.server.writes[before:]

    def settle(self) -> None:
        while self.look():
            pass


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def first(cluster: Cluster) -> Release:
    """The release that serves the resource."""
    release = Release(cluster, "one")
    release.settle()
    return release


def test_the_first_marks_the_resource_before_it_writes_anything_else(cluster: Cluster) -> None:
    written = Release(cluster, "one").look()
    assert written[0] == ("status", ("inferencedeployments", *KEY))
    assert {verb for verb, _ in written[1:]} == {"apply", "status"}
    assert cluster.status["servedBy"] == "one"


def test_a_second_release_asks_once_says_why_and_leaves_everything_alone(
    cluster: Cluster, first: Release
) -> None:
    second = Release(cluster, "two")
    assert second.look() == [("status", ("inferencedeployments", *KEY))]
    assert (cluster.status["servedBy"], cluster.status["challenger"]) == ("one", "two")
    assert first.look() == [("status", ("inferencedeployments", *KEY))], "the answer"
    assert "challenger" not in cluster.status
    cluster.edit(3)
    first.settle()
    for _ in range(int(RETRY_SECONDS / 20) - 1):
        cluster.seconds += 20
        assert second.look() == []
        assert first.look() == []
    assert cluster.image == "registry.test/one:1"
    assert cluster.status["desiredReplicas"] == 3
    (told,) = cluster.told
    assert "the operator in namespace one serves this" in told
    assert "the one in namespace two leaves it alone" in told
    assert "scope.namespaces" in told
    cluster.seconds += 20
    assert second.look(), "asks again: the other may be gone by now"


def test_a_release_that_is_gone_is_followed_and_finds_the_mark_when_it_comes_back(
    cluster: Cluster, first: Release
) -> None:
    second = Release(cluster, "two")
    second.look()
    cluster.seconds += ANSWER_SECONDS - 1
    assert second.look() == []
    cluster.seconds += 1
    second.settle()
    assert "challenger" not in cluster.status
    assert (cluster.status["servedBy"], cluster.image) == ("two", "registry.test/two:1")
    first.start()
    assert first.look() == [("status", ("inferencedeployments", *KEY))], "it asks"
    second.settle()
    assert first.look() == []
    assert cluster.image == "registry.test/two:1"


def test_a_restart_of_the_release_goes_on_at_once(cluster: Cluster, first: Release) -> None:
    again = Release(cluster, "one")
    assert again.look() == []
    cluster.edit(2)
    again.settle()
    assert cluster.status["desiredReplicas"] == 2


def test_children_from_before_the_mark_are_kept(cluster: Cluster, first: Release) -> None:
    unmarked = {k: v for k, v in cluster.status.items() if k != "servedBy"}
    cluster.server.put({**cluster.body, "status": unmarked})
    again = Release(cluster, "one")
    assert again.look() == [("status", ("inferencedeployments", *KEY))]
    assert again.look() == []
    assert cluster.status == unmarked | {"servedBy": "one"}


def test_a_release_that_missed_the_change_of_the_mark_writes_nothing(
    cluster: Cluster, first: Release
) -> None:
    first.sync()
    cluster.server.put({**cluster.body, "status": cluster.status | {"servedBy": "two"}})
    first.store.mark_deleted(
        DEPLOYMENT, first.store.all(DEPLOYMENT)[0]
    )  # it wants to write it again
    with pytest.raises(ApiError, match="has changed since"):
        first.look(sync=False)
    assert cluster.server.writes[-1][1][0] != DEPLOYMENT.plural
    assert cluster.status["servedBy"] == "two"


def test_an_invalid_resource_is_answered_for_too(cluster: Cluster) -> None:
    broken = cluster.body["spec"] | {"model": {"source": "nowhere"}}
    cluster.server.put({**cluster.body, "spec": broken})
    first, second = Release(cluster, "one"), Release(cluster, "two")
    first.settle()
    second.look()
    first.look()
    assert "challenger" not in cluster.status
    assert (cluster.status["servedBy"], cluster.status["conditions"][0]["reason"]) == (
        "one",
        "InvalidSpec",
    )


def test_an_operator_that_writes_no_mark_is_not_fought(cluster: Cluster, first: Release) -> None:
    def older() -> None:
        """It writes its own status, which has no mark."""
        status = {k: v for k, v in cluster.status.items() if k != "servedBy"}
        cluster.server.put({**cluster.body, "status": status})

    writes = 0
    for _ in range(20):
        older()
        writes += len(first.look())
        cluster.seconds += 20
    assert writes <= 2
    (told,) = cluster.told
    assert told.startswith("an older operator serves this resource, so the one in namespace one ")
    cluster.seconds += RETRY_SECONDS
    first.settle()
    assert cluster.status["servedBy"] == "one"


def test_an_older_definition_that_drops_the_mark_costs_no_further_write(cluster: Cluster) -> None:
    release = Release(cluster, "one")
    put = cluster.server.put

    def pruning(body: Object) -> Object:
        stored = put(body)
        (stored.get("status") or {}).pop("servedBy", None)
        return stored

    cluster.server.put = pruning  # type: ignore[method-assign]
    release.settle()
    cluster.edit(4)
    release.settle()
    cluster.seconds += RETRY_SECONDS
    assert release.look() == []
    assert cluster.status["desiredReplicas"] == 4
    assert cluster.told == []


def test_pods_of_another_release_are_not_probed(cluster: Cluster, first: Release) -> None:
    second = Release(cluster, "two")
    results: Memory[ProbeResults] = Memory()
    unused: Any = None
    prober = Prober(second.store, results, second.settings, unused, unused, unused, unused)
    uid = cluster.body["metadata"]["uid"]
    results.put(KEY, uid, ProbeResults(complete=True))
    assert asyncio.run(prober(KEY)) is None
    assert results.get(KEY, uid) is None


def test_an_upgrade_waits_for_no_deployment_of_another_release(
    cluster: Cluster, first: Release
) -> None:
    """The other's sorts first and is Ready: it would have its turn first, for ever."""
    ready = {"type": "Ready", "status": "True"}
    deployment = cluster.server.find(DEPLOYMENT, *KEY)
    assert deployment is not None
    other = resource_body("another")
    del other["metadata"]["uid"]
    meta = deployment["metadata"]
    rolled = {**meta, "name": "another", "labels": {}, "ownerReferences": []}
    revision = deployment["spec"]["template"]["metadata"]["labels"]["serving.fairlead.dev/revision"]
    status = {"conditions": [ready], "targetRevision": revision, "servedBy": "two"}
    cluster.server.put({**other, "status": status})
    cluster.server.put({**deployment, "metadata": rolled})
    cluster.server.put({**cluster.body, "status": cluster.status | {"conditions": [ready]}})
    first.settings = dataclasses.replace(first.settings, runtime_image="registry.test/one:2")
    first.start()
    first.settle()
    assert cluster.image == "registry.test/one:2"


@pytest.mark.parametrize("seed", SEEDS)
def test_only_the_marked_release_writes_children_whatever_happens(seed: int) -> None:
    """Releases stop, restart and see the cluster late. At the end all run, and one serves."""
    rng = random.Random(seed)
    cluster = Cluster()
    releases = [Release(cluster, name) for name in ("one", "two", "three")]

    def look(release: Release, *, sync: bool) -> None:
        written: Written = []
        with contextlib.suppress(ApiError):  # its store was behind
            written = release.look(sync=sync)
        children = [name for verb, name in written if verb != "status"]
        assert not children or cluster.status["servedBy"] == release.name

    for _ in range(120):
        draw, release = rng.random(), rng.choice(releases)
        if draw < 0.6:
            look(release, sync=rng.random() < 0.7)
        elif draw < 0.8:
            cluster.seconds += rng.choice((1, 20, ANSWER_SECONDS))
        elif draw < 0.9:
            release.start()
        else:
            cluster.edit(rng.randint(1, 9))
    # All run from here on: who has the mark keeps it, and soon nothing is written any more.
    for _ in range(6):
        cluster.seconds += RESYNC
        for release in releases:
            look(release, sync=True)
    owner = cluster.status["servedBy"]
    before = len(cluster.server.writes)
    for _ in range(int(RETRY_SECONDS / RESYNC)):
        cluster.seconds += RESYNC
        for release in releases:
            look(release, sync=True)
        assert cluster.status["servedBy"] == owner
    assert cluster.image == f"registry.test/{owner}:1"
    # A release asks at most once in RETRY_SECONDS, and each question has one answer.
    assert len(cluster.server.writes) - before <= 2 * 2 * (len(releases) - 1)
    # The owner goes: the first of the others that asks and waits follows it.
    rest = [release for release in releases if release.name != owner]
    for _ in range(int((RETRY_SECONDS + 2 * ANSWER_SECONDS) / RESYNC)):
        cluster.seconds += RESYNC
        for release in rest:
            look(release, sync=True)
    assert cluster.status["servedBy"] in {release.name for release in rest}
