"""One part is killed at a time, under load: only what was in flight on a killed pod is lost, and
everything recovers by itself.
"""

import time
from collections.abc import Callable, Iterator

import pytest

from cluster.harness.apiclient import Object, eventually
from e2e.harness.figures import Figures
from e2e.harness.installation import NAMESPACE, OPERATOR
from e2e.harness.load import Client, Load
from e2e.harness.node import AWAY, MAY_BE_AWAY, NAME, Node
from e2e.harness.processes import Process, engine_process, http_process, kill
from e2e.harness.served import Served
from support.full import LONG_FORM

pytestmark = pytest.mark.e2e
RECOVERED = 30  # seconds
TRAFFIC = {
    "new_per_second": 10 if LONG_FORM else 5,
    "kept": 4 if LONG_FORM else 2,
    "streams": 4 if LONG_FORM else 2,
    "tokens": 4,
    "stream_tokens": 200,
}


@pytest.fixture
def load(chat: Served, client: Client) -> Iterator[Load]:
    """Requests and streams throughout the test, whole before it begins."""
    chat.until_rolled_out()
    with client.load(chat.service, model=chat.name, **TRAFFIC) as running:
        running.await_more(20, streams=2)
        yield running


@pytest.fixture
def fault(
    load: Load, figures: Figures, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], None]]:
    """Call it when all is as before; at the end of the test what the fault cost is noted."""
    began, names = time.monotonic(), []

    def recovered(name: str) -> None:
        figures.note("recovery", f"{name}: whole again, s", time.monotonic() - began)
        names.append(name)

    yield recovered
    if names:
        report = load.look()
        figures.note("recovery", f"{names[0]}: answered", report.answered + report.streams)
        figures.note("recovery", f"{names[0]}: lost", len(report.failed) + len(report.cut))


@pytest.mark.parametrize("find", [http_process, engine_process], ids=["http", "engine"])
def test_a_killed_process_costs_no_more_than_what_its_pod_had_in_flight(
    chat: Served,
    load: Load,
    fault: Callable[[str], None],
    find: Callable[[Object], Process],
) -> None:
    killed = kill(min(chat.pods(), key=restarts), find)  # the kubelet delays a second restart
    chat.until_rolled_out(RECOVERED)
    fault(f"{find.__name__.replace('_', ' ')} killed")
    report = load.await_more(20, streams=2)
    killed.assert_bounds(report.failed + report.cut)


def restarts(pod: Object) -> int:
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def test_a_deleted_pod_costs_nothing(
    chat: Served, load: Load, fault: Callable[[str], None]
) -> None:
    victim = min(chat.names())
    chat.installation.api.delete("Pod", NAMESPACE, victim)
    eventually(lambda: victim not in chat.names(), 60, "the pod is gone")
    chat.until_rolled_out(RECOVERED)
    fault("pod deleted")
    load.await_more(20, streams=2).assert_nothing_lost()


def test_a_killed_operator_costs_nothing_and_its_successor_goes_on(
    chat: Served, load: Load, fault: Callable[[str], None]
) -> None:
    (pod,) = chat.installation.api.items("Pod", NAMESPACE, labelSelector=OPERATOR)
    http_process(pod).kill()
    chat.apply(replicas=1)  # somebody must carry this out
    eventually(lambda: len(chat.endpoints()) == 1, RECOVERED, "its successor follows the resource")
    fault("operator killed")
    chat.apply(replicas=2)
    chat.until_rolled_out()
    load.await_more(20, streams=2).assert_nothing_lost()


@pytest.mark.parametrize("part", MAY_BE_AWAY)
def test_a_part_of_the_cluster_that_is_away_for_seconds_costs_nothing(
    chat: Served, load: Load, fault: Callable[[str], None], node: Node, part: str
) -> None:
    node.lose(part, AWAY)
    chat.until_rolled_out(RECOVERED)
    fault(f"{part} away for {AWAY} s")
    load.await_more(20, streams=2).assert_nothing_lost()


def test_a_drain_of_the_node_leaves_one_pod_and_loses_nothing(
    chat: Served, load: Load, fault: Callable[[str], None]
) -> None:
    """The only node is cordoned, so the evicted pod has no successor, and the budget protects the
    other until the node takes pods again.
    """
    only = f"--pod-selector=serving.fairlead.dev/name={chat.name}"
    options = (only, "--ignore-daemonsets", "--delete-emptydir-data")
    with chat.installation.kubectl_running("drain", NAME, *options):
        eventually(lambda: len(chat.endpoints()) == 1, 60, "one pod is evicted")
        (left,) = chat.endpoints()
        load.await_more(40, streams=4)
        assert chat.endpoints() == {left}, "the budget protects the last pod"
    chat.installation.kubectl("uncordon", NAME)
    chat.until_rolled_out()
    fault("node drained and taken back")
    load.await_more(20, streams=2).assert_nothing_lost()
