"""A step's rows as flashinfer's wrappers take them: block tables in compressed sparse rows.

Owns the first block that each row can see and the length of its last one. Pure. Tables that the
device has are compressed there.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels.interface.attention import DecodeRows, RaggedRows


@dataclass(frozen=True, slots=True, eq=False)
class PagedRows:
    """The rows of one step and group, int32 on the host, but for ``indices`` where tables are on
    the device.

    ``query_starts`` [B+1] as in RaggedRows. Row b reads the blocks ``indices``
    [``starts``[b]:``starts``[b+1]], from the first that its first query sees to its last, of which
    ``last_lens``[b] tokens are its own, 1 to block_size. Its keys are counted from that first block
    on; a causal mask and a window count back from the last key, so both stay what they were.
    ``single``: every row has one query.
    """

    query_starts: Tensor
    starts: Tensor
    indices: Tensor
    last_lens: Tensor
    single: bool


def paged_rows(ragged: RaggedRows, *, pinned: bool = False) -> PagedRows:
    """The rows of a step as the wrappers take them, with their blocks where its tables are.

    The tensors are new, so the next step may reuse the memory of ``ragged``. A copy of a pageable
    one to the device has read it when the call that starts the copy returns, for which a large one
    may wait for the kernels before it; with ``pinned`` the blocks, or where they are in the tables,
    are in memory that torch keeps until their copy has run.
    """
    size = ragged.block_size
    counts = np.diff(ragged.query_starts.numpy())
    lens = ragged.kv_lens.numpy()
    first_key = np.zeros_like(lens)
    if ragged.window is not None:
        first_key = np.maximum(0, lens - counts - ragged.window + 1)
    first, end = first_key // size, -(-lens // size)
    starts = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(end - first, out=starts[1:])
    if ragged.rows is None:
        indices = _sent(_visible(ragged.tables.numpy(), first, end), pinned=pinned)
    else:
        places = _sent(np.stack([ragged.rows.numpy(), first, end]), pinned=pinned)
        row, begin, until = places.to(ragged.tables.device, non_blocking=True)
        indices = _indices(ragged.tables, row, begin, until, int(starts[-1]))
    return PagedRows(
        query_starts=torch.from_numpy(ragged.query_starts.numpy().copy()),
        starts=torch.from_numpy(starts),
        indices=indices,
        last_lens=_last_lens(lens, size),
        single=bool((counts == 1).all()),
    )


def decode_rows(decodes: DecodeRows) -> PagedRows:
    """The rows of a step of decodes as the wrappers take them.

    ``indices`` are on the device, where the wrappers' plans leave them: no plan reads a block's
    id. The host counts them from the rows' lengths, so that it need not wait for their number.
    """
    size, lens = decodes.block_size, decodes.kv_lens.numpy()
    first = np.zeros_like(lens)
    if decodes.window is not None:
        first = np.maximum(0, lens - decodes.window) // size
    starts = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(-(-lens // size) - first, out=starts[1:])
    on_device = decodes.lens
    end, begin = (on_device + (size - 1)) // size, torch.zeros_like(on_device)
    if decodes.window is not None:
        begin = (on_device - decodes.window).clamp_(min=0) // size
    return PagedRows(
        query_starts=torch.arange(len(lens) + 1, dtype=torch.int32),
        starts=torch.from_numpy(starts),
        indices=_indices(decodes.tables, decodes.rows, begin, end, int(starts[-1])),
        last_lens=_last_lens(lens, size),
        single=True,
    )


def _last_lens(lens: Any, size: int) -> Tensor:
    return torch.from_numpy((lens - 1) % size + 1)


def _sent(array: Any, *, pinned: bool) -> Tensor:
    """An array that goes to the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if pinned else tensor


def _visible(tables: Any, first: Any, end: Any) -> Any:
    """The blocks from ``first`` to ``end`` of each row of ``tables``, one row after the other."""
    columns = np.arange(tables.shape[1])
    return tables[(columns >= first[:, None]) & (columns < end[:, None])]


def _indices(tables: Tensor, rows: Tensor, first: Tensor, end: Tensor, total: int) -> Tensor:
    """The same on the device, of the ``rows`` of ``tables``: int32 [total]. The other tensors are
    int64 [B].
    """
    counts = end - first
    places = torch.arange(len(rows), device=rows.device)
    row = torch.repeat_interleave(places, counts, output_size=total)
    # Of each row, where its blocks would begin if they were not cut off before the first.
    begin = counts.cumsum(0) - end
    column = torch.arange(total, device=rows.device) - begin[row]
    return tables[rows[row], column]
