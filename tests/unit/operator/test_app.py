"""The operator's lists: a namespace that is gone holds up neither the others nor readiness."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fairlead_operator import app
from fairlead_operator.app import CHILD_SETTLE, IDLE_SECONDS, READ_SINGLY, Operator
from fairlead_operator.errors import ApiError
from fairlead_operator.health import Health
from fairlead_operator.metrics import Metrics
from fairlead_operator.resource.kinds import (
    POD,
    QUOTA,
    RESOURCE,
    Key,
    Kind,
    Object,
    key_of,
    version_of,
)
from support.fake_api_server import FakeApiServer, FakeCluster, Name
from support.operator_bodies import SETTINGS, pod, resource_body


def operator_of(server: FakeApiServer, *namespaces: str) -> Operator:
    metrics = Metrics()
    settings = replace(SETTINGS, namespaces=namespaces)
    operator = Operator(settings, Health(metrics.registry), metrics, {})
    operator._cluster = FakeCluster(server, operator._store)
    return operator


class Woken:
    """A work queue that only notes what wakes it."""

    def __init__(self) -> None:
        self.keys: list[tuple[Key, float | None]] = []

    def wake(self, key: Key, after: float | None = None) -> None:
        self.keys.append((key, after))


def unwoken(operator: Operator) -> Woken:
    """Queues in which nobody works, and what wakes both."""
    woken = Woken()
    operator._queue = operator._probes = cast("Any", woken)
    operator._reconciler = cast("Any", SimpleNamespace(count_drained=lambda *_: None))
    return woken


def resource_in(namespace: str) -> Object:
    return resource_body() | {"metadata": {"name": "chat", "namespace": namespace, "uid": "u"}}


def lists(operator: Operator) -> bool:
    return asyncio.run(operator._list_all())


def test_a_namespace_that_is_gone_is_said_once_and_waited_for_no_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors: dict[tuple[str, str], int] = {}  # by namespace and plural; "": every kind

    def refuse(_: str, name: Name) -> None:
        plural, namespace, _ = name
        if code := errors.get((namespace, plural)) or errors.get((namespace, "")):
            raise ApiError(code, "Forbidden", "forbidden")

    server = FakeApiServer()
    server.put(resource_in("gone"))
    server.on_request = refuse
    operator = operator_of(server, "kept", "gone")
    unwoken(operator)
    assert lists(operator)
    errors["gone", POD.plural] = 403
    assert not lists(operator), "a Role that lacks a kind is an error"
    errors["gone", ""] = 403
    assert lists(operator)
    assert operator._gone == {"gone"}
    caplog.clear()
    assert lists(operator)
    assert caplog.messages == []
    errors["kept", ""] = 503
    assert not lists(operator)
    assert operator._gone == {"gone"}, "an API server that is ill is no missing namespace"
    errors.clear()
    assert lists(operator)
    assert operator._gone == set()


@pytest.mark.parametrize(
    ("code", "served", "asked_of_others"),
    [(0, 0, 0), (429, 0, 0), (503, 0, 0), (403, 0, 1), (404, 2, 3)],
)
def test_an_idle_namespace_whose_resources_are_refused_costs_few_requests(
    code: int, served: int, asked_of_others: int
) -> None:
    """``served``: which other kind is the first that is not refused."""
    server = FakeApiServer()
    operator = operator_of(server, "idle")
    asked: list[tuple[str, str]] = []

    def refuse(verb: str, name: Name) -> None:
        asked.append((verb, name[0]))
        if name[0] in [kind.plural for kind in operator._kinds[: served + 1]]:
            raise ApiError(code, "", "refused")

    server.on_request = refuse
    assert not lists(operator)
    others = [kind.plural for kind in operator._kinds[1 : asked_of_others + 1]]
    assert asked == [("list", RESOURCE.plural)] + [("versions", plural) for plural in others]
    assert operator._gone == set()
    assert not any(operator._store.has_list(kind, "idle") for kind in operator._kinds)


def test_an_idle_namespace_in_which_every_kind_is_refused_is_gone() -> None:
    def refuse(*_: object) -> None:
        raise ApiError(403, "Forbidden", "forbidden")

    server = FakeApiServer()
    server.on_request = refuse
    operator = operator_of(server, "idle")
    assert lists(operator)
    assert operator._gone == {"idle"}


def test_the_steady_comparison_lists_versions_and_reads_whole_what_differs() -> None:
    server = FakeApiServer()
    server.page = 2
    asked: list[str] = []

    def note(verb: str, name: Name) -> None:
        if name[0] == POD.plural:
            assert verb in {"list", "versions"}, "the chart grants no right to get a pod"
            asked.append(name[2] or verb)

    server.on_request = note
    server.put(resource_body())
    operator = operator_of(server, "ns")
    unwoken(operator)
    for name in ("a", "b", "c"):
        server.put(pod(name))

    def compared() -> list[str]:
        asked.clear()
        assert lists(operator)
        held = {one["metadata"]["name"]: version_of(one) for one in operator._store.all(POD)}
        assert held == {one["metadata"]["name"]: version_of(one) for one in server.all(POD)}
        assert all(one["spec"]["containers"] for one in operator._store.all(POD))
        return asked

    assert compared() == ["list", "list"], "the first is read whole"
    assert compared() == ["versions", "versions"]
    server.put(pod("b"))
    server.put(pod("d"))
    server.remove(POD, "ns", "a")
    assert compared() == ["versions", "versions", "b", "d"]
    for number in range(READ_SINGLY + 1):
        server.put(pod(f"more-{number}"))
    assert compared()[-1] == "list", "many are cheaper in one list"


def note_lists(server: FakeApiServer) -> list[tuple[str, str]]:
    """Namespace and plural of each list from now on."""
    asked: list[tuple[str, str]] = []
    server.on_request = lambda _, name: asked.append((name[1], name[0]))
    return asked


def test_of_a_namespace_without_a_resource_only_resources_are_listed_and_kept() -> None:
    server = FakeApiServer()
    operator = operator_of(server, "idle", "ns")
    unwoken(operator)
    server.put(resource_body())
    for namespace in ("idle", "ns"):
        server.put(quota(namespace))
    asked = note_lists(server)
    assert lists(operator)
    assert [plural for namespace, plural in asked if namespace == "idle"] == [RESOURCE.plural]
    assert {plural for _, plural in asked} == {kind.plural for kind in operator._kinds}
    assert kept_quotas(operator) == ["ns"]
    assert operator._is_listed("ns")

    server.remove(RESOURCE, "ns", "chat")
    operator._take(QUOTA, False, server.put(quota("idle")))  # a watch that is still open
    assert lists(operator)
    assert kept_quotas(operator) == []
    asked.clear()
    assert lists(operator)
    assert {plural for _, plural in asked} == {RESOURCE.plural}
    server.put(resource_body())
    assert lists(operator)
    assert kept_quotas(operator) == ["ns"], "all is read again"


def test_namespaces_that_take_turns_stay_watched_and_idle_ones_do_not() -> None:
    """One that comes back to the watches restarts those of all."""
    now = 0.0
    server = FakeApiServer()
    operator = operator_of(server, "a", "b", "never")
    operator._store._clock = lambda: now
    unwoken(operator)
    left_out = note_left_out(operator)
    for namespace in "abab":
        server.put(resource_in(namespace))
        lists(operator)
        server.remove(RESOURCE, namespace, "chat")
        lists(operator)
        assert not operator._is_listed(namespace)
        now += 60.0
    assert left_out == [{"b", "never"}] * 2 + [{"never"}] * 6
    now += IDLE_SECONDS - 60.0
    lists(operator)
    assert left_out[-1] == {"a", "never"}, "10 minutes after its resource"


def note_left_out(operator: Operator) -> list[frozenset[str]]:
    """The namespaces that are left out of the children's watches, at each time that it is said."""
    left_out: list[frozenset[str]] = []
    sinks = (lambda _: None, left_out.append)
    operator._watches = cast("Any", [SimpleNamespace(leave_out=sink) for sink in sinks])
    return left_out


def test_a_namespace_whose_resource_goes_during_the_lists_is_listed_no_longer() -> None:
    """Else its next resource would be judged by what no watch tells any more."""
    server = FakeApiServer()
    operator = operator_of(server, "ns")
    unwoken(operator)
    body = server.put(resource_body())
    lists(operator)
    assert operator._is_listed("ns")
    server.on_request = lambda *_: operator._take(RESOURCE, True, body)
    lists(operator)
    operator._leave_out()
    assert not operator._is_listed("ns")
    operator._take(RESOURCE, False, server.put(resource_body()))
    assert operator._arrival.is_set()


def test_a_namespace_that_is_forgotten_during_a_list_is_not_half_known_after_it() -> None:
    server = FakeApiServer()
    operator = operator_of(server, "ns")
    unwoken(operator)
    body = server.put(resource_body())
    for name in ("a", "b"):
        server.put(pod(name))
    lists(operator)
    server.put(pod("b"))

    def leave(verb: str, name: Name) -> None:
        if verb == "list" and name[2] == "b":
            operator._take(RESOURCE, True, body)
            operator._leave_out()

    server.on_request = leave
    lists(operator)
    assert operator._store.has_list(POD, "ns")
    assert {key_of(one)[1] for one in operator._store.all(POD)} == {"a", "b"}


def quota(namespace: str) -> Object:
    return {"kind": QUOTA.name, "metadata": {"name": "q", "namespace": namespace}}


def kept_quotas(operator: Operator) -> list[str]:
    return [key_of(body)[0] for body in operator._store.all(QUOTA)]


def test_the_first_resource_of_a_namespace_has_all_kinds_listed_and_watched_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "RELIST_RETRY_SECONDS", 0.0)
    server = FakeApiServer()
    operator = operator_of(server, "ns", "other")
    operator._election = cast("Any", SimpleNamespace(holds=lambda: True))
    woken, left_out = unwoken(operator), note_left_out(operator)
    failures = [ApiError(503, "ServiceUnavailable", "later")]

    def fail_once(_: str, name: Name) -> None:
        if name[0] == POD.plural and failures:
            raise failures.pop()

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - conditions of several kinds
            await asyncio.sleep(0)

    async def go() -> None:
        await operator._list_all()
        operator._began.set()
        server.on_request = fail_once
        task = asyncio.create_task(operator._enter())
        operator._take(RESOURCE, False, server.put(resource_body()))
        await until(lambda: not failures)
        assert not operator._may_work(("ns", "chat")), "its pods are not known"
        woken.keys.clear()
        await until(lambda: operator._is_listed("ns"))
        task.cancel()

    asyncio.run(go())
    assert left_out[:2] == [{"ns", "other"}, {"other"}]
    assert woken.keys == [(("ns", "chat"), None)] * 2, "by both queues, when all is listed"
    assert operator._may_work(("ns", "chat"))
    assert not operator._store.has_list(POD, "other")


def test_an_object_deleted_between_its_list_and_its_reading_is_gone() -> None:
    server = FakeApiServer()
    operator = operator_of(server, "ns")
    unwoken(operator)
    server.put(resource_body())
    server.put(pod("a"))
    server.put(pod("b"))
    lists(operator)
    server.put(pod("b"))

    def vanish(verb: str, name: Name) -> None:
        if verb == "list" and name[2] == "b":
            server.remove(POD, "ns", "b")

    server.on_request = vanish
    lists(operator)
    assert [one["metadata"]["name"] for one in operator._store.all(POD)] == ["a"]


def test_news_wake_decisions_and_probes_and_those_of_children_become_one() -> None:
    """Between news, each goes on at its own interval."""
    operator = operator_of(FakeApiServer())
    decisions, probes = Woken(), Woken()
    operator._queue, operator._probes = cast("Any", decisions), cast("Any", probes)
    operator._reconciler = cast("Any", SimpleNamespace(count_drained=lambda *_: None))
    operator._election = cast("Any", SimpleNamespace(holds=lambda: True))

    def news(kind: Kind, body: Object, version: int) -> None:
        meta = body["metadata"] | {"resourceVersion": str(version)}
        operator._take(kind, False, {**body, "metadata": meta})

    news(RESOURCE, resource_body(), 11)
    news(POD, pod(), 12)
    news(POD, pod(), 12)  # known already
    wanted = [(("ns", "chat"), None), (("ns", "chat"), CHILD_SETTLE)]
    assert decisions.keys == probes.keys == wanted

    async def reconciled(_: Key) -> float:
        return 20.0

    operator._reconciler = cast("Any", reconciled)
    assert asyncio.run(operator._pass(("ns", "chat"))) is None, "the first lists are not complete"
    assert lists(operator)
    assert probes.keys.pop() == (("ns", "chat"), None), "now they are"
    assert asyncio.run(operator._pass(("ns", "chat"))) == 20.0
    assert probes.keys == wanted, "a pass has no pod scraped once more"


def test_no_pod_is_probed_before_the_first_lists_are_complete() -> None:
    """Results of some pods would pass for those of all, and the status would be wrong."""
    operator = operator_of(FakeApiServer())
    operator._election = cast("Any", SimpleNamespace(holds=lambda: True))
    unwoken(operator)

    async def probed(_: Key) -> float:
        return 5.0

    operator._take(RESOURCE, False, resource_body())
    assert asyncio.run(operator._probe(probed, ("ns", "chat"))) is None
    assert lists(operator)
    assert asyncio.run(operator._probe(probed, ("ns", "chat"))) == 5.0
