"""Run steps, which are targets of make, and print the seconds of each, also when one fails.

    python3 scripts/steps.py setup check functional+images,test-images

The arguments run one after the other. Within one, "+" parts what runs side by side, and "," what
runs in order. A step that fails ends those behind it in its own row, and then the run. Under the
table stand the tests that failed beside other steps, whose output would hide them.

Exit code: 0 if all succeeded, else that of the first that failed. Needs nothing but Python's
standard library: it makes the virtual environment, too.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

_printing = threading.Lock()


class Spent(NamedTuple):
    """What a step took: seconds by the clock, and of processors in it and its descendants."""

    step: str
    clock: float
    processors: float
    code: int
    failed: tuple[str, ...] = ()  # as pytest names them at its end


def run(step: str, *, alone: bool) -> Spent:
    """Run one step. Beside others its name stands before each line of its output."""
    began = time.monotonic()
    pipe = None if alone else subprocess.PIPE
    process = subprocess.Popen(
        ["make", "--no-print-directory", step],
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=None if alone else subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    failed: list[str] = []
    shows = threading.Thread(target=_show, args=(step, process.stdout or (), failed), daemon=True)
    shows.start()
    _, status, used = os.wait4(process.pid, 0)
    shows.join(10)  # a process that it left behind may hold its output open for ever
    process.returncode = os.waitstatus_to_exitcode(status)
    clock = time.monotonic() - began
    processors = used.ru_utime + used.ru_stime
    return Spent(step, clock, processors, process.returncode, tuple(failed))


def _show(step: str, lines: Iterable[str], failed: list[str]) -> None:
    for line in lines:
        with _printing:
            print(f"{step}: {line}", end="", flush=True)
        if line.startswith(("FAILED ", "ERROR tests/")):
            failed.append(line.strip())


def run_in_order(steps: list[str], *, alone: bool) -> list[Spent]:
    """Run steps until one fails."""
    done: list[Spent] = []
    for step in steps:
        done.append(run(step, alone=alone))
        if done[-1].code:
            break
    return done


def run_side_by_side(rows: list[list[str]]) -> list[Spent]:
    """Run each row of steps, and wait for all, also when one fails."""
    alone = len(rows) == 1
    with ThreadPoolExecutor(len(rows)) as pool:
        done = pool.map(lambda steps: run_in_order(steps, alone=alone), rows)
        return [spent for row in done for spent in row]


def table(steps: list[Spent], left_out: list[str], clock: float) -> str:
    """Seconds by step; "busy" is the share of this machine's processors."""
    cores = os.cpu_count() or 1
    total = Spent("all", clock, sum(spent.processors for spent in steps), 0)
    rows = [
        f"{spent.step:12} {spent.clock:7.0f} {spent.processors:10.0f} "
        f"{spent.processors / spent.clock / cores:5.0%}{'  failed' if spent.code else ''}"
        for spent in [*steps, total]
    ]
    missing = [f"{step:12} was not run" for step in left_out]
    failed = [f"{spent.step}: {test}" for spent in steps for test in spent.failed]
    heading = f"{'step':12} {'seconds':>7} {'processors':>10}  busy"
    return "\n".join([heading, *rows, *missing, *failed])


def main(arguments: list[str]) -> int:
    phases = [[row.split(",") for row in phase.split("+")] for phase in arguments]
    if not phases or not all(step for phase in phases for row in phase for step in row):
        print(__doc__, file=sys.stderr)
        return 2
    began = time.monotonic()
    done: list[Spent] = []
    for phase in phases:
        done += run_side_by_side(phase)
        if any(spent.code for spent in done):
            break
    began_steps = {spent.step for spent in done}
    planned = [step for phase in phases for row in phase for step in row]
    left_out = [step for step in planned if step not in began_steps]
    print(f"\n{table(done, left_out, time.monotonic() - began)}", flush=True)
    return next((spent.code for spent in done if spent.code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
