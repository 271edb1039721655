"""What stops a pod is told by the right blocker with a hint, in `kubectl get`, within seconds; the
pods of the last revision serve on, and all is well once the cause is gone.

An image that is missing is part of test_rollouts.py, a GPU without a driver of test_devices.py.
"""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.harness.apiclient import Api, Object, eventually
from e2e.harness.figures import Figures
from e2e.harness.installation import NAMESPACE, Installation
from e2e.harness.node import Node
from e2e.harness.sandbox import ADDRESS
from e2e.harness.served import SMALL, Served, serving
from support.hub_server import Hub, Repository

pytestmark = pytest.mark.e2e
AT_ONCE = 10  # seconds
HUB = "tests/demo"
DEMO = Path(__file__).parents[2] / "runtime" / "fairlead_runtime" / "demo"
# The demo model as files: its memory is not planned before a pod has read them.
FILES = "file:///opt/fairlead/lib/python3.11/site-packages/fairlead_runtime/demo"
Setting = Callable[[Api, Node], AbstractContextManager[None]]


def resources(**changes: object) -> Object:
    return {"resources": {**SMALL["resources"], **changes}}


BATCH = {"scheduler": {**SMALL["scheduler"], "maxBatchTokens": 300}}


@contextmanager
def quota_of_two_pods(api: Api, _node: Node) -> Iterator[None]:
    """The operator's pod and one that serves are the whole quota."""
    meta, spec = {"name": "tests", "namespace": NAMESPACE}, {"hard": {"pods": "2"}}
    api.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": meta, "spec": spec})
    eventually(
        lambda: "used" in api.get("ResourceQuota", NAMESPACE, "tests").get("status", {}),
        30,
        "the quota counts",
    )
    try:
        yield
    finally:
        api.delete("ResourceQuota", NAMESPACE, "tests")


@contextmanager
def volume_without_room(api: Api, node: Node) -> Iterator[None]:
    """A claim "tiny" whose volume is smaller than the model."""
    disk = node.home / "tiny"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=777", "tmpfs", disk], check=True)
    capacity, modes = {"storage": "1Mi"}, ["ReadWriteMany"]
    volume: Object = {"capacity": capacity, "accessModes": modes, "storageClassName": ""}
    volume["hostPath"] = {"path": str(disk)}
    claim: Object = {"accessModes": modes, "storageClassName": "", "volumeName": "tiny"}
    claim["resources"] = {"requests": capacity}
    v1 = {"apiVersion": "v1"}
    api.create({**v1, "kind": "PersistentVolume", "metadata": {"name": "tiny"}, "spec": volume})
    meta = {"name": "tiny", "namespace": NAMESPACE}
    api.create({**v1, "kind": "PersistentVolumeClaim", "metadata": meta, "spec": claim})
    try:
        yield
    finally:
        api.delete("PersistentVolumeClaim", NAMESPACE, "tiny")
        api.delete("PersistentVolume", "", "tiny")


@dataclass(frozen=True, slots=True)
class Fault:
    """A change of the resource that no pod can start with, and the blocker that says so.

    ``setting``: what else has to be there for it.
    """

    name: str
    code: str
    change: Object
    setting: Setting = lambda _api, _node: nullcontext()


FAULTS = (
    Fault(
        "out of memory", "OutOfMemory", {"model": {"source": FILES}, **resources(memory="200Mi")}
    ),
    Fault("model missing", "ModelNotFound", {"model": {"source": "file:///no/such/model"}}),
    Fault(
        "wrong revision",
        "ModelNotFound",
        {"model": {"source": f"hf://{HUB}", "revision": "no-such-revision"}},
    ),
    Fault(
        "quota exceeded",
        "QuotaExceeded",
        {
            "scheduler": {**SMALL["scheduler"], "maxBatchTokens": 300},
            "rollout": {"strategy": "Surge"},
        },
        quota_of_two_pods,
    ),
    Fault(
        "no accelerator",
        "InsufficientAccelerator",
        resources(accelerator={"count": 1, "resourceName": "example.com/npu"}),
    ),
    Fault(
        "secret missing",
        "SecretMissing",
        {"security": {"apiKeySecretRef": {"name": "no-such-secret", "key": "key"}}},
    ),
    Fault(
        "full disk",
        "NoSpace",
        {
            "model": {"source": f"hf://{HUB}"},
            "modelCache": {"type": "PVC", "claimName": "tiny"},
        },
        volume_without_room,
    ),
)


@pytest.fixture(scope="module")
def chat(installation: Installation) -> Iterator[Served]:
    """A pod that serves; models come from a hub of the test's own."""
    files = Repository.of(DEMO, lfs_from=2**40)
    with Hub({HUB: files}, address=ADDRESS) as hub:
        installation.upgrade("--set", f"hub.endpoint={hub.endpoint}")
        with serving(installation, "faulty", **SMALL) as served:
            yield served


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_is_told_and_the_old_pods_serve_on(
    chat: Served, api: Api, node: Node, figures: Figures, fault: Fault
) -> None:
    serving_pods, whole = chat.endpoints(), chat.spec
    assert len(serving_pods) == 1
    with fault.setting(api, node):
        with figures.timed("blockers", f"{fault.name}, s"):
            chat.apply(**fault.change)
            blocker = chat.until_blocked_by(fault.code, AT_ONCE)
        assert blocker["hint"]
        shown = chat.installation.kubectl("get", "idep", chat.name).splitlines()[1]
        assert fault.code in shown.split()
        assert chat.endpoints() == serving_pods
        chat.spec = whole
        chat.apply()
        chat.until_rolled_out()
    assert chat.endpoints() == serving_pods
