"""Random workloads under scarce memory, run to their end on a device that records every slot it
wrote.

``run`` runs a Scenario and checks the invariants after every step, every key that a row reads,
every event, and every delivered token against an oracle without a scheduler. ``shrink`` removes
arrivals and events from a failing scenario while it still fails. With ``ahead`` steps are
launched, the next before the tokens of the last are known.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fairlead_runtime.request.sequence import FINAL, Failure, FinishReason, Sequence
from fairlead_runtime.scheduling import Finished, Plan, Result, Row, Scheduler, Token, Work
from fairlead_runtime.sizing.groups import NULL, group_layers
from support.whole_run_device import Device, RunError
from support.whole_run_scenario import ROOMY, Arrival, Scenario, alone, draw, draw_states

__all__ = [
    "ROOMY",
    "Arrival",
    "Outcome",
    "RunError",
    "Scenario",
    "draw",
    "draw_states",
    "fails",
    "run",
    "shrink",
]


@dataclass
class Outcome:
    steps: int = 0
    preemptions: int = 0
    offloads: int = 0
    forks: int = 0
    hits: int = 0
    ahead: int = 0  # steps that were launched while another was in flight
    started: int = 0  # sequences that started in these
    dead: int = 0  # rows of sequences that had ended
    recalls: int = 0
    delivered: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finishes: dict[tuple[str, int], FinishReason] = field(default_factory=dict)

    def count(self, outcome: "Outcome") -> None:
        """Add another run's numbers to these."""
        for name, value in vars(outcome).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)


RESERVATIONS = 4  # of preempted sequences; of more only the needs count


class Flight(NamedTuple):
    """A committed step that the device has computed, and the scheduler has not been told of."""

    work: Work
    results: dict[int, Result]
    launched: bool
    units: list[int]  # that its rows write to


class ScenarioRun:
    def __init__(
        self, scenario: Scenario, make: Callable[..., Scheduler] = Scheduler, *, ahead: bool = False
    ) -> None:
        self.scenario = scenario
        self.ahead = ahead
        self.flights: list[Flight] = []
        limits = scenario.limits
        groups = group_layers(scenario.windows) if scenario.windows else ()
        self.scheduler = make(limits, groups, b"model")
        self.device = Device(groups, limits.block_size, states=limits.state_units > 0)
        self.outcome = Outcome()
        self.ended: set[int] = set()
        self.blocked_since: dict[int, int] = {}  # step in which blocks were first reserved
        self.aborts: list[Arrival] = []  # to abort while the next step is on the device
        self.by_id = {a.request.id: a for a in scenario.arrivals}

    def run(self) -> Outcome:
        arrivals = sorted(self.scenario.arrivals, key=lambda a: a.step)
        aborts = sorted(
            (a for a in arrivals if a.abort_at is not None), key=lambda a: a.abort_at or 0
        )
        now = 0
        bound = self._bound()
        while arrivals or self.scheduler.has_work or self.flights:
            if arrivals and not self.scheduler.has_work:
                now = max(now, arrivals[0].step)
            # The last step was checked at its end: again only where something changes after it.
            changed = False
            while arrivals and arrivals[0].step <= now:
                self.scheduler.add(arrivals.pop(0).request)
                changed = True
            while aborts and (aborts[0].abort_at or 0) <= now:
                abort = aborts.pop(0)
                if abort.abort_within:
                    self.aborts.append(abort)
                else:
                    self._abort(abort)
                    changed = True
            for sequence in [s for s in self.scheduler.live() if s.host]:
                if self.by_id[sequence.request.id].abort_offloaded:
                    for event in self.scheduler.abort(sequence.request.id, sequence.choice):
                        self._finished(event)
                    changed = True
            if changed:
                self.scheduler.check()
            if self.scheduler.has_work or self.flights:
                self.step()
                self.scheduler.check()
            now += 1
            if self.outcome.steps > bound:
                raise RunError(f"not done after {bound} steps: livelock")
        self._check_at_rest()
        return self.outcome

    def _bound(self) -> int:
        """A limit of steps, far above what any run needs."""
        return 1000 + 20 * sum(
            a.request.params.n * (len(a.request.prompt) + a.request.max_tokens)
            for a in self.scenario.arrivals
        )

    def step(self) -> None:
        scheduler = self.scheduler
        if not self.flights:
            self._start(scheduler.plan(), scheduler.plan())
        if self.flights[0].launched:
            plan = scheduler.plan_ahead()
            if plan is not None and _launches(plan.rows):
                self._start(plan, scheduler.plan_ahead())
        while self.aborts:
            self._abort(self.aborts.pop())
        self._check_writes()
        self._collect()
        self._check_writes()
        self._check_blocks_held()

    def _start(self, plan: Plan, again: Plan | None) -> None:
        if plan != again:
            raise RunError("planning twice gives different plans")
        self._check_limits(plan)
        started = {s.id for s in self.scheduler.running}
        work = self.scheduler.commit(plan)
        self.device.copy(work)
        launched = self.ahead and _launches(work.rows)
        if not launched:
            self._repeat(work)
        results = self.device.forward(work.rows, launched=launched)
        size = self.scenario.limits.block_size
        units = [
            unit
            for row in work.rows
            for table in row.sequence.tables
            for unit in table[row.start // size : -(-(row.start + row.count) // size)]
        ]
        if self.scenario.limits.state_units:
            units += [unit for row in work.rows for unit in row.sequence.state_target()]
        if launched:
            self.scheduler.launch(work)
        outcome = self.outcome
        outcome.ahead += bool(self.flights)
        outcome.started += len(plan.admitted) if self.flights else 0
        self.flights.append(Flight(work, results, launched, units))
        outcome.steps += 1
        outcome.preemptions += len(plan.preempted)
        outcome.offloads += sum(p.offload for p in plan.preempted)
        outcome.forks += sum(a.source == "fork" for a in plan.admitted)
        outcome.hits += sum(a.start for a in plan.admitted if a.source == "prefix")
        if plan.preempted and (plan.admitted or not started):
            raise RunError("a step that preempted also admitted")

    def _collect(self) -> None:
        flight = self.flights.pop(0)
        if not (flight.launched and self._fails_in_engine(flight.work)):
            self._update(flight.work, flight.results)
            return
        # As the engine does when a launched step fails: one after another, without dead rows.
        self.scheduler.recall()
        self.outcome.recalls += 1
        again, self.flights = [flight, *self.flights], []
        for each in again:
            work = each.work.living()
            self._repeat(work)
            self._update(work, self.device.forward(work.rows))

    def _repeat(self, work: Work) -> None:
        """A step that is not launched may fail, and is repeated in halves: states must bear it."""
        if self.scenario.limits.state_units:
            half = len(work.rows) // 2
            for part in (work.rows, work.rows[half:], work.rows[:half]):
                self.device.forward(part)

    def _update(self, work: Work, results: dict[int, Result]) -> None:
        self.outcome.dead += len(work.rows) - len(work.living().rows)
        work = self._inject(work, results)
        for event in self.scheduler.update(work, results):
            if isinstance(event, Token):
                self._token(event)
            else:
                self._finished(event)

    def _check_writes(self) -> None:
        """What a step in flight writes to is one sequence's, and nobody finds it."""
        pool = self.scheduler.state.cache.pool
        for unit in [u for flight in self.flights if flight.launched for u in flight.units]:
            if pool.refs[unit] != 1 or pool.content[unit] is not None:
                raise RunError(f"unit {unit} is written in flight, and {pool.refs[unit]} hold it")

    def _check_blocks_held(self) -> None:
        """Recount: a sequence holds the blocks of its computed tokens, except those before its
        windows.
        """
        size = self.scenario.limits.block_size
        for sequence in self.scheduler.running:
            done = sequence.planned_length
            for group, table in zip(self.device.groups, sequence.tables, strict=True):
                freed_blocks = (
                    0
                    if group.window is None
                    else max(0, sequence.computed - group.window + 1) // size
                )
                if len(table) - table.count(NULL) != -(-done // size) - freed_blocks:
                    raise RunError(f"sequence {sequence.id} holds {table} after {done} tokens")
        for sequence in self.scheduler.live():
            tables = [*sequence.tables, *sequence.states] or sequence.host
            if self.scheduler.state.cache.units_held(sequence) != sum(
                len(table) - table.count(NULL) for table in tables
            ):
                raise RunError(f"sequence {sequence.id} holds other units than {tables}")

    def _abort(self, arrival: Arrival) -> None:
        for event in self.scheduler.abort(arrival.request.id, arrival.abort_choice):
            self._finished(event)

    def _fails(self, row: Row) -> bool:
        """Whether this row's choice is to fail now: with its first token, in flight also later."""
        request, choice = row.sequence.request, self.by_id[row.sequence.request.id].fail_choice
        if not row.samples or choice != row.sequence.choice or row.sequence.status in FINAL:
            return False
        return not self.ahead or row.start + row.count - len(request.prompt) >= request.seed % 5

    def _fails_in_engine(self, work: Work) -> bool:
        return any(
            self._fails(row) and self.by_id[row.sequence.request.id].fail_by_engine
            for row in work.rows
        )

    def _inject(self, work: Work, results: dict[int, Result]) -> Work:
        rows = []
        for row in work.rows:
            arrival = self.by_id[row.sequence.request.id]
            if self._fails(row):
                if arrival.fail_by_engine:
                    for event in self.scheduler.fail(
                        row.sequence.id, Failure("found by bisection")
                    ):
                        self._finished(event)
                    continue
                results[row.sequence.id] = Result(0, failure=Failure("non-finite logits"))
            rows.append(row)
        return work.subset(rows)

    @property
    def slots(self) -> int:
        """Sequences that the next step may start: those whose last token is in flight make room."""
        return self.scenario.limits.max_requests - len(self._staying())

    def _staying(self) -> list[Sequence]:
        """The running ones whose last token is not in flight."""
        return [s for s in self.scheduler.running if s.length < s.limit]

    def _check_limits(self, plan: Plan) -> None:
        limits = self.scenario.limits
        if not plan.rows:
            raise RunError("a step without rows although there is work")
        if sum(row.count for row in plan.rows) > limits.max_batch_tokens:
            raise RunError("the step exceeds the token budget")
        if len(plan.admitted) > self.slots:
            raise RunError("more running than max_requests")
        for row in plan.rows:
            whole = row.start + row.count == row.sequence.length
            if row.count < 1 or row.samples != whole:
                raise RunError("a row without tokens, or one that samples before its end")
        self._check_prompts(plan)
        self._check_order(plan)
        self._check_passed_over(plan)
        self._check_computed_once(plan)
        self._check_reservation(plan)
        self._check_margin(plan)

    def _check_prompts(self, plan: Plan) -> None:
        """Prompts beside decodes are within their bound, with everybody counted who may wait for
        them; alone they are not cut short of the step's tokens.
        """
        limits, scheduler = self.scenario.limits, self.scheduler
        bound, started = limits.prefill_beside_decodes, {a.sequence.id for a in plan.admitted}
        prompts = [r for r in plan.rows if r.sequence.id in started or not _is_decode(r.sequence)]
        decodes, tokens = len(plan.rows) - len(prompts), sum(row.count for row in prompts)
        if decodes and bound and limits.policy != "prefill_first":
            prefills = sum(not _is_decode(s) for s in scheduler.running)
            heads = prefills + min(self.slots, len(scheduler.waiting))
            left = len(plan.preempted)  # each leaves the token of its own decode
            if tokens > bound * max(heads, decodes) // decodes + left:
                raise RunError(f"{tokens} tokens of prompts beside {decodes} decodes")
        elif tokens < limits.max_batch_tokens - decodes and not plan.preempted:
            cut = [row for row in prompts if not row.samples and not self._leaves_state(row)]
            if cut:
                raise RunError(f"a prompt is cut at {tokens} tokens although no decode waits")

    def _leaves_state(self, row: Row) -> bool:
        """Whether it ends where others find its state."""
        limits = self.scenario.limits
        kept = limits.state_units and limits.allow_block_sharing
        return bool(kept) and (row.start + row.count) % limits.block_size == 0

    def _check_order(self, plan: Plan) -> None:
        """Rows are in order of their kind and victims are the youngest; checked without the
        policies' code.
        """
        limits, scheduler = self.scenario.limits, self.scheduler
        started = {a.sequence.id for a in plan.admitted}
        first = limits.policy == "prefill_first"
        kinds = [
            2 if r.sequence.id in started else _is_decode(r.sequence) == first for r in plan.rows
        ]
        if kinds != sorted(kinds):
            raise RunError(f"rows in the wrong order for {limits.policy}: {kinds}")
        if limits.policy == "fair":
            return

        victims = {p.sequence.id for p in plan.preempted}
        older = [self._place(s) for s in scheduler.running if s.id not in victims]
        younger = [self._place(p.sequence) for p in plan.preempted]
        if older and younger and max(older) > min(younger):
            raise RunError(f"{limits.policy}: not the youngest preempted")

    def _place(self, sequence: Sequence) -> tuple[int, int]:
        urgent = self.scenario.limits.policy == "priority"
        return (sequence.request.priority if urgent else 0, sequence.id)

    def _check_passed_over(self, plan: Plan) -> None:
        """A sequence starts before an older one only if that one waits for tokens that a running
        one computes, or if it or one before it has a reservation.
        """
        if not plan.admitted or self.scenario.limits.policy == "fair":
            return
        started = {a.sequence.id for a in plan.admitted}
        last = max(self._place(a.sequence) for a in plan.admitted)
        for sequence in self.scheduler.live():
            if sequence.holds_units or sequence.id in started or self._place(sequence) > last:
                continue
            lacks = plan.blocked and self._place(plan.blocked[0]) <= self._place(sequence)
            if not lacks and not self._waits(sequence, plan):
                raise RunError(f"sequence {sequence.id} is passed over without a reason")

    def _computing(self, plan: Plan) -> list[tuple[Sequence, int]]:
        """Sequences that compute their prompt in this step or later, and from which token on."""
        running = [(s, s.computed) for s in self.scheduler.running if s.status == "prefilling"]
        return running + [(a.sequence, a.start) for a in plan.admitted]

    def _waits(self, sequence: Sequence, plan: Plan) -> bool:
        size, sharing = self.scenario.limits.block_size, self.scenario.limits.allow_block_sharing
        for leader, start in self._computing(plan):
            if leader.request is sequence.request:
                return True
            end = (start // size + 1) * size
            if sharing and end < len(sequence.tokens) and _same_tokens(leader, sequence, end):
                return True
        return False

    def _check_computed_once(self, plan: Plan) -> None:
        """No admitted sequence computes a full block that another is about to compute. A fork does
        not count: it hashes no prompt, so that none waits for the last token that it computes. Nor
        does one that is restored to decode: none waits for a decode.
        """
        size = self.scenario.limits.block_size
        if not self.scenario.limits.allow_block_sharing:
            return
        others = {
            a.sequence.id
            for a in plan.admitted
            if a.source == "fork"
            or (a.source == "restore" and len(a.sequence.tokens) - a.start == 1)
        }
        computing = [pair for pair in self._computing(plan) if pair[0].id not in others]
        for admission in plan.admitted:
            end = (admission.start // size + 1) * size
            if admission.source != "prefix" or end >= len(admission.sequence.tokens):
                continue
            if admission.sequence.scores_prompt:
                continue  # it needs the logits of its whole prompt
            for leader, start in computing:
                if leader is admission.sequence:
                    break
                if start // size * size + size == end and _same_tokens(
                    leader, admission.sequence, end
                ):
                    raise RunError(f"sequence {admission.sequence.id} computes block {end} again")

    def _check_reservation(self, plan: Plan) -> None:
        """Recount, where no blocks are shared by content, who must start and who must not."""
        limits = self.scenario.limits
        for sequence in plan.blocked:
            self.blocked_since.setdefault(sequence.id, plan.step)
        for admission in plan.admitted:
            self.blocked_since.pop(admission.sequence.id, None)
        if limits.allow_block_sharing or limits.policy == "fair" or plan.preempted:
            return
        Recount(self, plan).run()

    def _check_margin(self, plan: Plan) -> None:
        """Recount: what all prompts that are computed lack fits beside all rows and the margin."""
        cache, limits = self.scheduler.state.cache, self.scenario.limits
        if not plan.admitted or any(g.window is not None for g in cache.groups):
            return
        if not self._staying() and len(plan.admitted) == 1:
            return
        used: set[int] = {
            u for s in self.scheduler.running for table in (*s.tables, *s.states) for u in table
        }
        new = 0
        for row in plan.rows:
            new += cache.units(row.start, row.start + row.count)
        last = plan.admitted[-1]
        for admission in plan.admitted:
            if admission.source == "prefix":
                used |= {u for table in cache.hit(admission.sequence).tables for u in table}
                new += cache.state_need
            elif admission.source == "restore":
                new += cache.start_units(admission.sequence)
            elif admission.start % limits.block_size:
                new += 1
        done = {row.sequence.id: row.start + row.count for row in plan.rows}
        prompts = [s for s in self._staying() if not _is_decode(s)] + [last.sequence]
        rest = sum(cache.units(done.get(s.id, s.planned_length), s.length) for s in prompts)
        left = cache.pool.units - len(used) - new - rest
        if left < limits.safety_margin * cache.pool.units:
            raise RunError(
                f"sequence {last.sequence.id} was admitted and leaves {left} of "
                f"{cache.pool.units} units"
            )

    def _token(self, event: Token) -> None:
        sequence = event.sequence
        if sequence.id in self.ended:
            raise RunError(f"sequence {sequence.id}: a token after its end")
        out = self.outcome.delivered.setdefault((sequence.request.id, sequence.choice), [])
        if event.index != len(out):
            raise RunError(f"sequence {sequence.id}: index {event.index} after {len(out)} tokens")
        out.append(event.token)
        self._check_prompt_scores(event)
        if event.finish is not None:
            self._end(sequence, event.finish)

    def _check_prompt_scores(self, event: Token) -> None:
        """Each token of the prompt is scored once, in order, and comes with the first token."""
        request = event.sequence.request
        wanted: list[tuple[int, int]] = []
        if request.params.prompt_logprobs is not None and not (
            event.index or event.sequence.choice
        ):
            wanted = list(enumerate(request.prompt))[1:]
        if [(entry.rank, entry.token) for entry in event.prompt] != wanted:
            raise RunError(f"request {request.id}: its prompt's scores are {event.prompt}")

    def _finished(self, event: Finished) -> None:
        self._end(event.sequence, event.reason)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.id in self.ended:
            raise RunError(f"sequence {sequence.id} ended twice")
        self.ended.add(sequence.id)
        self.outcome.finishes[sequence.request.id, sequence.choice] = reason

    def _check_at_rest(self) -> None:
        stats = self.scheduler.stats()
        if stats.used or stats.running or stats.waiting or stats.free + stats.cached != stats.units:
            raise RunError(f"at rest: {stats}")
        if len(self.scheduler.state.cache.host.free) != self.scenario.limits.offload_units:
            raise RunError("at rest: host units are held")
        for arrival in self.scenario.arrivals:
            for choice in range(arrival.request.params.n):
                self._check_tokens(arrival, choice)

    def _check_tokens(self, arrival: Arrival, choice: int) -> None:
        key = (arrival.request.id, choice)
        tokens, reason = alone(arrival.request, choice)
        got, finish = self.outcome.delivered.get(key, []), self.outcome.finishes.get(key)
        if finish in (FinishReason.ABORT, FinishReason.ERROR):
            expected = (
                arrival.abort_at is not None
                or arrival.abort_offloaded
                or arrival.fail_choice == choice
            )
            if not expected or got != tokens[: len(got)]:
                raise RunError(f"{key}: {finish} without a reason, or wrong tokens before it")
        elif (got, finish) != (tokens, reason):
            raise RunError(f"{key}: got {got} ({finish}), alone it is {tokens} ({reason})")


def _same_tokens(one: Sequence, other: Sequence, end: int) -> bool:
    return (
        one.request.salt == other.request.salt
        and len(one.tokens) >= end
        and one.tokens[:end] == other.tokens[:end]
    )


class Entry(NamedTuple):
    """A sequence with a reservation."""

    sequence: Sequence
    need: int
    steps: int  # that it takes once it has started


class Recount:
    """The admissions of one step, decided again sequence by sequence without shared content."""

    def __init__(self, run: ScenarioRun, plan: Plan) -> None:
        self.run_, self.plan, self.limits = run, plan, run.scenario.limits
        self.cache = run.scheduler.state.cache
        self.reserve = math.ceil(self.limits.safety_margin * self.cache.pool.units)
        self.started = {a.sequence.id: a for a in plan.admitted}
        own = [row for row in plan.rows if row.sequence.id not in self.started]
        self.counts = {row.sequence: row.count for row in own}
        decodes = [row for row in own if _is_decode(row.sequence)]
        self.runs = len(own)
        self.holders, self.slots = list(run.scheduler.running), run.slots
        self.prefills = [s for s in run._staying() if not _is_decode(s)]
        # Places of those that end or have ended in flight, whose blocks are not free yet.
        ended, staying = run.scheduler.state.ended, run._staying()
        self.early = len(ended) + len(self.holders) - len(staying)
        self.free = self.cache.pool.available
        self.free -= sum(self.cache.units(row.start, row.start + 1) for row in decodes)
        self.tokens = self._prompt_tokens(decodes)
        self._serve_prefills()
        self.entries: list[Entry] = []
        self.further: list[int] = []  # needs of preempted ones beyond these

    def _prompt_tokens(self, decodes: list[Row]) -> int:
        """The tokens of this step for prompts, running and starting ones."""
        self.bound = self.limits.prefill_beside_decodes
        if not self.bound or self.limits.policy == "prefill_first":
            self.bound = self.limits.max_batch_tokens
        tokens = self.limits.max_batch_tokens - len(decodes)
        if not decodes or self.limits.policy == "prefill_first":
            return tokens
        room = self.free - self.reserve
        room -= sum(self.cache.growth(s, s.planned_length) for s in self.prefills)
        count = len(self.prefills)
        for sequence in self._in_order()[: self.run_.slots]:
            room -= self.cache.growth(sequence, 0) + self.cache.state_need
            count += room >= 0
            if room < 0:
                break
        return min(tokens, self.bound * max(count, len(decodes)) // len(decodes))

    def _for_others(self, tokens: int) -> int:
        if self.limits.policy == "prefill_first" or tokens < 2:
            return 0
        block = self.limits.block_size
        return min(tokens - 1, max(math.ceil(tokens / 4), block * (tokens >= 2 * block)))

    def _serve_prefills(self) -> None:
        """What running prompts lack once older ones have three quarters of the tokens, and those
        that are short the rest of them.
        """
        size, self.lacks = self.tokens, {s: s.length - s.planned_length for s in self.prefills}
        short = [s for s, count in self.lacks.items() if count <= size]
        for share, served in (
            (size - self._for_others(size), self.prefills),
            (self._for_others(size), short),
        ):
            left = share
            for sequence in served:
                count = min(left, self.lacks[sequence])
                left -= count
                self.tokens -= count
                self._compute(sequence, count)
        self.lacks = {s: count for s, count in self.lacks.items() if count}
        self.rest = sum(self.cache.growth(s, s.length - count) for s, count in self.lacks.items())

    def _compute(self, sequence: Sequence, count: int) -> None:
        end = sequence.length - self.lacks[sequence]
        self.lacks[sequence] -= count
        self.free -= self.cache.units(end, end + count)

    def _in_order(self) -> list[Sequence]:
        waiting = [s for s in self.run_.scheduler.live() if not s.holds_units]
        return sorted(waiting, key=self.run_._place)

    def run(self) -> None:
        for sequence in self._in_order():
            if not self.tokens or self.slots <= (self.early if self.entries else 0):
                break
            self._one(sequence)
        entries = [entry.sequence for entry in self.entries]
        blocked = list(self.plan.blocked)  # where no block is left, the first is enough
        if blocked != entries[: len(blocked)] or bool(blocked) != bool(entries):
            raise RunError(f"step {self.plan.step}: others have a reservation")
        self._check_rest()

    def _check_rest(self) -> None:
        """What starts have left goes to the prompts with the fewest tokens left."""
        for sequence in sorted(self.lacks, key=lambda s: self.lacks[s]):
            count = min(self.tokens, self.lacks[sequence])
            self.tokens -= count
            self.lacks[sequence] -= count
        for s in self.prefills:
            if self.counts.get(s, 0) != s.length - s.planned_length - self.lacks.get(s, 0):
                raise RunError(f"step {self.plan.step}: sequence {s.id} has another share")

    def _one(self, sequence: Sequence) -> None:
        shared = sequence.prompt_len - 1
        family = [s for s in self.holders if s.request is sequence.request]
        start, taken = 0, self.cache.state_need
        if sequence.host:
            start, taken = sequence.computed, self.cache.start_units(sequence)
        elif shared and family and not self.limits.state_units:
            if any(s.tables and self.cache.can_fork(s, shared) for s in family):
                start = shared
                taken = len(self.cache.groups) if shared % self.cache.block_size else 0
            elif any(not s.tables or s.computed < shared for s in family):
                self._expect(sequence, starts=False)
                return
        need = taken + self.cache.growth(sequence, start)
        room = self.free - self.rest - (self.reserve if self.runs else 0)
        steps = self._steps(sequence, start)
        starts = need <= room and need + self._due(sequence, steps) <= room
        self._expect(sequence, starts=starts)
        if starts:
            count = min(self.tokens, len(sequence.tokens) - start)
            self.tokens -= count
            self.free -= taken + self.cache.units(start, start + count)
            self.holders.append(sequence)
            self.slots -= 1
            self.runs += 1
        elif self._becomes_entry(sequence):
            self.entries.append(Entry(sequence, need, steps))
        elif sequence.preemptions:
            self.further.append(need)

    def _becomes_entry(self, sequence: Sequence) -> bool:
        victims = [entry for entry in self.entries if entry.sequence.preemptions]
        if sequence.preemptions:
            return len(victims) < RESERVATIONS
        return victims == self.entries

    def _expect(self, sequence: Sequence, *, starts: bool) -> None:
        if starts != (sequence.id in self.started):
            expected = "must" if starts else "must not"
            raise RunError(f"step {self.plan.step}: sequence {sequence.id} {expected} start")

    def _steps(self, sequence: Sequence, start: int) -> int:
        """Steps in which it certainly ends if it starts now."""
        steps = sequence.limit - len(sequence.tokens)
        rest = len(sequence.tokens) - start - self.tokens
        return steps + (self._prompt_steps(rest) if rest > 0 else 0)

    def _prompt_steps(self, tokens: int) -> int:
        budget = min(self.bound, self.limits.max_batch_tokens - len(self.holders))
        # Not fewer than in any later step with more tokens.
        budgets = range(budget, max(budget, 2 * self.limits.block_size) + 1)
        least = max(1, min(tokens - self._for_others(tokens) for tokens in budgets))
        return math.ceil((tokens + sum(self.lacks.values())) / least)

    def _due(self, sequence: Sequence, steps: int) -> int:
        """What is reserved for those that the sequence might delay: it neither ends before such a
        one can start, nor fits beside it then.
        """
        if not self.entries:
            return 0
        due, most = 0, self._most(sequence)
        prompts = self._prompt_steps(0)
        ends = [
            (s.limit - len(s.tokens) + prompts * (s in self.lacks), self._most(s))
            for s in self.holders
        ]
        ends += [(0, self._most(s)) for s in self.run_.scheduler.state.ended.values()]
        for entry, at, spare in self._entry_starts(ends):
            if steps > at and most > spare:
                waited = self.plan.step - self.run_.blocked_since.get(
                    entry.sequence.id, self.plan.step
                )
                share = 16 if entry.sequence.preemptions else min(waited, 16)
                due += entry.need * share // 16
        if self.further and steps > self._first_room(min(self.further), ends):
            due += sum(self.further)
        return due

    def _first_room(self, need: int, ends: list[tuple[int, int]]) -> int:
        """The first moment at which so many units are free beside what runs."""
        units = self.cache.pool.units - self.reserve
        moments = sorted(at for at, _ in ends)
        rooms = [units - sum(most for end, most in ends if end > at) for at in moments]
        return next(
            (at for at, room in zip(moments, rooms, strict=True) if room >= need), moments[-1]
        )

    def _entry_starts(self, ends: list[tuple[int, int]]) -> list[tuple[Entry, int, int]]:
        """Of each entry: the first moment at which it delays no older one and its need fits beside
        all that have not reached their limit, and the units that are left then.
        """
        starts: dict[Entry, int] = {}
        crowded: set[Entry] = set()  # they fit only when nothing else runs

        def free(at: int, besides: Entry) -> int:
            """Units beside one entry that others do not have at its start or at a moment."""
            units = self.cache.pool.units - self.reserve - besides.need
            units -= sum(most for end, most in ends if end > at)
            entries = list(starts)
            rank = entries.index(besides) if besides in starts else len(entries)
            for i, entry in enumerate(entries):
                first, end = starts[entry], starts[entry] + entry.steps
                if i != rank and (first < at or (first == at and i < rank)) and at < end:
                    units -= self._most(entry.sequence)
            return units

        def fits(entry: Entry, at: int) -> bool:
            late = [o for o, start in starts.items() if at < start < at + entry.steps]
            most = self._most(entry.sequence)
            beside = all(o not in crowded and free(starts[o], o) >= most for o in late)
            return free(at, entry) >= 0 and beside

        for entry in self.entries:
            moments = {end for end, _ in ends} | {at + o.steps for o, at in starts.items()}
            fitting = [at for at in sorted(moments) if fits(entry, at)]
            if not fitting:
                crowded.add(entry)
            starts[entry] = fitting[0] if fitting else max(moments)
        return [(o, at, 0 if o in crowded else free(at, o)) for o, at in starts.items()]

    def _most(self, sequence: Sequence) -> int:
        size, chunk = self.limits.block_size, self.limits.max_batch_tokens
        blocks = -(-(sequence.limit - 1) // size)
        return self.cache.state_need + sum(
            blocks if g.window is None else min(blocks, -(-(g.window - 1 + chunk) // size) + 1)
            for g in self.cache.groups
        )


def _is_decode(sequence: Sequence) -> bool:
    """Whether only its last token is left to compute."""
    return sequence.length - sequence.planned_length == 1


def _launches(rows: Iterable[Row]) -> bool:
    """Whether the device could be given these rows before the tokens of the last step are known."""
    return not any(row.sequence.scores_prompt for row in rows)


def run(
    scenario: Scenario, make: Callable[..., Scheduler] = Scheduler, *, ahead: bool = False
) -> Outcome:
    return ScenarioRun(scenario, make, ahead=ahead).run()


def shrink(scenario: Scenario) -> Scenario:
    """The scenario without the arrivals, aborts and failures that the fault does not need."""
    changed = True
    while changed:
        changed = False
        for i, arrival in enumerate(scenario.arrivals):
            rest = scenario.arrivals[:i], scenario.arrivals[i + 1 :]
            plain = dataclasses.replace(
                arrival, abort_at=None, fail_choice=None, abort_offloaded=False
            )
            for smaller in ((), (plain,)):
                if smaller == (arrival,):
                    continue
                candidate = dataclasses.replace(scenario, arrivals=(*rest[0], *smaller, *rest[1]))
                if fails(candidate):
                    scenario, changed = candidate, True
                    break
            if changed:
                break
    return scenario


def fails(scenario: Scenario) -> Exception | None:
    try:
        run(scenario)
    except Exception as error:  # noqa: BLE001 - any error is a finding of the run
        return error
    return None
