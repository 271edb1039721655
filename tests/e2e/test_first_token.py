"""From `kubectl apply` to the first token: the documented example, the documented commands."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.harness.apiclient import Object, eventually
from cluster.harness.resources import KIND
from e2e.harness.figures import Figures
from e2e.harness.installation import NAMESPACE, Installation
from e2e.harness.served import Served
from fairlead_operator.decide.pods.startup import PARTS

pytestmark = pytest.mark.e2e
INSTALL = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
QUESTION = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


def documented_example() -> str:
    """The first resource of docs/install.md, as a user copies it."""
    found = re.search(r"```yaml\n(apiVersion.*?)```", INSTALL, re.DOTALL)
    assert found
    return found[1]


@pytest.fixture(scope="module")
def demo(installation: Installation, figures: Figures) -> Iterator[Served]:
    """The example, applied by kubectl; its timeline is noted."""
    installation.upgrade()  # whatever other tests set, the chart's own values hold here
    text = documented_example()
    served = Served(installation, yaml.safe_load(text)["metadata"]["name"])
    began = time.time()
    installation.kubectl("apply", "-f", "-", stdin=text)
    address = eventually(lambda: service_address(installation), 60, "the Service has an address")
    eventually(lambda: answers(address), 400, "a first token", every=0.1)
    reached = {"first token through the Service": time.time()}
    served.until_ready()
    reached["Ready"] = time.time()
    (pod,) = served.pods()
    for name, at in {**moments(pod, served.status["startup"]), **reached}.items():
        figures.note("apply", f"{name}, s after apply", max(0.0, at - began))
    yield served
    served.delete()


def service_address(installation: Installation) -> str:
    service = installation.api.find("Service", NAMESPACE, "demo") or {"spec": {}}
    return str(service["spec"].get("clusterIP", ""))


def answers(address: str) -> bool:
    """Whether the Service gives a chat completion."""
    try:
        answer = httpx.post(f"http://{address}/v1/chat/completions", json=QUESTION, timeout=60)
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


def moments(pod: Object, parts: Object) -> dict[str, float]:
    """When the parts of a pod's start ended; the API server gives whole seconds.

    ``parts`` is ``status.startup``: the seconds of each part of the runtime's start.
    """
    conditions = {c["type"]: c["lastTransitionTime"] for c in pod["status"]["conditions"]}
    (container,) = pod["status"]["containerStatuses"]
    started = seconds(container["state"]["running"]["startedAt"])
    return {
        "pod scheduled": seconds(conditions["PodScheduled"]),
        "container started": started,
        "weights read": started + parts["imports"] + parts["weights"],
        "ready": started + sum(parts.get(part, 0) for part in PARTS),
    }


def seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def test_the_documented_example_answers_a_chat_completion(demo: Served) -> None:
    assert answers(service_address(demo.installation))


def test_kubectl_wait_returns_as_documented(demo: Served) -> None:
    told = demo.installation.kubectl("wait", "--for=condition=Ready", "idep/demo", "--timeout=1m")
    assert "condition met" in told


def test_kubectl_get_shows_the_state_at_a_glance(demo: Served) -> None:
    head, row = demo.installation.kubectl("get", "idep", "demo").splitlines()
    assert head.split() == [
        "NAME",
        "READY",
        "REPLICAS",
        "DESIRED",
        "REASON",
        "MODEL",
        "QUEUE",
        "AGE",
    ]
    assert row.split()[:4] == ["demo", "True", "1", "1"]
    assert "demo:" in row.split()


def test_kubectl_describe_shows_the_conditions_and_what_happened(demo: Served) -> None:
    told = demo.installation.kubectl("describe", "idep", "demo")
    assert re.search(r"Type:\s+Ready", told)
    assert re.search(r"Concurrent Tokens:\s+\d+", told)


def test_kubectl_explain_names_the_fields(demo: Served) -> None:
    told = demo.installation.kubectl("explain", "idep.spec.scheduler")
    assert "maxBatchTokens\t<integer>" in told


def test_the_service_answers_through_a_forwarded_port_as_documented(demo: Served) -> None:
    """The first request of the page, sent to the port that its `kubectl port-forward` opens."""
    body = re.search(r"curl .*/v1/completions.*?-d '(.*?)'", INSTALL, re.DOTALL)
    assert body

    def answered() -> bool:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.post(
                "http://127.0.0.1:8000/v1/completions", json=json.loads(body[1]), timeout=60
            )
            return answer.status_code == 200 and bool(answer.json()["choices"][0]["text"])
        return False

    with demo.installation.kubectl_running("port-forward", "service/demo", "8000:80"):
        eventually(answered, 30, "an answer through the forwarded port")


def test_the_capacity_that_was_planned_is_the_one_that_is_measured(
    demo: Served, figures: Figures
) -> None:
    def measured() -> Object | None:
        capacity: Object = demo.status.get("capacity") or {}
        return capacity if capacity.get("measured") else None

    capacity = eventually(measured, 60, "the operator has read the pod's memory")
    planned, found = capacity["planned"]["numBlocks"], capacity["measured"]["numBlocks"]
    figures.note("capacity", "blocks planned", planned)
    figures.note("capacity", "blocks measured", found)
    figures.note("capacity", "drift, %", capacity["driftPercent"])
    assert abs(found - planned) <= 0.02 * planned


def test_nothing_is_left_when_the_example_is_deleted(
    demo: Served, installation: Installation, figures: Figures
) -> None:
    began = time.monotonic()
    installation.kubectl("delete", "idep", "demo")
    demo.delete()
    figures.note("apply", "deleted with everything of it, s", time.monotonic() - began)
    assert not installation.api.find(KIND, NAMESPACE, "demo")
