"""Nodes without machines: kwok marks their pods Ready, for tests that only read status."""

from pathlib import Path

from cluster.harness.apiclient import Api, Object, eventually
from cluster.harness.controlplane import ControlPlane, free_ports

STAGES = Path(__file__).parent / "stages.yaml"


def start_kwok(plane: ControlPlane, kind: str = "kwok", cidr: str = "10.128.0.0/16") -> None:
    """Let a kwok play the kubelet of every node labelled ``type=KIND``; its pods get addresses of
    ``cidr``.
    """
    plane.spawn(
        "kwok",
        [
            f"--kubeconfig={plane.kubeconfig()}",
            "--manage-all-nodes=false",
            f"--manage-nodes-with-label-selector=type={kind}",
            f"--cidr={cidr}",
            "--node-ip=127.0.0.1",
            "--node-lease-duration-seconds=40",
            f"--server-address=127.0.0.1:{free_ports(1)[0]}",
            "-c",
            str(STAGES),
        ],
    )


def add_nodes(
    api: Api, count: int, gpus: int = 0, prefix: str = "kwok", kind: str = "kwok"
) -> None:
    """Ready nodes with room for 200 pods each and, if asked, accelerators."""
    for index in range(count):
        api.apply(node(f"{prefix}-{index}", gpus, kind), force="true")

    def ready() -> bool:
        nodes = [n for n in api.items("Node") if n["metadata"]["name"].startswith(prefix)]
        return len(nodes) >= count and all(is_ready(n) for n in nodes)

    eventually(ready, 30, f"{count} nodes Ready")


def node(name: str, gpus: int, kind: str = "kwok") -> Object:
    capacity = {"cpu": "512", "memory": "8Ti", "pods": "200", "ephemeral-storage": "1Ti"}
    if gpus:
        capacity["nvidia.com/gpu"] = str(gpus)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"type": kind, "kubernetes.io/hostname": name}},
        "status": {"capacity": capacity, "allocatable": capacity},
    }


def is_ready(body: Object) -> bool:
    conditions = body.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
