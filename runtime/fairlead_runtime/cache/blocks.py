"""The pool of units. Every block id is in one of three states:

    free        has no content                          taken first
    cached      has content with a hash, no reference   taken next, least recently used first
    referenced  in the tables of ``refs[unit]`` sequences

Owns reference counts and the content index. Knows no sequence, position or tensor. Keeps nothing of
a unit that the garbage collector would walk over: there may be a million.
"""

import itertools
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from functools import partial
from operator import is_not

LOSSES = 4096  # the contents that left the index last, as many as are known


class PoolError(RuntimeError):
    """The pool was asked for units it does not have: a bug in the planner, never a full cache."""


class BlockPool:
    """``units`` ids from 0, shared by ``groups`` layer groups, with an index of their content; the
    last ``states`` groups are those of the parts of states.
    """

    def __init__(self, units: int, groups: int, states: int = 0) -> None:
        self.units = units
        self._of_keys = groups - states  # groups whose losses are known one by one
        self.refs = [0] * units
        self.content: list[bytes | None] = [None] * units  # the digest of what it has
        # 1 where a unit was taken, shared, released or freed since the last check began
        self.moved = bytearray(units)
        self.version = 0  # of the index: equal versions find the same units
        self.free = list(range(units - 1, -1, -1))  # a stack: low ids first
        # least recently used first; removal is O(1)
        self.cached: OrderedDict[int, None] = OrderedDict()
        self._index: list[dict[bytes, int]] = [{} for _ in range(groups)]
        kind = "H" if groups <= 1 << 16 else "I"
        self._group = array(kind, bytes(array(kind).itemsize * units))  # of the content
        self._block = array("I", bytes(4 * units))  # its place in its sequence
        self.losses = 0  # contents that have left the index
        self._lost: deque[tuple[int, int, bytes]] = deque(maxlen=LOSSES)

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
            self.refs[unit] = self.moved[unit] = 1
            units.append(unit)
        return units

    def forget(self, unit: int) -> None:
        """Remove a unit's content from the index; an unreferenced unit becomes free."""
        digest = self.content[unit]
        if digest is not None:
            del self._index[self._group[unit]][digest]
            self.content[unit] = None
            self.version += 1
            if self._group[unit] < self._of_keys:
                self.losses += 1
                self._lost.append((self._group[unit], self._block[unit], digest))
        if unit in self.cached:
            del self.cached[unit]
            self.free.append(unit)
            self.moved[unit] = 1

    def forget_cached(self) -> int:
        """Remove the content of every unit without a reference; returns their number."""
        units = [*self.cached]
        for unit in units:
            self.forget(unit)
        return len(units)

    def share(self, units: Iterable[int]) -> None:
        """Add a reference to each unit; all are referenced or cached."""
        refs, cached, moved = self.refs, self.cached, self.moved
        for unit in units:
            if not refs[unit]:
                if unit not in cached:
                    raise PoolError(f"unit {unit} is free: it has no content to share")
                del cached[unit]
            refs[unit] += 1
            moved[unit] = 1

    def release(self, units: Iterable[int]) -> None:
        """Drop one reference to each. Pass tail blocks first, so that prefixes are evicted last."""
        refs, content, moved = self.refs, self.content, self.moved
        for unit in units:
            if refs[unit] < 1:
                raise PoolError(f"unit {unit} was released twice")
            refs[unit] -= 1
            moved[unit] = 1
            if not refs[unit]:
                if content[unit] is None:
                    self.free.append(unit)
                else:
                    self.cached[unit] = None

    def register(self, unit: int, group: int, digest: bytes, block: int = 0) -> None:
        """Add a unit's content, the block with this index of a sequence, to the index of contents,
        unless another unit has equal content: tables are append-only, so both units stay.
        """
        if self.content[unit] is None and digest not in self._index[group]:
            self._index[group][digest] = unit
            self.content[unit], self._group[unit], self._block[unit] = digest, group, block
            self.version += 1

    def find(self, group: int, digest: bytes) -> int | None:
        """The unit that holds this content, referenced or cached."""
        return self._index[group].get(digest)

    def lost_since(self, losses: int) -> Iterable[tuple[int, int, bytes]] | None:
        """Of each block that has left the index since there were so many ``losses``: its group, its
        index and its digest. None where they are too many to be known.
        """
        count = self.losses - losses
        return itertools.islice(reversed(self._lost), count) if count <= len(self._lost) else None

    def find_leading(self, group: int, digests: Iterable[bytes]) -> list[int]:
        """The units that hold these contents, up to the first that none holds."""
        units = map(self._index[group].get, digests)
        return list(itertools.takewhile(partial(is_not, None), units))  # type: ignore[arg-type]

    def group_of(self, unit: int) -> int:
        """The layer group of a unit's content."""
        return self._group[unit]

    def block_of(self, unit: int) -> int:
        """The index in its sequence of the block that a unit with content has, or ends with."""
        return self._block[unit]

    def is_indexed(self, unit: int) -> bool:
        """Whether a unit with content is found by it."""
        digest = self.content[unit]
        return digest is not None and self.find(self._group[unit], digest) == unit
