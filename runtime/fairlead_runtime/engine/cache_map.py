"""The block map for the debug view: which units of the cache are free, cached or held, and by whom.

The engine thread only copies (``CacheCopy``), between two steps; another thread makes the map of
the copy. Shows no token and no hash.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from fairlead_runtime.outputs import BlockRun, BlockState, CacheView
from fairlead_runtime.scheduling.scheduler import Scheduler

WINDOW = 4096  # units of one map
HOLDERS = 4  # requests named for one unit


@dataclass(frozen=True, slots=True)
class CacheCopy:
    """A part of the cache after a step: the units from ``start`` on, at most WINDOW."""

    block_size: int
    groups: int
    units: int
    free: int
    cached: int
    host_units: int
    host_free: int
    start: int
    references: list[int]  # by unit
    has_content: list[bool]  # by unit
    # of all sequences, with their request; the units of states, too
    tables: list[tuple[str, list[list[int]]]]

    @classmethod
    def of(cls, scheduler: Scheduler, start: int) -> Self:
        cache = scheduler.state.cache
        pool, host = cache.pool, cache.host
        return cls(
            block_size=cache.block_size,
            groups=len(cache.groups),
            units=pool.units,
            free=len(pool.free),
            cached=len(pool.cached),
            host_units=host.units,
            host_free=len(host.free),
            start=start,
            references=pool.refs[start : start + WINDOW],
            has_content=[content is not None for content in pool.content[start : start + WINDOW]],
            tables=[
                (sequence.request.id, [units[:] for units in (*sequence.tables, *sequence.states)])
                for sequence in scheduler.live()
                if sequence.holds_units
            ],
        )

    def view(self) -> CacheView:
        """Takes time in proportion to all blocks that requests hold."""
        numbers: dict[str, int] = {}  # of the requests that are named, in order
        holders: dict[int, list[int]] = {}
        end = self.start + len(self.references)
        for request_id, tables in self.tables:
            for table in tables:
                for unit in table:
                    if self.start <= unit < end:
                        named = holders.setdefault(unit, [])
                        number = numbers.setdefault(request_id, len(numbers))
                        if number not in named and len(named) < HOLDERS:
                            named.append(number)
        return CacheView(
            block_size=self.block_size,
            groups=self.groups,
            units=self.units,
            free=self.free,
            cached=self.cached,
            host_units=self.host_units,
            host_free=self.host_free,
            start=self.start,
            end=end,
            requests=tuple(numbers),
            blocks=tuple(self._runs(holders)),
        )

    def _runs(self, holders: dict[int, list[int]]) -> Iterator[BlockRun]:
        """Neighbours of one state together."""
        first, count, before = self.start, 0, None
        for offset, references in enumerate(self.references):
            state = BlockState.FREE
            if references:
                state = BlockState.REFERENCED
            elif self.has_content[offset]:
                state = BlockState.CACHED
            now = (state, references, tuple(holders.get(self.start + offset, ())))
            if before is not None and now != before:
                yield BlockRun(first, count, *before)
                first, count = first + count, 0
            before, count = now, count + 1
        if before is not None:
            yield BlockRun(first, count, *before)
