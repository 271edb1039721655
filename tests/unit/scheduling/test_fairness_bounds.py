"""The bounds of docs/design/0001-scheduling.md over workloads that Hypothesis draws and shrinks.

A blocked request starts within ACCRUAL_STEPS + D steps, stops no other for longer than that and its
own prompt, and nothing else stops a request that could start.
"""

from collections import Counter, deque
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence, Status
from fairlead_runtime.scheduling import Limits, Plan, Result, Scheduler
from fairlead_runtime.scheduling.reservations import ACCRUAL_STEPS
from fairlead_runtime.settings.engine_config import SchedulerType
from fairlead_runtime.sizing.groups import group_layers
from support.full import LONG_FORM
from support.whole_run_scenario import POLICIES

BLOCK, BLOCKS, LONGEST = 4, 40, 24
CAPACITY = BLOCK * BLOCKS
EXAMPLES = settings(max_examples=600 if LONG_FORM else 25, deadline=None)


class Arrival(NamedTuple):
    gap: int  # steps after the one before it
    prompt: int
    output: int
    n: int
    tenant: str
    priority: int
    shared: bool  # its prompt begins as those of all others that share


SMALL = st.tuples(st.integers(1, 12), st.sampled_from((1, 6, LONGEST)))
MIDDLE = st.tuples(st.integers(20, 60), st.integers(1, LONGEST))
LARGE = st.tuples(st.integers(100, CAPACITY - LONGEST), st.integers(1, LONGEST))
ARRIVALS = st.lists(
    st.builds(
        lambda gap, size, n, tenant, priority, shared: Arrival(
            gap, size[0], size[1], n, tenant, priority, shared
        ),
        st.sampled_from((0, 0, 0, 1, 2, 9)),
        st.one_of(SMALL, SMALL, SMALL, MIDDLE, LARGE),
        st.sampled_from((1, 1, 1, 2, 3)),
        st.sampled_from("abc"),
        st.integers(0, 1),
        st.booleans(),
    ),
    min_size=2,
    max_size=30,
)
# A request of one shape every few steps, so that a large one meets a stream that never ends.
STREAMS = st.builds(
    lambda gap, size, tenant: [Arrival(gap, size[0], size[1], 1, tenant, 0, False)] * 60,
    st.sampled_from((1, 2, 3)),
    SMALL,
    st.sampled_from("abc"),
)
LIMITS = st.builds(
    lambda budget, requests, margin, sharing, bound: Limits(
        policy="fifo",
        max_batch_tokens=budget,
        max_requests=requests,
        safety_margin=margin,
        block_size=BLOCK,
        num_blocks=BLOCKS,
        max_model_len=CAPACITY,
        allow_block_sharing=sharing,
        prefill_beside_decodes=bound,
    ),
    st.sampled_from((20, 40, 400)),
    st.sampled_from((4, 12)),
    st.sampled_from((0.0, 0.2)),
    st.booleans(),
    st.sampled_from((0, 6, 24)),
)


class Run:
    """One workload, and how long each blocked request waited and stopped each other one."""

    def __init__(self, limits: Limits, *arrivals: list[Arrival]) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits, group_layers([None]))
        # Steps that all prompts in the cache take at most, beside a decode of every request.
        self.beside = 0 if limits.policy == "prefill_first" else limits.prefill_beside_decodes
        tokens = limits.max_batch_tokens - limits.max_requests
        tokens = min(tokens, self.beside or tokens)
        self.prompt_steps = -(-CAPACITY // self.scheduler.state.least_of_running(tokens))
        self.bound = ACCRUAL_STEPS + LONGEST + self.prompt_steps
        self.blocked: Counter[int] = Counter()  # steps as the head, by sequence
        self.stopped: Counter[tuple[int, int]] = Counter()  # by sequence and who stopped it
        timed = [
            (step, arrival)
            for each in arrivals
            for step, arrival in zip(accumulate(a.gap for a in each), each, strict=True)
        ]
        self._left = deque(sorted(timed, key=lambda pair: pair[0]))

    def run(self) -> None:
        left, now, number = self._left, 0, 0
        while left or self.scheduler.has_work:
            while left and left[0][0] <= now:
                number += 1
                self.scheduler.add(_request(number, left.popleft()[1]))
            if self.scheduler.has_work:
                self._step()
            now += 1
            assert now < 20_000

    def _step(self) -> None:
        plan = self.scheduler.plan()
        starting = {a.sequence.id for a in plan.admitted}
        waiting = [s for s in self.scheduler.waiting if s.id not in starting]
        self.count(plan, waiting)
        self.check_nobody_else_stops(plan, waiting)
        if self.limits.policy == "fair":
            self.check_tenants(plan, waiting)
        work = self.scheduler.commit(plan)
        self.scheduler.update(work, {r.sequence.id: Result(1) for r in work.rows if r.samples})

    def count(self, plan: Plan, waiting: list[Sequence]) -> None:
        """A preemption starts the bounds again: the preempted one has more steps left. So does a
        start of a more urgent request: the bounds hold among requests of one priority, and under
        ``fair`` from when the blocked one's tenant has its turn.
        """
        if plan.preempted or self.starts_more_urgent(plan, waiting):
            self.blocked.clear()
            self.stopped.clear()
            return
        prompts = [r for r in plan.rows if r.start < r.sequence.prompt_len - 1]
        tokens_left = self.tokens_left(plan)
        decodes_stand = self.limits.policy == "prefill_first" and not tokens_left
        head = plan.blocked[0] if plan.blocked else None
        if head is not None and not (prompts and decodes_stand):
            self.blocked[head.id] += 1
            assert self.blocked[head.id] <= self.bound, f"{head.id} is not served in time"
            for sequence in waiting:
                self.stopped[sequence.id, head.id] += sequence is not head
        if not tokens_left:
            for row in prompts:
                for sequence in waiting:
                    self.stopped[sequence.id, row.sequence.id] += row.sequence is not head
        longest = max(self.stopped.values(), default=0)
        assert longest <= self.bound + self.prompt_steps, "one request stops another too long"

    def tokens_left(self, plan: Plan) -> int:
        """Tokens that this step certainly had for one more prompt."""
        left = self.limits.max_batch_tokens - sum(r.count for r in plan.rows)
        starting = {a.sequence.id for a in plan.admitted}
        prompts = [
            row.count
            for row in plan.rows
            if row.sequence.id in starting or len(row.sequence.tokens) - row.sequence.computed > 1
        ]
        if not self.beside or len(prompts) == len(plan.rows):
            return left
        return min(left, max(0, self.beside - sum(prompts)))

    def starts_more_urgent(self, plan: Plan, waiting: list[Sequence]) -> bool:
        """Whether this step admits a request of a lower priority number than a blocked one's, or of
        another tenant that had less service. One that was blocked before is still so in a step
        whose starts leave no tokens to look at it.
        """
        heads = plan.blocked[:1] or [s for s in waiting if self.blocked[s.id]]
        return any(self.is_more_urgent(a.sequence, h) for a in plan.admitted for h in heads)

    def is_more_urgent(self, started: Sequence, head: Sequence) -> bool:
        if self.limits.policy == "priority":
            return started.request.priority < head.request.priority
        rank = self.scheduler.state.policy.rank
        other = started.request.tenant != head.request.tenant
        return self.limits.policy == "fair" and other and rank(started) < rank(head)

    def check_nobody_else_stops(self, plan: Plan, waiting: list[Sequence]) -> None:
        """With tokens, slots and blocks left, only a prompt that is being computed is waited for:
        by its other choices, and by those that share it.
        """
        slots = self.limits.max_requests - len(self.scheduler.running) - len(plan.admitted)
        tokens_left = self.tokens_left(plan)
        if plan.preempted or plan.blocked or not slots or not tokens_left:
            return
        running = [s for s in self.scheduler.running if s.status is Status.PREFILLING]
        computing = running + [a.sequence for a in plan.admitted]
        for sequence in waiting:
            assert any(
                leader.request is sequence.request
                or (self.limits.allow_block_sharing and leader.tokens[:4] == sequence.tokens[:4])
                for leader in computing
            ), f"{sequence.id} waits for nothing"

    def check_tenants(self, plan: Plan, waiting: list[Sequence]) -> None:
        """A tenant with a blocked request starts no later one while another tenant's first request
        of the same size waits.
        """
        if not plan.blocked or self.limits.allow_block_sharing:
            return
        firsts: dict[str, Sequence] = {}
        for sequence in waiting:
            firsts.setdefault(sequence.request.tenant, sequence)
        head = plan.blocked[0]
        for started in (a.sequence for a in plan.admitted):
            if started.request.tenant != head.request.tenant or started.id < head.id:
                continue
            for first in firsts.values():
                assert (
                    first.request.tenant == head.request.tenant
                    or _size(first) != _size(started)
                    or first.request.params.n > 1
                    or started.request.params.n > 1
                ), f"{started.id} of the blocked tenant starts before {first.id}"


def _size(sequence: Sequence) -> tuple[int, int]:
    return len(sequence.tokens), sequence.limit


def _request(number: int, arrival: Arrival) -> Request:
    own = 1000 * (number + 1)
    first = 0 if arrival.shared else own
    prompt = (*range(first, first + arrival.prompt - 1), own)
    return Request(
        f"r{number}",
        prompt,
        SamplingParams(n=arrival.n, max_tokens=arrival.output),
        arrival.output,
        tenant=arrival.tenant,
        priority=arrival.priority,
    )


@pytest.mark.parametrize("policy", POLICIES)
@EXAMPLES
@given(limits=LIMITS, arrivals=ARRIVALS, stream=STREAMS)
def test_a_large_request_is_served_and_stops_others_within_the_stated_bounds(
    policy: SchedulerType, limits: Limits, arrivals: list[Arrival], stream: list[Arrival]
) -> None:
    Run(replace(limits, policy=policy), arrivals, stream).run()
