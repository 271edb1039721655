"""Two releases of the operator that serve the same namespace, on the real control plane."""

from collections.abc import Iterator

import pytest

from cluster.harness.apiclient import Api, eventually
from cluster.harness.controlplane import ControlPlane
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import KIND, create_namespace, current, idep, status

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]
CALLS = "fairlead_operator_api_calls_total"


@pytest.fixture
def homes(api: Api, namespace: str) -> Iterator[tuple[str, str]]:
    """The namespaces of two releases."""
    names = (f"{namespace[:50]}-one", f"{namespace[:50]}-two")
    for name in names:
        create_namespace(api, name)
    yield names
    for name in names:
        api.delete("Namespace", "", name)


def release(plane: ControlPlane, home: str, serves: str) -> OperatorProcess:
    """The operator of the release in ``home``; the image that its pods run tells whose they are."""
    return OperatorProcess(
        plane,
        (),
        identity=home,
        arguments=(f"--namespace={serves}", f"--lease-namespace={home}"),
        environ={"FAIRLEAD_RUNTIME_IMAGE": f"registry.test/{home}:1"},
    )


def image(api: Api, namespace: str) -> str:
    deployment = api.find("Deployment", namespace, "chat")
    if deployment is None:
        return ""
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


def told(api: Api, namespace: str, by: str) -> list[str]:
    """The messages of the Events by which the release ``by`` says that it leaves the resource."""
    return [
        event["message"]
        for event in api.items("Event", namespace)
        if event["reason"] == "ServedByAnother" and f"in namespace {by} leaves" in event["message"]
    ]


@pytest.mark.timeout(300)
def test_of_two_releases_one_writes_the_other_says_why_and_follows_one_that_is_gone(
    plane: ControlPlane, api: Api, namespace: str, homes: tuple[str, str]
) -> None:
    processes = {home: release(plane, home, namespace) for home in homes}
    with processes[homes[0]], processes[homes[1]]:
        api.create(idep(namespace))
        eventually(lambda: current(api, namespace), 20, "one of them serves the resource")
        owner = status(api, namespace)["servedBy"]
        (other,) = set(homes) - {owner}
        (message,) = eventually(lambda: told(api, namespace, other), 20, "the other says so")
        assert message.startswith(f"the operator in namespace {owner} serves this resource")
        assert "scope.namespaces" in message
        assert message in processes[other].log.read_text()
        idle = processes[other]
        # After the Event, and again where the owner wrote the status meanwhile.
        eventually(lambda: idle.metric(CALLS, verb="status", code="200") == 1, 30, "it asks")
        eventually(lambda: "challenger" not in status(api, namespace), 20, "the owner answers")

        api.merge(KIND, namespace, "chat", {"spec": {"replicas": 3}})
        eventually(lambda: status(api, namespace).get("desiredReplicas") == 3, 20, "it is served")
        assert image(api, namespace) == f"registry.test/{owner}:1"
        assert not told(api, namespace, owner)
        # It wrote its question and its Event; what came second was refused.
        assert idle.metric(CALLS, verb="status", code="200") == 1
        assert idle.metric(CALLS, verb="event", code="201") == 1
        assert not any(idle.metric(CALLS, verb=verb) for verb in ("apply", "create", "delete"))

    # Started again, it asks at once, and nobody is there to answer.
    processes[other].intervals["fairlead_operator.decide.release.ANSWER_SECONDS"] = 2.0
    with processes[other]:
        eventually(
            lambda: image(api, namespace) == f"registry.test/{other}:1",
            30,
            f"the release that is left serves the resource; {processes[other].tail()}",
        )
        assert status(api, namespace)["servedBy"] == other
        with processes[owner]:
            eventually(lambda: told(api, namespace, owner), 20, "the first one is second now")
            eventually(lambda: "challenger" not in status(api, namespace), 20, "it is answered")
            api.merge(KIND, namespace, "chat", {"spec": {"replicas": 2}})
            eventually(
                lambda: status(api, namespace).get("desiredReplicas") == 2, 20, "it is served"
            )
            assert image(api, namespace) == f"registry.test/{other}:1"
            assert not any(process.tracebacks() for process in processes.values())
