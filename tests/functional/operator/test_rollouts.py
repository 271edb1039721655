"""Random clusters through rollouts and upgrades: the promises about disruption hold in every state.

The real reconcile runs on an API server in memory beside Kubernetes' own rolling-update arithmetic.
Rooms are tight, pods start slowly and die, users edit, defaults change, the operator restarts.
"""

import asyncio
import copy
import dataclasses
import random
from datetime import UTC, datetime, timedelta

import pytest

from fairlead_operator.cluster.cache import Store
from fairlead_operator.decide.children.manifests import revision_of
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.errors import ApiError
from fairlead_operator.reconcile import Reconciler
from fairlead_operator.resource.kinds import DEPLOYMENT, POD, RESOURCE, Key, Object, key_of
from support.deployment_controller import Nodes, is_ready, template_hash
from support.fake_api_server import FakeApiServer, FakeCluster
from support.full import LONG_FORM
from support.operator_bodies import SETTINGS, resource_body

SEEDS = range(2000 if LONG_FORM else 12)
BAD_IMAGE = "registry.test/bad:1"


def image_of(deployment: Object) -> str:
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


class Fleet:
    """One random cluster with its operator, and what the test knows about it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.server = FakeApiServer()
        self.settings = dataclasses.replace(
            SETTINGS, upgrade_concurrency=self.rng.choice((1, 1, 2))
        )
        self.keys = [("ns", f"chat{i}") for i in range(self.rng.randint(1, 4))]
        self.strategies: dict[Key, str] = {}
        self.most: dict[Key, int] = {}  # replicas that there is room for
        total = 0
        for namespace, name in self.keys:
            count, strategy = self.rng.randint(1, 4), self.rng.choice(("Auto", "Auto", "Surge"))
            total += count
            self.strategies[namespace, name] = strategy
            self.most[namespace, name] = count
            body = resource_body(name, replicas=count, rollout={"strategy": strategy})
            del body["metadata"]["uid"]
            self.server.put(body)
        self.nodes = Nodes(self.server, self.rng, total + self.rng.randint(0, 2), self.pod_ended)
        self.waited: dict[tuple[Key, str], float] = {}  # longest wait for room, by revision
        self.images: dict[Key, str] = {}
        self.rolling: set[Key] = set()  # took a turn in an upgrade and is not Ready again
        self.edited: set[Key] = set()  # its spec changed since its template was last written
        self.restart()

    def restart(self) -> None:
        """A new operator process: nothing is remembered but what the cluster holds."""
        self.store = Store()
        self.seen = 0
        self.probed: dict[Key, ProbeResults] = {}
        self.cluster = FakeCluster(self.server, self.store)
        self.reconcile = Reconciler(
            self.cluster,
            lambda key, _: self.probed.get(key),
            self.settings,
            lambda: self.now,
            lambda: datetime.timestamp(self.now),
        )

    # -- what is promised

    def pod_ended(self, key: Key, left: int, deployment: Object) -> None:
        """The Deployment controller has taken an available pod for a rollout."""
        replicas = int(deployment["spec"]["replicas"])
        strategy = deployment["spec"]["strategy"]
        assert strategy["type"] == "RollingUpdate", "nobody asked for Recreate"
        if not replicas:
            return  # its user wants no pod
        one_by_one = strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
        assert left >= replicas - one_by_one, f"{key}: {left} of {replicas} pods are left"
        if one_by_one:
            revision = revision_of(deployment)
            status = self.status(key)
            assert self.strategies[key] == "Auto", "Surge waits, it never takes a pod"
            assert status["targetRevision"] == revision
            assert status["rollout"]["strategyChosen"] == "OneByOne", "the status says so first"
            assert replicas > 1 or "interrupts" in status["rollout"]["why"]
            assert self.waited.get((key, revision), 0) >= 60, "an extra pod might have come"

    def check(self) -> None:
        """In every state: not more deployments roll for a changed default than may."""
        for deployment in self.server.all(DEPLOYMENT):
            key = key_of(deployment)
            image = image_of(deployment)
            old, self.images[key] = self.images.get(key, image), image
            if image != old and key not in self.edited and self.was_ready(key):
                self.rolling.add(key)
            if image != old or key in self.edited:
                self.edited.discard(key)
            if self.is_ready(key, revision_of(deployment)) or not deployment["spec"]["replicas"]:
                self.rolling.discard(key)
        assert len(self.rolling) <= self.settings.upgrade_concurrency, self.rolling

    def status(self, key: Key) -> Object:
        body = self.server.find(RESOURCE, *key)
        return {} if body is None else body.get("status") or {}

    def is_ready(self, key: Key, revision: str) -> bool:
        status = self.status(key)
        ready = any(
            c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ()
        )
        rolls = (status.get("rollout") or {}).get("phase") == "Rolling"
        return ready and not rolls and status.get("targetRevision") == revision

    def was_ready(self, key: Key) -> bool:
        status = self.status(key)
        return self.is_ready(key, str(status.get("targetRevision")))

    # -- what happens

    async def step(self) -> None:
        """One random thing."""
        draw = self.rng.random()
        if draw < 0.45:
            await self.look_at(self.rng.choice(self.keys))
        elif draw < 0.63:
            self.nodes.control(self.now)
        elif draw < 0.72:
            self.nodes.schedule()
        elif draw < 0.84:
            self.nodes.start_one()
        elif draw < 0.96:
            self.pass_time(self.rng.uniform(0, 25))
        elif draw < 0.975:
            self.nodes.kill_one()
        elif draw < 0.982:
            self.edit(self.rng.choice(self.keys))
        elif draw < 0.985:
            self.scale(self.rng.choice(self.keys))
        elif draw < 0.992:
            self.change_default(f"registry.test/fairlead-runtime:{self.rng.randint(2, 99)}")
        else:
            self.restart()
        self.check()

    async def look_at(self, key: Key) -> None:
        self.nodes.publish_endpoints()
        self.seen = self.server.sync(self.store, self.seen)
        body = self.server.find(RESOURCE, *key)
        if body is not None:
            ready = frozenset(p["metadata"]["uid"] for p in self.server.all(POD) if is_ready(p))
            self.probed[key] = ProbeResults(complete=True, canaries=ready)
        try:
            await self.reconcile(key)
        except ApiError as error:
            if error.code != 409:
                raise

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        for pod in self.server.all(POD):
            condition = pod["status"]["conditions"][0]
            if condition["status"] == "False":
                since = datetime.fromisoformat(condition["lastTransitionTime"])
                labels = pod["metadata"]["labels"]
                key = (pod["metadata"]["namespace"], labels["deployment"])
                place = (key, labels["serving.fairlead.dev/revision"])
                wait = (self.now - since).total_seconds()
                self.waited[place] = max(self.waited.get(place, 0), wait)

    def edit(self, key: Key) -> None:
        body = self.server.find(RESOURCE, *key)
        if body is None:
            return
        spec = {**body["spec"], "scheduler": {"maxBatchTokens": self.rng.randint(256, 9999)}}
        self.server.put({**body, "spec": spec})
        self.edited.add(key)

    def scale(self, key: Key) -> None:
        """`kubectl scale`, down to nothing and up to the count that there is room for."""
        body = self.server.find(RESOURCE, *key)
        if body is not None:
            replicas = self.rng.randint(0, self.most[key])
            self.server.put({**body, "spec": {**body["spec"], "replicas": replicas}})

    def change_default(self, image: str) -> None:
        """A new release of the operator: its process restarts with another default image."""
        self.settings = dataclasses.replace(self.settings, runtime_image=image)
        self.restart()

    @property
    def settled(self) -> bool:
        """Whether every deployment serves what its resource and today's defaults ask for."""
        bodies = self.server.all(DEPLOYMENT)
        return (
            len(bodies) == len(self.keys)
            and not self.edited
            and all(image_of(b) == self.settings.runtime_image for b in bodies)
            and all(
                self.is_ready(key_of(b), revision_of(b)) or not b["spec"]["replicas"]
                for b in bodies
            )
        )

    async def settle(self, rounds: int) -> None:
        """Let time pass without further news, until there is nothing left to do."""
        for _ in range(rounds):
            if self.settled:
                return
            for key in self.keys:
                await self.look_at(key)
                self.check()
            self.nodes.control(self.now)
            self.nodes.schedule()
            for _ in self.keys:
                self.nodes.start_one()
            self.pass_time(5)
            self.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rollout_takes_at_most_one_ready_pod_and_none_while_an_extra_one_can_come(
    seed: int,
) -> None:
    async def run() -> None:
        fleet = Fleet(seed)
        await fleet.settle(20)
        for _ in range(400):
            await fleet.step()
        await fleet.settle(200)
        for key in fleet.keys:
            deployment = fleet.server.find(DEPLOYMENT, *key)
            assert deployment is not None
            image = image_of(deployment)
            if fleet.strategies[key] == "Auto" and "Surge" not in fleet.strategies.values():
                assert image == fleet.settings.runtime_image, "the rollout came to its end"
                ready = fleet.is_ready(key, revision_of(deployment))
                assert ready or not deployment["spec"]["replicas"]

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(8))
def test_a_default_that_fails_reaches_no_more_deployments_than_may_roll(seed: int) -> None:
    async def run() -> None:
        fleet = Fleet(seed)
        await fleet.settle(20)
        fleet.nodes.room += 4  # strategy Surge waits for room, and that is not the subject here
        fleet.nodes.bad_images.add(BAD_IMAGE)
        fleet.change_default(BAD_IMAGE)
        await fleet.settle(60)
        images = [image_of(body) for body in fleet.server.all(DEPLOYMENT)]
        assert images.count(BAD_IMAGE) <= fleet.settings.upgrade_concurrency
        fleet.change_default("registry.test/fairlead-runtime:good")
        await fleet.settle(200)
        images = [image_of(body) for body in fleet.server.all(DEPLOYMENT)]
        assert BAD_IMAGE not in images, "the next default frees the others"

    asyncio.run(run())


def test_a_deadline_or_a_drain_time_needs_no_new_pod() -> None:
    async def run() -> None:
        fleet = Fleet(1)
        await fleet.settle(20)
        key = fleet.keys[0]
        live = fleet.server.find(DEPLOYMENT, *key)
        body = fleet.server.find(RESOURCE, *key)
        assert live is not None
        assert body is not None
        before = template_hash(live)
        rollout = {"progressDeadlineSeconds": 77, "drainTimeoutSeconds": 88}
        fleet.server.put({**body, "spec": {**body["spec"], "rollout": rollout}})
        await fleet.look_at(key)
        after = fleet.server.find(DEPLOYMENT, *key)
        assert after is not None
        assert after["spec"]["progressDeadlineSeconds"] == 77
        assert template_hash(after) == before
        fleet.edit(key)
        await fleet.settle(60)
        changed = fleet.server.find(DEPLOYMENT, *key)
        assert changed is not None
        pod = changed["spec"]["template"]["spec"]
        assert "--drain-timeout=88.0" in pod["containers"][0]["args"], "with the next revision"

    asyncio.run(run())


def test_a_template_that_somebody_changed_is_restored_without_a_turn() -> None:
    async def run() -> None:
        fleet = Fleet(2)
        await fleet.settle(40)
        key = fleet.keys[0]
        live = fleet.server.find(DEPLOYMENT, *key)
        assert live is not None
        before = template_hash(live)
        changed = copy.deepcopy(live)
        del changed["spec"]["template"]["metadata"]["labels"]["serving.fairlead.dev/revision"]
        fleet.server.put(changed)
        await fleet.look_at(key)
        after = fleet.server.find(DEPLOYMENT, *key)
        assert after is not None
        assert template_hash(after) == before

    asyncio.run(run())
