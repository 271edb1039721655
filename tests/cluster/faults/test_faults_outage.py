"""An unreachable API server, an operator that restarts repeatedly, two operators at once: running
pods are not touched.
"""

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.harness.apiclient import Api, eventually
from cluster.harness.completions import Clients
from cluster.harness.controlplane import ControlPlane
from cluster.harness.fakekubelet import STANDIN, FakeKubelet
from cluster.harness.faultproxy import FaultProxy
from cluster.harness.operators import OperatorProcess
from cluster.harness.resource_lifecycle import Lifecycle, Wanted
from cluster.harness.resources import (
    CHILDREN,
    KIND,
    PROCESSES,
    START,
    condition,
    idep,
    ready,
    status,
)
from support.full import LONG_FORM

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd", "nodes")]
LEADS = "fairlead_operator_leader"
PASSES = "fairlead_operator_reconciles_total"


def running_pods(api: Api, namespace: str, count: int) -> list[str]:
    """The uids of the running pods, once there are ``count``."""

    def look() -> list[str] | None:
        pods = [
            p
            for p in api.items("Pod", namespace)
            if (p.get("status") or {}).get("phase") == "Running"
        ]
        return sorted(p["metadata"]["uid"] for p in pods) if len(pods) == count else None

    return eventually(look, 30, f"{count} pods run")


def remaining(api: Api, namespace: str) -> list[str]:
    """The objects of the resource that still exist."""
    kinds = (KIND, *CHILDREN, "ReplicaSet", "Pod")
    names = [
        (kind, body["metadata"]["name"]) for kind in kinds for body in api.items(kind, namespace)
    ]
    return [
        f"{kind}/{name}"
        for kind, name in names
        if name == "chat" or (name.startswith("chat-") and "theirs" not in name)
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("outage", "deadline"),
    [(30, 15), pytest.param(300, 30, marks=pytest.mark.full)],
    ids=["30 s", "5 min"],
)
def test_an_unreachable_api_server_stops_no_pod_and_the_operator_catches_up(
    plane: ControlPlane, api: Api, namespace: str, outage: float, deadline: float
) -> None:
    with (
        FaultProxy(plane) as proxy,
        OperatorProcess(plane, (namespace,), server=proxy.url) as operator,
    ):
        first = operator.process
        lifecycle = Lifecycle(api, [(namespace, "chat")], 20, pods={}, explain=operator.tail)
        lifecycle.create()
        pods = running_pods(api, namespace, 2)
        before, memory = len(proxy.calls), operator.memory_bytes()
        proxy.unreachable = True
        proxy.cut_connections()
        lifecycle.patch({"replicas": 3})
        api.delete("Service", namespace, "chat")
        began = time.monotonic()
        while time.monotonic() < began + outage:
            assert operator.probe("/healthz")[0] == 200, "a restart would not help"
            assert running_pods(api, namespace, 2) == pods
            time.sleep(1)
        away = time.monotonic() - began
        tried = Counter(call.path.split("?")[0] for call in proxy.calls[before:])
        grown = operator.memory_bytes() - memory
        proxy.unreachable = False
        lifecycle.within, lifecycle.slowest = deadline, 0.0
        lifecycle.settle("caught up", Wanted(3, "1", 80))
        assert set(pods) <= set(running_pods(api, namespace, 3))
        assert operator.process is first
        assert not [call for call in proxy.calls[before:] if call.verb == "delete"]
        assert grown < memory / 4
        # Two clients ask about a kind, the re-list and the watch: 2 requests/s each.
        assert max(tried.values()) <= 2 * 2 * (away + 1), tried.most_common(3)
        assert not operator.tracebacks()
    print(
        f"outage of {outage} s: {tried.total()} requests meanwhile, "
        f"caught up after {lifecycle.slowest:.1f} s, "
        f"memory {memory / 2**20:.0f} MiB and {grown / 2**20:+.1f} MiB"
    )


def test_half_a_second_of_latency_changes_nothing(
    plane: ControlPlane, api: Api, namespace: str
) -> None:
    with FaultProxy(plane, latency=0.5) as proxy:
        with OperatorProcess(plane, (namespace,), server=proxy.url) as operator:
            lifecycle = Lifecycle(api, [(namespace, "chat")], 15, pods={}, explain=operator.tail)
            lifecycle.create()
            lifecycle.patch({"replicas": 3})
            lifecycle.settle("scaled", Wanted(3, "1", 80))
            pods = running_pods(api, namespace, 3)
            api.delete("Service", namespace, "chat")
            lifecycle.settle("repaired", Wanted(3, "1", 80))
            assert running_pods(api, namespace, 3) == pods
            assert operator.metric(LEADS) == 1, "the Lease is renewed in time"
            assert not [call for call in proxy.calls if call.verb == "delete"]
            assert not operator.tracebacks()
        print(f"a step took at most {lifecycle.slowest:.1f} s")


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("pod_addresses")
def test_no_request_fails_while_the_api_server_or_etcd_is_stopped(
    plane: ControlPlane, api: Api, namespace: str
) -> None:
    """The processes are stopped: operator, kubelet and controllers wait for them, while a real
    runtime serves requests.
    """
    outage = {"kube-apiserver": 300 if LONG_FORM else 30, "etcd": 20}
    deadline = 30 if LONG_FORM else 15
    with FakeKubelet(plane), OperatorProcess(plane, (namespace,)) as operator:
        scaling = {"minReplicas": 1, "maxReplicas": 2, "targetPerReplica": 100}
        api.create(idep(namespace, podTemplate=PROCESSES, autoscaling=scaling))
        eventually(lambda: ready(api, namespace), START, "Ready")
        (pod,) = api.items("Pod", namespace)
        first, deployment = operator.process, api.get("Deployment", namespace, "chat")
        slowest = 0.0
        with Clients(pod["status"]["podIP"], 2) as clients:
            for port, (part, seconds) in enumerate(outage.items(), 8080):
                asked = clients.done
                with stopped(plane, part):
                    ends = time.monotonic() + seconds
                    while time.monotonic() < ends:
                        assert operator.probe("/healthz")[0] == 200, "a restart would not help"
                        assert not clients.failures
                        time.sleep(1)
                    assert clients.done > asked, "requests went on being answered"
                began = time.monotonic()
                eventually(plane.answers, deadline, "the API server answers")
                api.merge(KIND, namespace, "chat", {"spec": {"service": {"port": port}}})
                eventually(
                    lambda port=port: served_port(api, namespace) == port,  # type: ignore[misc]
                    deadline,
                    "caught up",
                )
                slowest = max(slowest, time.monotonic() - began)
                assert slowest <= deadline or not LONG_FORM
        assert clients.failures == []
        assert operator.process is first
        assert not operator.tracebacks()
        (now,) = api.items("Pod", namespace)
        assert now["metadata"]["uid"] == pod["metadata"]["uid"]
        assert now["status"]["containerStatuses"][0]["restartCount"] == 0
        same = api.get("Deployment", namespace, "chat")
        assert same["metadata"]["generation"] == deployment["metadata"]["generation"], (
            "nothing was scaled or rolled"
        )
        eventually(lambda: ready(api, namespace), deadline, "Ready")
    print(f"{clients.done} requests, 0 failed, caught up after {slowest:.1f} s")


def served_port(api: Api, namespace: str) -> int:
    return int(api.get("Service", namespace, "chat")["spec"]["ports"][0]["port"])


@contextlib.contextmanager
def stopped(plane: ControlPlane, part: str) -> Iterator[None]:
    """SIGSTOP: it accepts connections and never answers."""
    process = plane.part(part).process
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("collector")
def test_restarts_change_nothing_and_deleting_needs_no_operator(
    plane: ControlPlane, api: Api, namespace: str
) -> None:
    with (
        FaultProxy(plane) as proxy,
        OperatorProcess(plane, (namespace,), server=proxy.url) as operator,
    ):
        lifecycle = Lifecycle(api, [(namespace, "chat")], 20, pods={}, explain=operator.tail)
        lifecycle.create()
        pods = running_pods(api, namespace, 2)
        deployment = api.get("Deployment", namespace, "chat")
        before = len(proxy.calls)
        for _ in range(20 if LONG_FORM else 5):
            operator.kill()
            operator.start()
            eventually(
                lambda: operator.metric(PASSES, result="ok") > 0, 20, "the operator made a pass"
            )
            assert not operator.tracebacks()
        assert not [call for call in proxy.calls[before:] if call.of_children], (
            "children were written"
        )
        assert running_pods(api, namespace, 2) == pods
        now = api.get("Deployment", namespace, "chat")
        assert now["metadata"]["generation"] == deployment["metadata"]["generation"]
        assert now["spec"] == deployment["spec"]

        operator.kill()
        api.delete(KIND, namespace, "chat")
        eventually(
            lambda: remaining(api, namespace) == [],
            10,
            "all is gone without an operator",
        )
        operator.start()
        eventually(lambda: operator.metric(LEADS) == 1, 20, "the operator leads again")
        assert remaining(api, namespace) == [], "the operator recreated an object"


@pytest.mark.usefixtures("pod_addresses")
def test_a_restarted_operator_changes_no_status(
    plane: ControlPlane, api: Api, namespace: str, tmp_path: Path
) -> None:
    """It remembers nothing, and asks its pods (stand-ins) before it reports missing data."""
    load = tmp_path / "load.json"
    load.write_text("{}")
    with FakeKubelet(plane, environ={"STANDIN_LOAD": str(load)}, programs=STANDIN):
        with OperatorProcess(plane, (namespace,)) as operator:
            scaling = {"minReplicas": 1, "maxReplicas": 2, "targetPerReplica": 100}
            api.create(idep(namespace, podTemplate=PROCESSES, autoscaling=scaling))
            eventually(lambda: ready(api, namespace), 30, "Ready")
            eventually(lambda: all_measured(api, namespace), 20, "pods are measured")
            operator.kill()
        before = status(api, namespace)
        with OperatorProcess(plane, (namespace,)) as operator:
            eventually(
                lambda: operator.metric(PASSES, result="ok") > 0, 20, "the operator made a pass"
            )
            ends = time.monotonic() + 12  # two looks of the autoscaler
            while time.monotonic() < ends:
                assert status(api, namespace) == before
                time.sleep(0.02)


def all_measured(api: Api, namespace: str) -> bool:
    """Whether the pods were measured and the measurement led to a decision."""
    seen = status(api, namespace)
    return (
        "startup" in seen
        and "load" in seen
        and condition(seen, "AutoscalingActive")["status"] == "True"
    )


@pytest.mark.timeout(900)
def test_of_two_operators_one_writes_and_the_other_takes_over_within_20_seconds(
    plane: ControlPlane, api: Api, namespace: str
) -> None:
    watched = 300 if LONG_FORM else 20
    first_proxy, second_proxy = FaultProxy(plane), FaultProxy(plane)
    with (
        first_proxy,
        second_proxy,
        OperatorProcess(plane, (namespace,), "first", server=first_proxy.url) as first,
        OperatorProcess(
            plane, (namespace,), "second", server=second_proxy.url, wait=False
        ) as second,
    ):
        lifecycle = Lifecycle(api, [(namespace, "chat")], 20, explain=first.tail)
        lifecycle.create()
        eventually(second.ready, 20, "a standby is ready")
        ends, replicas = time.monotonic() + watched, 2
        while time.monotonic() < ends:
            replicas = 5 - replicas
            lifecycle.patch({"replicas": replicas})
            lifecycle.settle("scaled", Wanted(replicas, "1", 80))
            assert (first.metric(LEADS), second.metric(LEADS)) == (1, 0)
        assert not [call for call in second_proxy.calls if call.writes], "the standby wrote"
        lifecycle.patch({"replicas": 4})
        lifecycle.settle("scaled", Wanted(4, "1", 80))

        first.kill()
        began = time.monotonic()
        eventually(lambda: second.metric(LEADS) == 1, 20, "the standby leads")
        failover = time.monotonic() - began
        eventually(lambda: second.metric(PASSES, result="ok") > 0, 10, "the operator made a pass")
        takeover_writes = Counter(
            call.path.split("?")[0]
            for call in second_proxy.calls
            if call.writes and call.about_objects
        )
        assert all(count <= 1 for count in takeover_writes.values()), takeover_writes
        lifecycle.patch({"replicas": 2})
        lifecycle.settle("scaled by the new leader", Wanted(2, "1", 80))
        assert not second.tracebacks()
    print(f"failover after {failover:.1f} s, {takeover_writes.total()} writes on taking over")
