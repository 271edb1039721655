"""Models from a hub: the init container downloads and reports progress, then the runtime serves
offline.
"""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.harness.apiclient import Api, Object, eventually
from cluster.harness.completions import complete
from cluster.harness.controlplane import ControlPlane
from cluster.harness.fakekubelet import FakeKubelet
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import (
    PROCESSES,
    START,
    await_reason,
    condition,
    idep,
    ready,
    reason,
    status,
)
from fairlead_operator.decide.pods.startup import PARTS
from support.hub_server import MAIN, Hub, Repository, sharded

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]
DEMO = Path(__file__).parents[3] / "runtime" / "fairlead_runtime" / "demo"
NAME = "tiny/demo"
QUIET = 6  # seconds: more than the operator waits between two looks at a download


@pytest.fixture(scope="module")
def kubelet(plane: ControlPlane, pod_addresses: None) -> Iterator[FakeKubelet]:
    with FakeKubelet(plane) as started:
        yield started


@pytest.fixture
def repository() -> Repository:
    """The demo model, its weights in five files of about equal size."""
    return Repository(sharded(DEMO, 5), refs={"main": MAIN, "v1": MAIN})


@pytest.fixture
def hub(repository: Repository) -> Iterator[Hub]:
    with Hub({NAME: repository}) as server:
        yield server


def downloading(api: Api, namespace: str) -> Object | None:
    """The status once it reports the progress of the download."""
    seen = status(api, namespace)
    return (
        seen
        if " % of the weights are there" in condition(seen, "Ready").get("message", "")
        else None
    )


def test_a_model_is_fetched_with_its_progress_shown_and_then_served_offline(
    plane: ControlPlane,
    api: Api,
    namespace: str,
    kubelet: FakeKubelet,
    hub: Hub,
    repository: Repository,
) -> None:
    release = threading.Event()
    last = next(
        name for name in sorted(repository.files, reverse=True) if name.endswith(".safetensors")
    )

    def hold(name: str) -> None:
        if name == last:
            release.wait(60)

    repository.on_get = hold
    with OperatorProcess(plane, (namespace,), environ={"HF_ENDPOINT": hub.endpoint}) as operator:
        api.create(
            idep(
                namespace, model={"source": f"hf://{NAME}", "revision": "v1"}, podTemplate=PROCESSES
            )
        )
        try:
            seen = eventually(lambda: downloading(api, namespace), 30, "the download is seen")
            first = seen["blockers"][0]
            assert (first["code"], first["object"].partition("/")[0]) == ("FetchingWeights", "Pod")
            # Seen at any moment before or during the wait for the last file.
            assert re.match(
                r"\d+ % of the weights are there: [\d.]+ [KM]iB of 4\.\d MiB", first["message"]
            )
            assert condition(seen, "Planned")["status"] == "True"
            version = api.get("InferenceDeployment", namespace, "chat")["metadata"][
                "resourceVersion"
            ]
            ends = time.monotonic() + QUIET
            while time.monotonic() < ends:
                now = api.get("InferenceDeployment", namespace, "chat")["metadata"][
                    "resourceVersion"
                ]
                assert now == version, "a stalled download costs no write"
                time.sleep(0.2)
        finally:
            release.set()
        seen = eventually(lambda: ready(api, namespace), START, "Ready")
        assert not seen["blockers"]
        startup = eventually(
            lambda: status(api, namespace).get("startup"), 20, "what the start took"
        )
        assert set(startup) == {"scheduled", "imagePulled", "weightsFetched", *PARTS}
        assert QUIET <= startup["weightsFetched"] < START
        assert 0 < startup["imports"] < sum(startup[part] for part in PARTS) < START
        (pod,) = api.items("Pod", namespace)
        (fetch,) = pod["status"]["initContainerStatuses"]
        assert fetch["state"]["terminated"]["exitCode"] == 0
        assert fetch["restartCount"] == pod["status"]["containerStatuses"][0]["restartCount"] == 0
        assert complete(pod["status"]["podIP"])["usage"]["completion_tokens"] == 4
        # The download asks once for each thing it needs, but again for the file that was held for
        # longer than its time-out; a runtime would ask again for others, or for more.
        once = [path for path in hub.requests if not path[1].endswith(last)]
        assert len(set(once)) == len(once), "the runtime asked the hub"
        names = {path.rpartition("/")[2] for _, path in hub.requests}
        assert names <= {*repository.files, "v1"}, "the runtime asked the hub for another file"
        assert not operator.tracebacks()


def test_a_wrong_name_or_revision_is_reported_with_the_message_of_the_download(
    plane: ControlPlane, api: Api, namespace: str, kubelet: FakeKubelet, hub: Hub
) -> None:
    """The message stays while the download is retried."""
    wrong = {
        "revision": (
            {"source": f"hf://{NAME}", "revision": "nowhere"},
            f"{NAME}: no revision nowhere",
            "use a commit",
        ),
        "name": (
            {"source": "hf://tiny/nothing"},
            "tiny/nothing: not found at http",
            "check the owner and the name",
        ),
    }
    with OperatorProcess(plane, (namespace,), environ={"HF_ENDPOINT": hub.endpoint}):
        for name, (model, _, _) in wrong.items():
            api.create(idep(namespace, name, model=model, podTemplate=PROCESSES))
        for name, (_, message, hint) in wrong.items():
            seen = await_reason(api, namespace, "ModelNotFound", 30, name)
            first = seen["blockers"][0]
            assert (first["message"][: len(message)], first["hint"][: len(hint)]) == (message, hint)
            assert condition(seen, "Ready")["message"] == f"{first['message']} ({first['hint']})"

        def tried_again() -> bool:
            assert {reason(api, namespace, name) for name in wrong} == {"ModelNotFound"}
            pods = api.items("Pod", namespace)
            return all(p["status"]["initContainerStatuses"][0]["restartCount"] >= 2 for p in pods)

        eventually(tried_again, 30, "the download is retried")
        names = [
            e["involvedObject"]["name"]
            for e in api.items("Event", namespace)
            if e["reason"] == "ModelNotFound"
        ]
        assert sorted(names) == sorted(wrong), "one Event per change, not per try"
