"""An accelerator's errors: one that lasts ends the engine, another one only its rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.sampling.token_readback import TokenReadback
from fairlead_runtime.engine.isolate import run_isolated
from fairlead_runtime.scheduling.plan import DeviceLostError, Work
from support.engine_rig import Setting, greedy, rig
from support.in_flight import InFlight

SETTING = Setting(block_size=4, chunk=64, num_blocks=100, max_requests=4)


class World(InFlight):
    def __init__(self) -> None:
        asked = [greedy(name, (5, 6, 7, number), 6) for number, name in enumerate("abcd")]
        super().__init__(rig("llama", "resident"), SETTING, *asked)


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def fails(calls: list[str]) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        calls.append("failed")
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nCompile with ...")

    return fail


@pytest.fixture(params=[True, False], ids=["lasts", "does not last"])
def lasts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the device fails again when it is waited for."""

    def synchronize(_device: torch.device) -> None:
        if request.param:
            raise torch.AcceleratorError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    return bool(request.param)


def test_a_batch_is_halved_only_for_an_error_that_does_not_last(
    lasts: bool, calls: list[str], fails: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    plan = world.scheduler.plan()
    assert plan is not None
    work = world.scheduler.commit(plan)
    monkeypatch.setattr(PagedModel, "forward", fails)
    if lasts:
        with pytest.raises(DeviceLostError, match=r"^cpu can compute nothing .* memory access$"):
            run_isolated(world.runner, work)
        assert len(calls) == 1
    else:
        assert len(run_isolated(world.runner, work).failed) == len(work.rows) == 4
        assert len(calls) == 7


@pytest.mark.parametrize("place", ["launch", "collect", "copy"])
def test_every_way_to_the_device_tells_that_it_is_lost(
    place: str, lasts: bool, fails: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    kind = DeviceLostError if lasts else torch.AcceleratorError
    if place == "launch":
        monkeypatch.setattr(PagedModel, "forward", fails)
        with pytest.raises(kind):
            world.launch()
    elif place == "collect":
        world.launch()
        monkeypatch.setattr(TokenReadback, "wait", fails)
        with pytest.raises(kind):
            world.collect()
    else:
        monkeypatch.setattr(CacheStorage, "copy", fails)
        with pytest.raises(kind):
            world.runner.copy(Work(0))
