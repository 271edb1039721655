"""Bugs planted in the sequence table, graphs, asynchronous steps and offload are caught in every
run of the suite, each by the one quick test that is named with it.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import plant_package_bugs
from planted.bug import PackageBug
from planted.forked import Change, Forks, why_missed

BUGS = [bug for bug in plant_package_bugs.BUGS if bug.quick]
AREAS = {
    "sequence table": {
        "fairlead_runtime.device.sampling.sequence_table",
        "fairlead_runtime.device.sampling.sequence_row",
        "fairlead_runtime.device.sampling.logit_edits",
        "fairlead_runtime.device.sampling.sampling_mode",
    },
    "graphs": {
        "fairlead_runtime.device.warmup.decode_plan",
        "fairlead_runtime.device.step.graph_cache",
        "fairlead_runtime.device.step.cuda_graphs",
        "fairlead_runtime.device.step.decode_steps",
    },
    "asynchronous steps": {
        "fairlead_runtime.engine.pipeline",
        "fairlead_runtime.scheduling.planner",
        "fairlead_runtime.device.step.model_runner",
        "fairlead_runtime.device.step.mixed_steps",
        "fairlead_runtime.device.step.pending_step",
        "fairlead_runtime.device.sampling.mask_upload",
        "fairlead_runtime.device.sampling.device_sampler",
        "fairlead_runtime.device.sampling.token_readback",
    },
    "offload": {
        "fairlead_runtime.device.memory.offloading",
        "fairlead_runtime.device.memory.host_memory",
        "fairlead_runtime.device.memory.storage",
        "fairlead_runtime.device.memory.streams",
    },
}
LINE = "from collections import OrderedDict\n"  # of the module below
HARMLESS = Change(
    ("unit/device/test_graphs.py::test_a_graph_that_is_replayed_is_in_use",),
    "fairlead_runtime.device.step.graph_cache:",
    LINE,
    f"{LINE}# nothing\n",
)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as started:
        yield started


def change_of(bug: PackageBug) -> Change:
    return Change((bug.quick_test,), bug.place, bug.old, bug.new)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: PackageBug, forks: Forks) -> None:
    change = change_of(bug)
    missed = why_missed(change, forks.run(change))
    assert not missed, f"MISSED: {bug.name} ({bug.file}): {missed}"


def test_without_a_bug_the_same_tests_pass(forks: Forks) -> None:
    tests = sorted({bug.quick_test for bug in BUGS})
    answer = forks.run(Change(tuple(tests)))
    assert answer.ended, answer.output
    assert answer.failed == answer.broken == {}
    assert sorted(answer.passed) == tests


def test_each_area_has_its_bugs() -> None:
    planted = [bug.place.partition(":")[0] for bug in BUGS]
    counts = {area: sum(module in modules for module in planted) for area, modules in AREAS.items()}
    assert sum(counts.values()) == len(BUGS) >= 40
    assert min(counts.values()) >= 10, counts


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (HARMLESS, "in_use passed"),
        (replace(HARMLESS, new=f"{LINE}raise ImportError\n"), "broken: .*ImportError"),
        (replace(HARMLESS, new=f"{LINE}else:\n"), "died: .*SyntaxError"),
        (replace(HARMLESS, old="a line of no file"), "died: .*AnchorError"),
        (replace(HARMLESS, tests=("unit/device/test_graphs.py::test_none",)), "test_none did not"),
        (
            replace(
                HARMLESS,
                place="fairlead_runtime.device.proof.selftest:",
                old="import math\n",
                new="\n",
            ),
            "not import",
        ),
        (replace(HARMLESS, new="import time; time.sleep(1e6)\n", seconds=3.0), "no end within 3 s"),
    ],
)
def test_what_proves_nothing_has_caught_nothing(change: Change, why: str, forks: Forks) -> None:
    missed = why_missed(change, forks.run(change))
    assert re.search(why, missed, re.DOTALL), missed
