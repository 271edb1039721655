"""The units of sequences' states, and the snapshots by which a prefix hit finds one.

    versions of a sequence     [ 4 8 | 6 1 ]     a step reads one and writes the next
    after a step's end at a block's boundary: the units just written are that block's snapshot
    before one is written again: where it is a snapshot, or another's, others take its place

So nothing is copied, and a step can be repeated. A snapshot is n units of the pool; its i-th is the
content of group ``first_group + i``. Owns the versions of sequences; ``paged`` says when they
change.
"""

from collections import abc
from collections.abc import Iterable, Mapping
from itertools import chain

from fairlead_runtime.cache.blocks import BlockPool
from fairlead_runtime.cache.prefix import digests
from fairlead_runtime.request.sequence import Sequence


class StateUnits:
    """``units`` of one version, of which a running sequence has ``versions``."""

    def __init__(
        self, pool: BlockPool, first_group: int, units: int, versions: int, block_size: int
    ) -> None:
        self.units = units
        self.versions = versions
        self.groups = range(first_group, first_group + units)
        self._pool = pool
        self._block_size = block_size

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

    def keep(self, sequence: Sequence, full: int) -> None:
        """Make the current version the snapshot after so many full blocks, unless there is one. It
        stays only where others will look for it. Of those after its prompt the last is enough: a
        text that goes on from there has all of it.
        """
        # Those that wait for tokens of a prompt start once it is past them: the last state before.
        last = 1 if full * self._block_size < sequence.prompt_len else 0
        self._withdraw(sequence, len(sequence.passing) - last)
        pool, digest = self._pool, _digest(sequence, full)
        entries = [pool.find(group, digest) for group in self.groups]
        if None not in entries:
            return
        for unit in entries:  # what is left of an older one, whose other units are lost
            if unit is not None:
                pool.forget(unit)
        units = self.current(sequence)
        for group, unit in zip(self.groups, units, strict=True):
            pool.register(unit, group, digest, full - 1)
        if full not in self._lasting(sequence):
            sequence.passing.append((full, units))

    def drop(self, digest: bytes) -> None:
        """Remove a snapshot from the index, also one that somebody holds."""
        for unit in self.find(digest):
            self._pool.forget(unit)

    def current(self, sequence: Sequence) -> list[int]:
        """The units that the last collected step wrote."""
        return sequence.states[sequence.turn % self.versions]

    def released_with(
        self, sequence: Sequence, tails: abc.Sequence[tuple[int, ...]]
    ) -> Iterable[int]:
        """What a sequence gives back, in the order of eviction: ``tails``, the units of its blocks,
        last ones first, and before those of a block the snapshot at its end, also one that it has
        left and does not hold any more. Takes a reference of such a one.
        """
        passing, size = sequence.passing, self._block_size
        passed = bool(passing) and passing[-1][0] * size < sequence.prompt_len <= sequence.computed
        self._withdraw(sequence, len(passing) - (not passed))
        passing.clear()
        pool, versions = self._pool, [*sequence.states]
        for full in self._lasting(sequence):
            if 0 < full <= sequence.registered and (snapshot := self.find(_digest(sequence, full))):
                pool.share(snapshot)
                versions.append(snapshot)
        ends = [(len(tails) - i, 0, units) for i, units in enumerate(tails)]
        for units in versions:
            is_snapshot = pool.content[units[0]] is not None
            ends.append(
                (pool.block_of(units[0]) + 1 if is_snapshot else len(tails) + 1, 1, (*units,))
            )
        ends.sort(key=lambda end: end[:2], reverse=True)
        return chain.from_iterable(units for _, _, units in ends)

    def _lasting(self, sequence: Sequence) -> set[int]:
        """The full blocks at whose end others will look for its state: where they part from it, the
        last ones before the token that predicts the next, and those of the whole prompt.
        """
        ends = (sequence.branch, sequence.prompt_len - 1, sequence.prompt_len)
        return {end // self._block_size for end in ends}

    def _withdraw(self, sequence: Sequence, count: int) -> None:
        """Remove the first ``count`` of the snapshots that later ones take the place of, unless
        others hold them, or another's has come after they were evicted.
        """
        for full, units in sequence.passing[: max(0, count)]:
            digest, references = _digest(sequence, full), sequence.states.count(units)
            if self.find(digest) == units and self._pool.refs[units[0]] == references:
                self.drop(digest)
        del sequence.passing[: max(0, count)]


def _digest(sequence: Sequence, full: int) -> bytes:
    """Of the last of so many full blocks."""
    return digests(sequence.hashes, full - 1, full)[0]
