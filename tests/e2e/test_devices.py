"""Scheduling on GPUs without one: a device plugin of the tests' own offers two to the kubelet."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cluster.harness.apiclient import Api, Object, eventually
from e2e.harness.figures import Figures
from e2e.harness.installation import NAMESPACE, Installation
from e2e.harness.node import NAME, Node
from e2e.harness.served import SMALL, Served

pytestmark = pytest.mark.e2e
GPU = "nvidia.com/gpu"
# Where the kubelet keeps which pod has which device.
GIVEN = Path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
ON_A_GPU: Object = {
    **SMALL,
    "resources": {**SMALL["resources"], "accelerator": {"count": 1, "memory": "16Gi"}},
}


@pytest.fixture(scope="module", autouse=True)
def two_gpus(node: Node, api: Api) -> Iterator[None]:
    """The kubelet offers the plugin's devices."""

    def offered() -> str:
        return str(api.get("Node", "", NAME)["status"]["allocatable"].get(GPU, "0"))

    node.plane.spawn("deviceplugin", [])
    eventually(lambda: offered() == "2", 30, "the node offers two GPUs")
    yield
    node.plane.remove("deviceplugin")


@pytest.fixture
def chat(node: Node, installation: Installation) -> Iterator[Served]:
    """A resource of a release without a value. The CPU build stands in for the GPU build."""
    node.tag_image(installation.image("runtime"), installation.image("accelerator"))
    installation.upgrade()
    served = Served(installation, "gpus")
    yield served
    served.delete(drained=False)


def devices_of(pod: Object) -> list[str]:
    """The devices that the kubelet gave the pod."""
    entries = json.loads(GIVEN.read_text())["Data"]["PodDeviceEntries"] or ()
    return [
        device
        for entry in entries
        if entry["PodUID"] == pod["metadata"]["uid"] and entry["ResourceName"] == GPU
        for devices in entry["DeviceIDs"].values()
        for device in devices
    ]


def test_pods_get_a_gpu_each_until_none_is_left_and_a_cpu_build_says_what_it_is(
    chat: Served, figures: Figures
) -> None:
    chat.apply(**ON_A_GPU, replicas=3)
    with figures.timed("blockers", "no GPU that torch can use, s"):
        blocker = chat.until_blocked_by("NoAccelerator", 60)
    assert "is a CPU build" in blocker["message"]
    assert "runtime.acceleratorImage" in blocker["hint"]
    refused = chat.until_blocked_by("InsufficientAccelerator", 10)
    assert GPU in refused["message"]

    pods = chat.pods()
    placed = [pod for pod in pods if pod["spec"].get("nodeName") == NAME]
    assert (len(pods), len(placed)) == (3, 2)
    assert sorted(device for pod in placed for device in devices_of(pod)) == ["gpu-0", "gpu-1"]
    for pod in placed:
        (container,) = pod["spec"]["containers"]
        assert container["image"] == chat.installation.image("accelerator")
        ended = eventually(partial(end_of, chat, pod), 60, "its container has ended")
        assert ended["exitCode"] == 2


def end_of(chat: Served, pod: Object) -> Object | None:
    """How the container of the pod last ended, if it did."""
    now = chat.installation.api.get("Pod", NAMESPACE, pod["metadata"]["name"])
    states: list[Object] = [
        container.get(kind) or {}
        for container in now["status"].get("containerStatuses") or ()
        for kind in ("state", "lastState")
    ]
    return next((state["terminated"] for state in states if "terminated" in state), None)
