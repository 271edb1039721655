"""Which row of the kept block tables each sequence has, and what a step adds to it.

Owns this bookkeeping, on the host alone; the tables themselves are in ``block_tables``. A row is
right for its step or is sent again: nobody tells of a prefill, a preemption or an end, since a
sequence's tables only grow between two preemptions.
"""

from collections import abc
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from fairlead_runtime.request.sequence import Sequence

Array = np.ndarray[Any, np.dtype[Any]]


class Growth(NamedTuple):
    """What a step needs of tables int32 [groups, R, W] that are kept from step to step.

    ``rows`` int64 [B]: the row of each sequence of the step. ``spans`` int64 [N, 3]: row, first
    block and number of blocks of what must be written there before; ``units`` int32 [groups, M]:
    the blocks of all spans, one span after the other.
    """

    rows: Array
    spans: Array
    units: Array

    def places(self, shape: abc.Sequence[int]) -> Array:
        """The flat places int64 [groups * M] of ``units`` in tables of this shape."""
        groups, rows, width = shape
        row, begin, counts = self.spans.T
        skipped = counts.cumsum() - counts
        inside = np.repeat(row * width + begin - skipped, counts) + np.arange(self.units.shape[1])
        places: Array = np.arange(groups)[:, None] * (rows * width) + inside
        return places.reshape(-1)


class TableRows:
    """The rows from ``first`` on of tables that have ``rows`` of them. ``blocks`` int64 [rows]: how
    many each has. ``fresh`` bool [rows]: it has got another sequence, or other blocks of the same,
    until who reads that says False.
    """

    def __init__(self, groups: int, rows: int = 0, *, first: int = 0) -> None:
        self._groups = groups
        self._first = first
        # Of sequences that nobody else has any more none is left, nor are their tokens.
        self._rows: dict[ref[Sequence], int] = {}
        self._free = list(range(rows - 1, first - 1, -1))
        self._preemptions = np.zeros(rows, dtype=np.int64)
        self.blocks = np.zeros(rows, dtype=np.int64)
        self.fresh = np.ones(rows, dtype=np.bool_)

    @property
    def sequences(self) -> int:
        """The most sequences of a step."""
        return len(self.fresh) - self._first

    def extend(self, sequences: int) -> None:
        """Make rows for a step of so many sequences."""
        more = sequences - self.sequences
        if more > 0:
            rows = len(self.fresh)
            self._free[:0] = range(rows + more - 1, rows - 1, -1)
            self._preemptions = np.pad(self._preemptions, (0, more))
            self.blocks = np.pad(self.blocks, (0, more))
            self.fresh = np.pad(self.fresh, (0, more), constant_values=True)

    def row(self, sequence: Sequence) -> int | None:
        """The row that the sequence has."""
        return self._rows.get(ref(sequence))

    def enter(self, sequences: abc.Sequence[Sequence]) -> Growth:
        """The rows of a step of these sequences, and all their blocks that are not there yet: from
        now on they count as written. Raises ValueError for more sequences than rows.
        """
        if len(sequences) > self.sequences:
            raise ValueError(f"{len(sequences)} rows: the step has room for {self.sequences}")
        known = list(map(self._rows.get, map(ref, sequences)))
        rows = np.array(
            [
                self._take(sequence, sequences) if row is None else row
                for sequence, row in zip(sequences, known, strict=True)
            ]
            if None in known
            else known,
            dtype=np.int64,
        )
        preemptions = [sequence.preemptions for sequence in sequences]
        restarted = rows[self._preemptions[rows] != preemptions]
        self._preemptions[rows] = preemptions
        self.blocks[restarted] = 0
        self.fresh[restarted] = True
        # A model without keys has no tables.
        ends = np.array(
            [len(sequence.tables[0]) if self._groups else 0 for sequence in sequences],
            dtype=np.int64,
        )
        begins = self.blocks[rows]
        (grown,) = (ends > begins).nonzero()
        self.blocks[rows[grown]] = ends[grown]
        spans = np.stack([rows, begins, ends - begins], axis=1)[grown]
        units = np.empty((self._groups, int(spans[:, 2].sum())), dtype=np.int32)
        for group in range(self._groups):
            new = (
                sequences[place].tables[group][begin:]
                for place, begin in zip(grown.tolist(), spans[:, 1].tolist(), strict=True)
            )
            units[group] = list(chain.from_iterable(new))
        return Growth(rows, spans, units)

    def _take(self, sequence: Sequence, needed: abc.Sequence[Sequence]) -> int:
        """A row for a sequence that has none, from one that is not ``needed`` where none is
        free.
        """
        if not self._free:
            owners = set(map(ref, needed))
            for unneeded in [owner for owner in self._rows if owner not in owners]:
                self._free.append(self._rows.pop(unneeded))
        row = self._rows[ref(sequence)] = self._free.pop()
        self.blocks[row], self.fresh[row] = 0, True
        return row

    def forget(self, sequences: abc.Iterable[Sequence]) -> None:
        """Write the blocks of these sequences again in full: their step may have run or not."""
        for sequence in sequences:
            row = self._rows.pop(ref(sequence), None)
            if row is not None:
                self._free.append(row)
