"""Plant one-line bugs over all packages, one at a time, each in a copy of the repository; the unit
tests that are named with a bug must catch it.

    .venv/bin/python scripts/plant_package_bugs.py [--jobs 2] [--only NAME] [--one-in N]

Exit code: 0 if every bug was caught but those whose table names a reason, 1 if one was missed, 2
if the text of a bug does not occur exactly once in its file or the tests fail without a bug.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from planted import kernels_table, operator_table, runtime_table
from planted.bug import PackageBug

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("operator", "runtime", "kernels")
FOLDERS = (*PACKAGES, "tests", "scripts", "benchmarks", "crds", "charts", "docs", "examples")
SECONDS = 300  # after which a run that hangs counts as caught

BUGS: tuple[PackageBug, ...] = (
    *operator_table.BUGS,
    *runtime_table.BUGS,
    *kernels_table.BUGS,
)

RUN = """
import pathlib, sys
import fairlead_kernels, fairlead_operator, fairlead_runtime, pytest
here = pathlib.Path(sys.argv[1])
for module in (fairlead_kernels, fairlead_operator, fairlead_runtime):
    if here not in pathlib.Path(module.__file__).parents:
        sys.exit(f"{module.__file__} is not in the copy")
sys.exit(pytest.main(["-q", "-x", "--no-header", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


class Verdict(NamedTuple):
    bug: PackageBug
    caught: bool
    how: str
    seconds: float


def mismatches(bugs: Iterable[PackageBug] = BUGS) -> list[str]:
    """Bugs whose text does not occur exactly once in its file: they would prove nothing."""
    errors = []
    for bug in bugs:
        path = ROOT / bug.file
        count = path.read_text().count(bug.old) if path.is_file() else 0
        if count != 1:
            errors.append(f"{bug.name}: {bug.file} contains {bug.old!r} {count} times, not once")
        errors += [
            f"{bug.name}: tests/unit/{test} does not exist"
            for test in bug.tests
            if not (ROOT / "tests" / "unit" / test).is_file()
        ]
    return errors


def copy_to(folder: Path) -> None:
    """The repository's files that tests read, without caches."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, folder)


def run_tests(copy: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the tests of a copy on the packages of that copy. Raises TimeoutExpired."""
    paths = os.pathsep.join(str(copy / name) for name in PACKAGES)
    return subprocess.run(
        [sys.executable, "-c", RUN, str(copy), *(f"tests/unit/{test}" for test in tests)],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )


def hunt(bug: PackageBug, copy: Path) -> Verdict:
    """Plant the bug in the copy, run its tests and take the bug out again."""
    started = time.monotonic()
    target = copy / bug.file
    source = target.read_text()
    target.write_text(source.replace(bug.old, bug.new))
    try:
        done = run_tests(copy, bug.tests)
    except subprocess.TimeoutExpired:
        return Verdict(bug, True, "a test hung", time.monotonic() - started)
    finally:
        target.write_text(source)
    # 1: a test failed; 2: a test file could not be imported. Others: the run itself broke.
    if done.returncode not in {0, 1, 2}:
        raise RuntimeError(f"{bug.name}: {(done.stdout + done.stderr)[-2000:]}")
    return Verdict(bug, done.returncode != 0, _first_failure(done.stdout), _since(started))


def _since(started: float) -> float:
    return time.monotonic() - started


def _first_failure(output: str) -> str:
    lines = (line for line in output.splitlines() if line.startswith(("FAILED", "ERROR ")))
    return next(lines, "").partition(" ")[2].partition(" - ")[0].removeprefix("tests/unit/")


def hunt_all(bugs: Sequence[PackageBug], jobs: int) -> list[Verdict]:
    """Every bug's verdict; each job has a copy of its own. Raises RuntimeError when the tests fail
    without a bug.
    """
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def hunt_in_a_copy(bug: PackageBug) -> Verdict:
        copy = copies.get()
        try:
            return hunt(bug, copy)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        for index in range(jobs):
            copy = Path(name).resolve() / str(index)
            copy.mkdir()
            copy_to(copy)
            copies.put(copy)
        clean = copies.get()
        without = run_tests(clean, sorted({test for bug in bugs for test in bug.tests}))
        copies.put(clean)
        if without.returncode != 0:
            raise RuntimeError(f"the tests fail without a bug:\n{without.stdout[-3000:]}")
        return list(pool.map(hunt_in_a_copy, bugs))


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant bugs in all packages; tests catch them.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="bugs whose name or file contains this")
    parser.add_argument("--one-in", type=int, default=1, help="take every n-th bug only")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if options.only in bug.name or options.only in bug.file]
    if errors := mismatches(bugs):
        print("\n".join(errors), file=sys.stderr)
        return 2
    try:
        verdicts = hunt_all(bugs[:: options.one_in], options.jobs)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    for verdict in verdicts:
        print(
            f"{'caught' if verdict.caught else 'MISSED':<7} {verdict.seconds:5.1f} s  "
            f"{verdict.bug.name:<60} {verdict.bug.missed or verdict.how}"
        )
    caught = sum(verdict.caught for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} planted bugs caught")
    return 1 if any(not v.caught and not v.bug.missed for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
