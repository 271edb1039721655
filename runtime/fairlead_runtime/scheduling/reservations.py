"""The blocks reserved for waiting sequences, and whether another may start beside them.

Owns the rules and the list of one step. Reads no queue and no block pool: it works on counts.
"""

from bisect import insort
from collections.abc import Callable
from typing import NamedTuple

from fairlead_runtime.request.sequence import Sequence

# Steps after which the whole need of a blocked sequence is reserved.
ACCRUAL_STEPS = 16
# The preempted sequences whose own start is known, at most: each costs a step a walk over all that
# run.
RESERVATIONS = 4

Hold = tuple[int, int]  # steps after which a sequence has certainly ended, and its most units


class Claim(NamedTuple):
    """What a sequence takes when it starts."""

    need: int  # units for its whole remaining prompt and one more block
    most: int  # units at its limit
    steps: int  # after which it has certainly ended


class Reservations:
    """One step's list, in the policy's order: the head, which is the first sequence that was never
    preempted and cannot start for want of blocks, and the preempted ones that cannot. ``units`` are
    those of the cache beyond the margin; ``holders`` lists what runs, with what starts in this
    step.
    """

    def __init__(self, units: int, holders: Callable[[], list[Hold]]) -> None:
        self.sequences: list[Sequence] = []
        self._units = units
        self._running = holders
        self._claims: list[Claim] = []
        self._reserved: list[int] = []
        self._preempted = 0  # entries
        self._further: list[int] = []  # the needs of preempted ones beyond these
        self._further_start: int | None = None  # before which none of them can start
        # By entry, once asked for: the steps after which it can start at the latest, and the units
        # that are then left beside it.
        self._starts: list[tuple[int, int]] = []
        self._holders: list[Hold] = []  # of what runs, by steps

    def __len__(self) -> int:
        return len(self.sequences)

    def takes(self, sequence: Sequence) -> bool:
        """Whether it becomes an entry if it cannot start."""
        return sequence.preemptions > 0 or self._preempted == len(self.sequences)

    def add(self, sequence: Sequence, claim: Claim, step: int) -> None:
        """Append a sequence that cannot start. A preempted one has its whole need reserved at once;
        of another the reservation grows from its first step in the list on. Of preempted ones
        beyond RESERVATIONS only the needs count.
        """
        if sequence.preemptions and self._preempted == RESERVATIONS:
            self._further.append(claim.need)
            self._further_start = None
            return
        since = step if sequence.blocked_since is None else sequence.blocked_since
        waited = ACCRUAL_STEPS if sequence.preemptions else min(step - since, ACCRUAL_STEPS)
        self.sequences.append(sequence)
        self._preempted += sequence.preemptions > 0
        self._claims.append(claim)
        self._reserved.append(claim.need * waited // ACCRUAL_STEPS)

    def leave(self, claim: Claim, room: int) -> bool:
        """Whether a sequence may start in ``room`` free units beside every entry.

        Of each entry one of three must hold: what is reserved for it by now is free afterwards, the
        sequence certainly ends before the entry can start, or it fits beside the entry even then;
        of further preempted ones one of the first two.
        """
        room -= claim.need
        if room >= sum(self._reserved) + sum(self._further):
            return True
        for (steps, spare), reserved in zip(self._latest_starts(), self._reserved, strict=True):
            if claim.steps > steps and claim.most > spare:
                room -= reserved
        if self._further and claim.steps > self._start_of_further():
            room -= sum(self._further)
        return room >= 0

    def start(self, claim: Claim) -> None:
        """Note that a sequence starts in this step."""
        if not self._starts:
            return
        for at, (steps, spare) in enumerate(self._starts):
            if claim.steps > steps:
                self._starts[at] = steps, spare - claim.most
        insort(self._holders, (claim.steps, claim.most))
        self._further_start = None
        if any(spare < 0 for _, spare in self._starts):
            self._starts.clear()

    def _latest_starts(self) -> list[tuple[int, int]]:
        if not self._starts:
            self._holders = sorted(self._running())
        for claim in self._claims[len(self._starts) :]:
            start, spare = self._latest_start(claim)
            for at, (steps, left) in enumerate(self._starts):
                if start < steps < start + claim.steps:
                    self._starts[at] = steps, left - claim.most
            self._starts.append((start, spare))
        return self._starts

    def _latest_start(self, claim: Claim) -> tuple[int, int]:
        """The first moment at which its need is free and its start delays no older entry: it ends
        before that one starts, or fits beside it. Every holder is taken to reach its limit and to
        share no block.
        """
        older = [
            (start, start + c.steps, c.most)
            for c, (start, _) in zip(self._claims, self._starts, strict=False)
        ]
        moments = sorted({end for end, _ in self._holders} | {end for _, end, _ in older})
        room = self._units - claim.need - sum(units for _, units in self._holders)
        at = 0
        for moment in moments:
            while at < len(self._holders) and self._holders[at][0] <= moment:
                room += self._holders[at][1]
                at += 1
            spare = room - sum(most for start, end, most in older if start <= moment < end)
            if spare >= 0 and self._is_early(claim, moment):
                return moment, spare
        # It fits only without the margin, when nothing else runs.
        return moments[-1] if moments else 0, 0

    def _start_of_further(self) -> int:
        """The first moment at which the least of their needs is free, were there no entry."""
        if self._further_start is None:
            room = self._units - min(self._further) - sum(units for _, units in self._holders)
            self._further_start = 0
            for end, units in self._holders:
                self._further_start = end
                if (room := room + units) >= 0:
                    break
        return self._further_start

    def _is_early(self, claim: Claim, moment: int) -> bool:
        """Whether one that starts at this moment delays no entry that starts later."""
        return all(
            steps <= moment or moment + claim.steps <= steps or claim.most <= spare
            for steps, spare in self._starts
        )
