"""Hunts planted bugs: bounded runs of tests, each verdict printed at once, and counts by package.

A bug is planted in a copy, never in the repository, so a hunt that is killed leaves nothing to
restore. SIGTERM and Ctrl-C end the running tests and remove the copies.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

Bug = TypeVar("Bug")


class Outcome(StrEnum):
    CAUGHT = "caught"
    EXCUSED = "excused"
    MISSED = "MISSED"
    BROKE = "BROKE"


class Verdict(NamedTuple):
    """``how``: the test that failed, the reason why the bug may be missed, or what broke the run.
    ``seconds``: of the hunt.
    """

    name: str
    package: str
    outcome: Outcome
    how: str
    seconds: float

    @property
    def caught(self) -> bool:
        return self.outcome is Outcome.CAUGHT


class Run(NamedTuple):
    """``code``: the exit code, None when its time was over. ``output``: stdout, then stderr."""

    code: int | None
    output: str


class Runs:
    """The runs of tests that are going on. Each has a process group, to end its children too."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._lock = threading.Lock()

    def run(
        self, command: Sequence[str], folder: Path, environ: Mapping[str, str], seconds: float
    ) -> Run:
        """Run a command to its end, or for ``seconds``."""
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with self._lock:
            self._groups.add(process.pid)
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Run(None, "")
        finally:
            with self._lock:
                self._groups.discard(process.pid)
            _end(process.pid)  # servers that a failed test left behind, too
            process.communicate()
        return Run(process.returncode, out + errors)

    def end(self) -> None:
        with self._lock:
            for group in self._groups:
                _end(group)


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def hunt_all(
    bugs: Sequence[Bug], hunt: Callable[[Bug], Verdict], jobs: int, end: Callable[[], None]
) -> list[Verdict]:
    """Every bug's verdict, printed as soon as it is known. ``end`` ends the tests that run."""
    verdicts: list[Verdict] = []
    began = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(hunt, bug) for bug in bugs]
        try:
            for future in as_completed(futures):
                one = future.result()
                verdicts.append(one)
                place = f"{len(verdicts):>3}/{len(bugs)}"
                print(f"{place} {one.outcome:<7} {one.seconds:5.1f} s  {one.name}: {one.how}")
                sys.stdout.flush()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end()
            raise
    _print_counts(verdicts, time.monotonic() - began)
    return verdicts


def _print_counts(verdicts: Sequence[Verdict], seconds: float) -> None:
    caught = Counter(one.package for one in verdicts if one.caught)
    planted = Counter(one.package for one in verdicts)
    parts = ", ".join(f"{name} {caught[name]} of {planted[name]}" for name in sorted(planted))
    total = f"{caught.total()} of {len(verdicts)} planted bugs caught in {seconds:.0f} s"
    print(f"{total} ({parts})")
    for one in verdicts:
        if not one.caught:
            print(f"{one.outcome}: {one.name} ({one.package}): {one.how}")


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """0: every bug was caught or is excused; 1: one was missed; 2: a run broke."""
    outcomes = {one.outcome for one in verdicts}
    return 2 if Outcome.BROKE in outcomes else 1 if Outcome.MISSED in outcomes else 0


def end_on_sigterm() -> None:
    """Let SIGTERM unwind the process like Ctrl-C, so that it ends its runs and removes copies."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
