"""The steps of .ci/run, one after the other, and the seconds of each, also when one fails.

    python3 scripts/ci.py [STEP...]

Exit code: that of the first step that fails. Needs nothing but Python's standard library: the
virtual environment does not exist yet.
"""

import argparse
import os
import subprocess
import sys
import time
from typing import NamedTuple

# Each a target of make.
STEPS = ("setup", "check", "functional", "cluster", "images", "test-images", "e2e")


class Spent(NamedTuple):
    """What a step took: seconds by the clock, and of processors in it and its descendants."""

    step: str
    clock: float
    processors: float
    code: int


def run(step: str) -> Spent:
    """Run one step, its output shown as it comes."""
    began = time.monotonic()
    process = subprocess.Popen(["make", step], stdin=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    clock = time.monotonic() - began
    return Spent(step, clock, used.ru_utime + used.ru_stime, process.returncode)


def table(steps: list[Spent], clock: float) -> str:
    """Seconds by step; "busy" is the share of this machine's processors."""
    cores = os.cpu_count() or 1
    rows = [
        f"{spent.step:12} {spent.clock:7.0f} {spent.processors:10.0f} "
        f"{spent.processors / spent.clock / cores:5.0%}{'' if spent.code == 0 else '  failed'}"
        for spent in steps
    ]
    total = sum(spent.processors for spent in steps)
    last = f"{'all':12} {clock:7.0f} {total:10.0f} {total / clock / cores:5.0%}"
    return "\n".join([f"{'step':12} {'seconds':>7} {'processors':>10}  busy", *rows, last])


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the steps of .ci/run and time each.")
    parser.add_argument("step", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}")
    steps = parser.parse_args().step or STEPS
    if unknown := set(steps) - set(STEPS):
        parser.error(f"{', '.join(sorted(unknown))}: a step is one of {', '.join(STEPS)}")
    began = time.monotonic()
    done: list[Spent] = []
    for step in steps:
        done.append(run(step))
        if done[-1].code:
            break
    print(f"\n{table(done, time.monotonic() - began)}", flush=True)
    return done[-1].code


if __name__ == "__main__":
    sys.exit(main())
