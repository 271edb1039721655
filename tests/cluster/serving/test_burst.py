"""A burst on a real cluster: the time from 800 requests in flight to the maximum of pods.

The pods are stand-ins that serve the runtime's own metrics text with a load the test sets: eight
real engines would measure this machine's cores. What is tested is the operator, its scrapes and
decisions, and Kubernetes; that a real engine's load scales is in test_serving.py.
"""

import json
import time
from pathlib import Path

import pytest

from cluster.harness.apiclient import Api, Object, eventually
from cluster.harness.controlplane import ControlPlane
from cluster.harness.fakekubelet import STANDIN, FakeKubelet
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import PROCESSES, idep, ready, status

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd", "pod_addresses")]
WITHIN = 35.0  # seconds from the burst to all the pods that may be
SCALING = {"minReplicas": 1, "maxReplicas": 8, "targetPerReplica": 100}


def test_800_requests_out_of_nothing_reach_every_replica_within_35_seconds(
    plane: ControlPlane, api: Api, namespace: str, tmp_path: Path
) -> None:
    """All requests stay on the only pod at the start: new pods add nothing to the demand."""
    load = tmp_path / "load.json"
    load.write_text("{}")
    environ = {"STANDIN_LOAD": str(load)}
    with (
        FakeKubelet(plane, environ=environ, programs=STANDIN),
        OperatorProcess(plane, (namespace,)),
    ):
        api.create(idep(namespace, podTemplate=PROCESSES, autoscaling=SCALING))
        eventually(lambda: ready(api, namespace), 30, "Ready")
        eventually(
            lambda: status(api, namespace).get("load") == {"running": 0, "waiting": 0}, 20, "idle"
        )
        assert desired(api, namespace) == (1, 1)
        (pod,) = api.items("Pod", namespace)

        began = time.monotonic()
        replaced(load, {pod["status"]["podIP"]: [256, 544]})
        eventually(lambda: desired(api, namespace) == (8, 8), WITHIN, "eight replicas are wanted")
        wanted = time.monotonic() - began
        eventually(lambda: status(api, namespace)["readyReplicas"] == 8, 20, "eight pods are ready")
        served = time.monotonic() - began

        ups = [d for d in status(api, namespace)["autoscaling"]["decisions"] if d["to"] > d["from"]]
        assert [(d["from"], d["to"]) for d in reversed(ups)] == [(1, 5), (5, 8)], (
            "at most maxStep every 15 s"
        )
        assert {d["demand"] for d in ups} == {800}
        assert len(api.items("Pod", namespace)) == 8
    print(f"eight wanted after {wanted:.1f} s, ready after {served:.1f} s")


def desired(api: Api, namespace: str) -> tuple[int, int]:
    """The count in the resource's status and in the Deployment."""
    deployment: Object = api.get("Deployment", namespace, "chat")
    return status(api, namespace)["desiredReplicas"], deployment["spec"]["replicas"]


def replaced(path: Path, loads: dict[str, list[int]]) -> None:
    """Replace the file atomically: the pods read it at any moment."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(loads))
    fresh.rename(path)
