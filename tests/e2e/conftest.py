"""Fixtures of a whole cluster with a real node: everything runs in a sandbox (harness/sandbox.py),
which `make e2e` enters before pytest starts.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.harness.apiclient import Api
from cluster.harness.charts import Helm
from cluster.harness.resources import create_namespace
from e2e.harness.figures import Figures
from e2e.harness.images import archives
from e2e.harness.installation import NAMESPACE, Installation
from e2e.harness.load import Client
from e2e.harness.node import Node
from e2e.harness.sandbox import HOME


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run on the machine itself: a node changes its network, mounts and settings."""
    if session.config.option.collectonly:
        return
    mine = [item for item in session.items if item.get_closest_marker("e2e")]
    if mine and HOME not in os.environ:
        raise pytest.UsageError("these tests run in a sandbox of their own: use `make e2e`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A newcomer finds nothing of Fairlead: those tests come before the others install it."""
    items.sort(key=lambda item: item.path.name != "test_newcomer.py")


@pytest.fixture(scope="session")
def figures() -> Iterator[Figures]:
    """What the tests measure; written to the file FAIRLEAD_E2E_FIGURES if that is set."""
    measured = Figures()
    yield measured
    measured.write()


@pytest.fixture(scope="session")
def node(figures: Figures) -> Iterator[Node]:
    """A cluster with one node that is Ready."""
    started = Node(Path(os.environ[HOME]))
    with figures.timed("node", "from nothing to a node that is Ready, s"):
        started.start()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def api(node: Node) -> Iterator[Api]:
    """The administrator's client."""
    with node.plane.api() as client:
        yield client


@pytest.fixture(scope="session")
def imports(node: Node, figures: Figures) -> Iterator[dict[str, Future[None]]]:
    """The imports of the images of `make images`, by the name of the archive. They run side by
    side: each keeps one core busy.
    """

    def run(archive: Path) -> None:
        with figures.timed("node", f"import of {archive.name}, s"):
            node.import_image(archive)

    with ThreadPoolExecutor() as pool:
        yield {archive.name: pool.submit(run, archive) for archive in archives()}


@pytest.fixture(scope="session")
def chart(node: Node, api: Api, imports: dict[str, Future[None]]) -> Installation:
    """Installs the chart; the operator's image is there."""
    imports["operator.tar"].result()
    return Installation(api, Helm(node.home, "helm", node.plane.kubeconfig()))


@pytest.fixture(scope="session")
def runtime_image(imports: dict[str, Future[None]]) -> None:
    """The runtime's image is there too."""
    imports["runtime.tar"].result()


@pytest.fixture(scope="session")
def installation(
    chart: Installation, api: Api, runtime_image: None, figures: Figures
) -> Installation:
    """The chart, installed without a value into a namespace that enforces "restricted"."""
    create_namespace(api, NAMESPACE)
    with figures.timed("node", "helm install until the operator is ready, s"):
        chart.install()
    return chart


@pytest.fixture(scope="session")
def client(api: Api, installation: Installation) -> Client:
    """The pod from which tests send load, in a namespace of its own."""
    create_namespace(api, "clients")
    started = Client(api, "clients", installation.image("operator"))
    started.start()
    return started
