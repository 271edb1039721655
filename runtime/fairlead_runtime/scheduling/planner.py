"""Plan one step: which sequences run, which start, which are preempted. Pure: changes nothing.

Owns the decision. It only counts blocks; ``commit`` in scheduler.py takes their ids.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fairlead_runtime.cache.paged import Hit, PagedCache
from fairlead_runtime.request.sequence import Sequence, Status
from fairlead_runtime.scheduling.plan import (
    Admission,
    AdmissionSource,
    Limits,
    Plan,
    Preemption,
    Row,
)
from fairlead_runtime.scheduling.policies import Fifo
from fairlead_runtime.scheduling.reservations import Claim, Hold, Reservations

# One step passes over at most so many waiting sequences, and of these looks up so many.
PASSED_SEQUENCES = 1024
LOOKED_SEQUENCES = 256
# Once looks have compared so many tokens that were new to them, those with more than SHORT tokens
# are looked up in the next step.
LOOKED_TOKENS = 65_536
SHORT = 512


@dataclass(slots=True)
class State:
    """Everything a decision depends on. The planner reads it, only the scheduler changes it."""

    limits: Limits
    cache: PagedCache
    policy: Fifo  # holds the waiting queue
    step: int = 0
    running: list[Sequence] = field(default_factory=list)  # in the policy's order
    # the live sequences of one request, by its id
    siblings: dict[str, list[Sequence]] = field(default_factory=dict)
    # by id, those that ended in flight: they keep their blocks until the last launched step that
    # writes there is collected
    ended: dict[int, Sequence] = field(default_factory=dict)

    @property
    def margin(self) -> int:
        """Units kept free for running sequences. The planner ignores it when none runs; otherwise a
        large request would never start.
        """
        return math.ceil(self.limits.safety_margin * self.cache.pool.units)

    @property
    def prefill_bound(self) -> int:
        """Tokens that prefills and starts may take beside decodes, at least."""
        bound = self.limits.prefill_beside_decodes
        if not bound or self.policy.prefills_first:
            return self.limits.max_batch_tokens
        return min(bound, self.limits.max_batch_tokens)

    def share_of_others(self, tokens: int) -> int:
        """Of a step's prompt tokens, those that the running prefills leave to starts and to shorter
        prompts: a quarter, at least a block where two fit, never all.
        """
        if self.policy.prefills_first:
            return 0
        least = self.cache.block_size if tokens >= 2 * self.cache.block_size else 1
        return max(0, min(tokens - 1, max(least, -(-tokens // 4))))

    def least_of_running(self, tokens: int) -> int:
        """Of so many prompt tokens of a step or more, those that the running prefills have at
        least: where the others' block first fits twice, it is half of them.
        """
        size, rest = self.cache.block_size, tokens - self.share_of_others(tokens)
        halves = tokens < 2 * size and not self.policy.prefills_first
        return max(1, min(rest, size) if halves else rest)


def plan_step(state: State) -> Plan:
    """Decide one step. Equal states give equal plans."""
    return _drafted(state).plan()


def plan_ahead(state: State) -> Plan | None:
    """The step after those in flight, or None where they must be collected first: nothing is left
    to compute, blocks must be copied or taken from a sequence, or one that waits could start with
    the tokens that they compute.
    """
    if state.cache.states is not None and state.cache.states.versions < 3:
        return None  # the step in flight writes what this one would read, and reads the other
    draft = _drafted(state)
    copies = any(a.source is not AdmissionSource.PREFIX for a in draft.admitted)
    if draft.preempted or copies or draft.awaits_flight:
        return None
    plan = draft.plan()
    return plan if plan.rows else None


def _drafted(state: State) -> "_Draft":
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    draft = _Draft(state)
    for sequence in state.running:
        if sequence.steps_in_flight and sequence.finishes_in_flight:
            draft.slots += 1
            draft.early += 1
            continue
        (decodes if sequence.length - sequence.planned_length == 1 else prefills).append(sequence)
    if state.policy.prefills_first:
        draft.run(prefills)
        draft.run(decodes)
    else:
        draft.run(decodes)
        draft.bound_prefills(prefills)
        draft.run_prefills(prefills)
    draft.cut_prompts(prefills)
    draft.admit()
    draft.run(sorted(draft.cut, key=draft.cut.__getitem__))  # what is left, to the shortest
    return draft


class _Candidate(NamedTuple):
    """A waiting sequence's possible start, with the units that it takes."""

    admission: Admission
    claimed: list[int]  # evictable units that its cached prefix references
    start_units: int  # units that its cached tokens take
    need: int  # units for its whole remaining prefill and one more block


@dataclass(slots=True)
class _Bar:
    """The lengths of one that cannot start now: nor can another that has neither fewer tokens nor
    fewer to come, and finds no more in the cache.
    """

    tokens: float = math.inf
    rest: float = math.inf

    def stops(self, sequence: Sequence) -> bool:
        length = len(sequence.tokens)
        return length >= self.tokens and sequence.limit - length >= self.rest

    def lower(self, sequence: Sequence) -> None:
        length = len(sequence.tokens)
        if length <= self.tokens and sequence.limit - length <= self.rest:
            self.tokens, self.rest = length, sequence.limit - length


@dataclass(slots=True)
class _Looks:
    """What a step may still spend on waiting sequences that it passes over."""

    passes: int = PASSED_SEQUENCES
    sequences: int = LOOKED_SEQUENCES
    tokens: int = LOOKED_TOKENS
    hits: list[tuple[Sequence, Hit]] = field(default_factory=list)

    @property
    def spent(self) -> bool:
        return self.passes < 0 or self.sequences <= 0

    def allow(self, sequence: Sequence) -> bool:
        return self.tokens > 0 or len(sequence.tokens) <= SHORT


class _Draft:
    """A plan in the making, and the token and block budgets that remain."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.cache = state.cache
        self.states = state.cache.states
        self.tokens = state.limits.max_batch_tokens
        # sequences that may start; one whose last token is in flight has made room
        self.slots = state.limits.max_requests - len(state.running)
        # places among them whose blocks come when what is in flight is collected
        self.early = len(state.ended)
        self.free = state.cache.pool.available
        self.host_free = len(state.cache.host.free)
        self.rows: dict[int, Row] = {}  # of running sequences, by id
        self.starts: list[Row] = []
        self.admitted: list[Admission] = []
        self.preempted: list[Preemption] = []
        # the running prefills that the rows up to the starts do not end: the tokens that each lacks
        self.cut: dict[Sequence, int] = {}
        self.lacking = 0  # units for these tokens
        self.looks = _Looks()
        # of those of which the cache has nothing, and of those that delay an entry whatever it has
        self._uncached, self._delaying = _Bar(), _Bar()
        # by the first block of a prompt that is being computed: its sequences, and the tokens that
        # each has
        self._leaders: dict[bytes, list[tuple[Sequence, int]]] = {}
        self.reserved = Reservations(state.cache.pool.units - state.margin, self._holders)
        # whether one waits for tokens of which the steps in flight compute the last
        self.awaits_flight = False
        self._preempted_ids: set[int] = set()
        # evictable units that planned admissions reference
        self._claimed_units: set[int] = set()
        # by unit, the references that planned preemptions release
        self._released_refs: dict[int, int] = {}
        # by id, units that a row's state takes although its sequence has as many
        self._renewed: dict[int, int] = {}
        self._keeps_states = state.cache.states is not None and state.cache.sharing

    def plan(self) -> Plan:
        return Plan(
            self.state.step,
            (*self.rows.values(), *self.starts),
            tuple(self.admitted),
            tuple(self.preempted),
            tuple(self.reserved.sequences),
            tuple(self.looks.hits),
        )

    def bound_prefills(self, prefills: list[Sequence]) -> None:
        """Leave the prefills and starts beside this step's decodes a bounded number of tokens.

        Every token of a prompt delays each decode a little, and each sequence that waits for it
        gains as much. So the bound grows with those that wait, per decode.
        """
        decodes, bound = len(self.rows), self.state.prefill_bound
        if decodes and bound < self.state.limits.max_batch_tokens:
            enough = self.tokens * decodes // bound  # with more the bound exceeds all tokens
            waiting = max(decodes, self._waiting_for_tokens(prefills, enough))
            self.tokens = min(self.tokens, bound * waiting // decodes)

    def _waiting_for_tokens(self, prefills: list[Sequence], limit: int) -> int:
        """Sequences whose prompts this step computes or could start, counted up to ``limit``: the
        running ones, and those of the queue for which slots and blocks are free whatever the prefix
        cache has.
        """
        cache, count = self.cache, len(prefills)
        if count > limit or not self.slots:
            return count
        room = self._room - sum(cache.growth(s, s.planned_length) for s in prefills)
        for sequence in itertools.islice(self.state.policy.candidates(), self.slots):
            room -= cache.growth(sequence, 0) + cache.state_need
            if room < 0 or count > limit:
                break
            count += 1
        return count

    def run_prefills(self, prefills: list[Sequence]) -> None:
        """Add rows for running prefills: most of the tokens in the policy's order, then the share
        of others to those that one step can compute whole.
        """
        tokens = self.tokens
        share = self.state.share_of_others(tokens)
        self.tokens -= share
        self.run(prefills)
        self.tokens += share
        self.run(s for s in prefills if s.length - s.planned_length <= tokens)

    def run(self, sequences: Iterable[Sequence]) -> None:
        """Add or lengthen a row for each running sequence while the token budget lasts. A sequence
        that lacks blocks preempts the youngest.
        """
        for sequence in sequences:
            if not self.tokens:
                return
            if sequence.id in self._preempted_ids:
                continue
            # A step in flight makes a sequence longer, whichever its token is.
            start = done = sequence.planned_length
            if (row := self.rows.get(sequence.id)) is not None:
                done += row.count
            missing = sequence.length - done
            count = min(missing, self.tokens)
            if self._keeps_states:
                end = self._end_of_chunk(sequence, start, done, done + count, sequence.branch)
                count = end - done
                if not count:
                    continue
            end = done + count
            need = self.cache.units(done, end)
            if self.states is not None and row is None:
                need += self._renew(sequence)
            while need > self.free:
                if self._preempt_youngest() is sequence:
                    break
                if self.states is not None and row is None:
                    need = self.cache.units(done, end) + self._renew(sequence)
            else:
                self.free -= need
                self.tokens -= count
                self.rows[sequence.id] = Row(sequence, start, end - start, count == missing)

    def _renew(self, sequence: Sequence) -> int:
        """Note the units that the row of a sequence takes for its state, and return them."""
        units = self.cache.renewal(sequence, self._released_refs)
        self._renewed[sequence.id] = units
        return units

    def _end_of_chunk(
        self, sequence: Sequence, start: int, done: int, end: int, branch: int
    ) -> int:
        """Where a row ends that has tokens from ``start`` to ``done`` and could end at ``end``: at
        the end of a block if it can, where others find its state, and once at the last one before
        the token that predicts the next. ``branch``: so far others had the same tokens; more will
        come that begin with these.
        """
        if start < branch <= end and done <= branch:
            return branch
        size, most = self.cache.block_size, sequence.length - 1
        rounded = min(end, most) // size * size
        if rounded == most // size * size:
            least = start + 1
        else:  # less than a quarter of the tokens may be lost for a state that soon has no use
            least = max(start + size, end - (end - start - 1) // 4)
        return rounded if rounded >= max(done, least) else end

    def _end_of_row(self, sequence: Sequence) -> int:
        """The tokens of a running sequence that are computed after this step."""
        row = self.rows.get(sequence.id)
        return sequence.planned_length if row is None else row.start + row.count

    def cut_prompts(self, prefills: list[Sequence]) -> None:
        """Note what the running prefills still lack: what starts now leaves these blocks free."""
        running = [s for s in prefills if s.id not in self._preempted_ids]
        lengths = {s: s.length - self._end_of_row(s) for s in running}
        self.cut = {s: count for s, count in lengths.items() if count}
        self.lacking = sum(self.cache.growth(s, s.length - n) for s, n in self.cut.items())
        if self.states is not None:
            rowless = [s for s in self.cut if s.id not in self.rows]
            self.lacking += sum(self.cache.renewal(s, self._released_refs) for s in rowless)

    def _preempt_youngest(self) -> Sequence:
        """Preempt the sequence that the policy ranks last. The first one keeps running, so every
        step makes progress.
        """
        candidates = [s for s in self.state.running if s.id not in self._preempted_ids]
        victim = max(candidates, key=self.state.policy.rank)
        if (row := self.rows.pop(victim.id, None)) is not None:
            self.tokens += row.count
            self.free += self.cache.units(row.start, row.start + row.count)
            self.free += self._renewed.pop(victim.id, 0)
        self.free += self.cache.units_freed(victim, self._released_refs)
        units = self.cache.units_offloaded(victim)
        offload = 0 < units <= self.host_free
        if offload:
            self.host_free -= units
        self._preempted_ids.add(victim.id)
        self.preempted.append(Preemption(victim, offload))
        return victim

    def admit(self) -> None:
        """Start waiting sequences in the policy's order.

        Two kinds are passed over and keep their place: a sequence whose next tokens a running
        sequence is computing, and one that lacks blocks. The first ones that lack blocks have
        reservations, beside which others start, and in no place whose blocks are still to come: the
        first of them may start there in the next step.

        A sequence takes its blocks chunk by chunk, but is admitted only when its whole prompt fits
        beside what the prompts that are being computed still lack.
        """
        state = self.state
        if self.preempted or not self.tokens:
            return
        for sequence in filter(_prefills, state.running):
            self._lead(sequence, sequence.computed)
        blocked: set[int] = set()
        cached: dict[int, int] = {}
        for sequence in state.policy.candidates(blocked, cached):
            if self._ends_admission():
                return
            self.looks.passes -= 1
            if self._is_stopped(sequence):
                blocked.add(sequence.id)
            elif self._waits_for_sibling(sequence) or self._waits_for_block(sequence):
                continue
            elif not self.looks.allow(sequence):
                if sequence.preemptions:
                    return  # what it needs is reserved before anything starts behind it
            elif (start := self._start_or_reserve(sequence)) is None:
                blocked.add(sequence.id)
            else:
                cached[sequence.id] = start

    def _start_or_reserve(self, sequence: Sequence) -> int | None:
        """Start it where it may start; the tokens that it found. Else keep what was found, and
        blocks for an entry.
        """
        tokens = self.looks.tokens
        candidate = self._candidate(sequence)
        if self._may_start(candidate):
            self._start(candidate)
            self.looks.passes += 1
            self.looks.tokens = tokens  # what starts is looked up for the last time
            return candidate.admission.start
        self.looks.sequences -= 1
        if len(self.state.siblings[sequence.request.id]) == 1 and self.cache.has_none(sequence):
            self._uncached.lower(sequence)
        if (hit := candidate.admission.hit) is not None:
            self.looks.hits.append((sequence, hit))
        self._reserve(candidate)
        return None

    def _is_stopped(self, sequence: Sequence) -> bool:
        """Whether it certainly cannot start, and gets no reservation: it is not looked up."""
        if sequence.preemptions or self.reserved.takes(sequence):
            return False
        if self._delaying.stops(sequence):
            return True
        alone = len(self.state.siblings[sequence.request.id]) == 1
        if alone and self._uncached.stops(sequence) and self.cache.has_none(sequence):
            return True
        claim = Claim(0, self.cache.most_units(sequence), sequence.limit - len(sequence.tokens))
        if self.reserved.leave(claim, self._room):
            return False
        self._delaying.lower(sequence)
        return True

    def _reserve(self, candidate: _Candidate) -> None:
        """Keep blocks for the head, the first that cannot start, and for preempted sequences."""
        sequence = candidate.admission.sequence
        if self.reserved.takes(sequence):
            self.reserved.add(sequence, self._claim(candidate), self.state.step)

    def _ends_admission(self) -> bool:
        places = self.slots - (self.early if self.reserved else 0)
        full = bool(self.reserved) and self._room < len(self.cache.groups) + self.cache.state_need
        return not self.tokens or self.looks.spent or places <= 0 or full

    @property
    def _room(self) -> int:
        """Free units beyond those that running prompts lack, and beyond the margin, which does not
        apply when nothing runs.
        """
        runs = self.rows or self.starts
        return self.free - self.lacking - (self.state.margin if runs else 0)

    def _may_start(self, candidate: _Candidate) -> bool:
        """Whether its blocks are free and it leaves every reservation its due."""
        if candidate.need > self._room:
            return False
        return not self.reserved or self.reserved.leave(self._claim(candidate), self._room)

    def _start(self, candidate: _Candidate) -> None:
        admission = candidate.admission
        sequence, start = admission.sequence, admission.start
        if self.reserved:
            self.reserved.start(self._claim(candidate))
        # An entry that must now start later is no bar to those that end before it.
        self._uncached, self._delaying = _Bar(), _Bar()
        missing = len(sequence.tokens) - start
        count = min(missing, self.tokens)
        if self._keeps_states:
            branch = 0 if admission.hit is None else admission.hit.branch
            count = self._end_of_chunk(sequence, start, start, start + count, branch) - start
        self.slots -= 1
        self.tokens -= count
        self.free -= candidate.start_units + self.cache.units(start, start + count)
        self._claimed_units.update(candidate.claimed)
        self.admitted.append(admission)
        self.starts.append(Row(sequence, start, count, count == missing))
        if admission.source is AdmissionSource.PREFIX:
            self._lead(sequence, start)

    def _candidate(self, sequence: Sequence) -> _Candidate:
        claimed: list[int] = []
        # The prompt's last token is always computed: its logits predict the first new token.
        shared = sequence.prompt_len - 1
        if sequence.host:
            admission = Admission(sequence, AdmissionSource.RESTORE, sequence.computed, None)
            start_units = self.cache.start_units(sequence)
        elif (sibling := self._fork_source(sequence, shared)) is not None:
            admission = Admission(sequence, AdmissionSource.FORK, shared, sibling)
            start_units = len(self.cache.groups) if shared % self.cache.block_size else 0
        else:
            hit = self.cache.hit(sequence)
            self.looks.tokens -= hit.walked
            admission = Admission(sequence, AdmissionSource.PREFIX, hit.tokens, None, hit)
            if self._counts_units(sequence, hit):
                claimed = [u for u in self.cache.evictable(hit) if u not in self._claimed_units]
            # A state that the hit finds is another's next, or must be kept: it counts as taken.
            start_units = len(claimed) + self.cache.state_need
        need = start_units + self.cache.growth(sequence, admission.start)
        return _Candidate(admission, claimed, start_units, need)

    def _counts_units(self, sequence: Sequence, hit: Hit) -> bool:
        """Whether the units that the hit claims decide anything: not where it lacks blocks without
        them, and gets no reservation. To go through them is charged but for an entry.
        """
        if self.reserved.takes(sequence):
            return True
        if self.cache.growth(sequence, hit.tokens) + self.cache.state_need > self._room:
            return False
        self.looks.tokens -= hit.tokens
        return True

    def _fork_source(self, sequence: Sequence, shared: int) -> Sequence | None:
        """A running sibling that holds the prompt's blocks.

        A sequence that has generated tokens looks its own blocks up instead when the cache still
        has more of them than the prompt.
        """
        siblings = self.state.siblings[sequence.request.id]
        if len(siblings) == 1 or not shared or sequence.scores_prompt:
            return None
        if sequence.generated and self.cache.hit(sequence).tokens >= shared:
            return None
        return next((s for s in siblings if s.tables and self.cache.can_fork(s, shared)), None)

    # -- sequences that wait for tokens that another one is computing

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """Whether a running sibling is still computing the prompt, and none has it.

        A sequence waits only for sequences that run, so none waits for ever.
        """
        siblings = self.state.siblings[sequence.request.id]
        shared = sequence.prompt_len - 1
        if self.states is not None:  # one starts from the last snapshot, if there is one
            shared = shared // self.cache.block_size * self.cache.block_size
            shared = shared if self.cache.sharing else 0
        if len(siblings) == 1 or not shared or sequence.host or sequence.scores_prompt:
            return False
        running = [s for s in siblings if s.holds_units]
        if any(
            self.cache.can_fork(s, shared) if self.states is None else s.computed >= shared
            for s in running
        ):
            return False
        self.awaits_flight |= any(s.computed < shared <= s.planned_length for s in running)
        starting = any(a.sequence.request is sequence.request for a in self.admitted)
        return starting or any(s.computed < shared for s in running)

    def _lead(self, sequence: Sequence, start: int) -> None:
        """Note the block that it computes next, unless the cache has it."""
        block = self.cache.next_block(sequence, start)
        if block is None or self.cache.has(block):
            return
        first = self.cache.next_block(sequence, 0)
        if first is not None:
            self._leaders.setdefault(first, []).append((sequence, start))

    def _waits_for_block(self, sequence: Sequence) -> bool:
        """Whether one that runs is computing a block of its prompt, and has all those before it.

        The cache is not looked up: the digest of a block stands for all tokens up to its end.
        """
        if not self._leaders or sequence.host or sequence.scores_prompt:
            return False
        if self._fork_source(sequence, sequence.prompt_len - 1) is not None:
            return False
        first = self.cache.next_block(sequence, 0)
        leaders = [
            leader
            for leader, start in self._leaders.get(first or b"", ())
            if self._shares_block(leader, sequence, start)
        ]
        self.awaits_flight |= any(
            s.steps_in_flight and self._gives_all(s, sequence) for s in leaders
        )
        return bool(leaders)

    def _shares_block(self, leader: Sequence, sequence: Sequence, start: int) -> bool:
        """Whether both have the same tokens up to the end of the block that holds ``start``."""
        block = self.cache.next_block(sequence, start, keep=1)
        return block is not None and block == self.cache.next_block(leader, start)

    def _gives_all(self, leader: Sequence, sequence: Sequence) -> bool:
        """Whether the sequence shares no block with the leader that this computes after the steps
        in flight.
        """
        return not self._shares_block(leader, sequence, leader.planned_length)

    # -- what a sequence takes beside those with reservations

    def _claim(self, candidate: _Candidate) -> Claim:
        sequence, start = candidate.admission.sequence, candidate.admission.start
        rest = len(sequence.tokens) - start - self.tokens
        steps = self._prompt_steps(rest) if rest > 0 else 0
        steps += sequence.limit - len(sequence.tokens)
        return Claim(candidate.need, self.cache.most_units(sequence), steps)

    def _prompt_steps(self, tokens: int) -> int:
        """Steps after which so many tokens are computed, and all that running prefills lack."""
        decodes = len(self.state.running) + len(self.admitted)
        budget = min(self.state.limits.max_batch_tokens - decodes, self.state.prefill_bound)
        tokens += sum(self.cut.values())
        least = self.state.least_of_running(budget)
        if not self._keeps_states:
            return math.ceil(tokens / least)
        # A chunk is cut to blocks, where others part from a prompt, and before its last block.
        size = self.cache.block_size
        return math.ceil(tokens / max(min(least, size), least - size + 1)) + 2 * len(self.cut) + 2

    def _holders(self) -> list[Hold]:
        """Of each sequence that holds blocks: the steps after which it has certainly ended, and the
        most units that it holds.
        """
        prompts = self._prompt_steps(0)
        running = (*self.state.running, *(a.sequence for a in self.admitted))
        return [
            (s.limit - len(s.tokens) + (prompts if s in self.cut else 0), self.cache.most_units(s))
            for s in running
        ] + [(0, self.cache.most_units(s)) for s in self.state.ended.values()]


def _prefills(sequence: Sequence) -> bool:
    return sequence.status is Status.PREFILLING
