"""Plan one step: which sequences run, which start, which are preempted. Pure: changes nothing.

Owns the decision. It only counts blocks; ``commit`` in scheduler.py takes their ids.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from fairlead_runtime.cache.paged import PagedCache
from fairlead_runtime.request import Sequence
from fairlead_runtime.scheduling.plan import (
    Admission,
    AdmissionSource,
    Limits,
    Plan,
    Preemption,
    Row,
)
from fairlead_runtime.scheduling.policies import Fifo


@dataclass(slots=True)
class State:
    """Everything a decision depends on. The planner reads it, only the scheduler changes it."""

    limits: Limits
    cache: PagedCache
    policy: Fifo  # holds the waiting queue
    step: int = 0
    running: list[Sequence] = field(default_factory=list)  # in the policy's order
    # live sequences by request id
    families: dict[str, list[Sequence]] = field(default_factory=dict)
    # the last preempted one; no sequence starts until it fits again or a sequence ends
    victim: Sequence | None = None

    @property
    def margin(self) -> int:
        """Units kept free for running sequences. The planner ignores it when none runs; otherwise a
        large request would never start.
        """
        return math.ceil(self.limits.safety_margin * self.cache.pool.units)


def plan_step(state: State) -> Plan:
    """Decide one step. Equal states give equal plans."""
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    for sequence in state.running:
        (decodes if len(sequence.tokens) - sequence.computed == 1 else prefills).append(sequence)
    draft = _Draft(state)
    for sequences in (prefills, decodes) if state.policy.prefills_first else (decodes, prefills):
        draft.run(sequences)
    draft.admit()
    return Plan(state.step, tuple(draft.rows), tuple(draft.admitted), tuple(draft.preempted))


class _Draft:
    """A plan in the making, and the token and block budgets that remain."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.cache = state.cache
        self.tokens = state.limits.max_batch_tokens
        self.free = state.cache.pool.available
        self.host_free = len(state.cache.host.free)
        self.rows: list[Row] = []
        self.admitted: list[Admission] = []
        self.preempted: list[Preemption] = []
        self._preempted_ids: set[int] = set()
        # evictable units that planned admissions reference
        self._claimed_units: set[int] = set()
        # by unit, the references that planned preemptions release
        self._released_refs: dict[int, int] = {}

    def run(self, sequences: Iterable[Sequence]) -> None:
        """Add a row for each running sequence while the token budget lasts. A sequence that lacks
        blocks preempts the youngest.
        """
        for sequence in sequences:
            if not self.tokens:
                return
            if sequence.id in self._preempted_ids:
                continue
            start = sequence.computed
            missing = len(sequence.tokens) - start
            count = min(missing, self.tokens)
            need = self.cache.units(start, start + count)
            while need > self.free:
                if self._preempt_youngest() is sequence:
                    break
            else:
                self.free -= need
                self.tokens -= count
                self.rows.append(Row(sequence, start, count, count == missing))

    def _preempt_youngest(self) -> Sequence:
        """Preempt the sequence that the policy ranks last. The first one keeps running, so every
        step makes progress.
        """
        candidates = [s for s in self.state.running if s.id not in self._preempted_ids]
        victim = max(candidates, key=self.state.policy.rank)
        for row in self.rows:
            if row.sequence is victim:
                self.rows.remove(row)
                self.tokens += row.count
                self.free += self.cache.units(row.start, row.start + row.count)
                break
        self.free += self.cache.units_freed(victim, self._released_refs)
        held = self.cache.units_held(victim)
        offload = 0 < held <= self.host_free
        if offload:
            self.host_free -= held
        self._preempted_ids.add(victim.id)
        self.preempted.append(Preemption(victim, offload))
        return victim

    def admit(self) -> None:
        """Start waiting sequences in the policy's order, up to the first that cannot start: none
        overtakes it.

        If tokens remain, every running prefill ends in this step, so all remaining free blocks are
        available to new prompts. A sequence takes its blocks chunk by chunk, but is admitted only
        when its whole prompt fits.
        """
        state = self.state
        if self.preempted or not self.tokens:
            return
        if state.victim is not None and self._admission_for(state.victim) is None:
            return
        for sequence in state.policy.candidates():
            if (
                not self.tokens
                or len(state.running) + len(self.admitted) >= state.limits.max_requests
            ):
                return
            entry = self._admission_for(sequence)
            if entry is None:
                return
            admission, claimed, start_units = entry
            start, missing = admission.start, len(sequence.tokens) - admission.start
            count = min(missing, self.tokens)
            self.tokens -= count
            self.free -= start_units + self.cache.units(start, start + count)
            self._claimed_units.update(claimed)
            self.admitted.append(admission)
            self.rows.append(Row(sequence, start, count, count == missing))

    def _admission_for(self, sequence: Sequence) -> tuple[Admission, list[int], int] | None:
        """How the sequence would start, the evictable units it claims, and the units that its
        cached tokens take.

        None when its whole remaining prefill and one more block do not fit, or when a sibling is
        still computing their prompt.
        """
        claimed: list[int] = []
        if sequence.host:
            admission = Admission(sequence, AdmissionSource.RESTORE, sequence.computed, None)
            start_units = self.cache.units_held(sequence)
        else:
            # The prompt's last token is always computed: its logits predict the first new token.
            shared = sequence.prompt_len - 1
            sibling, wait = self._fork_source(sequence, shared)
            if wait:
                return None
            hit = self.cache.hit(sequence)
            if sibling is not None and hit.tokens < shared:
                admission = Admission(sequence, AdmissionSource.FORK, shared, sibling)
                start_units = len(self.cache.groups) if shared % self.cache.block_size else 0
            else:
                admission = Admission(sequence, AdmissionSource.PREFIX, hit.tokens, None)
                claimed = [u for u in self.cache.evictable(hit) if u not in self._claimed_units]
                start_units = len(claimed)
        need = start_units + self.cache.growth(sequence, admission.start)
        margin = self.state.margin if self.rows else 0
        return (admission, claimed, start_units) if need <= self.free - margin else None

    def _fork_source(self, sequence: Sequence, shared: int) -> tuple[Sequence | None, bool]:
        """A running sibling to fork from, and whether to wait for one that is still computing the
        prompt.
        """
        family = self.state.families[sequence.request.id]
        if len(family) == 1 or not shared:
            return None, False
        running = [s for s in family if s.tables]
        for sibling in running:
            if self.cache.can_fork(sibling, shared):
                return sibling, False
        starting = any(a.sequence.request is sequence.request for a in self.admitted)
        return None, starting or any(s.computed < shared for s in running)
