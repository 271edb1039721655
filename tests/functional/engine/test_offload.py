"""What is offloaded comes back exactly, whatever the order in which a GPU's two streams run: greedy
text equals transformers', token for token.

On the stand-ins of streams, of flashinfer's wrappers and of graphs. That steps in flight, stops and
clients that leave change nothing beside it: test_asynchronous_steps.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairlead_runtime.device.step.model_runner import ModelRunner
from fairlead_runtime.engine.isolate import run_isolated
from fairlead_runtime.scheduling.plan import Event, Result, Work
from fairlead_runtime.scheduling.scheduler import Scheduler
from support.engine_rig import FP8_CACHE, Rig, Setting, greedy, prompts, rig, run_to_end
from support.full import LONG_FORM

LENGTHS, SHARED, NEW = (9, 21, 17, 13), 6, 32
# Tokens of a cache in which one sequence fits, and two do not.
SMALL = 56
SCARCE = Setting(block_size=4, chunk=32, num_blocks=SMALL // 4, offload=True, sharing=False)
SIDES = [0, pytest.param(1, marks=pytest.mark.full)]
SETTINGS = st.builds(
    lambda block_size, tokens, **more: replace(
        SCARCE, block_size=block_size, num_blocks=tokens // block_size, **more
    ),
    block_size=st.sampled_from((4, 8)),
    tokens=st.sampled_from((SMALL, SMALL + 16)),
    chunk=st.sampled_from((16, 64)),
    sharing=st.booleans(),
    max_requests=st.sampled_from((3, 16)),
    graphs=st.sampled_from((2, 32)),
    side=st.integers(0, 1 << 16),
)


def requests(family: str, n: int) -> list[tuple[int, Any]]:
    given_prompts = prompts(len(family), LENGTHS, SHARED)
    return [(0, greedy(str(i), p, NEW, n=n)) for i, p in enumerate(given_prompts)]


def offloads(
    engine: Rig,
    setting: Setting,
    n: int = 1,
    runner: Any = None,
    kind: type[Scheduler] = Scheduler,
) -> int:
    """Compare every text with transformers'; how many sequences went to host memory."""
    arrivals = requests(engine.family, n)
    scheduler = kind(setting.limits(len(engine.groups)), engine.groups, b"rig")
    outcome = run_to_end(scheduler, runner or engine.runner(setting), arrivals)
    for _, one in arrivals:
        for choice in range(n):
            assert outcome.texts[one.id, choice] == engine.reference(one.prompt, NEW)
    assert outcome.stats is not None
    return outcome.stats.offloads


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("llama", "graphs"),
        pytest.param("gemma2", "graphs", marks=pytest.mark.full),
        ("mistral", "flashinfer"),
        pytest.param("gpt2", "layers", marks=pytest.mark.full),
    ],
)
def test_text_is_that_of_transformers_in_any_order_of_two_streams(
    family: str, kernels: str
) -> None:
    gone = 0

    @settings(max_examples=60 if LONG_FORM else 4, deadline=None, derandomize=not LONG_FORM)
    @given(setting=SETTINGS, n=st.sampled_from((1, 1, 2)))
    @example(setting=SCARCE, n=2)
    def any_setting(setting: Setting, n: int) -> None:
        nonlocal gone
        gone += offloads(rig(family, kernels), setting, n)

    any_setting()
    assert gone > 2


class ResetScheduler(Scheduler):
    """Its prefix cache is reset after every step."""

    evicted = 0

    def update(self, work: Work, results: Mapping[int, Result]) -> list[Event]:
        events = super().update(work, results)
        type(self).evicted += self.reset_cache()
        return events


def test_resets_of_the_prefix_cache_leave_running_and_offloaded_text_as_it_is() -> None:
    setting, evicted = replace(SCARCE, sharing=True), ResetScheduler.evicted
    assert offloads(rig("llama", "graphs"), setting, 2, kind=ResetScheduler) > 0
    assert ResetScheduler.evicted > evicted


@pytest.mark.parametrize("side", SIDES)
def test_each_rank_of_a_split_model_offloads_its_own(side: int) -> None:
    assert offloads(rig("llama", "ranks"), replace(SCARCE, side=side)) > 0


@pytest.mark.parametrize("side", SIDES)
def test_an_fp8_cache_keeps_its_bytes(side: int) -> None:
    assert offloads(rig("llama", FP8_CACHE + "graphs"), replace(SCARCE, side=side)) > 0


class HalvingRunner:
    """The device of an engine on which no batch of several rows succeeds: each step is halved until
    it does.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.copies = self.failures = 0

    def copy(self, work: Work) -> None:
        self.copies += bool(work.offload or work.restore)
        self._runner.copy(work)

    def execute(self, work: Work) -> Mapping[int, Result]:
        outcome = run_isolated(_Alone(self, self._runner), work)
        assert not outcome.failed
        return outcome.results


class _Alone:
    def __init__(self, owner: HalvingRunner, runner: ModelRunner) -> None:
        self._owner = owner
        self._runner = runner

    def copy(self, work: Work) -> None:
        raise AssertionError("copies are made once")

    def execute(self, work: Work) -> Mapping[int, Result]:
        results = self._runner.execute(work)
        if len(work.rows) > 1:
            self._owner.failures += 1
            raise RuntimeError("planted")
        return results


def test_a_step_that_is_halved_copies_once() -> None:
    """Its rows run again and find what its copies left."""
    engine = rig("llama", "graphs")
    setting = replace(SCARCE, graphs=0)
    device = HalvingRunner(engine.runner(setting))
    assert offloads(engine, setting, runner=device) > 0
    assert device.copies > 1
    assert device.failures > 10
