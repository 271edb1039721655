"""Many resources at once: time to converge, requests per resource, memory, and requests when idle.

A hundred resources, a thousand with FAIRLEAD_FULL=1, or FAIRLEAD_SCALE of them; half are
autoscaled.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.harness.apiclient import Api, Object, eventually
from cluster.harness.controlplane import ControlPlane
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import CHILDREN, KIND, idep
from support.full import LONG_FORM

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]
COUNT = int(os.environ.get("FAIRLEAD_SCALE") or (1000 if LONG_FORM else 100))
IDLE = 40 if LONG_FORM else 20  # seconds: two re-lists, or one
CALLS = "fairlead_operator_api_calls_total"


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
