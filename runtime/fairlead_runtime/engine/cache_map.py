"""The block map for the debug view: which units of the cache are free, cached or held, and by whom.

The engine thread only copies (``CacheCopy``), between two steps; another thread makes the map of
the copy. Shows no token and no hash.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from fairlead_runtime.outputs import WHOLE_CACHE, BlockRun, BlockState, CacheView
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.sizing.arithmetic import ceil_div

WINDOW = 4096  # cells of one map
HOLDERS = 4  # requests of one tenant that are named for one cell


@dataclass(frozen=True, slots=True)
class CacheCopy:
    """A part of the cache after a step: the units from ``start`` on, at most WINDOW; with
    WHOLE_CACHE all of them, in at most WINDOW cells.
    """

    block_size: int
    groups: int
    units: int
    free: int
    cached: int
    host_units: int
    host_free: int
    start: int
    per_cell: int
    references: list[int]  # by unit
    content: list[bytes | None]  # by unit, the hash of what it holds
    # of all sequences, with their request and its tenant; the units of states, too
    tables: list[tuple[str, str, list[list[int]]]]

    @classmethod
    def of(cls, scheduler: Scheduler, start: int) -> Self:
        cache = scheduler.state.cache
        pool, host = cache.pool, cache.host
        per_cell = 1
        if start == WHOLE_CACHE:
            start, per_cell = 0, max(1, ceil_div(pool.units, WINDOW))
        part = slice(start, start + WINDOW * per_cell)
        return cls(
            block_size=cache.block_size,
            groups=len(cache.groups),
            units=pool.units,
            free=len(pool.free),
            cached=len(pool.cached),
            host_units=host.units,
            host_free=len(host.free),
            start=start,
            per_cell=per_cell,
            references=pool.refs[part],
            content=pool.content[part],
            tables=[
                (
                    sequence.request.id,
                    sequence.request.tenant,
                    [units[:] for units in (*sequence.tables, *sequence.states)],
                )
                for sequence in scheduler.live()
                if sequence.holds_units
            ],
        )

    def view(self) -> CacheView:
        """Takes time in proportion to all blocks that requests hold."""
        numbers: dict[str, int] = {}  # of the requests that are named, in order
        holders: dict[int, list[int]] = {}  # by cell
        of_tenant: dict[tuple[int, str], list[int]] = {}  # the same of one tenant alone
        end = self.start + len(self.references)
        for request_id, tenant, tables in self.tables:
            held = {
                (unit - self.start) // self.per_cell
                for table in tables
                for unit in table
                if self.start <= unit < end
            }
            for cell in held:
                number = numbers.setdefault(request_id, len(numbers))
                # Each tenant sees its own alone: those of others take no place from it.
                named = of_tenant.setdefault((cell, tenant), [])
                if number not in named and len(named) < HOLDERS:
                    named.append(number)
                    holders.setdefault(cell, []).append(number)
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
            per_cell=self.per_cell,
        )

    def _runs(self, holders: dict[int, list[int]]) -> Iterator[BlockRun]:
        """Neighbours of one state together."""
        first, count, before = self.start, 0, None
        for cell, offset in enumerate(range(0, len(self.references), self.per_cell)):
            part = slice(offset, offset + self.per_cell)
            references = max(self.references[part])
            state = BlockState.FREE
            if references:
                state = BlockState.REFERENCED
            elif self.content[part].count(None) < len(self.content[part]):
                state = BlockState.CACHED
            now = (state, references, tuple(holders.get(cell, ())))
            if before is not None and now != before:
                yield BlockRun(first, count, *before)
                first, count = first + count, 0
            before, count = now, count + len(self.references[part])
        if before is not None:
            yield BlockRun(first, count, *before)
