"""Plan one step: which sequences run, which start, which are preempted. Pure: changes nothing.

Owns the decision. It only counts blocks; ``commit`` in scheduler.py takes their ids.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fairlead_runtime.cache.paged import PagedCache
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
from fairlead_runtime.scheduling.reservations import RESERVATIONS, Claim, Hold, Reservations

# One step passes over at most so many waiting sequences. Of those with more than SHORT tokens it
# looks up the prefixes of at most so many tokens, and of as many longer ones as have a reservation.
PASSED_SEQUENCES = 256
PASSED_TOKENS = 65_536
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


def plan_step(state: State) -> Plan:
    """Decide one step. Equal states give equal plans."""
    return _drafted(state).plan()


def plan_ahead(state: State) -> Plan | None:
    """The step after those in flight, or None where they must be collected first: nothing is left
    to compute, blocks must be copied or taken from a sequence, or one that waits could start with
    the tokens that they compute.
    """
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


class _Draft:
    """A plan in the making, and the token and block budgets that remain."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.cache = state.cache
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
        self.reserved = Reservations(state.cache.pool.units - state.margin, self._holders)
        # whether one waits for tokens of which the steps in flight compute the last
        self.awaits_flight = False
        self._preempted_ids: set[int] = set()
        # evictable units that planned admissions reference
        self._claimed_units: set[int] = set()
        # by unit, the references that planned preemptions release
        self._released_refs: dict[int, int] = {}

    def plan(self) -> Plan:
        return Plan(
            self.state.step,
            (*self.rows.values(), *self.starts),
            tuple(self.admitted),
            tuple(self.preempted),
            tuple(self.reserved.sequences),
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
            room -= cache.growth(sequence, 0)
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
            end = done + count
            need = self.cache.units(done, end)
            while need > self.free:
                if self._preempt_youngest() is sequence:
                    break
            else:
                self.free -= need
                self.tokens -= count
                self.rows[sequence.id] = Row(sequence, start, end - start, count == missing)

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

    def _preempt_youngest(self) -> Sequence:
        """Preempt the sequence that the policy ranks last. The first one keeps running, so every
        step makes progress.
        """
        candidates = [s for s in self.state.running if s.id not in self._preempted_ids]
        victim = max(candidates, key=self.state.policy.rank)
        if (row := self.rows.pop(victim.id, None)) is not None:
            self.tokens += row.count
            self.free += self.cache.units(row.start, row.start + row.count)
        self.free += self.cache.units_freed(victim, self._released_refs)
        units = self.cache.units_held(victim)
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
        computing = {self.cache.next_block(s, s.computed) for s in state.running if _prefills(s)}
        blocked: set[int] = set()
        cached: dict[int, int] = {}
        passed, tokens, longer = 0, PASSED_TOKENS, RESERVATIONS
        for sequence in state.policy.candidates(blocked, cached):
            if self._ends_admission(passed):
                return
            passed += 1
            if self._delays_an_entry(sequence):
                blocked.add(sequence.id)
                continue
            length = len(sequence.tokens) if len(sequence.tokens) > SHORT else 0
            if self._waits_for_sibling(sequence) or (length > tokens and not longer):
                continue
            candidate = self._candidate(sequence)
            start = candidate.admission.start
            if not self._waits_for_block(candidate.admission, computing):
                if self._may_start(candidate):
                    self._start(candidate)
                    cached[sequence.id] = start
                    if candidate.admission.source is AdmissionSource.PREFIX:
                        computing.add(self.cache.next_block(sequence, start))
                    passed -= 1
                    continue
                blocked.add(sequence.id)
                self._reserve(candidate)
            if length <= tokens:
                tokens -= length
            else:
                longer -= 1

    def _delays_an_entry(self, sequence: Sequence) -> bool:
        """Whether it cannot start whatever the prefix cache has of it, which is then not asked."""
        if not self.reserved or sequence.preemptions:
            return False
        claim = Claim(0, self.cache.most_units(sequence), sequence.limit - len(sequence.tokens))
        return not self.reserved.leave(claim, self._room)

    def _reserve(self, candidate: _Candidate) -> None:
        """Keep blocks for the head, the first that cannot start, and for preempted sequences."""
        sequence, entries = candidate.admission.sequence, len(self.reserved)
        if not entries or (sequence.preemptions and entries < RESERVATIONS):
            self.reserved.add(sequence, self._claim(candidate), self.state.step)

    def _ends_admission(self, passed: int) -> bool:
        places = self.slots - (self.early if self.reserved else 0)
        full = bool(self.reserved) and self._room < len(self.cache.groups)
        return not self.tokens or passed == PASSED_SEQUENCES or places <= 0 or full

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
        missing = len(sequence.tokens) - start
        count = min(missing, self.tokens)
        self.slots -= 1
        self.tokens -= count
        self.free -= candidate.start_units + self.cache.units(start, start + count)
        self._claimed_units.update(candidate.claimed)
        self.admitted.append(admission)
        self.starts.append(Row(sequence, start, count, count == missing))

    def _candidate(self, sequence: Sequence) -> _Candidate:
        claimed: list[int] = []
        # The prompt's last token is always computed: its logits predict the first new token.
        shared = sequence.prompt_len - 1
        if sequence.host:
            admission = Admission(sequence, AdmissionSource.RESTORE, sequence.computed, None)
            start_units = self.cache.units_held(sequence)
        elif (sibling := self._fork_source(sequence, shared)) is not None:
            admission = Admission(sequence, AdmissionSource.FORK, shared, sibling)
            start_units = len(self.cache.groups) if shared % self.cache.block_size else 0
        else:
            hit = self.cache.hit(sequence)
            admission = Admission(sequence, AdmissionSource.PREFIX, hit.tokens, None, hit)
            claimed = [u for u in self.cache.evictable(hit) if u not in self._claimed_units]
            start_units = len(claimed)
        need = start_units + self.cache.growth(sequence, admission.start)
        return _Candidate(admission, claimed, start_units, need)

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
        if len(siblings) == 1 or not shared or sequence.host or sequence.scores_prompt:
            return False
        running = [s for s in siblings if s.tables]
        if any(self.cache.can_fork(s, shared) for s in running):
            return False
        self.awaits_flight |= any(s.computed < shared <= s.planned_length for s in running)
        starting = any(a.sequence.request is sequence.request for a in self.admitted)
        return starting or any(s.computed < shared for s in running)

    def _waits_for_block(self, admission: Admission, computing: set[bytes | None]) -> bool:
        """Whether a running sequence is computing the first block that the cached prefix lacks."""
        if admission.source is not AdmissionSource.PREFIX or admission.sequence.scores_prompt:
            return False
        sequence = admission.sequence
        block = self.cache.next_block(sequence, admission.start, keep=1)
        if block is None or block not in computing:
            return False
        self.awaits_flight |= any(
            s.steps_in_flight
            and self.cache.next_block(s, s.computed) == block
            and self._gives_all(s, sequence)
            for s in self.state.running
        )
        return True

    def _gives_all(self, leader: Sequence, sequence: Sequence) -> bool:
        """Whether the sequence shares no block with the leader that this computes after the steps
        in flight.
        """
        block = self.cache.next_block(sequence, leader.planned_length, keep=1)
        return block is None or block != self.cache.next_block(leader, leader.planned_length)

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
        budget = max(1, budget - self.state.share_of_others(budget))
        return math.ceil((sum(self.cut.values()) + tokens) / budget)

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
