"""Many resources at once: time to converge, requests per resource, memory, and requests when idle.

A hundred resources, a thousand with FAIRLEAD_FULL=1, or FAIRLEAD_SCALE of them; half are
autoscaled. Once without pods, and once with pods that are scraped (``FAIRLEAD_SCALE_PODS`` each):
kwok makes them Ready, and one server answers on all their addresses.
"""

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.harness.apiclient import Api, Object, eventually
from cluster.harness.controlplane import ControlPlane
from cluster.harness.idle_pod import report
from cluster.harness.nodes import add_nodes, start_kwok
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import CHILDREN, KIND, condition, idep
from fairlead_operator.resource.kinds import ADMIN_PORT
from fairlead_runtime.serving.metrics import EngineMetrics
from support.full import LONG_FORM

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]
COUNT = int(os.environ.get("FAIRLEAD_SCALE") or (1000 if LONG_FORM else 100))
IDLE = 40 if LONG_FORM else 20  # seconds: two re-lists, or one
CALLS = "fairlead_operator_api_calls_total"
PODS = int(os.environ.get("FAIRLEAD_SCALE_PODS") or 5)  # of each resource
WITH_PODS = int(os.environ.get("FAIRLEAD_SCALE") or (1000 if LONG_FORM else 20))  # resources
POD_NETWORK = f"10.{130 + os.getpid() % 100}.0.0/16"  # of this process: runs share the device


def resource(namespace: str, number: int) -> Object:
    """No node takes its pods: the test measures the operator, not the nodes."""
    nowhere = {"nodeSelector": {"type": "nowhere"}}
    scaling = (
        {"autoscaling": {"minReplicas": 2, "maxReplicas": 4}} if number % 2 else {"replicas": 2}
    )
    return idep(namespace, f"chat-{number}", podTemplate=nowhere, **scaling)


def converged(api: Api, namespace: str) -> bool:
    """Each status is about the newest spec, and each resource has all children at its revision."""
    bodies = api.items(KIND, namespace)
    deployments = {d["metadata"]["name"]: d for d in api.items("Deployment", namespace)}
    counts = [len(api.items(kind, namespace)) for kind in CHILDREN]
    if len(bodies) != COUNT or counts != [COUNT] * len(CHILDREN):
        return False
    for body in bodies:
        seen = body.get("status") or {}
        labels = deployments[body["metadata"]["name"]]["spec"]["template"]["metadata"]["labels"]
        if seen.get("observedGeneration") != body["metadata"]["generation"]:
            return False
        if seen.get("targetRevision") != labels["serving.fairlead.dev/revision"]:
            return False
    return True


@pytest.mark.timeout(1800)
def test_many_resources_converge_cheaply_and_cost_little_when_idle(
    plane: ControlPlane, api: Api, namespace: str
) -> None:
    with OperatorProcess(plane, (namespace,)) as operator:
        before = operator.metric(CALLS)
        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: api.create(resource(namespace, number)), range(COUNT)))
        eventually(lambda: converged(api, namespace), 300, f"{COUNT} resources converge")
        passed = time.monotonic() - began
        settled = _settled(operator)
        per_resource = (settled - before) / COUNT
        memory = operator.memory_bytes() / 2**20
        idle_began, idle_before = time.monotonic(), operator.metric(CALLS)
        time.sleep(IDLE)
        idle = (operator.metric(CALLS) - idle_before) / (time.monotonic() - idle_began)
        writes = sum(operator.metric(CALLS, verb=v) for v in ("create", "apply", "delete"))
        print(
            f"{COUNT} resources: {passed:.1f} s, {per_resource:.1f} requests each, "
            f"{memory:.0f} MiB, idle {idle:.2f} requests/s"
        )
        assert passed <= 300 or not LONG_FORM
        assert per_resource <= 12
        assert memory <= 300
        assert idle <= 1
        assert writes == COUNT * len(CHILDREN), "every child was written once"
        assert not operator.tracebacks()
        # One by one: deleting a whole collection answers only when the last object is marked.
        with ThreadPoolExecutor(8) as pool:
            list(
                pool.map(lambda number: api.delete(KIND, namespace, f"chat-{number}"), range(COUNT))
            )
        eventually(lambda: not api.items("Deployment", namespace), 180, "all is gone")


def _settled(operator: OperatorProcess) -> float:
    """The count of requests once only lists, gets and the Lease are requested for five seconds."""
    steady = ("list", "lease", "get")

    def rest() -> float:
        return operator.metric(CALLS) - sum(operator.metric(CALLS, verb=v) for v in steady)

    def look() -> bool:
        first = rest()
        time.sleep(5)  # the test waits for silence
        return rest() == first

    eventually(look, 120, "no more writes")
    return operator.metric(CALLS)


# -- with pods


@pytest.fixture
def pod_server() -> Iterator["PodServer"]:
    """Answers on the admin port of the addresses that it is given."""
    route = ["ip", "route", "replace", "local", POD_NETWORK, "dev", "lo"]
    if subprocess.run(route, check=False).returncode:
        pytest.skip("no route to the pods' addresses can be added: run as root")
    server = PodServer()
    try:
        yield server
    finally:
        server.stop()
        subprocess.run(["ip", "route", "del", "local", POD_NETWORK, "dev", "lo"], check=False)


class PodServer:
    """Many pods in one event loop, in a thread: metrics of an idle runtime, canaries, no more."""

    def __init__(self) -> None:
        self.scrapes: Counter[str] = Counter()  # by address
        self.canaries: Counter[str] = Counter()
        self._body = EngineMetrics("chat").exposition(report(0, 0))
        self._loop = asyncio.new_event_loop()
        self._listeners: dict[str, asyncio.Server] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def listen(self, addresses: set[str]) -> None:
        """On each of these too: pods of parallel runs use the same port on theirs."""
        for address in addresses - self._listeners.keys():
            starting = asyncio.start_server(self._handle, address, ADMIN_PORT)
            done = asyncio.run_coroutine_threadsafe(starting, self._loop)
            self._listeners[address] = done.result(10)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            address = writer.get_extra_info("sockname")[0]
            status, body = b"404 Not Found", b"{}"
            if head.startswith(b"GET /metrics "):
                self.scrapes[address] += 1
                status, body = b"200 OK", self._body
            elif head.startswith(b"POST /canary "):
                self.canaries[address] += 1
                status, body = b"200 OK", b'{"token": 1}'
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
            await writer.drain()
        writer.close()

    def stop(self) -> None:
        for listener in self._listeners.values():
            self._loop.call_soon_threadsafe(listener.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)


@pytest.mark.timeout(1800)
def test_many_resources_with_pods_become_ready_and_every_pod_is_scraped(
    plane: ControlPlane, api: Api, namespace: str, pod_server: PodServer
) -> None:
    total = WITH_PODS * PODS
    start_kwok(plane, "scale", POD_NETWORK)
    add_nodes(api, total // 150 + 1, prefix="scale", kind="scale")

    def body(number: int) -> Object:
        scaling: Object = {"minReplicas": PODS, "maxReplicas": PODS + 2}
        return idep(
            namespace,
            f"chat-{number}",
            model={"source": "demo:", "servedName": "chat"},
            podTemplate={"nodeSelector": {"type": "scale"}},
            **({"autoscaling": scaling} if number % 2 else {"replicas": PODS}),
        )

    def addresses() -> set[str]:
        pods = api.items("Pod", namespace)
        return {ip for pod in pods if (ip := pod.get("status", {}).get("podIP"))}

    def ready() -> int:
        pod_server.listen(addresses())
        return sum(
            condition(one.get("status") or {}, "Ready").get("status") == "True"
            for one in api.items(KIND, namespace)
        )

    with OperatorProcess(plane, (namespace,)) as operator:
        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: api.create(body(number)), range(WITH_PODS)))
        eventually(lambda: ready() == WITH_PODS, 600, f"{WITH_PODS} resources are Ready")
        passed = time.monotonic() - began
        _settled(operator)
        served = addresses()
        assert len(served) == total

        before, calls, at = pod_server.scrapes.copy(), operator.metric(CALLS), time.monotonic()
        cpu = operator.cpu_seconds()
        time.sleep(IDLE)  # what is measured is the rate of a quiet fleet
        seconds = time.monotonic() - at
        scraped = pod_server.scrapes - before
        rate = (operator.metric(CALLS) - calls) / seconds
        memory, busy = operator.memory_bytes() / 2**20, (operator.cpu_seconds() - cpu) / seconds
        print(
            f"{WITH_PODS} resources of {PODS} pods: Ready after {passed:.1f} s, {memory:.0f} MiB, "
            f"{scraped.total() / seconds:.1f} scrapes/s, {busy:.0%} of a core, "
            f"{rate:.2f} requests/s of the API server"
        )
        assert set(scraped) == served, "every pod is scraped"
        assert set(pod_server.canaries) == served
        assert memory <= 320
        assert rate <= 2
        assert not operator.tracebacks()
        with ThreadPoolExecutor(8) as pool:
            names = [f"chat-{number}" for number in range(WITH_PODS)]
            list(pool.map(lambda name: api.delete(KIND, namespace, name), names))
        eventually(lambda: not api.items("Pod", namespace), 300, "all is gone")
