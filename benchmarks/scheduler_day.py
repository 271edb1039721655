"""A day of bursty traffic through the scheduler alone: how long requests wait for their first step.

The clock is the step: 172,800 steps of half a second are a day. Small requests come all the time,
more of them at noon; bursts of 32 share 512 tokens; now and then one wants 80 to 90 % of the cache.
A tenth asks for two choices. Answers end before max_tokens, as they do in practice. It uses the
scheduler's public interface only, so an older version can be measured with PYTHONPATH.

Run: .venv/bin/python benchmarks/scheduler_day.py [--policy fifo fair] [--steps 172800] [--seed 1]
"""

import argparse
import math
import random
import statistics
import time
from collections import defaultdict

from fairlead_runtime.request import Request, SamplingParams
from fairlead_runtime.scheduling import Limits, Result, Scheduler
from fairlead_runtime.sizing.groups import group_layers

BLOCKS, BLOCK, DAY, EOS = 1000, 16, 172_800, 0
STARVED = 120  # steps: a minute, the default queue_timeout


def arrivals(rng: random.Random, steps: int) -> dict[int, list[tuple[str, Request, int]]]:
    """By step: the kind of each request, the request, and the tokens after which it ends."""
    day: dict[int, list[tuple[str, Request, int]]] = defaultdict(list)
    made = 0

    def add(step: int, kind: str, prompt: tuple[int, ...], mean: int, longest: int) -> None:
        nonlocal made
        n = 2 if kind == "small" and rng.random() < 0.1 else 1
        params = SamplingParams(n=n, max_tokens=longest)
        tenant = "batch" if kind == "large" else f"t{rng.randrange(4)}"
        request = Request(
            f"r{made}", prompt, params, longest, tenant=tenant, eos_ids=frozenset({EOS})
        )
        made += 1
        day[step].append((kind, request, 1 + min(longest, int(rng.expovariate(1 / mean)))))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, 50_000) for _ in range(count))

    for step in range(steps):
        busy = 1 + 0.8 * math.sin(2 * math.pi * step / DAY - math.pi / 2)
        if rng.random() < 0.1 * busy:
            add(step, "small", tokens(rng.randrange(30, 400)), 60, 256)
        if rng.random() < busy / 800:
            shared = tokens(512)
            for _ in range(32):
                add(step, "burst", shared + tokens(rng.randrange(8, 60)), 40, 128)
        if rng.random() < busy / 1500:
            add(step, "large", tokens(rng.randrange(BLOCKS * 13, BLOCKS * 14)), 80, 400)
    return day


def measure(policy: str, steps: int, seed: int) -> str:
    day = arrivals(random.Random(seed), steps)
    limits = Limits(policy, 2048, 64, 0.05, BLOCK, BLOCKS, BLOCKS * BLOCK)  # type: ignore[arg-type]
    scheduler = Scheduler(limits, group_layers([None]))
    kinds: dict[str, str] = {}
    lengths: dict[str, int] = {}
    came: dict[str, int] = {}
    waits: dict[str, list[int]] = defaultdict(list)
    computed = step = 0
    began = time.process_time()
    while step < steps or scheduler.has_work:
        for kind, request, length in day.get(step, ()):
            scheduler.add(request)
            kinds[request.id], lengths[request.id], came[request.id] = kind, length, step
        if scheduler.has_work:
            work = scheduler.commit(scheduler.plan())
            results = {}
            for sequence, start, count, samples in work.rows:
                name = sequence.request.id
                if name in came:
                    waits[kinds[name]].append(step - came.pop(name))
                if start < sequence.prompt_len:
                    computed += count
                if samples:
                    results[sequence.id] = Result(
                        EOS if sequence.generated + 1 >= lengths[name] else 1
                    )
            scheduler.update(work, results)
        step += 1
    lines = []
    for kind in ("small", "burst", "large"):
        values = sorted(waits[kind])
        p99 = values[len(values) * 99 // 100]
        starved = sum(value > STARVED for value in values)
        lines.append(
            f"{policy:<14} {kind:<6} {len(values):>6} {statistics.median(values):>6.0f} "
            f"{p99:>6} {values[-1]:>6} {starved:>8}"
        )
    cost = (time.process_time() - began) / step * 1e3
    lines.append(f"{policy:<14} prompt tokens computed {computed:,}; {cost:.3f} ms a step")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--policy", nargs="+", default=["fifo", "prefill_first", "priority", "fair"]
    )
    parser.add_argument("--steps", type=int, default=DAY)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    header = (
        f"{'policy':<14} {'kind':<6} {'count':>6} {'p50':>6} {'p99':>6} {'max':>6} {'> 120':>8}"
    )
    print(f"{header}   (waiting for the first step, in steps)")
    for policy in options.policy:
        print(measure(policy, options.steps, options.seed), flush=True)


if __name__ == "__main__":
    main()
