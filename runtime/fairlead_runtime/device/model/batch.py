"""A step's rows as tensors: packed tokens, positions, slots and block tables.

Owns the host buffers of one step and reuses them, so a Batch is valid until the next ``build``.
Decides nothing and uses no device.
"""

from collections import abc
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from fairlead_kernels.interface.attention import NULL, RaggedRows
from fairlead_runtime.request.sequence import Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.sizing.groups import LayerGroup

Array = np.ndarray[Any, np.dtype[Any]]

UNKNOWN = 0  # in the place of an id that the device alone has


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step of T packed tokens in B rows, S of which sample; all tensors are on the host.

    ``input_ids`` and ``positions`` int64 [T]. Per layer group: ``slots`` int64 [T], where each
    token's key and value are written, and ``ragged``, the rows with that group's tables.
    ``sample_index`` int64 [S]: the last packed token of each sampling row; ``sampling``: their
    sequences, in the same order.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    ragged: tuple[RaggedRows, ...]
    sample_index: torch.Tensor
    sampling: list[Sequence]


class _Buffer:
    """Host memory that grows; ``take`` returns its beginning as a numpy view and as a tensor on the
    same bytes.
    """

    def __init__(self, dtype: torch.dtype, *, pinned: bool) -> None:
        self._dtype = dtype
        self._pinned = pinned
        self._tensor = torch.empty(0, dtype=dtype)

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def take(self, *shape: int) -> tuple[Array, torch.Tensor]:
        size = int(np.prod(shape))
        if size > self._tensor.numel():
            self._tensor = torch.empty(2 * size, dtype=self._dtype, pin_memory=self._pinned)
        view = self._tensor[:size].view(*shape)
        return view.numpy(), view


class _Arrays(NamedTuple):
    """A Batch's host memory as numpy arrays: ids, positions, lengths; by layer group slots and
    tables.
    """

    ids: Array
    positions: Array
    lens: Array
    slots: list[Array]
    tables: list[Array]


class _Decodes:
    """A Batch of decodes, which becomes the next of the same sequences by changing what differs:
    blocks come to a sequence at its end, and others only after a preemption.
    """

    def __init__(self, batch: Batch, rows: abc.Sequence[Row], arrays: _Arrays) -> None:
        self.batch = batch
        self._rows = [(row.sequence, row.sequence.preemptions) for row in rows]
        self._starts = [row.start for row in rows]
        self._arrays = arrays

    def follow(self, rows: abc.Sequence[Row], block_size: int) -> bool:
        """Whether the batch is now that of these rows. If not, it is what it was."""
        if len(rows) != len(self._rows):
            return False
        arrays, ids, starts = self._arrays, list[int](), list[int]()
        begun: list[tuple[int, Sequence, int]] = []  # places of rows with a new block, and which
        for row, (sequence, preemptions), last in zip(rows, self._rows, self._starts, strict=True):
            start = last + 1
            if row.sequence is not sequence or row[1:] != (start, 1, True):
                return False
            if sequence.preemptions != preemptions:
                return False
            if start % block_size == 0:
                begun.append((len(ids), sequence, start // block_size))
            ids.append(sequence.tokens[start])
            starts.append(start)
        if any(block >= arrays.tables[0].shape[1] for _, _, block in begun):
            return False
        self._starts = starts
        arrays.ids[:] = ids
        arrays.positions[:] = starts
        arrays.lens[:] = arrays.positions + 1
        for group, (slots, table) in enumerate(zip(arrays.slots, arrays.tables, strict=True)):
            np.add(slots, 1, out=slots)
            for place, sequence, block in begun:
                unit = table[place, block] = sequence.tables[group][block]
                slots[place] = unit * block_size
        return True


class BatchBuilder:
    """Turns rows into a Batch without a Python loop over tokens."""

    def __init__(
        self, groups: abc.Sequence[LayerGroup], block_size: int, *, pinned: bool = False
    ) -> None:
        self._groups = tuple(groups)
        self._block_size = block_size
        wide, narrow = torch.int64, torch.int32
        self._ids = _Buffer(wide, pinned=pinned)
        self._positions = _Buffer(wide, pinned=pinned)
        self._slots = [_Buffer(wide, pinned=pinned) for _ in groups]
        self._tables = [_Buffer(narrow, pinned=pinned) for _ in groups]
        self._starts = _Buffer(narrow, pinned=pinned)
        self._lens = _Buffer(narrow, pinned=pinned)
        self._samples = _Buffer(wide, pinned=pinned)
        # The blocks that a window has passed are NULL in a table, which _Decodes does not know.
        self._windowed = any(group.window is not None for group in groups)
        self._last: _Decodes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers at present."""
        single = (self._ids, self._positions, self._starts, self._lens, self._samples)
        return sum(b.nbytes for b in (*single, *self._slots)) + self.table_nbytes

    @property
    def table_nbytes(self) -> int:
        """Bytes of the block tables among them."""
        return sum(b.nbytes for b in self._tables)

    def build(self, rows: abc.Sequence[Row], *, ahead: bool = False) -> Batch:
        """``rows``: at least one, each with at least one token and with blocks for its tokens.
        ``ahead``: the id of a row whose token a step in flight samples is UNKNOWN.

        The same Batch again, changed, where the rows are the next decodes of those of the last one.
        """
        last = self._last
        if last is not None and not ahead and last.follow(rows, self._block_size):
            return last.batch
        self._last = None
        batch, arrays = self._build(rows, ahead=ahead)
        if ahead or self._windowed:
            return batch
        if all(row.count == 1 and row.samples for row in rows):
            self._last = _Decodes(batch, rows, arrays)
        return batch

    def _build(self, rows: abc.Sequence[Row], *, ahead: bool) -> tuple[Batch, "_Arrays"]:
        starts = np.array([row.start for row in rows])
        counts = np.array([row.count for row in rows])
        row_ends = counts.cumsum()
        total = int(row_ends[-1])
        row_of = np.repeat(np.arange(len(rows)), counts)

        ids, input_ids = self._ids.take(total)
        known = (row.sequence.tokens[row.start : row.start + row.count] for row in rows)
        tokens = (row_ids or (UNKNOWN,) for row_ids in known) if ahead else known
        ids[:] = np.fromiter(chain.from_iterable(tokens), np.int64, total)
        at, positions = self._positions.take(total)
        at[:] = np.arange(total) + (starts - row_ends + counts)[row_of]
        query, query_starts = self._starts.take(len(rows) + 1)
        query[0], query[1:] = 0, row_ends
        lens, kv_lens = self._lens.take(len(rows))
        lens[:] = starts + counts

        arrays = _Arrays(ids, at, lens, [], [])
        slots: list[torch.Tensor] = []
        ragged: list[RaggedRows] = []
        for group in self._groups:
            table, tables = self._table(rows, lens, group.index)
            blocks = table[row_of, at // self._block_size].astype(np.int64)
            if blocks.min() < 0:
                raise RuntimeError(f"layer group {group.index}: a token of this step has no block")
            slot, tensor = self._slots[group.index].take(total)
            slot[:] = blocks * self._block_size + at % self._block_size
            slots.append(tensor)
            arrays.slots.append(slot)
            arrays.tables.append(table)
            ragged.append(
                RaggedRows(
                    query_starts, kv_lens, tables, self._block_size, group.window, group.index
                )
            )

        samples = np.array([row.samples for row in rows])
        places, index = self._samples.take(int(samples.sum()))
        places[:] = row_ends[samples] - 1
        sampling = [row.sequence for row in rows if row.samples]
        batch = Batch(input_ids, positions, tuple(slots), tuple(ragged), index, sampling)
        return batch, arrays

    def _table(
        self, rows: abc.Sequence[Row], lens: Array, group: int
    ) -> tuple[Array, torch.Tensor]:
        widths = -(-lens // self._block_size)
        table, tensor = self._tables[group].take(len(rows), int(widths.max()))
        table.fill(NULL)
        blocks = chain.from_iterable(
            row.sequence.tables[group][:width]
            for row, width in zip(rows, widths.tolist(), strict=True)
        )
        table[np.arange(table.shape[1]) < widths[:, None]] = np.fromiter(
            blocks, np.int32, int(widths.sum())
        )
        return table, tensor
