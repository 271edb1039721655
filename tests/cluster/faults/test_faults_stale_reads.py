"""Old lists are replayed, watch events are lost or late: the operator sees a wrong state for a
while but does nothing wrong.
"""

import json
import random
from collections.abc import Iterator

import pytest

from cluster.harness.apiclient import Api, eventually, path_of
from cluster.harness.case_selection import offset
from cluster.harness.controlplane import ControlPlane
from cluster.harness.faultproxy import Call, Fault, FaultProxy
from cluster.harness.operators import OperatorProcess
from cluster.harness.resource_lifecycle import Key, Lifecycle, Wanted, world_of
from cluster.harness.resources import KIND
from support.full import LONG_FORM

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]
SIDE_BY_SIDE = 10  # schedules in one operator, each in its own namespace
ROUNDS = 20
# Of each step, the first one from the operator's first call on; a watch opened in them keeps its
# fault.
FAULT_SECONDS = 10.0
# What no watch has shown is listed in half of the operator's time.
INTERVALS = {"fairlead_operator.app.RELIST_SECONDS": 9.0}


@pytest.fixture
def namespaces(api: Api, namespace: str) -> Iterator[list[str]]:
    names = [f"stale-{number}-{namespace}"[:60].strip("-") for number in range(SIDE_BY_SIDE)]
    for name in names:
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield names
    for name in names:
        api.delete("Namespace", "", name)


def run_with_faults(
    plane: ControlPlane, api: Api, namespaces: list[str], number: int
) -> tuple[float, int]:
    """A lifecycle with a schedule of faults per namespace: its slowest step and count of faults."""
    first = number * SIDE_BY_SIDE
    rngs = {name: random.Random(first + index) for index, name in enumerate(namespaces)}
    keys: list[Key] = [(name, f"chat-{number}") for name in namespaces]
    injected: list[Fault] = []
    wrong_deletions: list[Call] = []
    first_call_at: list[float] = []

    def choose_fault(call: Call) -> Fault:
        if not first_call_at:
            first_call_at.append(call.at)
        if call.verb == "delete" and not (
            call.plural == "poddisruptionbudgets" and lifecycle.shrinking
        ):
            wrong_deletions.append(call)
        rng = rngs.get(call.namespace)
        if (
            rng is None
            or call.verb not in {"list", "watch"}
            or call.at - max(lifecycle.step_began, first_call_at[0]) > FAULT_SECONDS
        ):
            return "pass"
        if rng.random() >= 0.5:
            return "pass"
        injected.append(
            "stale" if call.verb == "list" else rng.choice(("drop-events", "delay-events"))
        )
        return injected[-1]

    lifecycle = Lifecycle(api, keys, 30)
    proxy = FaultProxy(plane, choose_fault, rng=random.Random(first))
    with (
        proxy,
        OperatorProcess(
            plane, tuple(namespaces), server=proxy.url, wait=False, intervals=INTERVALS
        ) as operator,
    ):
        lifecycle.explain = operator.tail
        lifecycle.run()
        assert not operator.tracebacks()
    assert not wrong_deletions, wrong_deletions
    assert injected
    return lifecycle.slowest, len(injected)


@pytest.mark.timeout(3600)
def test_stale_lists_and_lost_or_late_events_delete_nothing_and_the_operator_catches_up(
    plane: ControlPlane, api: Api, namespaces: list[str]
) -> None:
    """Half of the lists and watches that begin in a step's first seconds are wrong, chosen per
    namespace.
    """
    rounds = range(ROUNDS) if LONG_FORM else [offset(20)]
    slowest, injected = zip(
        *(run_with_faults(plane, api, namespaces, number) for number in rounds), strict=True
    )
    print(
        f"{len(slowest) * SIDE_BY_SIDE} schedules, {sum(injected)} faults, "
        f"a step took at most {max(slowest):.1f} s"
    )


def facts(api: Api, namespaces: list[str]) -> dict[Key, tuple[object, ...]]:
    """What must not change without a change of the spec: the children's specs and the generation
    reported.
    """
    world = world_of(api)
    by_object: dict[Key, tuple[object, ...]] = {}
    for kind, bodies in world.items():
        for (namespace, _), body in bodies.items():
            if namespace in namespaces:
                meta = body["metadata"]
                reported = (
                    (body.get("status") or {}).get("observedGeneration") if kind == KIND else None
                )
                by_object[namespace, kind] = (
                    meta["uid"],
                    json.dumps(body["spec"], sort_keys=True),
                    reported,
                )
    return by_object


@pytest.mark.timeout(3600)
def test_an_operator_restarted_on_stale_lists_reverts_nothing(
    plane: ControlPlane, api: Api, namespaces: list[str]
) -> None:
    """Every list shows any earlier moment of the lifecycle, every watch is silent: no child and no
    status is reverted.
    """
    stale = False
    lifecycle = Lifecycle(api, [(name, "chat") for name in namespaces], 30)

    def choose_fault(call: Call) -> Fault:
        if not stale or call.namespace not in namespaces:
            return "pass"
        return {"list": "stale", "watch": "drop-events"}.get(call.verb, "pass")  # type: ignore[return-value]

    proxy = FaultProxy(plane, choose_fault, rng=random.Random(0))
    with (
        proxy,
        OperatorProcess(
            plane, tuple(namespaces), server=proxy.url, intervals=INTERVALS
        ) as operator,
    ):
        lifecycle.explain = operator.tail

        def restart() -> None:
            operator.kill()
            operator.start()  # returns when it is ready: every kind is listed

        lifecycle.create()
        restart()
        lifecycle.patch({"replicas": 1, "service": {"port": 81}})
        lifecycle.settle("scaled down", Wanted(1, "1", 81))
        restart()
        lifecycle.patch({"replicas": 3})
        lifecycle.settle("scaled up", Wanted(3, "1", 81))
        for number in range(20 if LONG_FORM else 1):
            before = facts(api, namespaces)
            stale = True
            restart()
            calls_before = len(proxy.calls)
            list_path = path_of(KIND, namespaces[-1])
            eventually(
                lambda n=calls_before, p=list_path: relisted(proxy.calls[n:], p),  # type: ignore[misc]
                40,
                "the operator lists again",
            )
            assert facts(api, namespaces) == before
            stale = False
            lifecycle.patch({"service": {"port": 90 + number}})
            lifecycle.settle("updated from current lists", Wanted(3, "1", 90 + number))
        assert not operator.tracebacks()


def relisted(calls: list[Call], path: str) -> bool:
    """Whether our own client listed again: kopf lists once, when it opens the watch."""
    return sum(call.verb == "list" and call.path.split("?")[0] == path for call in calls) >= 2
