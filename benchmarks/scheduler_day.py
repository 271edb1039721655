"""A day of bursty traffic through the scheduler alone: how long requests wait for their first step.

The clock is the step: 172,800 steps of half a second are a day. Small requests come all the time,
more of them at noon. In a day of ``bursts`` 32 at once share 512 tokens, and now and then one wants
80 to 90 % of the cache. In a ``long`` day, with ten times the cache, documents have 66,000 to
105,000 tokens, and 24 reports at once grow by 4,000 each and preempt each other. A tenth of the
small ones asks for two choices. Other answers end before max_tokens, as they do in practice. Small
requests have priority 0, the others 1. It uses the scheduler's public interface only, so an older
version can be measured with PYTHONPATH.

Run: .venv/bin/python benchmarks/scheduler_day.py [--day long] [--policy fifo fair] [--seed 1]
    [--steps 172800] [--json FILE], and with the files of two versions: --draw BEFORE AFTER > FILE
"""

import argparse
import json
import math
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from fairlead_runtime.request.sequence import Request, SamplingParams
from fairlead_runtime.scheduling import Limits, Result, Scheduler
from fairlead_runtime.sizing.groups import group_layers

BLOCKS, BLOCK, DAY, EOS = {"bursts": 1000, "long": 10_000}, 16, 172_800, 0
STARVED = 120  # steps: a minute, the default queue_timeout
KINDS = {"bursts": ("small", "burst", "large"), "long": ("small", "document", "report")}
ALONE = {"large", "document", "report"}  # kinds that are one tenant each
# Of one panel of the picture, in pixels; its widths are steps of waiting, its heights shares.
PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, LONGEST, LEAST = 250, 110, 96, 44, 400, 1e-4


def arrivals(
    rng: random.Random, steps: int, kind: str
) -> dict[int, list[tuple[str, Request, int]]]:
    """By step: the kind of each request, the request, and the tokens after which it ends."""
    day: dict[int, list[tuple[str, Request, int]]] = defaultdict(list)
    made = 0

    def add(step: int, kind: str, prompt: Sequence[int], mean: int, longest: int) -> None:
        nonlocal made
        n = 2 if kind == "small" and rng.random() < 0.1 else 1
        params = SamplingParams(n=n, max_tokens=longest)
        tenant = kind if kind in ALONE else f"t{rng.randrange(4)}"
        request = Request(
            f"r{made}",
            prompt,
            params,
            longest,
            priority=int(kind != "small"),
            tenant=tenant,
            eos_ids=frozenset({EOS}),
        )
        made += 1
        day[step].append((kind, request, 1 + min(longest, int(rng.expovariate(1 / mean)))))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, 50_000) for _ in range(count))

    def own(count: int) -> range:
        return range(made * 1000, made * 1000 + count)

    for step in range(steps):
        busy = 1 + 0.8 * math.sin(2 * math.pi * step / DAY - math.pi / 2)
        if rng.random() < 0.1 * busy:
            add(step, "small", tokens(rng.randrange(30, 400)), 60, 256)
        if kind == "long":
            if rng.random() < busy / 1500:
                add(step, "document", own(rng.randrange(66_000, 105_000)), 80, 400)
            if rng.random() < busy / 12_000:
                for _ in range(24):
                    add(step, "report", own(rng.randrange(2000, 6000)), 20_000, 4000)
            continue
        if rng.random() < busy / 800:
            shared = tokens(512)
            for _ in range(32):
                add(step, "burst", shared + tokens(rng.randrange(8, 60)), 40, 128)
        if rng.random() < busy / 1500:
            add(step, "large", tokens(rng.randrange(13_000, 14_000)), 80, 400)
    return day


def measure(kind: str, policy: str, steps: int, seed: int) -> tuple[str, dict[str, Counter[int]]]:
    """The table's lines, and for each kind how many requests waited how many steps."""
    day, blocks = arrivals(random.Random(seed), steps, kind), BLOCKS[kind]
    limits = Limits(policy, 2048, 64, 0.05, BLOCK, blocks, blocks * BLOCK)  # type: ignore[arg-type]
    scheduler = Scheduler(limits, group_layers([None]))
    kinds: dict[str, str] = {}
    lengths: dict[str, int] = {}
    came: dict[str, int] = {}
    waits: dict[str, list[int]] = defaultdict(list)
    computed = step = 0
    began = time.process_time()
    while step < steps or scheduler.has_work:
        for kind_of_request, request, length in day.pop(step, ()):
            scheduler.add(request)
            kinds[request.id], lengths[request.id] = kind_of_request, length
            came[request.id] = step
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
    for name in KINDS[kind]:
        values = sorted(waits[name])
        p99 = values[len(values) * 99 // 100]
        starved = sum(value > STARVED for value in values)
        lines.append(
            f"{policy:<14} {name:<8} {len(values):>6} {statistics.median(values):>6.0f} "
            f"{p99:>6} {values[-1]:>6} {starved:>8}"
        )
    cost = (time.process_time() - began) / step * 1e3
    lost = scheduler.stats().preemptions
    text = f"prompt tokens computed {computed:,}; {lost} preemptions; {cost:.3f} ms a step"
    lines.append(f"{policy:<14} {text}")
    return "\n".join(lines), {name: Counter(waits[name]) for name in KINDS[kind]}


Waits = dict[str, dict[str, dict[str, int]]]  # by policy, kind and steps: how many requests


def draw(before: Waits, after: Waits) -> Iterator[str]:
    """By policy and kind: the share of requests that wait longer, before (pale) and after."""
    kinds = list(next(iter(after.values())))
    width = LEFT + len(kinds) * (PANEL_WIDTH + 20)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} '
        f'{TOP + len(after) * (PANEL_HEIGHT + 14) + 16}" font-family="sans-serif" font-size="11">'
    )
    yield '<rect width="100%" height="100%" fill="white"/>'
    yield _text(4, 14, "share of requests (log) that wait longer than so many steps; ")
    yield _text(400, 14, f"pale: before, dark: after; dashed: starved ({STARVED} steps)")
    for column, kind in enumerate(kinds):
        yield _text(LEFT + column * (PANEL_WIDTH + 20), 34, kind)
    for line, policy in enumerate(after):
        y = TOP + line * (PANEL_HEIGHT + 14)
        yield _text(4, y + 20, policy)
        for share in (1.0, 0.01, LEAST):
            yield _text(LEFT - 38, _height(y, share) + 4, f"{share:g}")
        for column, kind in enumerate(kinds):
            x = LEFT + column * (PANEL_WIDTH + 20)
            at = x + PANEL_WIDTH * STARVED / LONGEST
            yield (
                f'<path d="M{x} {y}v{PANEL_HEIGHT}h{PANEL_WIDTH}" fill="none" stroke="#999"/>'
                f'<path d="M{at} {y}v{PANEL_HEIGHT}" stroke="#999" stroke-dasharray="3"/>'
            )
            for waits, colour in ((before, "#9cc3e6"), (after, "#1f4e79")):
                yield _curve(waits[policy][kind], x, y, colour)
    for column in range(len(kinds)):
        x = LEFT + column * (PANEL_WIDTH + 20)
        yield _text(x, y + PANEL_HEIGHT + 13, "0")
        yield _text(x + PANEL_WIDTH - 50, y + PANEL_HEIGHT + 13, f"{LONGEST} steps")
    yield "</svg>"


def _curve(waits: dict[str, int], x: float, y: float, colour: str) -> str:
    total = longer = sum(waits.values())
    points = [f"M{x} {_height(y, 1.0):.1f}"]
    for steps in sorted(map(int, waits)):
        at = x + PANEL_WIDTH * min(steps, LONGEST) / LONGEST
        longer -= waits[str(steps)]
        points.append(f"H{at:.1f}V{_height(y, longer / total):.1f}")
    return f'<path d="{"".join(points)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


def _height(y: float, share: float) -> float:
    return y + PANEL_HEIGHT * math.log(max(share, LEAST)) / math.log(LEAST)


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y:.1f}">{text}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--policy", nargs="+", default=["fifo", "prefill_first", "priority", "fair"]
    )
    parser.add_argument("--day", choices=BLOCKS, default="bursts")
    parser.add_argument("--steps", type=int, default=DAY)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write how many waited how long to this file")
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.draw:
        before, after = (json.loads(file.read_text()) for file in options.draw)
        print("\n".join(draw(before, after)))
        return
    header = (
        f"{'policy':<14} {'kind':<8} {'count':>6} {'p50':>6} {'p99':>6} {'max':>6} {'> 120':>8}"
    )
    print(f"{header}   (waiting for the first step, in steps)")
    waits: dict[str, dict[str, Counter[int]]] = {}
    for policy in options.policy:
        lines, waits[policy] = measure(options.day, policy, options.steps, options.seed)
        print(lines, flush=True)
    if options.json:
        options.json.write_text(json.dumps(waits) + "\n")


if __name__ == "__main__":
    main()
