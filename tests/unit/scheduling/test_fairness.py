"""Fairness in steps: shared prompts are computed once, choices stop nobody, and large and small
requests are both served within a bound.
"""

import dataclasses
import random
import zlib
from collections.abc import Iterator

import pytest

from fairlead_runtime.request.sequence import Failure, Request, SamplingParams, Sequence
from fairlead_runtime.scheduling import Limits, Plan, Result, Scheduler
from fairlead_runtime.scheduling.planner import LOOKED_SEQUENCES
from fairlead_runtime.scheduling.reservations import ACCRUAL_STEPS
from fairlead_runtime.sizing.groups import group_layers
from support.full import LONG_FORM
from support.whole_run_scenario import POLICIES

LIMITS = Limits(
    policy="fifo",
    max_batch_tokens=65_536,
    max_requests=256,
    safety_margin=0.0,
    block_size=16,
    num_blocks=4096,
    max_model_len=65_536,
)
SHARED = tuple(range(512))


def scheduler(**limits: object) -> Scheduler:
    return Scheduler(dataclasses.replace(LIMITS, **limits), group_layers([None]))  # type: ignore[arg-type]


def request(name: str, prompt: tuple[int, ...] | int, output: int, **more: object) -> Request:
    """A request with the given prompt, or with that many tokens that no other name shares."""
    if isinstance(prompt, int):
        prompt = (zlib.crc32(name.encode()) >> 1,) * prompt
    params = SamplingParams(n=int(more.pop("n", 1)), max_tokens=output)  # type: ignore[call-overload]
    return Request(name, prompt, params, output, **more)  # type: ignore[arg-type]


def steps(s: Scheduler, limit: int = 20_000) -> Iterator[Plan]:
    """Run to the end; yields each step's plan after its update."""
    for _ in range(limit):
        if not s.has_work:
            return
        plan = s.plan()
        work = s.commit(plan)
        s.update(work, {r.sequence.id: Result(1) for r in work.rows if r.samples})
        yield plan
    raise AssertionError(f"not done after {limit} steps")


def names(plan: Plan) -> list[str]:
    return [a.sequence.request.id for a in plan.admitted]


def prompt_tokens(plan: Plan) -> int:
    return sum(row.count for row in plan.rows if row.start < row.sequence.prompt_len)


# -- shared prefixes


def burst(s: Scheduler, count: int = 32, tail: int = 8, output: int = 4) -> None:
    """Requests that share 512 tokens and have ``tail`` tokens of their own."""
    for i in range(count):
        own = tuple(10_000 + 100 * i + j for j in range(tail))
        s.add(request(f"r{i}", SHARED + own, output, tenant=f"t{i % 3}", priority=i % 2))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [65_536, 200])
def test_a_burst_that_shares_a_prefix_computes_it_once(policy: str, budget: int) -> None:
    s = scheduler(policy=policy, max_batch_tokens=budget)
    burst(s)
    plans = list(steps(s))
    assert sum(map(prompt_tokens, plans)) == 512 + 32 * 8
    assert len(plans) <= (5 if budget > 10_000 else 20)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("budget", "done"), [(65_536, 512), (192, 192)])
def test_when_the_leader_is_aborted_the_others_compute_only_the_rest(
    policy: str, budget: int, done: int
) -> None:
    s = scheduler(policy=policy, max_batch_tokens=budget)
    burst(s)
    run = steps(s)
    first = next(run)
    assert len(first.admitted) == 1
    s.abort(names(first)[0])
    second = next(run)
    assert len(second.admitted) == (31 if done == 512 else 1)
    assert second.rows[0].start == done, "the blocks of the aborted leader are used"
    rest = sum(map(prompt_tokens, run))
    own = 8 if done == 512 else 0  # of the leader
    assert prompt_tokens(first) + prompt_tokens(second) + rest == 512 + own + 31 * 8


@pytest.mark.parametrize("policy", POLICIES)
def test_when_the_leader_fails_the_next_one_computes_the_prefix_again(policy: str) -> None:
    s = scheduler(policy=policy)
    burst(s)
    work = s.commit(s.plan())
    assert len(work.rows) == 1
    s.fail(work.rows[0].sequence.id, Failure("found by bisection"))
    assert sum(map(prompt_tokens, steps(s))) == 512 + 31 * 8


@pytest.mark.parametrize("policy", POLICIES)
def test_when_the_leader_is_preempted_only_what_it_lost_is_computed_again(policy: str) -> None:
    """Thirty older requests need a second block each while the leader computes the prefix."""
    s = scheduler(policy=policy, max_batch_tokens=94, num_blocks=68)
    for i in range(30):
        s.add(request(f"old{i}", 10, 16, tenant=f"old{i}"))
    run = steps(s)
    for _ in range(4):
        next(run)
    burst(s)
    computed, lost = 0, []
    for plan in run:
        lost += [p.sequence.request.id for p in plan.preempted]
        rows = [row for row in plan.rows if not row.sequence.request.id.startswith("old")]
        computed += sum(row.count for row in rows if row.start < row.sequence.prompt_len)
        if not lost:
            before = computed
    assert lost.count("r0") == 1, "the leader"
    assert 0 < before < 512 or policy == "prefill_first", "while it computes; there just after"
    # What others lose later is a few blocks each: the prefix itself stays in the cache.
    assert 512 + 32 * 8 <= computed <= before + 512 + (32 + 2 * len(lost)) * 16


def test_a_sequence_waits_only_for_the_block_that_it_lacks_first() -> None:
    """One that shares two blocks with a long prompt starts as soon as those two are computed."""
    s = scheduler(max_batch_tokens=64)
    s.add(request("long", SHARED, 4))
    s.add(request("short", (*SHARED[:32], 7, 8, 9), 4))
    run = steps(s)
    assert names(next(run)) == ["long"]
    plan = next(run)
    assert [(a.sequence.request.id, a.start) for a in plan.admitted] == [("short", 32)]
    assert [row.count for row in plan.rows] == [61, 3], "the long prefill takes what is left"


# -- choices


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [1, 2, 8])
def test_requests_of_several_choices_all_start_in_the_first_step(policy: str, n: int) -> None:
    count = 64 if n < 8 else 24
    s = scheduler(policy=policy, max_requests=1024)
    for i in range(count):
        s.add(request(f"r{i}", 40, 4, n=n, tenant=f"t{i % 3}"))
    run = steps(s)
    first, second = next(run), next(run)
    assert (len(first.admitted), len(second.admitted)) == (count, count * (n - 1))
    assert {a.source for a in second.admitted} <= {"fork"}


@pytest.mark.parametrize("policy", POLICIES)
def test_choices_start_before_requests_that_came_after_them(policy: str) -> None:
    s = scheduler(policy=policy, max_requests=3)
    for name in ("a", "b", "c"):
        s.add(request(name, 40, 4, n=2))
    started = [name for plan in steps(s) for name in names(plan)]
    assert started == ["a", "b", "c", "a", "b", "c"]


def test_waiting_choices_share_one_list_of_tokens_and_own_one_once_they_start() -> None:
    s = scheduler()
    choices = s.add(request("n", 40, 4, n=8))
    assert len({id(c.tokens) for c in choices}) == 1
    for _ in steps(s):
        running = [c for c in choices if c.tables]
        assert len({id(c.tokens) for c in running}) == len(running)
    assert [c.generated for c in choices] == [4] * 8


def test_a_fork_hashes_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scheduler()
    choices = s.add(request("n", 1600, 4, n=4))
    run = steps(s)
    next(run)
    hashed = [len(c.hashes) for c in choices]
    monkeypatch.setattr("fairlead_runtime.cache.paged.extend_chain", None)
    s.plan()
    assert [len(c.hashes) for c in choices] == hashed
    assert len({id(c.hashes) for c in choices[1:]}) == 1


# -- a large request and small ones


def blocked_run(policy: str, *, small_output: int, large: int = 850) -> tuple[Scheduler, Sequence]:
    """Four running requests hold 272 of 1,000 blocks and grow for 300 steps; one wants ``large``
    blocks, and small ones wait behind it.
    """
    s = scheduler(policy=policy, num_blocks=1000, max_model_len=16_000, max_requests=64)
    for i in range(4):
        s.add(request(f"run{i}", 1080, 300, tenant="old"))
    next(steps(s))
    head = s.add(request("large", large * 16 - 100, 20, tenant="large"))[0]
    for i in range(12):
        s.add(request(f"small{i}", 40, small_output, tenant=f"s{i % 2}"))
    return s, head


def test_blocks_of_one_that_has_ended_in_flight_are_counted_for_the_large_one() -> None:
    """Nobody runs, and what is in flight holds most: small ones start beside the large one's due
    alone, and it starts when that is collected.
    """
    s = scheduler(num_blocks=16)
    s.add(request("ends", 16 * 9, 40))
    s.add(request("large", 16 * 11, 16))
    for _ in range(ACCRUAL_STEPS + 1):
        work = s.commit(s.plan())
        s.update(work, {row.sequence.id: Result(1) for row in work.rows})
    flying = s.commit(s.plan())
    s.launch(flying)
    s.abort("ends")
    s.add(request("small", 16, 16))
    s.add(request("not as small", 16, 48))
    plan = s.plan_ahead()
    assert plan is not None
    assert names(plan) == ["small"]  # the large one leaves 4 of 16 units, and two take 2 and 4
    s.launch(s.commit(plan))
    s.update(flying, {})
    assert names(s.plan())[0] == "large"


@pytest.mark.parametrize("policy", POLICIES)
def test_small_requests_that_end_before_the_large_one_can_start_do_not_wait(policy: str) -> None:
    s, head = blocked_run(policy, small_output=50)
    started: dict[str, int] = {}
    for plan in steps(s):
        started |= dict.fromkeys(names(plan), plan.step)
        if plan.step == 150:
            s.add(request("late", 40, 50, tenant="late"))
    assert max(at for name, at in started.items() if name.startswith("small")) == 1
    assert started["late"] == 151, "the reservation is full, and it still ends in time"
    assert started["large"] == 300, "as soon as the four have ended"
    assert head.preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stream_of_small_requests_does_not_starve_the_large_one(policy: str) -> None:
    s, _ = blocked_run(policy, small_output=400)
    started: dict[str, int] = {}
    for i, plan in enumerate(steps(s)):
        started |= dict.fromkeys(names(plan), plan.step)
        if "large" in started:
            break  # the bound has held; to run all the others to their end takes a minute
        if i < 3000 and i % 2 == 0:
            s.add(request(f"more{i}", 200, 400, tenant=f"m{i % 5}"))
    # The last one that started beside a growing reservation has 400 steps left then.
    assert started["large"] <= 1 + ACCRUAL_STEPS + 400
    before = sum(at < started["large"] for at in started.values())
    assert before > 12, "small ones start while the reservation grows"


def test_under_fair_a_blocked_tenant_stops_no_other_while_the_reservation_grows() -> None:
    s = scheduler(policy="fair", num_blocks=100, max_model_len=1600)
    s.add(request("run", 160, 500, tenant="a"))
    next(steps(s))
    for i in range(LOOKED_SEQUENCES - 1):
        s.add(request(f"big{i}", 1500, 20, tenant="a"))
    s.add(request("guest", 40, 400, tenant="b"))
    plan = next(steps(s))
    assert names(plan) == ["guest"]


def test_under_fair_a_tenant_with_a_blocked_request_comes_after_one_with_more_service() -> None:
    s = scheduler(policy="fair", num_blocks=100, max_model_len=1600, max_requests=3)
    s.add(request("run", 1200, 100, tenant="b"))
    s.add(request("keep", 16, 100, tenant="a"))
    next(steps(s))
    s.add(request("big", 480, 20, tenant="a"))
    s.add(request("small", 16, 4, tenant="a"))
    s.add(request("guest", 16, 4, tenant="b"))
    plan = next(steps(s))
    assert ([s.request.id for s in plan.blocked], names(plan)) == (["big"], ["guest"])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8 if LONG_FORM else 3))
def test_every_head_starts_within_its_bound_and_all_requests_end(policy: str, seed: int) -> None:
    """The bound: 64 steps, and the most steps that a request can take. A preemption starts it
    again: the preempted sequence has more steps left.
    """
    rng = random.Random(seed)
    blocks = rng.choice((60, 120))
    s = scheduler(
        policy=policy,
        num_blocks=blocks,
        max_model_len=blocks * 16,
        max_batch_tokens=rng.choice((128, 512, 4096)),
        max_requests=rng.choice((8, 24)),
        safety_margin=rng.choice((0.0, 0.2)),
        allow_block_sharing=rng.random() < 0.5,
        prefill_beside_decodes=rng.choice((0, 64)),
    )
    longest = rng.choice((20, 60, 120))
    arrivals, at = [], 0
    for i in range(150):
        at += rng.choice((0, 0, 0, 1, 3, 12))
        large = rng.random() < 0.1
        prompt = rng.randrange(blocks * 8, blocks * 14) if large else rng.randrange(1, 80)
        # A large request always ends; a small one gets what is left of the cache.
        output = rng.randrange(1, min(longest, blocks * 16 - prompt))
        tenant = rng.choice("abc")
        n = rng.choice((1, 1, 1, 2))
        arrivals.append((at, request(f"r{i}", prompt, output, n=n, tenant=tenant)))
    now, worst = 0, 0
    waited: dict[int, int] = {}
    while arrivals or s.has_work:
        while arrivals and arrivals[0][0] <= now:
            s.add(arrivals.pop(0)[1])
        if s.has_work:
            plan = next(steps(s))
            if plan.preempted:
                waited.clear()
            if plan.blocked:
                head = plan.blocked[0]
                waited[head.id] = waited.get(head.id, 0) + 1
                worst = max(worst, *waited.values())
        now += 1
        assert now < 50_000
    budget = s.limits.max_batch_tokens - s.limits.max_requests
    budget = min(budget, s.limits.prefill_beside_decodes or budget)
    bound = ACCRUAL_STEPS + longest + -(-blocks * 16 // s.state.least_of_running(budget))
    assert worst <= bound


# -- one long request and the others, while most of the cache is free


def waits(s: Scheduler, arrivals: dict[int, Request], steps_to_run: int) -> dict[str, int]:
    """Run so many steps; by request, the steps from its arrival to its start."""
    came: dict[str, int] = {}
    started: dict[str, int] = {}
    for now in range(steps_to_run):
        if now in arrivals:
            came[arrivals[now].id] = now
            s.add(arrivals[now])
        work = s.commit(plan := s.plan())
        started |= dict.fromkeys(names(plan), now)
        s.update(work, {r.sequence.id: Result(1) for r in work.rows if r.samples})
    return {name: started.get(name, steps_to_run) - at for name, at in came.items()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "heads", [(55_000,), (66_000,), (100_000,), (66_000, *(100_000,) * 6, *(54_000,) * 6)]
)
def test_behind_a_blocked_head_of_any_length_small_requests_start(
    policy: str, heads: tuple[int, ...]
) -> None:
    """Three runners leave a third of 10,000 blocks free, in which no head fits; a hundred small
    requests need 9 blocks each and are gone long before.
    """
    s = scheduler(
        policy=policy,
        num_blocks=10_000,
        max_model_len=160_000,
        max_batch_tokens=200_000,
        allow_block_sharing=False,
    )
    for i in range(3):
        s.add(request(f"run{i}", 35_700, 1000, tenant=f"run{i}"))
    next(steps(s))
    for i, length in enumerate(heads):
        s.add(request(f"head{i}", length, 10, tenant="heads"))
    arrivals = {4 * i: request(f"small{i}", 100, 32, tenant=f"t{i % 3}") for i in range(100)}
    waited = waits(s, arrivals, 400)
    assert list(waited.values()) == [0] * 100


@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_preemption_small_requests_start_and_the_victim_as_early_as_without_them(
    policy: str,
) -> None:
    """Of 1,000 blocks an old sequence takes the last one from a young one of 8,000 tokens. Half of
    the cache is free until the old one ends, 600 steps later.
    """

    def run(small: int) -> tuple[list[int], int]:
        s = scheduler(policy=policy, num_blocks=1000, max_model_len=16_000, max_requests=64)
        s.add(request("old", 7000, 1300, tenant="old"))
        young = s.add(request("young", 7600, 2000, tenant="young", priority=1))[0]
        run = steps(s)
        while not next(run).preempted:
            pass
        arrivals = {
            20 * i: request(f"small{i}", 100, 100, tenant="small", priority=2) for i in range(small)
        }
        waited = waits(s, arrivals, 560)
        assert not young.tables
        while not young.tables:
            next(run)
        return list(waited.values()), s.state.step

    waited, start = run(25)
    assert waited == [0] * 25
    assert start == run(0)[1]


@pytest.mark.parametrize("policy", ["fifo", "fair"])
def test_no_number_of_long_prompts_hides_a_short_one(policy: str) -> None:
    """Half of the cache is free; 300 prompts that do not fit in it come before a short one."""
    s = scheduler(policy=policy, num_blocks=1000, max_model_len=16_000, allow_block_sharing=False)
    s.add(request("run", 8000, 5000))
    next(steps(s))
    for i in range(300):
        s.add(request(f"long{i}", 9000, 100))
    s.add(request("short", 50, 10))
    assert names(next(steps(s))) == ["short"]


def test_those_that_wait_for_a_block_hide_nobody_behind_them() -> None:
    """A document is computed for 200 steps, and twelve requests that share it wait for it."""
    s = scheduler(max_batch_tokens=256, num_blocks=40_000, max_model_len=200_000)
    document = tuple(range(50_000))
    s.add(request("leader", document, 10))
    next(steps(s))
    for i in range(12):
        s.add(request(f"waiter{i}", (*document, i), 10))
    s.add(request("long", 120_000, 10))
    run = steps(s)
    assert names(next(run)) == ["long"]
    assert [names(next(run)) for _ in range(3)] == [[], [], []]


class CountingIndex(dict[bytes, int]):
    looks = 0

    def get(self, key: bytes, default: object = None) -> object:  # type: ignore[override]
        self.looks += 1
        return super().get(key, default)


def test_a_step_looks_up_only_blocks_that_are_new_to_a_sequence_that_waits() -> None:
    s = scheduler(num_blocks=2_800, max_model_len=44_800)
    prompt = tuple(range(20_000))
    s.add(request("run", prompt, 900))
    run = steps(s)
    next(run)
    for i in range(3):
        s.add(request(f"wait{i}", (*prompt[:19_000], *[30_000 + i] * 25_000), 500))
    next(run)
    index = CountingIndex(s.state.cache.pool._index[0])
    s.state.cache.pool._index[0] = index
    for _ in range(40):
        next(run)
    assert s.waiting[0].request.id == "wait0"
    assert index.looks <= 40 * 3 * 4


def preempted(s: Scheduler, name: str, prompt: int, output: int) -> Sequence:
    """A sequence that waits as after a preemption."""
    sequence = s.add(request(name, prompt, output))[0]
    sequence.preemptions, s._preempted_tokens = 1, s._preempted_tokens + prompt
    return sequence


def test_behind_a_preempted_sequence_younger_ones_do_not_delay_a_large_one() -> None:
    """The preempted one waits for an old sequence of 600 steps, the large one for a short one of
    20; small ones that end before the old one come in every step.
    """
    s = scheduler(num_blocks=100, block_size=64, max_model_len=6400, allow_block_sharing=False)
    s.add(request("old", 20 * 64, 600))
    s.add(request("short", 38 * 64, 20))
    run = steps(s)
    next(run)
    preempted(s, "preempted", 84 * 64 - 20, 10)
    s.add(request("large", 58 * 64 - 20, 10))
    small = {i: request(f"small{i}", 130, 200) for i in range(30)}
    waited = waits(s, small, 30)
    assert sum(wait == 0 for wait in waited.values()) > 5, "they start while it waits"
    assert not [x for x in s.waiting if x.request.id == "large"], "as without them"


def test_preempted_sequences_beyond_the_fourth_have_their_needs_reserved() -> None:
    """An old sequence of 64 steps leaves 20 of 100 blocks; five preempted ones need 20 each."""
    s = scheduler(num_blocks=100, max_model_len=1600, allow_block_sharing=False, max_requests=64)
    s.add(request("old", 80 * 16, 64))
    run = steps(s)
    next(run)
    for i in range(5):
        preempted(s, f"preempted{i}", 304, 6)
    s.add(request("young", 112, 128))
    started: dict[str, int] = {}
    for plan in run:
        started |= dict.fromkeys(names(plan), plan.step)
    assert [started[f"preempted{i}"] for i in range(5)] == [64] * 5
