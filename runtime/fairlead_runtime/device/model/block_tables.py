"""The block tables that are kept from step to step, where attention reads them.

Owns their memory, and how a step finds its slots and rows there. Steps write only what is new
(``table_rows``). The ranks of a split model have one each, and get the same from their first.
"""

from collections import abc
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels.interface.attention import NULL, RaggedRows
from fairlead_runtime.device.model.host_buffer import Array, HostBuffer
from fairlead_runtime.device.model.table_rows import Growth
from fairlead_runtime.sizing.groups import LayerGroup


class BlockTables(Protocol):
    """Block tables int32 [groups, R, W], kept from step to step."""

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        ...

    def write(self, growth: Growth) -> None:
        """Make the rows of a step right."""
        ...

    def of(
        self, rows: Array, positions: Array, query_starts: Tensor, kv_lens: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[RaggedRows, ...]]:
        """Per group the slots int64 [T] of the packed tokens with these positions int64 [T], and
        the rows of a step whose tables are ``rows`` int64 [B]; the rest as in RaggedRows. On the
        host both are good until the next call.
        """
        ...


class HostTables:
    """Tables that grow with their steps. Each step's rows are copied next to each other, as
    attention on the host takes them.
    """

    def __init__(
        self, groups: abc.Sequence[LayerGroup], block_size: int, *, pinned: bool = False
    ) -> None:
        self._groups = tuple(groups)
        self._block_size = block_size
        self._array = np.empty((len(groups), 0, 0), dtype=np.int32)
        self._packed = [HostBuffer(torch.int32, spare=1) for _ in groups]
        self._slots = [HostBuffer(torch.int64, pinned=pinned) for _ in groups]

    @property
    def nbytes(self) -> int:
        return self.table_nbytes + sum(buffer.nbytes for buffer in self._slots)

    @property
    def table_nbytes(self) -> int:
        """Bytes that follow from the tables' width."""
        return self._array.nbytes + sum(buffer.nbytes for buffer in self._packed)

    def write(self, growth: Growth) -> None:
        if not len(growth.spans):
            return
        row, begin, count = growth.spans.T
        self._extend(int(row.max()) + 1, int((begin + count).max()))
        self._array.reshape(-1)[growth.places(self._array.shape)] = growth.units.reshape(-1)

    def _extend(self, rows: int, width: int) -> None:
        groups, had_rows, had_width = self._array.shape
        if rows > had_rows or width > had_width:
            shape = groups, max(rows, had_rows), max(width, had_width)
            array, self._array = self._array, np.full(shape, NULL, dtype=np.int32)
            self._array[:, :had_rows, :had_width] = array

    def of(
        self, rows: Array, positions: Array, query_starts: Tensor, kv_lens: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[RaggedRows, ...]]:
        size, slots, ragged = self._block_size, list[Tensor](), list[RaggedRows]()
        width = -(-int(kv_lens.max()) // size)
        row = np.repeat(np.arange(len(rows)), np.diff(query_starts.numpy()))
        block, offset = np.divmod(positions, size)
        places = torch.from_numpy(rows)
        for group, array, packed, buffer in zip(
            self._groups, self._array, self._packed, self._slots, strict=True
        ):
            table, tables = packed.take(len(rows), width)
            torch.index_select(torch.from_numpy(array)[:, :width], 0, places, out=tables)
            units = table[row, block].astype(np.int64)
            if units.min() < 0:
                raise RuntimeError(f"layer group {group.index}: a token of this step has no block")
            slot, tensor = buffer.take(len(positions))
            slot[:] = units * size + offset
            slots.append(tensor)
            ragged.append(
                RaggedRows(query_starts, kv_lens, tables, size, group.window, group.index)
            )
        return tuple(slots), tuple(ragged)


class DeviceTables:
    """Tables in ``tensor`` int32 [groups, R, W] on a device, of which a step sends no more than its
    rows and what is new.
    """

    def __init__(self, groups: abc.Sequence[LayerGroup], block_size: int, tensor: Tensor) -> None:
        self._groups = tuple(groups)
        self._block_size = block_size
        self._tensor = tensor

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and blocks of a group's tables."""
        _, rows, blocks = self._tensor.shape
        return rows, blocks

    def write(self, growth: Growth) -> None:
        if len(growth.spans):
            places = growth.places(self._tensor.shape)
            places_, units = self._send(np.stack([places, growth.units.reshape(-1)]))
            self._tensor.view(-1).index_copy_(0, places_, units.to(torch.int32))

    def of(
        self, rows: Array, positions: Array, query_starts: Tensor, kv_lens: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[RaggedRows, ...]]:
        size = self._block_size
        row, at = self._send(np.stack([np.repeat(rows, np.diff(query_starts.numpy())), positions]))
        block, offset = at // size, at % size
        slots = tuple(table[row, block].to(torch.int64) * size + offset for table in self._tensor)
        step = torch.from_numpy(rows)
        ragged = (
            RaggedRows(query_starts, kv_lens, table, size, group.window, group.index, step)
            for group, table in zip(self._groups, self._tensor, strict=True)
        )
        return slots, tuple(ragged)

    def _send(self, array: Array) -> Tensor:
        """A copy on the device, from memory that torch keeps until the copy has run."""
        tensor = torch.from_numpy(array)
        pinned = tensor.pin_memory() if self._tensor.is_cuda else tensor
        return pinned.to(self._tensor.device, non_blocking=True)
