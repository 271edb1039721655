"""The operator's lists: a namespace that is gone holds up neither the others nor readiness."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from fairlead_operator.app import READ_SINGLY, Operator
from fairlead_operator.cluster.cache import Store
from fairlead_operator.cluster.client import Cluster
from fairlead_operator.errors import ApiError
from fairlead_operator.health import Health
from fairlead_operator.metrics import Metrics
from fairlead_operator.resource.kinds import POD, Kind, version_of
from support.operator_bodies import SETTINGS, Object, pod


class PlayedLists:
    """Empty lists, and errors by namespace and kind ("": every kind)."""

    def __init__(self) -> None:
        self.errors: dict[tuple[str, str], int] = {}

    async def versions(self, kind: Kind, namespace: str = "") -> tuple[Object, int]:
        return {}, (await self.list(kind, namespace))[1]

    async def list(self, kind: Kind, namespace: str = "") -> tuple[list[Object], int]:
        for plural in (kind.plural, ""):
            if code := self.errors.get((namespace, plural)):
                raise ApiError(code, "Forbidden", "forbidden")
        return [], 1


def operator_of(cluster: object, *namespaces: str) -> Operator:
    metrics = Metrics()
    settings = replace(SETTINGS, namespaces=namespaces)
    operator = Operator(settings, Health(metrics.registry), metrics, {})
    operator._cluster = cast("Cluster", cluster)
    return operator


def lists(operator: Operator) -> tuple[bool, frozenset[str]]:
    return asyncio.run(operator._list_all())


def test_a_namespace_that_is_gone_is_said_once_and_waited_for_no_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = PlayedLists()
    operator = operator_of(cluster, "kept", "gone")
    assert lists(operator) == (True, frozenset())
    cluster.errors["gone", POD.plural] = 403
    assert lists(operator) == (False, frozenset()), "a Role that lacks a kind is an error"
    cluster.errors["gone", ""] = 403
    assert lists(operator) == (True, frozenset({"gone"}))
    caplog.clear()
    assert lists(operator) == (True, frozenset({"gone"}))
    assert caplog.messages == []
    cluster.errors["kept", ""] = 503
    assert lists(operator) == (False, frozenset({"gone"})), (
        "an API server that is ill is no missing namespace"
    )
    cluster.errors.clear()
    assert lists(operator) == (True, frozenset())


class PagedServer(Cluster):
    """Pods in pages of two, whole or by their metadata; counts what was asked for."""

    def __init__(self, store: Store) -> None:
        super().__init__(None, store, Metrics())  # type: ignore[arg-type]  # it makes no connection
        self.pods: dict[str, int] = {}  # version by name
        self.version = 0
        self.vanished: set[str] = set()  # deleted after the next list
        self.asked: list[str] = []

    def change(self, *names: str) -> None:
        for name in names:
            self.version += 1
            self.pods[name] = self.version

    def _body(self, name: str) -> Object:
        return pod(name) | {
            "metadata": pod(name)["metadata"] | {"resourceVersion": str(self.pods[name])}
        }

    async def call(
        self,
        verb: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "",
        accept: str = "",
    ) -> Any:
        name = path.rpartition("/")[2]
        if verb == "get":
            self.asked.append(name)
            if name in self.vanished:
                raise ApiError(404, "NotFound", "")
            return self._body(name)
        if name != POD.plural:
            return {"items": None, "metadata": {"resourceVersion": "1"}}
        self.asked.append("versions" if "PartialObjectMetadataList" in accept else "list")
        start = int((query or {}).get("continue", 0))
        names = sorted(self.pods)
        more = {"continue": str(start + 2)} if names[start + 2 :] else {}
        bodies = [self._body(name) for name in names[start : start + 2]]
        if self.asked[-1] == "versions":
            bodies = [{"metadata": one["metadata"]} for one in bodies]
        return {"items": bodies, "metadata": {"resourceVersion": str(self.version), **more}}


def test_the_steady_comparison_lists_versions_and_reads_whole_what_differs() -> None:
    operator = operator_of(None, "ns")
    server = PagedServer(operator._store)
    operator._cluster = server
    server.change("a", "b", "c")

    def compared() -> list[str]:
        server.asked.clear()
        assert lists(operator) == (True, frozenset())
        held = {one["metadata"]["name"]: version_of(one) for one in operator._store.all(POD)}
        assert held == server.pods
        assert all(one["spec"]["containers"] for one in operator._store.all(POD))
        return server.asked

    assert compared() == ["list", "list"], "the first is read whole"
    assert compared() == ["versions", "versions"]
    server.change("b", "d")
    del server.pods["a"]
    assert compared() == ["versions", "versions", "b", "d"]
    server.change(*(f"more-{number}" for number in range(READ_SINGLY + 1)))
    assert compared()[-1] == "list", "many are cheaper in one list"


def test_an_object_deleted_between_its_list_and_its_reading_is_gone() -> None:
    operator = operator_of(None, "ns")
    server = PagedServer(operator._store)
    operator._cluster = server
    server.change("a", "b")
    lists(operator)
    server.change("b")
    server.vanished = {"b"}
    lists(operator)
    assert [one["metadata"]["name"] for one in operator._store.all(POD)] == ["a"]
