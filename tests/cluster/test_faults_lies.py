"""Old lists replayed, watch events lost or late: what the operator sees is wrong for a while, what it does is not."""

import random
from collections.abc import Iterator

import pytest

from cluster.apiclient import Api
from cluster.controlplane import ControlPlane
from cluster.faultproxy import Call, Fate, FaultProxy
from cluster.operators import OperatorProcess
from cluster.rotation import FULL, offset
from cluster.story import Key, Story

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]
SIDE_BY_SIDE = 10  # schedules in one operator, each in a namespace of its own
ROUNDS = 20
LYING_SECONDS = 10.0  # of each step; a watch opened then goes on hiding what it sees


@pytest.fixture
def namespaces(api: Api, namespace: str) -> Iterator[list[str]]:
    names = [f"lies-{number}-{namespace}"[:60].strip("-") for number in range(SIDE_BY_SIDE)]
    for name in names:
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield names
    for name in names:
        api.delete("Namespace", "", name)


def told_lies(plane: ControlPlane, api: Api, namespaces: list[str], number: int) -> tuple[float, int]:
    """One story with a schedule for each namespace: the slowest step, and how many lies were told."""
    first = number * SIDE_BY_SIDE
    rngs = {name: random.Random(first + index) for index, name in enumerate(namespaces)}
    keys: list[Key] = [(name, f"chat-{number}") for name in namespaces]
    lies: list[Fate] = []
    wrong: list[Call] = []

    def judge(call: Call) -> Fate:
        if call.verb == "delete" and not (call.plural == "poddisruptionbudgets" and story.shrinking):
            wrong.append(call)
        rng = rngs.get(call.namespace)
        if rng is None or call.verb not in {"list", "watch"} or call.at - story.step_began > LYING_SECONDS:
            return "pass"
        if rng.random() >= 0.5:
            return "pass"
        lies.append("stale" if call.verb == "list" else rng.choice(("drop-events", "delay-events")))
        return lies[-1]

    story = Story(api, keys, 30)
    proxy = FaultProxy(plane, judge, rng=random.Random(first))
    with proxy, OperatorProcess(plane, tuple(namespaces), server=proxy.url, wait=False) as operator:
        story.explain = operator.tail
        story.play()
        assert not operator.tracebacks()
    assert not wrong, wrong
    assert lies
    return story.slowest, len(lies)


@pytest.mark.timeout(3600)
def test_stale_lists_and_lost_or_late_events_delete_nothing_and_are_caught_up_with(
    plane: ControlPlane, api: Api, namespaces: list[str]
) -> None:
    """Half of the lists and watches that begin in a step's first seconds lie, in each namespace others."""
    rounds = range(ROUNDS) if FULL else [offset(20)]
    slowest, lies = zip(*(told_lies(plane, api, namespaces, number) for number in rounds), strict=True)
    print(
        f"{len(slowest) * SIDE_BY_SIDE} schedules, {sum(lies)} lies, a step took at most {max(slowest):.1f} s"
    )
