"""Plant one-line bugs over all packages, one at a time, each in a copy of the repository; the
tests that are named with a bug must catch it.

    .venv/bin/python scripts/plant_package_bugs.py [--jobs 2] [--only NAME] [--new] [--one-in N]

A bug is caught by a test that passes without it and fails with it, in a fork of a process that has
the libraries imported: first the test that caught it last (``planted/catching_tests.json``, which
is written here), then those with a name like the bug's, those that caught others, and whole files
until one fails. Where no fork shows it, the files run in a process of their own, and that is the
verdict.

Exit code: 0 if every bug was caught but those whose table names a reason, 1 if one was missed, 2
if the text of a bug does not occur exactly once in its place, the tests fail without a bug, or a
run broke.
"""

import argparse
import ast
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from planted import (
    anchor,
    gpu_table,
    hostile_table,
    kernels_table,
    operator_table,
    runtime_table,
    snapshots_table,
    states_table,
    terminal_table,
)
from planted.bug import PackageBug
from planted.copies import Copy
from planted.forked import PACKAGES, Answer, Selection
from planted.hunting import (
    Outcome,
    Run,
    Runs,
    Verdict,
    end_on_sigterm,
    exit_code,
    hunt_all,
)
from planted.native import BASELINE, DIGITS, SUFFIXES, Build

from fairlead_kernels.cpu import compilation

ROOT = Path(__file__).resolve().parents[1]
CATCHING = Path(__file__).parent / "planted" / "catching_tests.json"

SECONDS = 600.0  # for one test file without a bug
HANGS = 10  # times what the tests take without a bug: then a test hangs, on a busy machine too
LEAST = 30.0  # seconds after which a test may hang: what it imports takes some, too
NEAREST = 6  # tests that are tried by their names

BUGS: tuple[PackageBug, ...] = (
    *operator_table.BUGS,
    *runtime_table.BUGS,
    *states_table.BUGS,
    *hostile_table.BUGS,
    *kernels_table.BUGS,
    *gpu_table.BUGS,
    *snapshots_table.BUGS,
    *terminal_table.BUGS,
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


def mismatches(bugs: Iterable[PackageBug] = BUGS) -> list[str]:
    """Bugs that would prove nothing: their text or a test is not where they say."""
    bugs = list(bugs)
    return anchor.mismatches(bugs) + [
        f"{bug.name}: tests/{test} does not exist"
        for bug in bugs
        for test in bug.tests
        if not (ROOT / "tests" / test).is_file()
    ]


def build_of(bug: PackageBug) -> Build | None:
    """What has to be compiled for the bug, and for its tests."""
    if any("test_cpu_digits" in test or "test_cpu_pairs" in test for test in bug.tests):
        return DIGITS
    return BASELINE if bug.place.endswith(SUFFIXES) else None


def nearest_tests(bug: PackageBug, folder: Path) -> list[str]:
    """The tests of the bug's files whose names share most words with the bug's, of those that share
    any; ``folder``: of all tests.
    """

    def words(text: str) -> set[str]:  # without their endings: a row is caught in rows
        return {word.rstrip("s")[:5] for word in re.findall("[a-z0-9]{3,}", text.lower())}

    common = {
        f"{file}::{node.name}": len(words(bug.name) & words(node.name.removeprefix("test_")))
        for file in bug.tests
        for node in ast.parse((folder / file).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }
    ordered = sorted(filter(common.get, common), key=lambda test: -common[test])
    return ordered[:NEAREST]


class CatchingTests:
    """The test that caught each bug last, kept in a file. A bug's quick test needs no file."""

    def __init__(self, file: Path = CATCHING) -> None:
        self._file = file
        self._tests: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
        self._lock = threading.Lock()

    def get(self, bug: PackageBug) -> str:
        """Empty where none is known, or the bug's files are others by now."""
        test = bug.quick_test if bug.quick else self._tests.get(bug.name, "")
        return test if test.partition("::")[0] in bug.tests else ""

    def of(self, files: Sequence[str]) -> list[str]:
        """The tests of these files that have caught a bug: they catch the next, too, more often
        than others.
        """
        with self._lock:
            tests = set(self._tests.values())
        return sorted(test for test in tests if test.partition("::")[0] in files)

    def put(self, bug: PackageBug, test: str) -> None:
        with self._lock:
            if self.get(bug) == test:
                return
            names = {bug.name for bug in BUGS}
            tests = {**self._tests, bug.name: test}
            self._tests = {name: tests[name] for name in sorted(tests) if name in names}
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(self._tests, indent=1, ensure_ascii=False) + "\n")
            partial.replace(self._file)


class Hunter:
    """Hunts one bug after the other, and knows what tests take without a bug."""

    def __init__(self, bugs: Sequence[PackageBug], runs: Runs, catching: CatchingTests) -> None:
        self._bugs, self._runs, self._catching = bugs, runs, catching
        # In the copies with each build.
        self._seconds: dict[tuple[Build | None, str], float | None] = {}
        self._file_seconds: dict[tuple[Build | None, str], float] = {}

    def hunt(self, bug: PackageBug, copy: Copy) -> Verdict:
        """Plant the bug in the copy, find a test that catches it and take the bug out again.
        Raises RuntimeError when the tests fail without a bug.
        """
        began = time.monotonic()
        try:
            test = self._caught_by(bug, copy)
            if test:
                self._catching.put(bug, test)
                outcome, how = Outcome.CAUGHT, test
            else:
                seconds = sum(self._seconds_of_file(test, copy) for test in bug.tests)
                outcome, how = judge(bug, copy, self._runs, HANGS * seconds)
        except compilation.NotBuiltError as error:
            outcome, how = Outcome.BROKE, str(error)
        package = anchor.file_of(bug.place, copy.folder).partition("/")[0]
        return Verdict(bug.name, package, outcome, how, time.monotonic() - began)

    def _caught_by(self, bug: PackageBug, copy: Copy) -> str:
        """A test that catches the bug in a fork; empty where none does."""
        known = self._catching.get(bug)
        if known and self._catches(known, bug, copy):
            return known
        others = [test for test in self._catching.of(bug.tests) if test != known]
        nearest = nearest_tests(bug, copy.folder / "tests")
        for tests in filter(None, (nearest, others, bug.tests)):
            with copy.planted(bug):
                answer = copy.forks.run(Selection(tests, until_failure=True))
            dead = "" if answer.ended else answer.running
            test = next(iter([*answer.failed, *answer.broken, dead]), "")
            if test and test != known and self._catches(test, bug, copy):
                return test
        return ""

    def _catches(self, test: str, bug: PackageBug, copy: Copy) -> bool:
        seconds = self._seconds_of(test, copy)
        if seconds is None:
            return False
        with copy.planted(bug):
            answer = copy.forks.run(Selection([test], max(LEAST, HANGS * seconds)))
        if answer.ended or answer.failed or answer.broken:
            return bool(answer.failed or answer.broken)
        # A test that hangs has caught the bug, and so has one that a bug in C++ crashes.
        native = bug.place.endswith(SUFFIXES)
        return not answer.signal or (native and answer.signal in (signal.SIGSEGV, signal.SIGABRT))

    def _seconds_of(self, test: str, copy: Copy) -> float | None:
        """What a test takes in a fork without a bug; None where it does not pass there. The
        others of its file that will be asked for are run with it.
        """
        build, file = copy.build, test.partition("::")[0]
        if (build, test) not in self._seconds:
            known = {self._catching.get(bug) for bug in self._bugs if build_of(bug) == build}
            group = {
                other
                for other in known
                if other.partition("::")[0] == file and (build, other) not in self._seconds
            }
            group = {test} if file == test else {test, *group}
            answer = copy.forks.run(Selection(sorted(group), SECONDS))
            if len(group) > 1 and not answer.passed:  # one that is gone keeps all from running
                group = {test}
                answer = copy.forks.run(Selection([test], SECONDS))
            for each in group:
                self._seconds[build, each] = _seconds_in(answer, each)
        return self._seconds[build, test]

    def _seconds_of_file(self, test: str, copy: Copy) -> float:
        """What a test file takes in a process without a bug. Raises RuntimeError when it fails."""
        if (copy.build, test) not in self._file_seconds:
            began = time.monotonic()
            code, output = run_tests(copy.folder, [test], self._runs, SECONDS)
            if code != 0:
                raise RuntimeError(f"{test} ends with {code} without a bug:\n{output[-3000:]}")
            self._file_seconds[copy.build, test] = time.monotonic() - began
        return self._file_seconds[copy.build, test]


def _seconds_in(answer: Answer, test: str) -> float | None:
    if "::" in test:
        return None if test in answer.broken else answer.passed.get(test)
    if answer.failed or answer.broken or not answer.ended:
        return None
    return sum(answer.passed.values())


def run_tests(copy: Path, tests: Sequence[str], runs: Runs, seconds: float) -> Run:
    """Run tests of a copy on the packages of that copy, until one fails or for ``seconds``."""
    paths = os.pathsep.join(str(copy / name) for name in PACKAGES)
    command = [sys.executable, "-c", RUN, str(copy), *(f"tests/{test}" for test in tests)]
    return runs.run(command, copy, {"PYTHONPATH": paths}, seconds)


def judge(bug: PackageBug, copy: Copy, runs: Runs, seconds: float) -> tuple[Outcome, str]:
    """Run the bug's files in a process until one fails: what came of it, and how. Files that hang
    with the bug have caught it, and so have files that a bug in C++ crashes.
    """
    with copy.planted(bug):
        code, output = run_tests(copy.folder, bug.tests, runs, seconds)
    native = bug.place.endswith(SUFFIXES)
    if native and code in (-signal.SIGSEGV, -signal.SIGABRT):
        code, output = 1, "FAILED its tests crash"
    if code == 0 and not re.search(r"\d passed", output):
        return Outcome.BROKE, f"none of its tests runs here: {output[-2000:]}"
    return {
        0: (Outcome.EXCUSED, bug.missed) if bug.missed else (Outcome.MISSED, "its tests pass"),
        1: (Outcome.CAUGHT, _first_failure(output)),
        2: (Outcome.CAUGHT, f"a test file cannot be imported {_first_failure(output)}"),
        None: (Outcome.CAUGHT, f"no end within {seconds:.0f} s"),
    }.get(code, (Outcome.BROKE, output[-2000:]))


def _first_failure(output: str) -> str:
    lines = (line for line in output.splitlines() if line.startswith(("FAILED", "ERROR ")))
    return next(lines, "").partition(" ")[2].partition(" - ")[0].removeprefix("tests/")


def hunt_in_copies(bugs: Sequence[PackageBug], jobs: int) -> list[Verdict]:
    """Every bug's verdict; each job has copies of its own, one for each build. Raises RuntimeError
    when the tests fail without a bug.
    """
    copies: list[Copy] = []
    idle: defaultdict[Build | None, list[Copy]] = defaultdict(list)
    runs = Runs()
    hunter = Hunter(bugs, runs, CatchingTests())

    def end() -> None:
        runs.end()
        for copy in copies:
            copy.forks.end()

    with tempfile.TemporaryDirectory() as name, ExitStack() as entered:
        objects = Path(name).resolve() / "objects"
        objects.mkdir()

        def hunt_in_a_copy(bug: PackageBug) -> Verdict:
            build = build_of(bug)
            if idle[build]:
                copy = idle[build].pop()
            else:
                folder = Path(tempfile.mkdtemp(dir=objects.parent))
                copy = entered.enter_context(Copy(folder, build, objects))
                copies.append(copy)
            try:
                return hunter.hunt(bug, copy)
            finally:
                idle[build].append(copy)

        return hunt_all(bugs, hunt_in_a_copy, jobs, end)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant bugs in all packages; tests catch them.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="bugs of which name, place or a test has this")
    parser.add_argument("--new", action="store_true", help="bugs that no test is known to catch")
    parser.add_argument("--one-in", type=int, default=1, help="take every n-th bug only")
    options = parser.parse_args()
    catching = CatchingTests()
    bugs = [
        bug
        for bug in BUGS
        if any(options.only in text for text in (bug.name, bug.place, *bug.tests))
        and not (options.new and catching.get(bug))
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
