"""The whole-run property catches planted bugs, one at a time, in a copy of the source."""

import fcntl
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import plant_bugs
import plant_package_bugs
from planted.bug import PackageBug
from planted.copies import Copy
from planted.hunting import Outcome, Run, Runs, Verdict, exit_code

# Each bug is caught within this many seeds; the script tries more by default.
SEEDS = 40


def test_the_property_holds_on_a_copy_without_a_bug() -> None:
    pool = "fairlead_runtime.cache.blocks:BlockPool"
    nothing = plant_bugs.Bug("nothing", pool, "class BlockPool", "class BlockPool")
    verdict = plant_bugs.hunt(nothing, 5, Runs())
    assert verdict.outcome is Outcome.MISSED, verdict.how


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    runs = Runs()
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda bug: plant_bugs.hunt(bug, SEEDS, runs), plant_bugs.BUGS)
        return {verdict.name: verdict for verdict in found}


@pytest.mark.parametrize("name", [bug.name for bug in plant_bugs.BUGS])
def test_a_planted_bug_is_caught(name: str, verdicts: dict[str, Verdict]) -> None:
    assert verdicts[name].caught, verdicts[name].how


def test_a_run_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    shell = f"exec 9>{lock}; flock 9; sleep 600 & wait"  # the child holds the lock, too
    assert Runs().run(["bash", "-c", shell], tmp_path, {}, 1.0).code is None
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_each_end_of_a_run_has_its_outcome(tmp_path: Path) -> None:
    module = tmp_path / "runtime" / "pkg" / "module.py"
    module.parent.mkdir(parents=True)
    module.write_text("one\n")
    bug = PackageBug("name", "pkg.module:", "one", "two", ("unit/test_module.py",))

    planted = module

    class Ends(Runs):
        def __init__(self, code: int | None, summary: str) -> None:
            super().__init__()
            self.code, self.summary = code, summary

        def run(
            self, command: Sequence[str], folder: Path, environ: Mapping[str, str], seconds: float
        ) -> Run:
            assert planted.read_text() == "two\n"
            assert command[-1] == "tests/unit/test_module.py"
            return Run(self.code, f"{self.summary}\nFAILED tests/unit/test_module.py::test - why")

    def judge(bug: PackageBug, code: int | None, summary: str = "1 passed") -> Verdict:
        ends = plant_package_bugs.judge(bug, Copy(tmp_path), Ends(code, summary), 1.0)
        return Verdict(bug.name, "runtime", *ends, 0.0)

    verdicts = {code: judge(bug, code) for code in (0, 1, 2, 5, -11, None)}
    assert {code: one.outcome for code, one in verdicts.items()} == {
        0: Outcome.MISSED,
        1: Outcome.CAUGHT,
        2: Outcome.CAUGHT,
        5: Outcome.BROKE,
        -11: Outcome.BROKE,
        None: Outcome.CAUGHT,
    }
    assert verdicts[1].how == "unit/test_module.py::test"
    assert judge(bug, 0, "2 skipped").outcome is Outcome.BROKE
    excused = judge(bug._replace(missed="why"), 0)
    assert (excused.outcome, excused.how) == (Outcome.EXCUSED, "why")
    assert exit_code([verdicts[1], excused]) == 0
    assert exit_code([verdicts[1], verdicts[0]]) == 1
    assert exit_code([verdicts[5], verdicts[0]]) == 2
    assert module.read_text() == "one\n"
    planted = module.with_suffix(".cpp")
    planted.write_text("one\n")
    crash = judge(bug._replace(place="runtime/pkg/module.cpp"), -11)
    assert (crash.outcome, crash.how) == (Outcome.CAUGHT, "its tests crash")
