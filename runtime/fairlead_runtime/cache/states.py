"""The units of sequences' states, and the snapshots by which a prefix hit finds one.

    versions of a sequence     [ 4 8 | 6 1 ]     a step reads one and writes the next
    after a step's end at a block's boundary: the units just written are that block's snapshot
    before one is written again: where it is a snapshot, or another's, others take its place

So nothing is copied, and a step can be repeated. A snapshot is n units of the pool; its i-th is the
content of group ``first_group + i``. Owns the versions of sequences; ``paged`` says when they
change.
"""

from collections.abc import Mapping

from fairlead_runtime.cache.blocks import BlockPool
from fairlead_runtime.request.sequence import Sequence


class StateUnits:
    """``units`` of one version, of which a running sequence has ``versions``."""

    def __init__(self, pool: BlockPool, first_group: int, units: int, versions: int) -> None:
        self.units = units
        self.versions = versions
        self.groups = range(first_group, first_group + units)
        self._pool = pool

    @property
    def held(self) -> int:
        """Units that a running sequence has, all versions together."""
        return self.units * self.versions

    def find(self, digest: bytes) -> list[int]:
        """The units of the snapshot at the end of a block; none where one of them is lost."""
        units: list[int] = []
        for group in self.groups:
            unit = self._pool.find(group, digest)
            if unit is None:
                return []
            units.append(unit)
        return units

    def renewal(self, sequence: Sequence, dropped: Mapping[int, int]) -> int:
        """Units that become unavailable with its next step, whose target others take the place of:
        none where it alone holds the target. ``dropped``: by unit, references that are dropped
        before.
        """
        unit = sequence.state_target()[0]
        return self.units if self._pool.refs[unit] - dropped.get(unit, 0) > 1 else 0

    def start(self, sequence: Sequence, current: list[int]) -> None:
        """Give a sequence all its versions. ``current``: the units of the one that it continues
        from, of which it has a reference; empty where it begins from zeros.
        """
        first = current or self._pool.take(self.units)
        rest = [self._pool.take(self.units) for _ in range(self.versions - 1)]
        sequence.states, sequence.turn = [first, *rest], 0

    def renew(self, sequence: Sequence) -> None:
        """Let the next step write to units that nobody else holds or finds."""
        pool, units = self._pool, sequence.state_target()
        # The units of a version are shared and registered together.
        if pool.refs[units[0]] > 1 or pool.content[units[0]] is not None:
            pool.release(units)
            at = (sequence.turn + sequence.steps_in_flight + 1) % self.versions
            sequence.states[at] = pool.take(self.units)

    def register(self, sequence: Sequence, digest: bytes, block: int) -> None:
        """Make the current version the snapshot at the end of this block, unless there is one."""
        pool = self._pool
        found = [pool.find(group, digest) for group in self.groups]
        if None not in found:
            return
        for unit in found:  # what is left of an older one, whose other units are lost
            if unit is not None:
                pool.forget(unit)
        for group, unit in zip(self.groups, self.current(sequence), strict=True):
            pool.register(unit, group, digest, block)

    def drop(self, digest: bytes, *, held: bool = False) -> None:
        """Remove a snapshot from the index; one that somebody holds only where ``held``."""
        for unit in self.find(digest):
            if held or not self._pool.refs[unit]:
                self._pool.forget(unit)

    def current(self, sequence: Sequence) -> list[int]:
        """The units that the last collected step wrote."""
        return sequence.states[sequence.turn % self.versions]

    def release(self, sequence: Sequence) -> None:
        for units in sequence.states:
            self._pool.release(units)
        sequence.states = []
