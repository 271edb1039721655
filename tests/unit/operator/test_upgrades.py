"""Turns in an upgrade as they are given: what a Deployment should hold now, and its marks."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from fairlead_operator.cluster.cache import Store
from fairlead_operator.decide.children.manifests import SURGE, render, revision_of
from fairlead_operator.decide.children.upgrade import (
    DEADLINES_MARK,
    DEFAULTS_MARK,
    REVISION_MARK,
    SPEC_MARK,
    TURN_MARK,
    marks,
)
from fairlead_operator.resource.kinds import DEPLOYMENT, RESOURCE
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings
from fairlead_operator.upgrades import Target, Upgrades
from support.fake_api_server import FakeApiServer, FakeCluster
from support.operator_bodies import SETTINGS, Object, resource_body

NEXT = replace(SETTINGS, runtime_image="registry.test/fairlead-runtime:2")
OWN_MARKS = {SPEC_MARK, DEFAULTS_MARK, DEADLINES_MARK, REVISION_MARK}


class Fleet:
    """Resources with their Deployments in an API server, and an operator's view of it."""

    def __init__(self, settings: Settings = NEXT) -> None:
        self.server, self.store = FakeApiServer(), Store()
        self.cluster = FakeCluster(self.server, self.store)
        self.upgrades = self.operator(settings)

    def operator(self, settings: Settings) -> Upgrades:
        return Upgrades(self.cluster, settings, lambda: datetime(2026, 1, 1, tzinfo=UTC))

    def add(self, name: str, *, ready: bool = True, **spec: object) -> None:
        """A resource and the Deployment that an operator with the old defaults wrote."""
        body = resource_body(name, **spec)
        self.server.put(body)
        self.store.replace(RESOURCE, "", self.server.all(RESOURCE), self.server.version)
        target = asyncio.run(self.operator(SETTINGS).target(self.resource(name), None))
        self.write(name, target)
        if ready:
            self.become_ready(name)

    def write(self, name: str, target: Target) -> None:
        """What a pass writes; a watch has not told it yet."""
        one = self.resource(name)
        children = render(one, NEXT, 1, SURGE, template=target.template, marks=target.marks)
        self.server.put(next(c for c in children if c["kind"] == DEPLOYMENT.name))

    def become_ready(self, name: str) -> None:
        body = self.server.find(RESOURCE, "ns", name)
        assert body is not None
        status = {
            "targetRevision": revision_of(self.live(name)),
            "rollout": {"phase": "Complete"},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        self.server.put({**body, "status": status})

    def sync(self) -> None:
        self.server.sync(self.store, 0)

    def live(self, name: str) -> Object:
        body = self.server.find(DEPLOYMENT, "ns", name)
        assert body is not None
        return body

    def resource(self, name: str) -> InferenceDeployment:
        body = self.server.find(RESOURCE, "ns", name)
        assert body is not None
        return InferenceDeployment.from_body(body)

    def target(self, name: str) -> Target:
        return asyncio.run(self.upgrades.target(self.resource(name), self.live(name)))


def image(target: Target) -> str:
    return str(target.template["spec"]["containers"][0]["image"])


@pytest.fixture
def fleet() -> Fleet:
    two = Fleet()
    two.add("a")
    two.add("b")
    two.sync()
    return two


def test_a_new_deployment_carries_every_mark_and_takes_no_turn(fleet: Fleet) -> None:
    target = asyncio.run(fleet.upgrades.target(fleet.resource("a"), None))
    assert target.marks.keys() == OWN_MARKS
    assert target.marks[REVISION_MARK] == target.revision
    assert image(target) == NEXT.runtime_image


def test_a_changed_default_reaches_one_after_another(fleet: Fleet) -> None:
    first, second = fleet.target("a"), fleet.target("b")
    assert (image(first), image(second)) == (NEXT.runtime_image, SETTINGS.runtime_image)
    assert first.marks[TURN_MARK] == first.marks[DEFAULTS_MARK]
    assert second.marks == marks(fleet.live("b")), "what it carries, as it is"
    assert second.turn.message == "waits for its turn in the upgrade, after ns/a"
    fleet.write("a", first)
    fleet.upgrades.finish(("ns", "a"))
    fleet.sync()
    assert not fleet.target("b").turn.allowed, "until the first is Ready"
    fleet.become_ready("a")
    fleet.sync()
    assert image(fleet.target("b")) == NEXT.runtime_image


def test_another_image_for_accelerators_rolls_those_alone() -> None:
    fleet = Fleet(replace(SETTINGS, accelerator_image="registry.test/fairlead-runtime:1-cuda"))
    for name, count in (("cpu", 0), ("gpu", 1), ("next", 1)):
        fleet.add(name, resources={"accelerator": {"count": count}})
    fleet.sync()
    untouched = fleet.target("cpu")
    assert untouched.template == fleet.live("cpu")["spec"]["template"]
    assert TURN_MARK not in untouched.marks
    fleet.write("cpu", untouched)
    fleet.sync()
    first, second = fleet.target("gpu"), fleet.target("next")
    assert image(first) == "registry.test/fairlead-runtime:1-cuda"
    assert (second.turn.allowed, image(second)) == (False, SETTINGS.runtime_image)


def test_a_turn_lasts_until_the_pass_is_over(fleet: Fleet) -> None:
    fleet.store.remove(RESOURCE, fleet.server.objects[RESOURCE.plural, "ns", "a"])
    assert fleet.target("b").turn.allowed
    fleet.sync()
    waits = fleet.target("a")
    assert waits.turn.message == "waits for its turn in the upgrade, after ns/b"
    fleet.upgrades.finish(("ns", "b"))
    assert fleet.target("a").turn.allowed, "the write of b failed"


def test_before_a_turn_is_given_the_newest_deployments_are_read(fleet: Fleet) -> None:
    """Another operator gave a turn, and no watch has told it yet."""
    rolled = asyncio.run(fleet.operator(NEXT).target(fleet.resource("b"), None))
    fleet.write("b", replace(rolled, marks=rolled.marks | {TURN_MARK: rolled.marks[DEFAULTS_MARK]}))
    held = fleet.target("a")
    assert (held.turn.allowed, image(held)) == (False, SETTINGS.runtime_image)
    assert held.turn.message == "waits for its turn in the upgrade, after ns/b"


def test_what_was_not_ready_takes_no_turn_that_others_wait_for() -> None:
    fleet = Fleet()
    fleet.add("a", ready=False)
    fleet.sync()
    target = fleet.target("a")
    assert image(target) == NEXT.runtime_image
    assert target.marks.keys() == OWN_MARKS


def test_a_paused_one_keeps_its_pods_and_reads_nothing(fleet: Fleet) -> None:
    body = fleet.server.objects[RESOURCE.plural, "ns", "a"]
    fleet.server.put({**body, "spec": body["spec"] | {"paused": True}})
    fleet.sync()
    asked: list[str] = []
    fleet.server.on_request = lambda verb, _: asked.append(verb)
    target = fleet.target("a")
    assert asked == []
    assert (image(target), target.marks) == (SETTINGS.runtime_image, marks(fleet.live("a")))
    assert target.turn.message == "changed defaults wait until spec.paused is false"
    assert image(fleet.target("b")) == NEXT.runtime_image, "it holds nobody"


def test_one_that_was_scaled_to_nothing_after_its_turn_holds_nobody(fleet: Fleet) -> None:
    fleet.write("a", fleet.target("a"))
    fleet.upgrades.finish(("ns", "a"))
    fleet.sync()
    assert not fleet.target("b").turn.allowed
    live = fleet.live("a")
    fleet.server.put({**live, "spec": {**live["spec"], "replicas": 0}})
    fleet.sync()
    assert image(fleet.target("b")) == NEXT.runtime_image


def test_a_changed_spec_needs_no_turn() -> None:
    fleet = Fleet(replace(NEXT, upgrade_concurrency=0))
    fleet.add("a")
    fleet.sync()
    assert image(fleet.target("a")) == SETTINGS.runtime_image
    body = fleet.server.objects[RESOURCE.plural, "ns", "a"]
    fleet.server.put({**body, "spec": body["spec"] | {"scheduler": {"maxBatchTokens": 512}}})
    target = fleet.target("a")
    assert image(target) == NEXT.runtime_image
    assert target.marks.keys() == OWN_MARKS


def test_deadlines_alone_keep_the_template_and_its_turn() -> None:
    fleet = Fleet(SETTINGS)
    fleet.add("a")
    fleet.sync()
    live = fleet.live("a")
    live["metadata"]["annotations"][TURN_MARK] = "d"
    body = fleet.server.objects[RESOURCE.plural, "ns", "a"]
    rollout = {"progressDeadlineSeconds": 77, "drainTimeoutSeconds": 88}
    fleet.server.put({**body, "spec": body["spec"] | {"rollout": rollout}})
    target = fleet.target("a")
    assert target.template == live["spec"]["template"]
    assert target.marks == live["metadata"]["annotations"], "the deadlines that it was written with"
    live["metadata"]["annotations"][DEADLINES_MARK] = "unreadable"
    assert fleet.target("a").template != live["spec"]["template"]
    assert fleet.target("a").marks[DEADLINES_MARK] == "77,88"
