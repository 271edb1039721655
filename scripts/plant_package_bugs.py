"""Plant one-line bugs over all packages, one at a time, each in a copy of the repository; the
tests that are named with a bug must catch it.

    .venv/bin/python scripts/plant_package_bugs.py [--jobs 2] [--only NAME] [--one-in N]

Exit code: 0 if every bug was caught but those whose table names a reason, 1 if one was missed, 2
if the text of a bug does not occur exactly once in its place, the tests fail without a bug, or a
run broke.
"""

import argparse
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planted import anchor, gpu_table, hostile_table, kernels_table, operator_table, runtime_table
from planted.bug import PackageBug
from planted.hunting import (
    Outcome,
    Run,
    Runs,
    Verdict,
    end_on_sigterm,
    exit_code,
    hunt_all,
)

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("operator", "runtime", "kernels")
FOLDERS = (*PACKAGES, "tests", "scripts", "benchmarks", "crds", "charts", "docs", "examples")

SECONDS = 600.0  # for one test file without a bug
HANGS = 10  # times what the tests take without a bug: then a test hangs, on a busy machine too

BUGS: tuple[PackageBug, ...] = (
    *operator_table.BUGS,
    *runtime_table.BUGS,
    *hostile_table.BUGS,
    *kernels_table.BUGS,
    *gpu_table.BUGS,
)

RUN = """
import pathlib, sys
import fairlead_kernels, fairlead_operator, fairlead_runtime, pytest
here = pathlib.Path(sys.argv[1])
for module in (fairlead_kernels, fairlead_operator, fairlead_runtime):
    if here not in pathlib.Path(module.__file__).parents:
        sys.exit(f"{module.__file__} is not in the copy")
from fairlead_kernels.cpu import library, sources
built = library.FOLDER / "baseline.so"
if built.exists() and sources.hash_sources(library.SOURCES).encode() not in built.read_bytes():
    # The bug is in C++: one instruction set is enough to find it. What VNNI and AMX compute has
    # tests of its own, and here AMX is emulated.
    import hatch_build
    digits = any("test_cpu_digits" in test for test in sys.argv)
    names = ("avx512", "baseline") if digits else ("baseline",)
    hatch_build.INSTRUCTION_SETS = {name: hatch_build.INSTRUCTION_SETS[name] for name in names}
    wanted = ("avx512+amx", "avx512+vnni", "baseline") if digits else ("baseline",)
    library.INSTRUCTION_SETS = wanted
    try:
        hatch_build.compile_all(library.FOLDER, ["-DFAIRLEAD_AMX_EMULATED"] if digits else [])
    except hatch_build.NotBuiltError as error:
        print(error)
        sys.exit(3)
sys.exit(pytest.main(["-q", "-x", "--no-header", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def mismatches(bugs: Iterable[PackageBug] = BUGS) -> list[str]:
    """Bugs that would prove nothing: their text or a test is not where they say."""
    bugs = list(bugs)
    return anchor.mismatches(bugs) + [
        f"{bug.name}: tests/{test} does not exist"
        for bug in bugs
        for test in bug.tests
        if not (ROOT / "tests" / test).is_file()
    ]


def copy_to(folder: Path) -> None:
    """The repository's files that tests read, with their byte code, and no other cache."""
    ignored = shutil.ignore_patterns(".*")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, folder)


def run_tests(copy: Path, tests: Sequence[str], runs: Runs, seconds: float) -> Run:
    """Run tests of a copy on the packages of that copy, until one fails or for ``seconds``."""
    paths = os.pathsep.join(str(copy / name) for name in PACKAGES)
    command = [sys.executable, "-c", RUN, str(copy), *(f"tests/{test}" for test in tests)]
    return runs.run(command, copy, {"PYTHONPATH": paths}, seconds)


def hunt(bug: PackageBug, copy: Path, runs: Runs, seconds: float) -> Verdict:
    """Plant the bug in the copy, run its tests and take the bug out again. A test that hangs with
    the bug has caught it, and so has one that a bug in C++ crashes.
    """
    began = time.monotonic()
    planted = anchor.plant(bug.place, bug.old, bug.new, copy)
    target = copy / planted.file
    source = target.read_text()
    target.write_text(planted.text)
    try:
        code, output = run_tests(copy, bug.tests, runs, seconds)
    finally:
        target.write_text(source)
    native = target.suffix in (".cpp", ".h")
    if native and code in (-signal.SIGSEGV, -signal.SIGABRT):
        code, output = 1, "FAILED its tests crash"
    outcome, how = {
        0: (Outcome.EXCUSED, bug.missed) if bug.missed else (Outcome.MISSED, "its tests pass"),
        1: (Outcome.CAUGHT, _first_failure(output)),
        2: (Outcome.CAUGHT, f"a test file cannot be imported {_first_failure(output)}"),
        None: (Outcome.CAUGHT, f"no end within {seconds:.0f} s"),
    }.get(code, (Outcome.BROKE, output[-2000:]))
    package = planted.file.partition("/")[0]
    return Verdict(bug.name, package, outcome, how, time.monotonic() - began)


def _first_failure(output: str) -> str:
    lines = (line for line in output.splitlines() if line.startswith(("FAILED", "ERROR ")))
    return next(lines, "").partition(" ")[2].partition(" - ")[0].removeprefix("tests/")


def hunt_in_copies(bugs: Sequence[PackageBug], jobs: int) -> list[Verdict]:
    """Every bug's verdict; each job has a copy of its own. Raises RuntimeError when the tests fail
    without a bug.
    """
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    runs = Runs()

    def hunt_in_a_copy(bug: PackageBug) -> Verdict:
        copy = copies.get()
        try:
            return hunt(bug, copy, runs, HANGS * sum(without[test] for test in bug.tests))
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory() as name:
        for index in range(jobs):
            copy = Path(name).resolve() / str(index)
            copy.mkdir()
            copy_to(copy)
            copies.put(copy)
        without = seconds_without_a_bug(bugs, copy, jobs, runs)
        return hunt_all(bugs, hunt_in_a_copy, jobs, runs)


def seconds_without_a_bug(
    bugs: Iterable[PackageBug], copy: Path, jobs: int, runs: Runs
) -> dict[str, float]:
    """What each test file takes on this machine now. Raises RuntimeError when one fails."""

    def measure(test: str) -> float:
        began = time.monotonic()
        code, output = run_tests(copy, [test], runs, SECONDS)
        if code != 0:
            raise RuntimeError(f"{test} ends with {code} without a bug:\n{output[-3000:]}")
        return time.monotonic() - began

    tests = sorted({test for bug in bugs for test in bug.tests})
    print(f"{len(tests)} test files without a bug first", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(tests, pool.map(measure, tests), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant bugs in all packages; tests catch them.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="bugs of which name, place or a test has this")
    parser.add_argument("--one-in", type=int, default=1, help="take every n-th bug only")
    options = parser.parse_args()
    bugs = [
        bug
        for bug in BUGS
        if any(options.only in text for text in (bug.name, bug.place, *bug.tests))
    ]
    if errors := mismatches(bugs):
        print("\n".join(errors), file=sys.stderr)
        return 2
    end_on_sigterm()
    try:
        return exit_code(hunt_in_copies(bugs[:: options.one_in], options.jobs))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
