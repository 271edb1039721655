"""Aborts at random points leave no blocks held; requests that barely fit do not starve others.

The long form (FAIRLEAD_FULL=1) plays 10,000 aborted requests for each of 20 seeds, and a thousand
that barely fit.
"""

import random

import pytest

from fairlead_runtime.request.sequence import FinishReason, Request, SamplingParams
from fairlead_runtime.scheduling import Finished, Limits, Result, Scheduler
from fairlead_runtime.sizing.groups import group_layers
from support.full import LONG_FORM


def step(scheduler: Scheduler, rng: random.Random) -> int:
    """One step with random tokens; returns the tokens it computed."""
    work = scheduler.commit(scheduler.plan())
    results = {row.sequence.id: Result(rng.randrange(50)) for row in work.rows if row.samples}
    scheduler.update(work, results)
    return sum(row.count for row in work.rows)


@pytest.mark.parametrize("seed", range(20))
def test_requests_aborted_at_random_points_leave_no_block_held(seed: int) -> None:
    rng = random.Random(seed)
    limits = Limits(
        policy=rng.choice(("fifo", "prefill_first", "priority", "fair")),
        max_batch_tokens=64,
        max_requests=16,
        safety_margin=rng.choice((0.0, 0.2)),
        block_size=4,
        num_blocks=40,
        max_model_len=160,
        allow_block_sharing=seed % 3 != 0,
        offload_units=rng.choice((0, 30)),
        prefill_beside_decodes=rng.choice((0, 1, 9)),
    )
    scheduler = Scheduler(limits, group_layers(rng.choice(((None,), (None, 9)))))
    total = 10_000 if LONG_FORM else 500
    submitted = aborted = 0
    live: dict[str, int] = {}
    while aborted < total:
        while len(live) < 30:
            n, name = rng.choice((1, 1, 1, 3)), f"r{submitted}"
            prompt = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 60)))
            scheduler.add(
                Request(
                    name,
                    prompt,
                    SamplingParams(n=n),
                    100,
                    priority=rng.randrange(3),
                    tenant=name[-1],
                )
            )
            live[name] = n
            submitted += 1
        for name in rng.sample(sorted(live), min(len(live), rng.choice((0, 1, 1, 2, 8)))):
            choice = rng.choice((None, None, rng.randrange(live[name])))
            within = scheduler.has_work and rng.random() < 0.3
            work = scheduler.commit(scheduler.plan()) if within else None
            events = scheduler.abort(name, choice)
            if work is not None:  # the abort came between commit and update
                results = {row.sequence.id: Result(1) for row in work.rows if row.samples}
                after = scheduler.update(work, results)
                assert not {e.sequence.id for e in events} & {e.sequence.id for e in after}
            assert all(isinstance(e, Finished) and e.reason is FinishReason.ABORT for e in events)
            if not scheduler.abort(name):
                del live[name]
                aborted += 1
            scheduler.check()
        live_now = {s.request.id for s in scheduler.live()}
        for name in [name for name in live if name not in live_now]:
            del live[name]
        if scheduler.has_work:
            step(scheduler, rng)
            scheduler.check()
    for name in live:
        scheduler.abort(name)
    scheduler.check()
    stats = scheduler.stats()
    assert (stats.used, stats.running, stats.waiting) == (0, 0, 0)
    assert len(scheduler.state.cache.host.free) == limits.offload_units


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority", "fair"])
@pytest.mark.parametrize(("offload", "bound"), [(0, 0), (12, 0), (12, 5)])
def test_a_pool_of_the_largest_request_and_one_block_finishes_all_requests(
    policy: str, offload: int, bound: int
) -> None:
    rng = random.Random(7)
    count = 1000 if LONG_FORM else 200
    largest = 96
    limits = Limits(
        policy=policy,  # type: ignore[arg-type]
        max_batch_tokens=32,
        max_requests=16,
        safety_margin=0.0,
        block_size=8,
        num_blocks=largest // 8 + 1,
        max_model_len=largest,
        allow_block_sharing=False,
        offload_units=offload,
        prefill_beside_decodes=bound,
    )
    scheduler = Scheduler(limits, group_layers([None]))
    needed = 0
    for i in range(count):
        prompt, output = rng.randrange(1, 49), rng.randrange(1, 48)
        needed += prompt + output - 1
        tokens = tuple(rng.randrange(50) for _ in range(prompt))
        scheduler.add(
            Request(f"r{i}", tokens, SamplingParams(), output, priority=i % 3, tenant=str(i % 4))
        )
    computed = steps = 0
    while scheduler.has_work:
        computed += step(scheduler, rng)
        steps += 1
        if steps % 16 == 0:
            scheduler.check()  # I12 and I13 among them
    scheduler.check()
    assert scheduler.stats().preemptions > count // 20
    # Each token is computed once, except those recomputed after a preemption: at most as many
    # again.
    assert needed <= computed <= 2 * needed
