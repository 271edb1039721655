"""A served namespace without a resource: only our own kind is listed and watched there."""

from collections.abc import Iterator

import pytest

from cluster.harness.apiclient import Api, eventually
from cluster.harness.controlplane import ControlPlane
from cluster.harness.faultproxy import FaultProxy
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import idep, status
from fairlead_operator.resource.kinds import RESOURCE, watched_kinds

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]
KINDS = {kind.plural for kind in watched_kinds(claims=False)}


@pytest.fixture
def idle(api: Api, namespace: str) -> Iterator[str]:
    """A second namespace, which is read before the other one."""
    name = f"idle-{namespace}"
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    api.delete("Namespace", "", name)


def test_until_its_first_resource_comes_a_namespace_is_read_for_resources_alone(
    plane: ControlPlane, api: Api, namespace: str, idle: str
) -> None:
    with (
        FaultProxy(plane) as proxy,
        OperatorProcess(plane, (idle, namespace), server=proxy.url) as operator,
    ):

        def is_read(of: str, kinds: set[str]) -> bool:
            """Whether these kinds were listed in a namespace, and watched, and no others."""
            calls = {verb: set[str]() for verb in ("list", "watch")}
            for call in proxy.calls:
                if call.namespace == of and call.verb in calls:
                    calls[call.verb].add(call.plural)
            return all(plurals == kinds for plurals in calls.values())

        api.create(idep(namespace, paused=True))
        eventually(lambda: is_read(namespace, KINDS), 20, "all is read where a resource is")
        eventually(lambda: status(api, namespace), 20, "it has a status")
        eventually(lambda: is_read(idle, {RESOURCE.plural}), 20, "and resources where none is")
        api.create(idep(idle, paused=True))
        eventually(lambda: status(api, idle), 20, "the first resource has a status")
        eventually(lambda: is_read(idle, KINDS), 20, "all is read there, too")
        assert not operator.tracebacks()
