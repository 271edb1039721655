"""What single rules of the scheduler cost: ours beside those of transformers' and vLLM's documents.

Runs the scheduler alone, on one workload for all rules: requests of 100 to 400 prompt tokens, of
which a third begin with one of eight shared prefixes of 256, and answers of 200 tokens in the mean.
A cache of 4,096 tokens holds about eight of them; `--tokens` changes that. Counts, so a run with a
seed gives the same numbers on every machine.

Run: .venv/bin/python benchmarks/scheduler_rules.py [--requests 300] [--tokens 4096] [--seed 1]
"""

import argparse
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from fairlead_runtime.cache.blocks import BlockPool
from fairlead_runtime.request.sequence import Request, SamplingParams
from fairlead_runtime.scheduling import Limits, Result, Scheduler, planner
from fairlead_runtime.sizing.groups import group_layers

LONGEST, EOS = 400, 0
EVERY = 12  # steps between two arrivals


class MostRecentFirst(BlockPool):
    """Evicts the most recently used content first, as transformers' cache does."""

    def take(self, count: int) -> list[int]:
        for unit in [*reversed(self.cached)][: max(0, count - len(self.free))]:
            self.forget(unit)
        return super().take(count)


class Count(NamedTuple):
    steps: int
    computed: int  # tokens
    needed: int  # tokens of prompts and answers, each once
    preemptions: int
    hits: int  # prompt tokens found in the prefix cache
    longest_wait: int  # steps from arrival to the end, of the slowest


@contextmanager
def oldest_victim() -> Iterator[None]:
    """Preempt the sequence that the policy ranks first, as transformers does."""

    def choose(*values: Any, key: Callable[[Any], Any] | None = None) -> Any:
        return max(*values) if key is None else min(*values, key=key)

    planner.max = choose  # type: ignore[attr-defined]  # the planner has no such setting
    try:
        yield
    finally:
        del planner.max  # type: ignore[attr-defined]


def workload(requests: int, seed: int) -> Iterator[tuple[Request, int]]:
    """Requests with the length of their answers, in the order of arrival."""
    draw = random.Random(seed)
    prefixes = [tuple(draw.randrange(1, 50_000) for _ in range(256)) for _ in range(8)]
    for number in range(requests):
        own = tuple(draw.randrange(1, 50_000) for _ in range(draw.randrange(100, 400)))
        prompt = draw.choice(prefixes) + own[:100] if draw.random() < 1 / 3 else own
        params = SamplingParams(max_tokens=LONGEST)
        request = Request(f"r{number}", prompt, params, LONGEST, eos_ids=frozenset({EOS}))
        yield request, 1 + min(LONGEST - 1, int(draw.expovariate(1 / 200)))


def measure(
    tokens: int, pairs: Iterable[tuple[Request, int]], pool: type[BlockPool], **settings: Any
) -> Count:
    block = settings.pop("block_size", 16)
    limits = Limits("fifo", 512, 64, settings.pop("margin", 0.2), block, tokens // block, 2048)
    scheduler = Scheduler(limits, group_layers([None]))
    scheduler.state.cache.pool.__class__ = pool
    coming, lengths, came = list(pairs)[::-1], {}, {}
    needed = sum(len(request.prompt) + length for request, length in coming)
    step = computed = slowest = 0
    while coming or scheduler.has_work:
        if coming and step % EVERY == 0:
            request, length = coming.pop()
            lengths[request.id], came[request.id] = length, step
            scheduler.add(request)
        if scheduler.has_work:
            work = scheduler.commit(scheduler.plan())
            results = {}
            for row in work.rows:
                computed += row.count
                ends = row.sequence.generated + 1 == lengths[row.sequence.request.id]
                if row.samples:
                    results[row.sequence.id] = Result(EOS if ends else 7)
                if row.samples and ends:
                    slowest = max(slowest, step - came[row.sequence.request.id])
            scheduler.update(work, results)
        step += 1
    stats = scheduler.stats()
    return Count(step, computed, needed, stats.preemptions, stats.prefix_hits, slowest)


Patch = Callable[[], AbstractContextManager[None]]
RULES: Mapping[str, tuple[type[BlockPool], Patch, dict[str, Any]]] = {
    "ours": (BlockPool, nullcontext, {}),
    "the most recent evicted": (MostRecentFirst, nullcontext, {}),
    "blocks of 256": (BlockPool, nullcontext, {"block_size": 256}),
    "no margin": (BlockPool, nullcontext, {"margin": 0.0}),
    "no margin, the oldest preempted": (BlockPool, oldest_victim, {"margin": 0.0}),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    head = ("rule", "steps", "computed / needed", "preemptions", "cached prompt tokens", "slowest")
    print(f"| {' | '.join(head)} |")
    print("|---|---|---|---|---|---|")
    for name, (pool, patched, settings) in RULES.items():
        with patched():
            pairs = workload(options.requests, options.seed)
            count = measure(options.tokens, pairs, pool, **settings)
        share = count.computed / count.needed
        print(
            f"| {name} | {count.steps:,} | {share:.2f} | {count.preemptions:,} | {count.hits:,} "
            f"| {count.longest_wait:,} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
