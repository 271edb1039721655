"""The release changes while its deployments serve: values, another image, rollback, removal."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest

from cluster.harness.apiclient import Api, eventually
from cluster.harness.charts import CRD
from cluster.harness.resources import KIND
from e2e.harness.figures import Figures
from e2e.harness.installation import NAMESPACE, OPERATOR, RELEASE, Installation
from e2e.harness.load import Client, Load
from e2e.harness.node import Node
from e2e.harness.served import SMALL, Served
from support.full import LONG_FORM
from support.looks import Looks

pytestmark = pytest.mark.e2e
NEXT = "next"  # a second name of the same runtime image: another version, as far as pods know
# One of these per deployment leaves the two cores time to start pods.
TRAFFIC = {
    "new_per_second": 2,
    "kept": 1,
    "streams": 1,
    "tokens": 4,
    "stream_tokens": 100,
    "pause": 1,
}
NAMES = ("one", "two", "three") if LONG_FORM else ("one", "two")


@pytest.fixture(scope="module")
def deployments(installation: Installation) -> Iterator[list[Served]]:
    """Deployments of a pod each that serve."""
    installation.upgrade()
    served = [Served(installation, name) for name in NAMES]
    try:
        for each in served:
            each.apply(**SMALL)
        for each in served:
            each.until_rolled_out()
        yield served
    finally:
        with ThreadPoolExecutor() as pool:  # side by side
            list(pool.map(partial(Served.delete, drained=False), served))


@pytest.fixture
def loads(deployments: list[Served], client: Client) -> Iterator[list[Load]]:
    """Requests and streams to each of them throughout the test; none may be lost."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(client.load(each.service, model=each.name, **TRAFFIC))
            for each in deployments
        ]
        serve_on(running)
        yield running
        serve_on(running)
    for load in running:
        load.report.assert_nothing_lost()


def serve_on(loads: list[Load]) -> None:
    for load in loads:
        load.await_more(5, streams=1)


def runs_only(served: Served, image: str) -> bool:
    return {pod["spec"]["containers"][0]["image"] for pod in served.pods()} == {image}


def test_a_changed_value_of_the_operator_alone_replaces_no_pod(
    deployments: list[Served], loads: list[Load], installation: Installation
) -> None:
    before = [each.names() for each in deployments]
    installation.upgrade("--set", "podLabels.team=tests", "--set", "metrics.service=false")
    serve_on(loads)
    for each in deployments:
        each.until_rolled_out()
    assert [each.names() for each in deployments] == before


@pytest.mark.usefixtures("loads")
def test_a_new_runtime_image_rolls_one_deployment_at_a_time_and_back_and_loses_nothing(
    deployments: list[Served], node: Node, installation: Installation, figures: Figures
) -> None:
    current = installation.image("runtime")
    following = current.rpartition(":")[0] + f":{NEXT}"
    node.tag_image(current, following)
    installation.upgrade()

    with (
        Looks(partial(count_mixed, deployments)) as rolling,
        figures.timed("upgrade", "all deployments rolled, s"),
    ):
        installation.upgrade("--set", f"runtime.image.tag={NEXT}")
        until_all_run(deployments, following)
    assert max(rolling.seen) == 1, "deployments rolled side by side"

    with (
        Looks(partial(count_mixed, deployments)) as rolling,
        figures.timed("upgrade", "all rolled back, s"),
    ):
        installation.helm.run("rollback", RELEASE, f"--namespace={NAMESPACE}", "--wait")
        until_all_run(deployments, current)
    assert max(rolling.seen) == 1, "deployments rolled back side by side"


def test_pods_serve_on_without_a_release_and_a_deleted_resource_leaves_nothing(
    deployments: list[Served],
    client: Client,
    installation: Installation,
    api: Api,
    figures: Figures,
) -> None:
    deleted, *others = deployments
    with ExitStack() as stack:
        running = [
            stack.enter_context(client.load(each.service, model=each.name, **TRAFFIC))
            for each in others
        ]
        serve_on(running)
        installation.helm.run("uninstall", RELEASE, f"--namespace={NAMESPACE}", "--wait")
        eventually(
            lambda: not api.items("Pod", NAMESPACE, labelSelector=OPERATOR), 60, "no operator runs"
        )
        with figures.timed("upgrade", "no operator: a deleted resource and all of it gone, s"):
            deleted.delete()
        serve_on(running)
        assert {item["metadata"]["name"] for item in api.items(KIND, NAMESPACE)} == set(NAMES[1:])
        assert api.find("CustomResourceDefinition", "", CRD), "documented: the definition stays"
        assert api.find("Lease", NAMESPACE, "fairlead-operator"), "documented: the Lease stays"
        before = [each.names() for each in others]
        installation.install()
        for each in others:
            each.until_rolled_out()
        assert [each.names() for each in others] == before, "a new release replaces no pod"
        serve_on(running)
    for load in running:
        load.report.assert_nothing_lost()


def until_all_run(served: list[Served], image: str) -> None:
    for each in served:
        eventually(partial(runs_only, each, image), 600, f"{each.name} runs {image}")
        each.until_rolled_out()


def count_mixed(served: list[Served]) -> int:
    """How many deployments have pods of two images now."""
    return sum(is_mixed(each) for each in served)


def is_mixed(served: Served) -> bool:
    alive = [pod for pod in served.pods() if "deletionTimestamp" not in pod["metadata"]]
    return len({pod["spec"]["containers"][0]["image"] for pod in alive}) > 1
