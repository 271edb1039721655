"""Fixtures of the real control plane: one cluster per test session, one restricted namespace per
test.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator

import pytest

from cluster.harness import addresses, binaries
from cluster.harness.apiclient import Api, Object, eventually
from cluster.harness.controlplane import ControlPlane
from cluster.harness.nodes import add_nodes, start_kwok
from cluster.harness.resources import create_namespace, idep, install_crd

_numbers = itertools.count(1)


# What a fixture starts; a test that runs others itself names them: `pytest.mark.cluster("helm")`.
PROGRAMS_OF_FIXTURES = {
    "plane": ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    "nodes": ("kwok",),
}


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Before pytest-xdist starts its workers: they cannot move to a namespace by themselves."""
    option = session.config.option
    if getattr(option, "numprocesses", None) and not option.collectonly:
        _ensure_addresses()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the programs that the collected tests need before any test's clock runs, with the
    progress visible; then see to pods' addresses.
    """
    tests = [item for item in session.items if item.get_closest_marker("cluster")]
    if session.config.option.collectonly or not tests:
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        binaries.build(sorted({name for item in tests for name in _programs(item)}))
        if any("pod_addresses" in getattr(item, "fixturenames", ()) for item in tests):
            _ensure_addresses()


def _programs(item: pytest.Item) -> Iterator[str]:
    for mark in item.iter_markers("cluster"):
        yield from mark.args
    for fixture in getattr(item, "fixturenames", ()):
        yield from PROGRAMS_OF_FIXTURES.get(fixture, ())


def _ensure_addresses() -> None:
    try:
        addresses.ensure_addresses()
    except addresses.NoAddressError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def pod_addresses() -> None:
    """For tests that play pods as processes: the hook above runs them where they get addresses."""


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    """etcd, kube-apiserver, controller-manager and scheduler, up in seconds."""
    with ControlPlane() as started:
        yield started


@pytest.fixture(scope="session")
def api(plane: ControlPlane) -> Iterator[Api]:
    """The administrator's client."""
    with plane.api() as client:
        yield client


@pytest.fixture(scope="session")
def crd(api: Api) -> Object:
    """The custom resource definition of this tree, installed and established."""
    return install_crd(api)


@pytest.fixture(scope="session")
def collector(api: Api, crd: Object) -> None:
    """Waits until the garbage collector knows our kind: it looks for new kinds every 30 seconds."""
    owner = api.create(idep("default", "collected", paused=True))
    reference = {key: owner[key] for key in ("apiVersion", "kind")} | {
        key: owner["metadata"][key] for key in ("name", "uid")
    }
    meta = {"name": "collected", "namespace": "default", "ownerReferences": [reference]}
    api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta})
    api.delete(owner["kind"], "default", "collected")
    eventually(
        lambda: api.find("ConfigMap", "default", "collected") is None,
        90,
        "the garbage collector removes the owned object",
    )


@pytest.fixture(scope="session")
def nodes(plane: ControlPlane, api: Api) -> None:
    """Five nodes played by kwok, the last with 8 accelerators."""
    start_kwok(plane)
    add_nodes(api, 4)
    add_nodes(api, 1, gpus=8, prefix="gpu")


@pytest.fixture
def namespace(api: Api, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace that enforces Pod Security "restricted"; deleted afterwards."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:40].strip("-")
    name = f"t{next(_numbers)}-{words}".rstrip("-")
    create_namespace(api, name)
    yield name
    api.delete("Namespace", "", name)
