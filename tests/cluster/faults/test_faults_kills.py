"""The operator is killed at any of its writes, before it is sent or after it took effect: the
objects end up the same.
"""

import hashlib
import itertools
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import fairlead_operator
from cluster.harness import apiclient
from cluster.harness.apiclient import Api, eventually
from cluster.harness.case_selection import share
from cluster.harness.controlplane import ControlPlane
from cluster.harness.faultproxy import Call, Fault, FaultProxy
from cluster.harness.operators import OperatorProcess
from cluster.harness.resource_lifecycle import Lifecycle

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd", "nodes")]
NAME = "chat"
SIDE_BY_SIDE = 2  # one operator each
_numbers = itertools.count()


def namespace_for(api: Api, word: str) -> str:
    name = f"{word}-{next(_numbers)}-{os.getpid()}"
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    eventually(
        lambda: api.find("ServiceAccount", name, "default"), 10, "the default ServiceAccount"
    )
    return name


@dataclass(slots=True)
class Outcome:
    """The result of one lifecycle with one kill."""

    snapshots: Sequence[str]
    calls: list[Call]
    killed: int
    slowest: float
    writes: list[Call] = field(init=False)

    def __post_init__(self) -> None:
        self.writes = [call for call in self.calls if call.writes and call.about_objects]

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.snapshots).encode()).hexdigest()


def run_lifecycle(
    plane: ControlPlane,
    api: Api,
    at: int,
    when: str,
    within: float = 40,
    path: str = "",
    whole: bool = True,
) -> Outcome:
    """The lifecycle with the operator killed at its ``at``-th write (never, for -1).

    ``path`` is searched before its own modules; ``whole`` False runs the first step only.
    """
    namespace = namespace_for(api, "kill")
    killed = writes = 0

    def kill() -> None:
        nonlocal killed
        assert operator.process is not None
        operator.process.kill()
        killed += 1

    def choose_fault(call: Call) -> Fault:
        nonlocal writes
        if not (call.writes and call.about_objects):
            return "pass"
        writes += 1
        if writes - 1 != at:
            return "pass"
        if when == "after":
            return "lost-answer"
        kill()
        return "reset"

    def restart_if_dead() -> None:
        assert operator.process is not None
        if operator.process.poll() is not None:
            operator.start()

    environ = {"PYTHONPATH": path} if path else {}
    proxy = FaultProxy(plane, choose_fault, on_lost_answer=kill)
    with proxy, OperatorProcess(plane, (namespace,), server=proxy.url, environ=environ) as operator:
        lifecycle = Lifecycle(
            api,
            [(namespace, NAME)],
            within,
            while_waiting=restart_if_dead,
            pods={},
            explain=operator.tail,
        )
        snapshots = list(lifecycle.run().values()) if whole else []
        if not whole:
            lifecycle.create()
        assert not operator.tracebacks()
    api.delete("Namespace", "", namespace)
    return Outcome(snapshots, proxy.calls, killed, lifecycle.slowest)


@pytest.fixture(scope="module")
def undisturbed(plane: ControlPlane, api: Api) -> Outcome:
    """The lifecycle without a fault: the resulting objects, and every call of the operator."""
    return run_lifecycle(plane, api, -1, "never", 20)


@pytest.mark.timeout(3600)
def test_killed_before_or_after_any_write_the_operator_reaches_the_same_objects(
    plane: ControlPlane, api: Api, undisturbed: Outcome
) -> None:
    points = [(at, when) for at in range(len(undisturbed.writes)) for when in ("before", "after")]
    assert len(points) >= 20
    began = time.monotonic()
    chosen = share(points)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        outcomes = list(pool.map(lambda point: run_lifecycle(plane, api, *point), chosen))
    for point, outcome in zip(chosen, outcomes, strict=True):
        assert outcome.digest() == undisturbed.digest(), (
            point,
            outcome.snapshots,
            undisturbed.snapshots,
        )
        deleted = [(call.plural, call.name) for call in outcome.calls if call.verb == "delete"]
        assert set(deleted) == {("poddisruptionbudgets", NAME)}, (point, deleted)
    # The number of status writes depends on timing: a run may not reach the last points.
    killed = sum(outcome.killed for outcome in outcomes)
    assert killed >= 0.8 * len(chosen)
    slowest = max(outcome.slowest for outcome in outcomes)
    print(
        f"{len(undisturbed.writes)} writes; {killed} kills at {len(chosen)} points in "
        f"{time.monotonic() - began:.0f} s, a step took at most {slowest:.1f} s"
    )


# Edge-triggered: it marks a generation as handled before it writes the children.
MARKED_TOO_EARLY = """
        generation = body["metadata"]["generation"]
        if (body.get("status") or {}).get("observedGeneration") == generation:
            return RESYNC_SECONDS
        marked = {**(body.get("status") or {}), "observedGeneration": generation}
        await self._cluster.set_status(body, marked)
        body = self._cluster.store.get(RESOURCE, key) or body
        try:
            resource = self._cluster.store.resource(body)"""
LEVEL_TRIGGERED = """
        try:
            resource = self._cluster.store.resource(body)"""


def test_an_operator_that_is_not_level_triggered_is_detected(
    plane: ControlPlane, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positive control: a planted bug that appears only with a kill at the wrong moment."""
    package = Path(fairlead_operator.__path__[0])
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    module = tmp_path / package.name / "reconcile.py"
    text = module.read_text()
    assert text.count(LEVEL_TRIGGERED) == 1
    module.write_text(text.replace(LEVEL_TRIGGERED, MARKED_TOO_EARLY))
    run_lifecycle(
        plane, api, -1, "never", 20, str(tmp_path), whole=False
    )  # without a kill the bug does not appear
    monkeypatch.setattr(apiclient, "LIMIT", 8)  # what never happens needs no longer wait
    with pytest.raises(AssertionError, match="not created within"):
        # The first write names the release; the bug's own is the second.
        run_lifecycle(plane, api, 1, "after", 8, str(tmp_path), whole=False)
