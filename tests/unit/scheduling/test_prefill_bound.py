"""Prompts beside decodes take a bounded number of tokens a step, more where more of them wait."""

import dataclasses
import itertools
import math
import zlib

import pytest

from fairlead_runtime.request.sequence import Request, SamplingParams
from fairlead_runtime.scheduling import Limits, Plan, Result, Scheduler
from fairlead_runtime.sizing.groups import group_layers
from support.full import LONG_FORM
from support.whole_run_scenario import POLICIES

LIMITS = Limits(
    policy="fifo",
    max_batch_tokens=512,
    max_requests=64,
    safety_margin=0.0,
    block_size=4,
    num_blocks=1024,
    max_model_len=1024,
    prefill_beside_decodes=16,
)
BOUNDED = tuple(policy for policy in POLICIES if policy != "prefill_first")


def scheduler(decodes: int, **limits: object) -> Scheduler:
    """One that has just computed the prompts of ``decodes`` requests, d0, d1 ..."""
    s = Scheduler(dataclasses.replace(LIMITS, **limits), group_layers([None]))  # type: ignore[arg-type]
    for i in range(decodes):
        add(s, f"d{i}", 2, 60)
    if decodes:
        step(s)
    return s


def add(
    s: Scheduler, name: str, prompt: int | tuple[int, ...], output: int = 4, n: int = 1
) -> None:
    """A request with the given prompt, or with that many tokens that no other name shares."""
    if isinstance(prompt, int):
        prompt = (zlib.crc32(name.encode()) >> 1,) * prompt
    s.add(Request(name, prompt, SamplingParams(n=n, max_tokens=output), output, tenant=name[-1]))


def step(s: Scheduler) -> Plan:
    plan = s.plan()
    work = s.commit(plan)
    s.update(work, {r.sequence.id: Result(7) for r in work.rows if r.samples})
    s.check()
    return plan


def counts(plan: Plan) -> dict[str, int]:
    """The tokens of this step's rows that are no decodes of ``scheduler``, by request."""
    names = [r.sequence.request.id for r in plan.rows]
    return {
        name: row.count
        for name, row in zip(names, plan.rows, strict=True)
        if not name.startswith("d")
    }


@pytest.mark.parametrize("policy", BOUNDED)
def test_a_long_prompt_takes_the_bound_a_step_and_every_decode_goes_on(policy: str) -> None:
    s = scheduler(8, policy=policy)
    add(s, "long", 40)
    plans = [step(s) for _ in range(4)]
    assert [counts(plan).get("long") for plan in plans] == [16, 16, 8, 1]
    assert all(len(plan.rows) == 9 for plan in plans)


def test_without_decodes_a_prompt_takes_the_whole_step() -> None:
    s = scheduler(0)
    for name in ("long", "other"):
        add(s, name, 200)
    assert counts(step(s)) == {"long": 200, "other": 200}


def test_when_the_last_decode_has_ended_a_prompt_takes_the_whole_step() -> None:
    s = scheduler(1)
    add(s, "long", 100)
    assert counts(step(s)) == {"long": 16}
    s.abort("d0")
    assert counts(step(s)) == {"long": 84}


@pytest.mark.parametrize("policy", BOUNDED)
@pytest.mark.parametrize(
    ("decodes", "prompts", "each", "tokens"),
    [(1, 31, 12, 31 * 12), (1, 31, 40, 496), (2, 6, 40, 48), (3, 4, 40, 21), (8, 3, 40, 16)],
)
def test_the_bound_is_shared_by_headcount(
    policy: str, decodes: int, prompts: int, each: int, tokens: int
) -> None:
    s = scheduler(decodes, policy=policy)
    for i in range(prompts):
        add(s, f"p{i}", each)
    assert sum(counts(step(s)).values()) == tokens


def test_a_prompt_that_is_being_computed_counts_with_those_behind_it() -> None:
    s = scheduler(2)
    add(s, "long", 200)
    assert counts(step(s)) == {"long": 16}
    for i in range(4):
        add(s, f"p{i}", 8)
    assert counts(step(s)) == {"long": 30, "p0": 8, "p1": 2}, "five wait, two decode"


def test_choices_wait_for_their_prompt_as_requests_do() -> None:
    s = scheduler(2)
    add(s, "four", 40, n=4)
    assert counts(step(s)) == {"four": 32}


@pytest.mark.parametrize(
    ("limits", "tokens"), [({"max_requests": 4}, 48), ({"num_blocks": 39}, 48), ({}, 160)]
)
def test_those_without_a_slot_or_blocks_do_not_count(limits: dict[str, int], tokens: int) -> None:
    """Each of the ten needs 11 blocks, the decode has one."""
    s = scheduler(1, **limits)
    for i in range(10):
        add(s, f"p{i}", 40)
    assert sum(counts(step(s)).values()) == tokens


def test_prefill_first_has_no_bound() -> None:
    s = scheduler(8, policy="prefill_first")
    add(s, "long", 200)
    assert counts(step(s)) == {"long": 200}


@pytest.mark.parametrize(
    ("decodes", "budget", "prompts", "tokens"), [(8, 20, 1, 12), (1, 100, 31, 99)]
)
def test_the_tokens_of_a_step_stay_the_upper_limit(
    decodes: int, budget: int, prompts: int, tokens: int
) -> None:
    s = scheduler(decodes, max_batch_tokens=budget, max_requests=min(64, budget))
    for i in range(prompts):
        add(s, f"p{i}", 40)
    plan = step(s)
    assert sum(counts(plan).values()) == tokens
    assert sum(row.count for row in plan.rows) == budget


@pytest.mark.parametrize("policy", POLICIES)
def test_a_burst_that_shares_a_prefix_takes_the_steps_that_it_takes_without_a_bound(
    policy: str,
) -> None:
    """The first computes the prefix alone; the others start beside its first decode."""

    def rows(bound: int) -> list[list[int]]:
        s = scheduler(0, policy=policy, prefill_beside_decodes=bound)
        for i in range(32):
            add(s, f"r{i}", (*range(128), *range(1000 * i, 1000 * i + 12)))
        return [[row.count for row in step(s).rows] for _ in range(5)]

    assert rows(16) == rows(0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bound", [1, 3])
def test_no_prompt_starves_beside_decodes_that_never_end(policy: str, bound: int) -> None:
    """A new decode every step, and three long prompts: each step computes some of them."""
    s = scheduler(6, policy=policy, prefill_beside_decodes=bound)
    for i in range(3):
        add(s, f"p{i}", 30, output=1)
    left, steps = {"p0", "p1", "p2"}, 0
    while left:
        add(s, f"d{6 + steps}", 1, 2)
        plan = step(s)
        steps += 1
        left &= {sequence.request.id for sequence in s.live()}
        assert counts(plan) or policy == "fair", "the three came first"
        assert steps < 400


@pytest.mark.parametrize(
    ("bound", "output", "starts"), [(16, 13, True), (16, 14, False), (0, 20, True), (0, 21, False)]
)
def test_one_that_overtakes_a_blocked_request_ends_in_time_with_its_prompt_in_parts(
    bound: int, output: int, starts: bool
) -> None:
    """20 steps are left until the blocked one can start; beside a decode the prompt takes eight at
    most: later ones may take a quarter of each step after the first.
    """
    s = Scheduler(
        dataclasses.replace(LIMITS, num_blocks=100, prefill_beside_decodes=bound),
        group_layers([None]),
    )
    add(s, "run", 200, 40)
    step(s)
    add(s, "large", 340, 20)
    for _ in range(19):
        assert len(step(s).rows) == 1
    add(s, "small", 96, output)
    assert [a.sequence.request.id for a in step(s).admitted] == ["small"] * starts
    if starts:
        for _ in range(19):
            assert not step(s).admitted
        assert [a.sequence.request.id for a in step(s).admitted] == ["large"], "not a step later"


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="prefill_beside_decodes: must not be negative, not -1"):
        scheduler(0, prefill_beside_decodes=-1)


# -- the share that long prompts leave


def behind_long_prompts(
    longs: int, shorts: list[int], decodes: int, **limits: object
) -> tuple[Scheduler, list[int]]:
    """The steps from the arrival of the short prompts to each one's first token, behind long ones
    that are all being computed.
    """
    s = scheduler(
        decodes,
        block_size=16,
        num_blocks=40_000,
        max_model_len=200_000,
        allow_block_sharing=False,
        **limits,
    )
    for i in range(longs):
        add(s, f"long{i}", 100_000)
    for _ in range(longs + 1):
        step(s)
    assert len(s.running) == longs + decodes
    for i, length in enumerate(shorts):
        add(s, f"short{i}", length, output=2)
    first: dict[str, int] = {}
    for now in range(1, 1000):
        plan = step(s)
        done = {r.sequence.request.id for r in plan.rows if r.samples}
        first |= {name: now for name in done if name not in first}
        if all(f"short{i}" in first for i in range(len(shorts))):
            break
    return s, [first[f"short{i}"] for i in range(len(shorts))]


BEHIND_LONG = [*itertools.product(BOUNDED, (1, 5), (0, 96), (1, 5))]
# Two of each policy, that hold every pair of values.
PAIRS = [BEHIND_LONG[place] for place in (0, 7, 11, 12, 17, 22)]


@pytest.mark.parametrize(
    ("policy", "longs", "bound", "shorts"), BEHIND_LONG if LONG_FORM else PAIRS
)
def test_a_first_token_behind_long_prompts_comes_with_a_quarter_of_the_tokens(
    policy: str, longs: int, bound: int, shorts: int
) -> None:
    share = {0: 2044, 96: 24}[bound]
    lengths = [500, 20, 96, 1, 300] if shorts == 5 else [50]
    s, first = behind_long_prompts(
        longs, lengths, 16, policy=policy, max_batch_tokens=8192, prefill_beside_decodes=bound
    )
    assert s.state.share_of_others(bound or 8192 - 16) == share
    for steps in first:
        before = sum(length for length, other in zip(lengths, first, strict=True) if other <= steps)
        assert steps <= math.ceil(before / share) + 2, first


def test_running_prompts_have_the_whole_step_where_nobody_waits() -> None:
    s = scheduler(0, max_batch_tokens=64)
    for name in ("a", "b"):
        add(s, name, 300)
    assert counts(step(s)) == {"a": 64}
    assert counts(step(s)) == {"a": 48, "b": 16}
    assert counts(step(s)) == {"a": 64}, "the rest goes to the one with the fewest tokens left"


def test_the_share_goes_first_to_prompts_that_a_step_can_compute_whole() -> None:
    s = scheduler(0, max_batch_tokens=64)
    add(s, "long", 300)
    step(s)
    add(s, "short", 40)
    add(s, "other", 8)
    assert counts(step(s)) == {"long": 48, "short": 16}
    assert counts(step(s)) == {"long": 48, "short": 16}
    assert counts(step(s)) == {"long": 48, "short": 8, "other": 8}


@pytest.mark.parametrize(("tokens", "share"), [(1, 0), (2, 1), (3, 1), (8, 4), (20, 5), (96, 24)])
def test_the_share_is_a_quarter_and_at_least_a_block_where_two_fit(tokens: int, share: int) -> None:
    assert scheduler(0).state.share_of_others(tokens) == share
    assert scheduler(0, policy="prefill_first").state.share_of_others(tokens) == 0


def test_what_starts_leaves_all_running_prompts_their_blocks() -> None:
    """Three long prompts of 76 blocks each are being computed; 12 more blocks are free."""
    s = scheduler(0, num_blocks=240, max_batch_tokens=64)
    for i in range(3):
        add(s, f"long{i}", 300)
        step(s)
    add(s, "large", 60)
    add(s, "small", 8)
    plan = step(s)
    assert [a.sequence.request.id for a in plan.admitted] == ["small"]
    assert [sequence.request.id for sequence in plan.blocked] == ["large"]
    while s.has_work:
        step(s)
    assert s.stats().preemptions == 0


@pytest.mark.parametrize("block_size", [4, 16, 256])
def test_a_step_with_more_tokens_never_gives_running_prompts_less_than_is_counted_on(
    block_size: int,
) -> None:
    state = scheduler(0, block_size=block_size).state
    sizes = range(1, 5 * block_size)
    rests = [max(1, tokens - state.share_of_others(tokens)) for tokens in sizes]
    counted = [state.least_of_running(tokens) for tokens in sizes]
    assert counted == [min(rests[at:]) for at in range(len(rests))]
