"""Where the time of a test run goes: seconds by folder, set-up included, printed after every run.

Owns the table and, where FAIRLEAD_TIMES names a file, one line per test that is appended to it.
"""

import os
import time
from collections import Counter, defaultdict
from pathlib import Path, PurePosixPath

import pytest

VARIABLE = "FAIRLEAD_TIMES"


def folder_of(nodeid: str) -> str:
    """At most two folders below tests/: "unit/device" of tests/unit/device/test_batch.py::test."""
    parts = PurePosixPath(nodeid.partition("::")[0]).parent.parts
    return "/".join(parts[1:3] if parts[:1] == ("tests",) else parts) or "."


class Times:
    """Sums what pytest reports; with pytest-xdist only the process that starts the workers does."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.began = time.monotonic()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        file = os.environ.get(VARIABLE)
        if file and report.when == "teardown":
            with Path(file).open("a", encoding="utf-8") as lines:
                lines.write(f"{self.seconds[report.nodeid]:.3f}\t{report.nodeid}\n")

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        if not self.seconds:
            return
        terminalreporter.section("seconds by folder, set-up included")
        for line in self.table(time.monotonic() - self.began):
            terminalreporter.write_line(line)

    def table(self, clock: float) -> list[str]:
        """The slowest folder first; last, what the processes had beside their tests."""
        folders: defaultdict[str, float] = defaultdict(float)
        cases: Counter[str] = Counter()
        for test, took in self.seconds.items():
            folders[folder_of(test)] += took
            cases[folder_of(test)] += 1
        slowest = sorted(folders.items(), key=lambda folder: -folder[1])
        rows = [f"{took:9.1f}  {cases[name]:5}  {name}" for name, took in slowest]
        tests = sum(self.seconds.values())
        beside = clock * self.processes - tests
        return [
            f"{'seconds':>9}  tests  folder",
            *rows,
            f"{tests:9.1f}  {len(self.seconds):5}  all",
            f"{clock:9.1f}         by the clock",
            f"{beside:9.1f}         of {self.processes} processes in no test",
        ]
