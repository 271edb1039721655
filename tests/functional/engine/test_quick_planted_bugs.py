"""Bugs planted in the sequence table, graphs, asynchronous steps and offload are caught in every
run of the suite, each by the one quick test that is named with it.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import plant_package_bugs
from planted.bug import PackageBug
from planted.copies import Copy
from planted.forked import SECONDS, Selection, why_missed

BUGS = [bug for bug in plant_package_bugs.BUGS if bug.quick]
AREAS = {
    "sequence table": {
        "fairlead_runtime.device.model.batch",
        "fairlead_runtime.device.model.table_rows",
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
        "fairlead_runtime.scheduling.reservations",
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
TEST = "unit/device/test_graphs.py::test_a_graph_that_is_replayed_is_in_use"
HARMLESS = PackageBug(
    "nothing",
    "fairlead_runtime.device.step.graph_cache:",
    LINE,
    f"{LINE}# nothing\n",
    (TEST,),
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    with Copy(tmp_path_factory.mktemp("copy")) as made:
        yield made


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: PackageBug, copy: Copy) -> None:
    tests = Selection((bug.quick_test,))
    with copy.planted(bug):
        missed = why_missed(tests, copy.forks.run(tests))
    assert not missed, f"MISSED: {bug.name} ({bug.file}): {missed}"


def test_without_a_bug_the_same_tests_pass(copy: Copy) -> None:
    tests = sorted({bug.quick_test for bug in BUGS})
    answer = copy.forks.run(Selection(tests))
    assert answer.ended, answer.output
    assert answer.failed == answer.broken == {}
    assert sorted(answer.passed) == tests


def test_each_area_has_its_bugs() -> None:
    planted = [bug.place.partition(":")[0] for bug in BUGS]
    counts = {area: sum(module in modules for module in planted) for area, modules in AREAS.items()}
    assert sum(counts.values()) == len(BUGS) >= 40
    assert min(counts.values()) >= 10, counts


@pytest.mark.parametrize(
    ("bug", "seconds", "why"),
    [
        (HARMLESS, SECONDS, "in_use passed"),
        (HARMLESS._replace(new=f"{LINE}raise ImportError\n"), SECONDS, "broken: .*ImportError"),
        (HARMLESS._replace(new=f"{LINE}else:\n"), SECONDS, "broken: .*SyntaxError"),
        (
            HARMLESS._replace(tests=("unit/device/test_graphs.py::test_none",)),
            SECONDS,
            "test_none did not",
        ),
        (HARMLESS._replace(new="import os; os.abort()\n"), SECONDS, "the fork died"),
        (HARMLESS._replace(new="import time; time.sleep(1e6)\n"), 3.0, "no end within 3 s"),
    ],
)
def test_what_proves_nothing_has_caught_nothing(
    bug: PackageBug, seconds: float, why: str, copy: Copy
) -> None:
    tests = Selection(bug.tests, seconds)
    with copy.planted(bug):
        missed = why_missed(tests, copy.forks.run(tests))
    assert re.search(why, missed, re.DOTALL), missed
