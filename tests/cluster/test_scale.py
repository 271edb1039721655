"""A fleet of many resources: how soon it is Ready, whether each pod is scraped at its interval,
what the operator costs, how soon it acts on changes, and what it does when all pods fall silent.

32 resources of 5 pods; 1,000 with FAIRLEAD_FULL=1, or FAIRLEAD_SCALE of them. Half are autoscaled.
kwok makes the pods Ready, and a process of their own answers on all their addresses. Each figure is
printed; figures in seconds and shares of a core are checked in the long form alone. The file that
FAIRLEAD_FIGURES names gets those that benchmarks/operator_scale.py draws.
"""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from cluster.harness.apiclient import Api, Object, eventually, path_of
from cluster.harness.controlplane import ControlPlane, cpu_seconds
from cluster.harness.many_pods import ManyPods, many_pods
from cluster.harness.nodes import add_nodes, start_kwok
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import CHILDREN, KIND, condition, create_namespace, idep, install_crd
from support.full import LONG_FORM

pytestmark = [
    pytest.mark.cluster("etcd", "kube-apiserver", "kube-controller-manager"),
    pytest.mark.cluster("kube-scheduler", "kwok"),
    pytest.mark.timeout(3600),
]
COUNT = int(os.environ.get("FAIRLEAD_SCALE") or (1000 if LONG_FORM else 32))
PODS = 5  # of each resource
CHANGES = min(COUNT, 200 if LONG_FORM else 16)
CHANGE_SECONDS = 58 / 200  # between the beginnings of two changes: all within 60 s
QUIET = 60 if LONG_FORM else 36  # seconds: two lists of everything, and two scrapes of each pod
SILENCE = 60 if LONG_FORM else 20  # seconds: samples are stale after 15
AUTOSCALED, FIXED = 5.0, 15.0  # seconds between two scrapes of a pod
# Requests in each pod: a rollout has up to three pods more at a time, and their load is for PODS.
RUNNING = 6
NAMESPACE = "fleet"
NETWORK = f"10.{130 + os.getpid() % 100}.0.0/16"  # of this process: runs share the device
CALLS = "fairlead_operator_api_calls_total"
PASSES = "fairlead_operator_reconciles_total"
# Kubernetes' own defaults. The harness allows the controllers 500 calls a second, which a rollout
# of 200 Deployments takes at once, and with them both cores of a small machine.
ITS_OWN_PACE: dict[str, Sequence[str]] = {
    "kube-controller-manager": (
        "--kube-api-qps=20",
        "--kube-api-burst=30",
        "--concurrent-deployment-syncs=5",
        "--concurrent-service-endpoint-syncs=5",
    ),
    "kube-scheduler": ("--kube-api-qps=50", "--kube-api-burst=100"),
}
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


@dataclass(slots=True)
class Fleet:
    """The operator at work on all resources, each with its pods, in a control plane of its own."""

    plane: ControlPlane
    api: Api
    pods: ManyPods
    operator: OperatorProcess
    # seconds until all were Ready, from the first creation and from the last pod's readiness
    ready_after: tuple[float, float] = (0.0, 0.0)

    def resources(self) -> list[Object]:
        return self.api.items(KIND, NAMESPACE)

    def ready(self) -> bool:
        return all(_is_ready(one) for one in self.resources())

    def intervals(self) -> dict[str, float]:
        """The seconds between two scrapes of each pod, by its address."""
        pods = self.api.items("Pod", NAMESPACE)
        return {
            pod["status"]["podIP"]: AUTOSCALED if _number(pod) % 2 else FIXED
            for pod in pods
            if not pod["metadata"].get("deletionTimestamp")
        }

    def made(self) -> dict[str, list[tuple[str, int]]]:
        """What must not change while nobody changes a resource: Deployments by generation, pods."""
        deployments = self.api.items("Deployment", NAMESPACE)
        return {
            "Deployment": sorted(
                (d["metadata"]["uid"], d["metadata"]["generation"]) for d in deployments
            ),
            "Pod": sorted((p["metadata"]["uid"], 0) for p in self.api.items("Pod", NAMESPACE)),
        }


@dataclass(slots=True)
class Spent:
    """The operator's passes and calls to the API server in a ``with`` block, and everyone's
    processor time.
    """

    fleet: Fleet
    seconds: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)  # by verb
    passes: float = 0.0
    cores: dict[str, float] = field(default_factory=dict)  # by process, in cores

    def _now(self) -> dict[str, float]:
        parts = {part.name: part.process for part in self.fleet.plane.parts}
        parts |= {"pods": self.fleet.pods.process, "operator": self.fleet.operator.running}
        return {name: cpu_seconds(process.pid) for name, process in parts.items()}

    def _calls(self) -> Counter[str]:
        return self.fleet.operator.by_label(CALLS, "verb")

    def __enter__(self) -> Self:
        self.seconds, self.calls = time.monotonic(), self._calls()
        self.cores, self.passes = self._now(), self.fleet.operator.metric(PASSES)
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self.seconds
        self.calls = self._calls() - self.calls
        self.passes = self.fleet.operator.metric(PASSES) - self.passes
        now = self._now()
        self.cores = {name: (now[name] - was) / self.seconds for name, was in self.cores.items()}

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in self.cores.items())
        verbs = ", ".join(f"{calls} {verb}" for verb, calls in self.calls.most_common())
        passes = self.passes / self.seconds
        return (
            f"{self.seconds:.0f} s, {self.calls_per_second:.2f} calls/s ({verbs}), "
            f"{passes:.0f} passes/s; {shares}"
        )

    @property
    def calls_per_second(self) -> float:
        return self.calls.total() / self.seconds


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Ready once yielded. Of this module alone: thousands of pods take minutes to delete."""
    try:
        with (
            many_pods(NETWORK, COUNT * PODS * 3 // 2, "chat", RUNNING) as pods,
            ControlPlane(more_arguments=ITS_OWN_PACE if LONG_FORM else {}) as plane,
            plane.api() as api,
        ):
            api.http.timeout = 120  # a list of 5,000 pods is 40 MB
            install_crd(api)
            create_namespace(api, NAMESPACE)
            start_kwok(plane, "scale", NETWORK)
            add_nodes(api, COUNT * PODS // 100 + 1, prefix="scale", kind="scale")
            with OperatorProcess(plane, (NAMESPACE,)) as operator:
                yield _made_ready(Fleet(plane, api, pods, operator))
                assert not operator.tracebacks()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no route to the pods' addresses can be added: {error.stderr.decode()}")


def _made_ready(fleet: Fleet) -> Fleet:
    began = time.time()
    with Spent(fleet) as spent:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: fleet.api.create(_body(number)), range(COUNT)))
        eventually(fleet.ready, 1800, f"{COUNT} resources are Ready", every=3)
    now = time.time()
    fleet.ready_after = (now - began, now - _last_ready(fleet.api.items("Pod", NAMESPACE)))
    print(f"{COUNT} resources of {PODS} pods, until Ready: {spent}")
    _keep("until all are Ready", spent.cores)
    return fleet


def _body(number: int) -> Object:
    """Half of the autoscaled ones have a load for more pods than they may have, and no pod that
    must stay: a load of nothing would take pods from them at once. The others may grow, and have
    no load for more pods, not even while a rollout has some more.
    """
    scaling: Object = {"minReplicas": PODS, "maxReplicas": PODS + 2, "targetPerReplica": 10}
    if number % 4 == 1:
        scaling = {"maxReplicas": PODS, "targetPerReplica": 1}
        scaling["scaleDown"] = {"stabilizationSeconds": 0, "maxStep": PODS}
    return idep(
        NAMESPACE,
        f"chat-{number}",
        model={"source": "demo:", "servedName": "chat"},
        podTemplate={"nodeSelector": {"type": "scale"}},
        replicas=PODS,
        **({"autoscaling": scaling} if number % 2 else {}),
    )


def _number(body: Object) -> int:
    """Of the resource that a pod, or a resource, belongs to."""
    meta = body["metadata"]
    name = (meta.get("labels") or {}).get("serving.fairlead.dev/name") or meta["name"]
    return int(name.removeprefix("chat-"))


def _is_ready(resource: Object) -> bool:
    status = resource.get("status") or {}
    return bool(
        condition(status, "Ready").get("status") == "True"
        and status["observedGeneration"] == resource["metadata"]["generation"]
        and status["readyReplicas"] == PODS
        and status["rollout"]["phase"] == "Complete"
    )


def _last_ready(pods: list[Object]) -> float:
    times = [condition(pod["status"], "Ready")["lastTransitionTime"] for pod in pods]
    return datetime.fromisoformat(max(times)).astimezone(UTC).timestamp()


def _memory(fleet: Fleet) -> float:
    """The operator's memory at its highest, in MiB."""
    return fleet.operator.peak_memory_bytes() / 2**20


def test_all_become_ready_at_a_bounded_cost(fleet: Fleet) -> None:
    total, after_pods = fleet.ready_after
    calls = fleet.operator.metric(CALLS)
    print(
        f"Ready after {total:.0f} s, {after_pods:.0f} s after the last pod; "
        f"{calls / COUNT:.1f} calls each, {_memory(fleet):.0f} MiB"
    )
    assert after_pods <= 300 or not LONG_FORM
    for kind in CHILDREN:
        made = fleet.api.items(kind, NAMESPACE)
        assert len(made) == COUNT
        # The API server counts changes of the spec; it leaves a Service's out.
        assert {one["metadata"].get("generation", 1) for one in made} == {1}, "written once each"
    assert calls / COUNT <= 25
    assert _memory(fleet) <= 320


def test_every_pod_is_scraped_at_its_interval_and_a_quiet_fleet_costs_few_calls(
    fleet: Fleet,
) -> None:
    intervals = fleet.intervals()
    assert len(intervals) == COUNT * PODS
    eventually(lambda: _quiet(fleet), 120, "no more writes", every=1)
    fleet.pods.tell("reset")
    with Spent(fleet) as spent:
        time.sleep(QUIET)  # what is measured is the rate of a quiet fleet
        seen = fleet.pods.seen()
    assert set(seen) == set(intervals), "every pod is scraped"
    late = sorted(seen[pod]["gap"] - interval for pod, interval in intervals.items())
    scrapes = sum(one["scrapes"] for one in seen.values())
    print(
        f"quiet: {spent}; {scrapes / spent.seconds:.0f} scrapes/s, at most {late[-1]:.1f} s late "
        f"(p99 {_p99(late):.1f} s), {_memory(fleet):.0f} MiB"
    )
    _keep("quiet", spent.cores)
    for pod, interval in intervals.items():
        assert 1 <= seen[pod]["scrapes"] <= QUIET / interval + 1, "no more often either"
    assert late[-1] <= 2.5 or not LONG_FORM
    assert spent.calls_per_second <= 2
    assert _memory(fleet) <= 320


def test_nothing_changes_when_all_pods_are_silent_for_a_minute(fleet: Fleet) -> None:
    made, shown = fleet.made(), _shown(fleet)
    with Spent(fleet) as spent:
        fleet.pods.tell("silent")
        time.sleep(SILENCE)  # long enough that every sample is stale
        eventually(
            lambda: sum(_is_stale(one) for one in fleet.resources()) == COUNT // 2,
            30,
            "every autoscaled resource says so",
            every=1,
        )
        fleet.pods.tell("reset")
    print(f"silent: {spent}")
    _keep("all pods silent", spent.cores)
    assert fleet.made() == made, "nothing was scaled or restarted"
    began = time.monotonic()
    with Spent(fleet) as spent:
        fleet.pods.tell("answer")
        pods = fleet.intervals()
        eventually(lambda: set(fleet.pods.seen()) == set(pods), 30, "all are scraped", every=1)
        scraped = time.monotonic() - began
        eventually(lambda: _shown(fleet) == shown, 30, "every status is as before", every=1)
        passed = time.monotonic() - began
    print(f"after the silence: all scraped after {scraped:.0f} s, as before after {passed:.0f} s")
    print(f"after the silence: {spent}; {_memory(fleet):.0f} MiB")
    _keep("after the silence", spent.cores)
    assert passed <= 30 or not LONG_FORM
    assert fleet.made() == made, "nothing was scaled or restarted"
    assert _memory(fleet) <= 320


def test_changes_are_acted_on_soon(fleet: Fleet) -> None:
    """Each change rolls the resource's pods. From the API server's answer to the change until a
    watch shows the Deployment's new generation.
    """
    changed: dict[str, float] = {}
    seen = _Generations(fleet.plane)
    before, acted = dict(seen.held), seen.changed_at
    began = time.monotonic()

    def change(number: int) -> None:
        name = f"chat-{number * (COUNT // CHANGES)}"
        fleet.api.merge(KIND, NAMESPACE, name, {"spec": {"scheduler": {"maxRequests": 32}}})
        changed[name] = time.monotonic()

    with Spent(fleet) as spent:
        with ThreadPoolExecutor(8) as pool:
            sent = []
            for number in range(CHANGES):
                due = began + number * CHANGE_SECONDS  # the rate is what is tested
                time.sleep(max(0.0, due - time.monotonic()))
                sent.append(pool.submit(change, number))
            for one in sent:
                one.result()
        sending = time.monotonic() - began
        eventually(lambda: acted.keys() >= changed.keys(), 60, "all changes are acted on")
    latencies = sorted(acted[name] - at for name, at in changed.items())
    print(
        f"{CHANGES} changes in {sending:.0f} s: {spent}; acted on after "
        f"{latencies[len(latencies) // 2]:.2f} s in the median, {_p99(latencies):.2f} s at p99, "
        f"{latencies[-1]:.2f} s at most"
    )
    _keep(f"{CHANGES} changes", spent.cores)
    _keep("latencies", latencies)
    assert sending <= 60 or not LONG_FORM
    eventually(fleet.ready, 600, "all are Ready again", every=3)
    print(f"after the rollouts: {_memory(fleet):.0f} MiB")
    assert _p99(latencies) <= 5 or not LONG_FORM
    assert acted.keys() == changed.keys(), "no other Deployment was changed"
    assert all(seen.held[name] == before[name] + 1 for name in changed), "written once each"
    assert _memory(fleet) <= 320


def test_a_restart_changes_nothing_and_fits_in_memory(fleet: Fleet) -> None:
    """A new process reads everything at once; the old one saw it grow."""
    made = fleet.made()
    fleet.operator.stop()
    fleet.pods.tell("reset")
    began, fleet.operator.wait = time.monotonic(), False
    fleet.operator.start()
    pods = fleet.intervals()
    eventually(lambda: set(fleet.pods.seen()) == set(pods), 120, "all are scraped", every=1)
    scraped = time.monotonic() - began
    eventually(lambda: _quiet(fleet), 120, "no more writes", every=1)
    print(f"restart: all scraped after {scraped:.0f} s, {_memory(fleet):.0f} MiB")
    assert fleet.ready()
    assert fleet.made() == made
    assert _memory(fleet) <= 320


def _keep(name: str, value: Any) -> None:
    """Add a figure to the file that is asked for: by process in cores, or seconds in order."""
    if given := os.environ.get("FAIRLEAD_FIGURES"):
        file = Path(given)
        kept = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(kept | {name: value}, indent=1) + "\n")


def _p99(values: list[float]) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, len(values) * 99 // 100)]


def _is_stale(resource: Object) -> bool:
    return condition(resource["status"], "AutoscalingActive").get("reason") == "StaleMetrics"


def _shown(fleet: Fleet) -> dict[str, Object]:
    """Each resource's status without times and the record of decisions."""
    return {one["metadata"]["name"]: _timeless(one["status"]) for one in fleet.resources()}


def _timeless(status: Object) -> Object:
    autoscaling = {k: v for k, v in (status.get("autoscaling") or {}).items() if k != "decisions"}
    conditions = [
        {k: v for k, v in one.items() if k != "lastTransitionTime"} for one in status["conditions"]
    ]
    return {**status, "autoscaling": autoscaling, "conditions": conditions}


def _quiet(fleet: Fleet) -> bool:
    """Whether no status needs another load, and only lists, gets and the Lease were requested for
    five seconds. A first load may lack pods, and is written again 30 s later.
    """
    if not all(_tells_load(one) for one in fleet.resources()):
        return False

    def writes() -> float:
        steady = ("list", "lease", "get")
        operator = fleet.operator
        return operator.metric(CALLS) - sum(operator.metric(CALLS, verb=v) for v in steady)

    first = writes()
    time.sleep(5)  # the test waits for silence
    return writes() == first


def _tells_load(resource: Object) -> bool:
    """The operator writes no other load for a change of less than a fifth."""
    shown = ((resource.get("status") or {}).get("load") or {}).get("running", 0)
    return bool(abs(PODS * RUNNING - shown) < 0.2 * shown)


class _Generations:
    """A watch of the Deployments' metadata, for as long as the control plane runs."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        with plane.api() as api:
            answer = api.call("GET", path_of("Deployment", NAMESPACE))
        self.held = {d["metadata"]["name"]: d["metadata"]["generation"] for d in answer["items"]}
        self.changed_at: dict[str, float] = {}  # the first time, on the monotonic clock
        version = answer["metadata"]["resourceVersion"]
        threading.Thread(target=self._watch, args=(version,), daemon=True).start()

    def _watch(self, version: str) -> None:
        query = {"watch": "1", "resourceVersion": version}
        path, headers = path_of("Deployment", NAMESPACE), {"Accept": METADATA}
        with (
            contextlib.suppress(httpx.HTTPError),  # it ends with the control plane
            self._plane.api() as api,
            api.http.stream("GET", path, params=query, headers=headers, timeout=None) as answer,
        ):
            for line in answer.iter_lines():
                meta = json.loads(line)["object"]["metadata"]
                name, generation = meta["name"], meta["generation"]
                if generation > self.held[name]:
                    self.held[name] = generation
                    self.changed_at.setdefault(name, time.monotonic())
