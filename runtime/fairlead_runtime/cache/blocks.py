"""The pool of units: every block id is free, cached, or referenced, and this module knows which.

free        no content anyone could want            → taken first cached      content with a hash,
no references      → taken least recently used first, its hash forgotten referenced  in the tables
of `refs[unit]` sequences

Owns reference counts and the content index. Never knows a sequence, a position or a tensor.
"""

from collections import OrderedDict
from collections.abc import Iterable

from fairlead_runtime.request import BlockHash


class PoolError(RuntimeError):
    """The pool was asked for what it does not have: a bug in the planner, never a full cache."""


class BlockPool:
    """``units`` ids from 0, shared by ``groups`` layer groups; content is found by (group, digest)."""

    def __init__(self, units: int, groups: int) -> None:
        self.units = units
        self.refs = [0] * units
        self.content: list[tuple[int, BlockHash] | None] = [None] * units
        self.free = list(range(units - 1, -1, -1))  # a stack: low ids first
        self.cached: OrderedDict[int, None] = (
            OrderedDict()
        )  # least recently used first; removal is O(1)
        self._index: list[dict[bytes, int]] = [{} for _ in range(groups)]

    @property
    def available(self) -> int:
        """Units that ``take`` can hand out: evictable cached ones are free."""
        return len(self.free) + len(self.cached)

    def take(self, count: int) -> list[int]:
        """``count`` units with one reference each and no content."""
        if count > self.available:
            raise PoolError(f"{count} units wanted, {self.available} available")
        taken: list[int] = []
        for _ in range(count):
            if not self.free:
                self.forget(next(iter(self.cached)))
            unit = self.free.pop()
            self.refs[unit] = 1
            taken.append(unit)
        return taken

    def forget(self, unit: int) -> None:
        """Make a unit's content unfindable; one that nobody references becomes free."""
        content = self.content[unit]
        if content is not None:
            del self._index[content[0]][content[1].digest]
            self.content[unit] = None
        if unit in self.cached:
            del self.cached[unit]
            self.free.append(unit)

    def share(self, unit: int) -> None:
        """One more reference to a unit that is referenced or cached."""
        if self.refs[unit] == 0:
            if unit not in self.cached:
                raise PoolError(f"unit {unit} is free: nothing in it can be shared")
            del self.cached[unit]
        self.refs[unit] += 1

    def release(self, units: Iterable[int]) -> None:
        """One reference less to each; give tail blocks first, so that prefixes live longest."""
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
        """Make a unit's content findable. Equal content that is there already stays: tables are
        append-only.
        """
        if self.content[unit] is None and block.digest not in self._index[group]:
            self._index[group][block.digest] = unit
            self.content[unit] = (group, block)

    def find(self, group: int, digest: bytes) -> int | None:
        """The unit that holds this content, referenced or cached."""
        return self._index[group].get(digest)
