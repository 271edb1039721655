"""What a pod's NetworkPolicy lets through, with kube-router's firewall as the engine that enforces
it.
"""

from collections.abc import Iterator

import pytest

from cluster.harness.apiclient import Api, eventually
from e2e.harness.installation import NAMESPACE, OPERATOR, Installation
from e2e.harness.load import PORT, Client
from e2e.harness.node import Node
from e2e.harness.served import Served

pytestmark = pytest.mark.e2e
API, ADMIN = 8000, 9000
CONNECT = """
import socket
try:
    socket.create_connection(({host!r}, {port}), timeout=2).close()
    print("open")
except OSError as error:
    print("closed:", error)
"""


@pytest.fixture
def policies(chat: Served) -> Iterator[None]:
    """The deployment has its policy again when the test ends."""
    yield
    chat.apply(security={"networkPolicy": True})
    chat.until_rolled_out()


@pytest.mark.usefixtures("policies")
def test_only_the_operator_reaches_the_admin_port_and_the_demo_reaches_nobody(
    chat: Served, installation: Installation, client: Client, node: Node, api: Api
) -> None:
    def reaches(namespace: str, pod: str, host: str, port: int) -> bool:
        """Whether a process in the pod can connect."""
        script = CONNECT.format(host=host, port=port)
        told = installation.kubectl(
            "exec", f"--namespace={namespace}", pod, "--", "python", "-c", script
        )
        return told == "open\n"

    (operator,) = (
        pod["metadata"]["name"] for pod in api.items("Pod", NAMESPACE, labelSelector=OPERATOR)
    )
    pod = chat.pods()[0]
    name, address = pod["metadata"]["name"], pod["status"]["podIP"]

    def client_reaches(port: int) -> bool:
        return reaches(client.namespace, "client", address, port)

    def pod_reaches_client() -> bool:
        return reaches(NAMESPACE, name, client.address, PORT)

    assert client_reaches(ADMIN), "nothing enforces policies yet"
    assert pod_reaches_client()
    with node.enforcing_policies():
        eventually(lambda: not client_reaches(ADMIN), 60, "a client is kept from the admin port")
        assert client_reaches(API)
        assert reaches(NAMESPACE, operator, address, ADMIN)
        assert not pod_reaches_client(), "the demo model needs nothing from the network"
        with client.load(chat.service, model=chat.name, new_per_second=5) as load:
            load.await_more(10)
        load.report.assert_nothing_lost()
        chat.until_ready()
        chat.apply(security={"networkPolicy": False})
        eventually(lambda: client_reaches(ADMIN), 60, "without its policy the port is open")
        assert pod_reaches_client()
