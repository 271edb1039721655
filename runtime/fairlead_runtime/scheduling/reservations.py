"""The blocks reserved for waiting sequences, and whether another may start beside them.

Owns the rules and the list of one step. Reads no queue and no block pool: it works on counts.
"""

from bisect import insort
from collections.abc import Callable
from typing import NamedTuple

from fairlead_runtime.request.sequence import Sequence

# Steps after which the whole need of a blocked sequence is reserved.
ACCRUAL_STEPS = 16
# The sequences with a reservation, at most: each costs a step a walk over all that run.
RESERVATIONS = 4

Hold = tuple[int, int]  # steps after which a sequence has certainly ended, and its most units


class Claim(NamedTuple):
    """What a sequence takes when it starts."""

    need: int  # units for its whole remaining prompt and one more block
    most: int  # units at its limit
    steps: int  # after which it has certainly ended


class Reservations:
    """One step's list, in the policy's order: the first sequence that cannot start for want of
    blocks, the head, and the preempted ones that cannot. ``units`` are those of the cache beyond
    the margin; ``holders`` lists what runs, with what starts in this step.
    """

    def __init__(self, units: int, holders: Callable[[], list[Hold]]) -> None:
        self.sequences: list[Sequence] = []
        self._units = units
        self._running = holders
        self._claims: list[Claim] = []
        self._reserved: list[int] = []
        # By entry, once asked for: the steps after which it can start at the latest, and the units
        # that are then left beside it.
        self._starts: list[tuple[int, int]] = []
        self._holders: list[Hold] = []  # of what runs and of the entries in ``_starts``, by steps

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence, claim: Claim, step: int) -> None:
        """Append a sequence that cannot start. A preempted one has its whole need reserved at once;
        of another the reservation grows from its first step in the list on.
        """
        since = step if sequence.blocked_since is None else sequence.blocked_since
        waited = ACCRUAL_STEPS if sequence.preemptions else min(step - since, ACCRUAL_STEPS)
        self.sequences.append(sequence)
        self._claims.append(claim)
        self._reserved.append(claim.need * waited // ACCRUAL_STEPS)

    def leave(self, claim: Claim, room: int) -> bool:
        """Whether a sequence may start in ``room`` free units beside every entry.

        Of each entry one of three must hold: what is reserved for it by now is free afterwards, the
        sequence certainly ends before the entry can start, or it fits beside the entry even then.
        """
        room -= claim.need
        if room >= sum(self._reserved):
            return True
        for (steps, spare), reserved in zip(self._latest_starts(), self._reserved, strict=True):
            if claim.steps > steps and claim.most > spare:
                room -= reserved
        return room >= 0

    def start(self, claim: Claim) -> None:
        """Note that a sequence starts in this step."""
        if not self._starts:
            return
        for at, (steps, spare) in enumerate(self._starts):
            if claim.steps > steps:
                self._starts[at] = steps, spare - claim.most
        insort(self._holders, (claim.steps, claim.most))
        if any(spare < 0 for _, spare in self._starts):
            self._starts.clear()

    def _latest_starts(self) -> list[tuple[int, int]]:
        if not self._starts:
            self._holders = sorted(self._running())
        for claim in self._claims[len(self._starts) :]:
            earliest = self._starts[-1][0] if self._starts else 0
            steps, spare = self._latest_start(claim.need, earliest)
            self._starts.append((steps, spare))
            insort(self._holders, (steps + claim.steps, claim.most))
        return self._starts

    def _latest_start(self, need: int, earliest: int) -> tuple[int, int]:
        """Every holder is taken to reach its limit and to share no block, and entries to start in
        their order.
        """
        room = self._units - need - sum(units for _, units in self._holders)
        last = len(self._holders) - 1
        steps = earliest
        for at, (end, units) in enumerate(self._holders):
            room += units
            steps = max(end, earliest)
            if room >= 0 and (at == last or self._holders[at + 1][0] > steps):
                return steps, room
        # It fits only without the margin, when nothing else runs.
        return steps, 0
