"""Pods that are real runtime processes: Ready means tokens, load becomes replicas, restarts of the
operator change nothing.
"""

import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.harness.apiclient import Api, Object, eventually
from cluster.harness.completions import complete, stream
from cluster.harness.controlplane import ControlPlane
from cluster.harness.fakekubelet import FakeKubelet
from cluster.harness.kubectl import kubectl
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import (
    KIND,
    PROCESSES,
    START,
    await_reason,
    condition,
    idep,
    ready,
    status,
)
from fairlead_operator.decide.pods.startup import PARTS

pytestmark = [pytest.mark.cluster("kubectl"), pytest.mark.usefixtures("crd")]


@pytest.fixture(scope="module")
def kubelet(plane: ControlPlane, pod_addresses: None) -> Iterator[FakeKubelet]:
    with FakeKubelet(plane) as started:
        yield started


def pods(api: Api, namespace: str) -> list[Object]:
    return [p for p in api.items("Pod", namespace) if not p["metadata"].get("deletionTimestamp")]


def test_a_resource_becomes_ready_by_a_token_and_survives_the_operator(
    plane: ControlPlane, api: Api, namespace: str, kubelet: FakeKubelet
) -> None:
    """Ready by endpoint and canary; measured capacity; a killed process; a restarted operator."""
    with OperatorProcess(plane, (namespace,)) as operator:
        accelerator = {"accelerator": {"count": 1, "memory": "8Gi"}}
        api.create(idep(namespace, podTemplate=PROCESSES, resources=accelerator))
        await_reason(api, namespace, "Starting", 5)
        seen = eventually(lambda: ready(api, namespace), START, "Ready")
        assert "a canary token went through" in condition(seen, "Ready")["message"]
        assert seen["readyReplicas"] == seen["updatedReplicas"] == 1
        assert seen["currentRevision"] == seen["targetRevision"]
        assert "blockers" not in seen or seen["blockers"] == []
        kubectl(
            plane, "wait", "--for=condition=Ready", "idep/chat", "-n", namespace, "--timeout=5s"
        )
        assert "a canary token went through" in kubectl(
            plane, "describe", "idep/chat", "-n", namespace
        )
        reasons = [
            e["reason"]
            for e in api.items("Event", namespace)
            if e["involvedObject"]["kind"] == KIND
        ]
        assert (reasons.count("Ready"), set(reasons)) == (1, {"Starting", "Ready"})
        row = kubectl(plane, "get", "idep", "chat", "-n", namespace).splitlines()[1].split()
        assert row[:6] == ["chat", "True", "1", "1", "Serving", "demo:"]
        (pod,) = pods(api, namespace)
        # As written; the played pod runs on the CPU (``podprocess.played_arguments``).
        assert "--device=cuda" in pod["spec"]["containers"][0]["args"]
        assert complete(pod["status"]["podIP"])["usage"]["completion_tokens"] == 4

        def measured() -> Object:
            measured_capacity: Object = status(api, namespace)["capacity"].get("measured") or {}
            return measured_capacity

        eventually(measured, 20, "capacity is measured")
        kubelet.kill(namespace, pod["metadata"]["name"])
        eventually(lambda: ready(api, namespace) is None, 20, "not Ready while no pod serves")
        startup = status(api, namespace)["startup"]
        assert set(startup) == {"scheduled", "imagePulled", *PARTS}
        eventually(lambda: ready(api, namespace), START, "Ready again")
        operator.kill()
    before = api.get("Deployment", namespace, "chat")["metadata"]["generation"]
    with OperatorProcess(plane, (namespace,)):
        eventually(lambda: ready(api, namespace), 20, "still Ready")
        eventually(
            lambda: set(status(api, namespace)["startup"]) == {*PARTS},
            20,
            "the restart in place is reported",
        )
        assert api.get("Deployment", namespace, "chat")["metadata"]["generation"] == before
    api.delete(KIND, namespace, "chat")
    eventually(
        lambda: not api.items("Pod", namespace),
        30,
        "without an operator, garbage collection cleans up",
    )


def test_a_rollout_cuts_off_no_stream_and_counts_what_finished(
    plane: ControlPlane, api: Api, namespace: str, kubelet: FakeKubelet
) -> None:
    """A stream that runs when its pod is terminated finishes from that pod, and the status counts
    it.
    """
    tokens = 1500
    with OperatorProcess(plane, (namespace,)), ThreadPoolExecutor(1) as pool:
        api.create(idep(namespace, podTemplate=PROCESSES, rollout={"strategy": "Recreate"}))
        eventually(lambda: ready(api, namespace), START, "Ready")
        (old,) = pods(api, namespace)
        address = old["status"]["podIP"]
        streaming = pool.submit(stream, address, tokens)
        eventually(lambda: streaming.done() or running(address), START, "the stream runs")
        template = {**PROCESSES, "env": [{"name": "MARK", "value": "2"}]}
        api.merge(KIND, namespace, "chat", {"spec": {"podTemplate": template}})
        eventually(
            lambda: not pods(api, namespace) or streaming.done(), 20, "the pod is terminated"
        )
        assert not streaming.done(), (
            "the stream ended before its pod was terminated: it is too short for this test"
        )
        assert streaming.result(120) == tokens

        def counted() -> bool:
            rollout = status(api, namespace)["rollout"]
            return (rollout["drained"], rollout["aborted"]) == (1, 0)

        eventually(counted, 20, "one request drained, none cut off")
        eventually(lambda: ready(api, namespace), START, "Ready with the new revision")


def running(address: str) -> bool:
    """Whether the runtime runs a request."""
    with urllib.request.urlopen(f"http://{address}:9000/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return any(
        line.startswith("vllm:num_requests_running") and float(line.split()[-1]) > 0
        for line in lines
    )


def test_a_refused_model_is_reported_with_the_message_of_the_runtime(
    plane: ControlPlane, api: Api, namespace: str, kubelet: FakeKubelet
) -> None:
    with OperatorProcess(plane, (namespace,)):
        api.create(
            idep(namespace, model={"source": "file:///nowhere/at/all"}, podTemplate=PROCESSES)
        )
        seen = await_reason(api, namespace, "ModelNotFound", START)
        assert "/nowhere/at/all" in seen["blockers"][0]["message"]
        assert seen["blockers"][0]["hint"]


def test_a_burst_scales_up_and_its_decisions_are_recorded(
    plane: ControlPlane, api: Api, namespace: str, kubelet: FakeKubelet
) -> None:
    with OperatorProcess(plane, (namespace,)):
        scaling = {"minReplicas": 1, "maxReplicas": 2, "targetPerReplica": 4}
        api.create(
            idep(
                namespace,
                podTemplate=PROCESSES,
                autoscaling=scaling,
                cache={"numBlocks": 4096},
                resources={"memory": "8Gi"},
            )
        )
        eventually(lambda: ready(api, namespace), START, "Ready")
        assert status(api, namespace)["desiredReplicas"] == 1
        address = pods(api, namespace)[0]["status"]["podIP"]
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                complete(address, 200)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        try:
            eventually(
                lambda: status(api, namespace)["desiredReplicas"] == 2,
                35,
                "two replicas are wanted",
            )
            decisions = status(api, namespace)["autoscaling"]["decisions"]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        decision = next(d for d in decisions if d["to"] == 2)
        assert decision["demand"] >= 5
        (event,) = [e for e in api.items("Event", namespace) if e["reason"] == "ScaledUp"]
        assert event["message"] == f"1 → 2 pods: {decision['why']}"
        assert (decision["from"], decision["target"]) == (1, 4)
        assert api.get("Deployment", namespace, "chat")["spec"]["replicas"] == 2
        assert api.get(KIND, namespace, "chat")["spec"]["replicas"] == 1, (
            "the operator never writes a spec"
        )
