"""The operator's lists: a namespace that is gone holds up neither the others nor readiness."""

import asyncio
from dataclasses import replace

import pytest

from fairlead_operator.app import READ_SINGLY, Operator
from fairlead_operator.errors import ApiError
from fairlead_operator.health import Health
from fairlead_operator.metrics import Metrics
from fairlead_operator.resource.kinds import POD, version_of
from support.fake_api_server import FakeApiServer, FakeCluster, Name
from support.operator_bodies import SETTINGS, pod


def operator_of(server: FakeApiServer, *namespaces: str) -> Operator:
    metrics = Metrics()
    settings = replace(SETTINGS, namespaces=namespaces)
    operator = Operator(settings, Health(metrics.registry), metrics, {})
    operator._cluster = FakeCluster(server, operator._store)
    return operator


def lists(operator: Operator) -> tuple[bool, frozenset[str]]:
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
    server.on_request = refuse
    operator = operator_of(server, "kept", "gone")
    assert lists(operator) == (True, frozenset())
    errors["gone", POD.plural] = 403
    assert lists(operator) == (False, frozenset()), "a Role that lacks a kind is an error"
    errors["gone", ""] = 403
    assert lists(operator) == (True, frozenset({"gone"}))
    caplog.clear()
    assert lists(operator) == (True, frozenset({"gone"}))
    assert caplog.messages == []
    errors["kept", ""] = 503
    assert lists(operator) == (False, frozenset({"gone"})), (
        "an API server that is ill is no missing namespace"
    )
    errors.clear()
    assert lists(operator) == (True, frozenset())


def test_the_steady_comparison_lists_versions_and_reads_whole_what_differs() -> None:
    server = FakeApiServer()
    server.page = 2
    asked: list[str] = []

    def note(verb: str, name: Name) -> None:
        if name[0] == POD.plural:
            asked.append(name[2] or verb)

    server.on_request = note
    operator = operator_of(server, "ns")
    for name in ("a", "b", "c"):
        server.put(pod(name))

    def compared() -> list[str]:
        asked.clear()
        assert lists(operator) == (True, frozenset())
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


def test_an_object_deleted_between_its_list_and_its_reading_is_gone() -> None:
    server = FakeApiServer()
    operator = operator_of(server, "ns")
    server.put(pod("a"))
    server.put(pod("b"))
    lists(operator)
    server.put(pod("b"))

    def vanish(verb: str, name: Name) -> None:
        if verb == "get" and name[2] == "b":
            server.remove(POD, "ns", "b")

    server.on_request = vanish
    lists(operator)
    assert [one["metadata"]["name"] for one in operator._store.all(POD)] == ["a"]
