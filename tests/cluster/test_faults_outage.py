"""The API server away, the operator restarted again and again, two operators at once: nothing that runs is touched."""

import time
from collections import Counter

import pytest

from cluster.apiclient import Api, eventually
from cluster.controlplane import ControlPlane
from cluster.faultproxy import FaultProxy
from cluster.operators import OperatorProcess
from cluster.rotation import FULL
from cluster.story import Story, Wanted

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd", "nodes")]
LEADS = "fairlead_operator_leader"
PASSES = "fairlead_operator_reconciles_total"


def running(api: Api, namespace: str, count: int) -> list[str]:
    """The uids of the pods once so many run."""

    def look() -> list[str] | None:
        pods = [p for p in api.items("Pod", namespace) if (p.get("status") or {}).get("phase") == "Running"]
        return sorted(p["metadata"]["uid"] for p in pods) if len(pods) == count else None

    return eventually(look, 30, f"{count} pods run")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("away", "after"), [(30, 15), pytest.param(300, 30, marks=pytest.mark.full)], ids=["30 s", "5 min"]
)
def test_an_api_server_that_is_away_stops_nothing_and_is_caught_up_with(
    plane: ControlPlane, api: Api, namespace: str, away: float, after: float
) -> None:
    with FaultProxy(plane) as proxy, OperatorProcess(plane, (namespace,), server=proxy.url) as operator:
        first = operator.process
        story = Story(api, [(namespace, "chat")], 20, pods={}, explain=operator.tail)
        story.create()
        pods = running(api, namespace, 2)
        before, memory = len(proxy.calls), operator.memory_bytes()
        proxy.away = True
        proxy.cut_connections()
        story.patch({"replicas": 3})
        api.delete("Service", namespace, "chat")
        ends = time.monotonic() + away
        while time.monotonic() < ends:
            assert operator.probe("/healthz")[0] == 200, "being restarted would not help"
            assert running(api, namespace, 2) == pods
            time.sleep(1)
        tried = Counter(call.path.split("?")[0] for call in proxy.calls[before:])
        grown = operator.memory_bytes() - memory
        proxy.away = False
        story.within, story.slowest = after, 0.0
        story.settle("caught up", Wanted(3, "1", 80))
        assert set(pods) <= set(running(api, namespace, 3))
        assert operator.process is first
        assert not [call for call in proxy.calls[before:] if call.verb == "delete"]
        assert grown < memory / 4
        # Two clients ask about a kind, the re-list and the watch: 2 requests/s each.
        assert max(tried.values()) <= 2 * 2 * away, tried.most_common(3)
        assert not operator.tracebacks()
    print(
        f"away {away} s: {tried.total()} requests meanwhile, caught up after {story.slowest:.1f} s, "
        f"memory {memory / 2**20:.0f} MiB and {grown / 2**20:+.1f} MiB"
    )


@pytest.mark.timeout(900)
def test_restarts_change_nothing(plane: ControlPlane, api: Api, namespace: str) -> None:
    with FaultProxy(plane) as proxy, OperatorProcess(plane, (namespace,), server=proxy.url) as operator:
        story = Story(api, [(namespace, "chat")], 20, pods={}, explain=operator.tail)
        story.create()
        pods = running(api, namespace, 2)
        deployment = api.get("Deployment", namespace, "chat")
        before = len(proxy.calls)
        for _ in range(20 if FULL else 5):
            operator.kill()
            operator.start()
            eventually(lambda: operator.metric(PASSES, result="ok") > 0, 20, "it has looked")
            assert not operator.tracebacks()
        assert not [call for call in proxy.calls[before:] if call.of_children], "children were written"
        assert running(api, namespace, 2) == pods
        now = api.get("Deployment", namespace, "chat")
        assert now["metadata"]["generation"] == deployment["metadata"]["generation"]
        assert now["spec"] == deployment["spec"]


@pytest.mark.timeout(900)
def test_of_two_operators_one_writes_and_the_other_takes_over_within_20_seconds(
    plane: ControlPlane, api: Api, namespace: str
) -> None:
    watched = 300 if FULL else 60
    first_proxy, second_proxy = FaultProxy(plane), FaultProxy(plane)
    with (
        first_proxy,
        second_proxy,
        OperatorProcess(plane, (namespace,), "first", server=first_proxy.url) as first,
        OperatorProcess(plane, (namespace,), "second", server=second_proxy.url, wait=False) as second,
    ):
        story = Story(api, [(namespace, "chat")], 20, explain=first.tail)
        story.create()
        eventually(second.ready, 20, "a standby is ready")
        ends, replicas = time.monotonic() + watched, 2
        while time.monotonic() < ends:
            replicas = 5 - replicas
            story.patch({"replicas": replicas})
            story.settle("scaled", Wanted(replicas, "1", 80))
            assert (first.metric(LEADS), second.metric(LEADS)) == (1, 0)
        assert not [call for call in second_proxy.calls if call.writes], "the standby wrote"
        story.patch({"replicas": 4})
        story.settle("scaled", Wanted(4, "1", 80))

        first.kill()
        began = time.monotonic()
        eventually(lambda: second.metric(LEADS) == 1, 20, "the standby leads")
        failover = time.monotonic() - began
        eventually(lambda: second.metric(PASSES, result="ok") > 0, 10, "it has looked")
        taken_over = Counter(
            call.path.split("?")[0] for call in second_proxy.calls if call.writes and call.about_objects
        )
        assert all(count <= 1 for count in taken_over.values()), taken_over
        story.patch({"replicas": 2})
        story.settle("scaled by the new leader", Wanted(2, "1", 80))
        assert not second.tracebacks()
    print(f"failover after {failover:.1f} s, {taken_over.total()} writes on taking over")
