"""The pool of units. Every block id is in one of three states:

    free        has no content                          taken first
    cached      has content with a hash, no reference   taken next, least recently used first
    referenced  in the tables of ``refs[unit]`` sequences

Owns reference counts and the content index. Knows no sequence, position or tensor.
"""

from collections import OrderedDict
from collections.abc import Iterable

from fairlead_runtime.request.sequence import BlockHash


class PoolError(RuntimeError):
    """The pool was asked for units it does not have: a bug in the planner, never a full cache."""


class BlockPool:
    """``units`` ids from 0, shared by ``groups`` layer groups, with an index of their content."""

    def __init__(self, units: int, groups: int) -> None:
        self.units = units
        self.refs = [0] * units
        self.content: list[tuple[int, BlockHash] | None] = [None] * units
        self.free = list(range(units - 1, -1, -1))  # a stack: low ids first
        # least recently used first; removal is O(1)
        self.cached: OrderedDict[int, None] = OrderedDict()
        self._index: list[dict[bytes, int]] = [{} for _ in range(groups)]

    @property
    def available(self) -> int:
        """Units that ``take`` can return: free ones and cached ones."""
        return len(self.free) + len(self.cached)

    def take(self, count: int) -> list[int]:
        """``count`` units with one reference each and no content."""
        if count > self.available:
            raise PoolError(f"{count} units requested, {self.available} available")
        units: list[int] = []
        for _ in range(count):
            if not self.free:
                self.forget(next(iter(self.cached)))
            unit = self.free.pop()
            self.refs[unit] = 1
            units.append(unit)
        return units

    def forget(self, unit: int) -> None:
        """Remove a unit's content from the index; an unreferenced unit becomes free."""
        content = self.content[unit]
        if content is not None:
            del self._index[content[0]][content[1].digest]
            self.content[unit] = None
        if unit in self.cached:
            del self.cached[unit]
            self.free.append(unit)

    def share(self, unit: int) -> None:
        """Add a reference to a unit that is referenced or cached."""
        if self.refs[unit] == 0:
            if unit not in self.cached:
                raise PoolError(f"unit {unit} is free: it has no content to share")
            del self.cached[unit]
        self.refs[unit] += 1

    def release(self, units: Iterable[int]) -> None:
        """Drop one reference to each. Pass tail blocks first, so that prefixes are evicted last."""
        for unit in units:
            if self.refs[unit] < 1:
                raise PoolError(f"unit {unit} was released twice")
            self.refs[unit] -= 1
            if self.refs[unit] == 0:
                if self.content[unit] is None:
                    self.free.append(unit)
                else:
                    self.cached[unit] = None

    def register(self, unit: int, group: int, block: BlockHash) -> None:
        """Add a unit's content to the index, unless another unit has equal content: tables are
        append-only, so both units stay.
        """
        if self.content[unit] is None and block.digest not in self._index[group]:
            self._index[group][block.digest] = unit
            self.content[unit] = (group, block)

    def find(self, group: int, digest: bytes) -> int | None:
        """The unit that holds this content, referenced or cached."""
        return self._index[group].get(digest)
