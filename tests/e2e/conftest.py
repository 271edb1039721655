"""Fixtures of a whole cluster with a real node: everything runs in a sandbox (harness/sandbox.py),
which `make e2e` enters before pytest starts.
"""

import os
from collections.abc import Iterator
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
def images(node: Node, figures: Figures) -> None:
    """The images of `make images`, imported."""
    for archive in archives():
        with figures.timed("node", f"import of {archive.name}, s"):
            node.import_image(archive)


@pytest.fixture(scope="session")
def installation(node: Node, api: Api, images: None, figures: Figures) -> Installation:
    """The chart, installed without a value into a namespace that enforces "restricted"."""
    create_namespace(api, NAMESPACE)
    installed = Installation(api, Helm(node.home, "helm", node.plane.kubeconfig()))
    with figures.timed("node", "helm install until the operator is ready, s"):
        installed.install()
    return installed


@pytest.fixture(scope="session")
def client(api: Api, installation: Installation) -> Client:
    """The pod from which tests send load, in a namespace of its own."""
    create_namespace(api, "clients")
    started = Client(api, "clients", installation.image("operator"))
    started.start()
    return started
