"""The cost of one step in the scheduler alone: plan + commit + update of running decodes, in
milliseconds.

Measures CPU time of the thread, so that other processes on the machine do not count.

Target: 256 decodes ≤ 1 ms, 1,024 ≤ 4 ms. Run: .venv/bin/python benchmarks/step_overhead.py
"""

import argparse
import gc
import os
import statistics
import time

from fairlead_runtime.recording.record import RecordedScheduler
from fairlead_runtime.request.sequence import Request, SamplingParams
from fairlead_runtime.scheduling import Limits, Result, Scheduler
from fairlead_runtime.sizing.groups import group_layers

TARGETS = {256: 1.0, 1024: 4.0}
PROMPT, WARM_UP = 200, 40


def running(
    decodes: int, windows: list[int | None], policy: str, steps: int, record: bool
) -> Scheduler:
    """A scheduler in which ``decodes`` sequences decode for at least ``steps`` steps."""
    output = WARM_UP + steps + 8
    limits = Limits(
        policy=policy,  # type: ignore[arg-type]
        max_batch_tokens=decodes * PROMPT,
        max_requests=decodes,
        safety_margin=0.0,
        block_size=16,
        num_blocks=decodes * (-(-(PROMPT + output) // 16) + 1),
        max_model_len=PROMPT + output,
    )
    groups = group_layers(windows)
    scheduler = (
        RecordedScheduler(limits, groups, path=os.devnull) if record else Scheduler(limits, groups)
    )
    for i in range(decodes):
        # lengths differ, so that blocks fill up at different steps
        prompt = tuple(range(i * PROMPT, (i + 1) * PROMPT - i % 16))
        scheduler.add(
            Request(f"r{i}", prompt, SamplingParams(max_tokens=output), output, tenant=str(i % 8))
        )
    return scheduler


def measure(
    decodes: int, windows: list[int | None], policy: str, steps: int, record: bool
) -> dict[str, list[float]]:
    """Milliseconds of each part, step by step."""
    scheduler = running(decodes, windows, policy, steps, record)
    times: dict[str, list[float]] = {"plan": [], "commit": [], "update": [], "step": []}
    for i in range(WARM_UP + steps):
        t0 = time.thread_time()
        plan = scheduler.plan()
        t1 = time.thread_time()
        work = scheduler.commit(plan)
        t2 = time.thread_time()
        results = {row.sequence.id: Result(5) for row in work.rows if row.samples}
        t3 = time.thread_time()
        scheduler.update(work, results)
        t4 = time.thread_time()
        if i >= WARM_UP:
            if len(work.rows) != decodes:
                raise SystemExit(f"{len(work.rows)} rows, expected {decodes}")
            for name, seconds in zip(
                times, (t1 - t0, t2 - t1, t4 - t3, t2 - t0 + t4 - t3), strict=True
            ):
                times[name].append(seconds * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    gc.freeze()
    print(
        f"{'decodes':>8} {'policy':>14} {'groups':>7} {'plan':>7} {'commit':>7} {'update':>7}   "
        "step: median (p5 .. p95) ms"
    )
    one: list[int | None] = [None]
    two: list[int | None] = [None, 64]
    cases = ((one, "fifo", False), (one, "fair", False), (two, "fifo", False), (one, "fifo", True))
    for windows, policy, record in cases:
        for decodes, target in TARGETS.items():
            times = measure(decodes, windows, policy, options.steps, record)
            parts = [statistics.median(times[name]) for name in ("plan", "commit", "update")]
            cuts = statistics.quantiles(times["step"], n=20)
            name = policy + (", recorded" if record else "")
            print(
                f"{decodes:>8} {name:>14} {len(windows):>7} "
                f"{parts[0]:>7.3f} {parts[1]:>7.3f} {parts[2]:>7.3f}"
                f"   {statistics.median(times['step']):.3f} ({cuts[0]:.3f} .. {cuts[-1]:.3f}), "
                f"target {target}"
            )


if __name__ == "__main__":
    main()
