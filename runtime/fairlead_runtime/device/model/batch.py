"""A step's rows as tensors: packed tokens, positions, slots and block tables.

Owns the host buffers of one step and reuses them, so a Batch is valid until the next ``build``.
Decides nothing and uses no device.
"""

from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from fairlead_kernels.interface.attention import RaggedRows
from fairlead_runtime.device.model.block_tables import BlockTables, HostTables
from fairlead_runtime.device.model.host_buffer import HostBuffer
from fairlead_runtime.device.model.table_rows import Growth, TableRows
from fairlead_runtime.request.sequence import Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.sizing.groups import LayerGroup

UNKNOWN = 0  # in the place of an id that the device alone has


class StateRows(NamedTuple):
    """The states of a step's rows in a model that keeps some: of each row its ``counts`` tokens,
    of which the first ``prompts`` are of its prompt, whether it ``begins`` a sequence, and int64
    [B, n] the units of the state that it reads (``source``) and of the one that it writes
    (``target``).
    """

    counts: tuple[int, ...]
    prompts: tuple[int, ...]
    begins: tuple[bool, ...]
    source: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step of T packed tokens in B rows, S of which sample. All tensors are on the host, but
    ``slots`` are where the block tables are.

    ``input_ids`` and ``positions`` int64 [T]. Per layer group: ``slots`` int64 [T], where each
    token's key and value are written, and ``ragged``, the rows with that group's tables.
    ``sample_index`` int64 [S]: the last packed token of each sampling row; ``sampling``: their
    sequences, in the same order. ``growth``: what came to the block tables with it, but for a batch
    that follows the last one. ``states``: of its rows, None in a model without.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    ragged: tuple[RaggedRows, ...]
    sample_index: torch.Tensor
    sampling: list[Sequence]
    growth: Growth
    states: StateRows | None = None


class _Decodes:
    """A Batch of decodes, which becomes the next of the same sequences by changing what differs:
    blocks come to a sequence at its end, and others only after a preemption.
    """

    def __init__(self, batch: Batch, rows: abc.Sequence[Row]) -> None:
        self.batch = batch
        self._rows = [(row.sequence, row.sequence.preemptions) for row in rows]
        self._starts = [row.start for row in rows]
        self._ids, self._positions = batch.input_ids.numpy(), batch.positions.numpy()
        self._lens = batch.ragged[0].kv_lens.numpy()
        self._slots = [slots.numpy() for slots in batch.slots]
        self._tables = [ragged.tables.numpy() for ragged in batch.ragged]

    def follow(self, rows: abc.Sequence[Row], block_size: int) -> bool:
        """Whether the batch is now that of these rows. If not, it is what it was."""
        if len(rows) != len(self._rows):
            return False
        ids, starts = list[int](), list[int]()
        begun: list[int] = []  # places of rows with a new block
        for row, (sequence, preemptions), last in zip(rows, self._rows, self._starts, strict=True):
            start = last + 1
            if row.sequence is not sequence or row[1:] != (start, 1, True):
                return False
            if sequence.preemptions != preemptions:
                return False
            if start % block_size == 0:
                begun.append(len(ids))
            ids.append(sequence.tokens[start])
            starts.append(start)
        if any(starts[place] // block_size >= self._tables[0].shape[1] for place in begun):
            return False
        self._starts = starts
        self._ids[:] = ids
        self._positions[:] = starts
        self._lens[:] = self._positions + 1
        for group, (slots, table) in enumerate(zip(self._slots, self._tables, strict=True)):
            np.add(slots, 1, out=slots)
            for place in begun:
                block = starts[place] // block_size
                unit = table[place, block] = rows[place].sequence.tables[group][block]
                slots[place] = unit * block_size
        return True


class BatchBuilder:
    """Turns rows into a Batch without a Python loop over tokens or blocks. ``tables`` has ``rows``;
    by default they are on the host, and its own. ``follows``: a batch may be the last one, changed;
    its ``growth`` then is not the next one's.
    """

    def __init__(
        self,
        groups: abc.Sequence[LayerGroup],
        block_size: int,
        *,
        pinned: bool = False,
        tables: BlockTables | None = None,
        rows: TableRows | None = None,
        follows: bool = True,
    ) -> None:
        self._block_size = block_size
        self._tables = tables or HostTables(groups, block_size, pinned=pinned)
        self._rows = rows or TableRows(len(groups))
        self._grows = rows is None
        self._has_keys = bool(groups)
        wide, narrow = torch.int64, torch.int32
        self._ids = HostBuffer(wide, pinned=pinned)
        self._positions = HostBuffer(wide, pinned=pinned)
        self._starts = HostBuffer(narrow, pinned=pinned)
        self._lens = HostBuffer(narrow, pinned=pinned)
        self._samples = HostBuffer(wide, pinned=pinned)
        self._units = HostBuffer(wide, pinned=pinned), HostBuffer(wide, pinned=pinned)
        # _Decodes changes a batch on the host, and knows no block that a window has passed.
        windowed = any(group.window is not None for group in groups)
        self._follows = follows and tables is None and not windowed
        self._last: _Decodes | None = None

    @property
    def shares_rows(self) -> bool:
        """Whether others enter sequences in its tables, too."""
        return not self._grows

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers at present."""
        buffers = (
            self._ids,
            self._positions,
            self._starts,
            self._lens,
            self._samples,
            *self._units,
        )
        return sum(b.nbytes for b in buffers) + self._tables.nbytes

    def build(
        self,
        rows: abc.Sequence[Row],
        *,
        ahead: bool = False,
        growth: Growth | None = None,
        continues: frozenset[int] = frozenset(),
    ) -> Batch:
        """``rows``: at least one, each with at least one token and with blocks for its tokens.
        ``ahead``: the id of a row whose token a step in flight samples is UNKNOWN. ``growth``: that
        of these rows where their blocks are in the tables already. ``continues``: the ids of
        sequences of which an earlier pass of the same step computed tokens: they read the state
        that it wrote.

        The same Batch again, changed, where the rows are the next decodes of those of the last one.
        """
        last, self._last = self._last, None
        if last is not None and not ahead and last.follow(rows, self._block_size):
            self._last = last
            return last.batch
        growth = self._enter(rows) if growth is None else growth
        batch = self._build(rows, growth, continues, ahead=ahead)
        follows = self._follows and batch.states is None and not ahead
        if follows and all(row.count == 1 and row.samples for row in rows):
            self._last = _Decodes(batch, rows)
        return batch

    def _enter(self, rows: abc.Sequence[Row]) -> Growth:
        if self._grows:
            self._rows.extend(len(rows))
        growth = self._rows.enter([row.sequence for row in rows])
        self._tables.write(growth)
        return growth

    @contextmanager
    def forgetting(self, rows: abc.Sequence[Row]) -> Iterator[None]:
        """A step of these rows that raises may have written their blocks everywhere or not."""
        try:
            yield
        except BaseException:
            self._last = None
            self._rows.forget(row.sequence for row in rows)
            raise

    def _build(
        self, rows: abc.Sequence[Row], growth: Growth, continues: frozenset[int], *, ahead: bool
    ) -> Batch:
        starts = np.array([row.start for row in rows])
        counts = np.array([row.count for row in rows])
        row_ends = counts.cumsum()
        total = int(row_ends[-1])

        ids, input_ids = self._ids.take(total)
        known = (row.sequence.tokens[row.start : row.start + row.count] for row in rows)
        tokens = (row_ids or (UNKNOWN,) for row_ids in known) if ahead else known
        ids[:] = np.fromiter(chain.from_iterable(tokens), np.int64, total)
        at, positions = self._positions.take(total)
        at[:] = np.arange(total) + np.repeat(starts - row_ends + counts, counts)
        query, query_starts = self._starts.take(len(rows) + 1)
        query[0], query[1:] = 0, row_ends
        lens, kv_lens = self._lens.take(len(rows))
        lens[:] = starts + counts
        held = self._rows.blocks[growth.rows] * self._block_size
        if self._has_keys and (held < lens).any():
            raise RuntimeError("rows: a token of this step has no block")
        slots, ragged = self._tables.of(growth.rows, at, query_starts, kv_lens)

        samples = np.array([row.samples for row in rows])
        places, index = self._samples.take(int(samples.sum()))
        places[:] = row_ends[samples] - 1
        sampling = [row.sequence for row in rows if row.samples]
        states = self._states(rows, continues)
        return Batch(input_ids, positions, slots, ragged, index, sampling, growth, states)

    def _states(self, rows: abc.Sequence[Row], continues: frozenset[int]) -> StateRows | None:
        if not rows[0].sequence.states:
            return None
        buffers = [
            buffer.take(len(rows), len(rows[0].sequence.states[0])) for buffer in self._units
        ]
        (read, source), (written, target) = buffers
        written[:] = [row.sequence.state_target() for row in rows]
        read[:] = [
            row.sequence.state_target()
            if row.sequence.id in continues
            else row.sequence.state_source()
            for row in rows
        ]
        counts = tuple(row.count for row in rows)
        prompts = tuple(max(0, min(row.count, row.sequence.prompt_len - row.start)) for row in rows)
        begins = tuple(row.start == 0 for row in rows)
        return StateRows(counts, prompts, begins, source, target)
