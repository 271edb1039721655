"""The node by itself: pods run, names of the cluster resolve, and nothing leads out of it."""

import socket
from pathlib import Path

import pytest

from cluster.harness.apiclient import Api, Object, eventually
from cluster.harness.resources import create_namespace
from e2e.harness.images import PAUSE
from e2e.harness.node import NAME, Node

pytestmark = pytest.mark.e2e


def test_a_pod_that_keeps_every_rule_of_pod_security_runs(node: Node, api: Api) -> None:
    create_namespace(api, "plain")
    api.create(plain_pod())
    pod = eventually(lambda: running(api), 60, "the pod runs")
    assert pod["status"]["podIP"].startswith("10.244.")
    assert pod["spec"]["nodeName"] == NAME


def test_a_name_of_the_cluster_resolves_and_no_other(node: Node) -> None:
    assert socket.gethostbyname("kubernetes.default.svc.cluster.local") == "10.96.0.1"
    with pytest.raises(socket.gaierror):
        socket.gethostbyname("example.org")


def test_nothing_outside_can_be_reached(node: Node) -> None:
    """No route leads out: the only devices are the node's own."""
    routes = Path("/proc/net/route").read_text().splitlines()[1:]
    assert routes
    assert all(line.split()[0].startswith(("flnode", "veth")) for line in routes)
    assert not [line for line in routes if line.split()[1] == "00000000"], "no default route"


def plain_pod() -> Object:
    """A pod that does nothing, as "restricted" wants it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "plain", "namespace": "plain"},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "plain",
                    "image": PAUSE,
                    "imagePullPolicy": "Never",
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "readOnlyRootFilesystem": True,
                    },
                }
            ],
        },
    }


def running(api: Api) -> Object | None:
    pod = api.get("Pod", "plain", "plain")
    return pod if (pod.get("status") or {}).get("phase") == "Running" else None
