"""The operator's lists: a namespace that is gone holds up neither the others nor readiness."""

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from fairlead_operator.app import Operator
from fairlead_operator.cluster.client import Cluster
from fairlead_operator.errors import ApiError
from fairlead_operator.health import Health
from fairlead_operator.metrics import Metrics
from fairlead_operator.resource.kinds import POD, Kind
from support.operator_bodies import SETTINGS, Object


class PlayedLists:
    """Empty lists, and errors by namespace and kind ("": every kind)."""

    def __init__(self) -> None:
        self.errors: dict[tuple[str, str], int] = {}

    async def list(self, kind: Kind, namespace: str = "") -> tuple[list[Object], int]:
        for plural in (kind.plural, ""):
            if code := self.errors.get((namespace, plural)):
                raise ApiError(code, "Forbidden", "forbidden")
        return [], 1


def lists(operator: Operator) -> tuple[bool, frozenset[str]]:
    return asyncio.run(operator._list_all())


def test_a_namespace_that_is_gone_is_said_once_and_waited_for_no_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics, cluster = Metrics(), PlayedLists()
    settings = replace(SETTINGS, namespaces=("kept", "gone"))
    operator = Operator(settings, Health(metrics.registry), metrics, {})
    operator._cluster = cast("Cluster", cluster)
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
