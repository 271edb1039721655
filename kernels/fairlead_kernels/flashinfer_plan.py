"""A step's rows as flashinfer's wrappers take them: block tables in compressed sparse rows.

Owns the first block that each row can see and the length of its last one. Pure; host memory only.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fairlead_kernels.attention import RaggedRows


@dataclass(frozen=True, slots=True, eq=False)
class PagedRows:
    """The rows of one step and group, int32 on the host.

    ``query_starts`` [B+1] as in RaggedRows. Row b reads the blocks ``indices``
    [``starts``[b]:``starts``[b+1]], from the first that its first query sees to its last, of which
    ``last_lens``[b] tokens are its own, 1 to block_size. Its keys are counted from that first block
    on; a causal mask and a window count back from the last key, so both stay what they were.
    ``single``: every row has one query.
    """

    query_starts: torch.Tensor
    starts: torch.Tensor
    indices: torch.Tensor
    last_lens: torch.Tensor
    single: bool


def paged_rows(ragged: RaggedRows) -> PagedRows:
    """The tensors are new and pageable: a copy to the device has read them when the call that
    starts it returns, so the next step may reuse the memory of ``ragged``.
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
    tables = ragged.tables.numpy()
    columns = np.arange(tables.shape[1])
    seen = (columns >= first[:, None]) & (columns < end[:, None])
    return PagedRows(
        query_starts=torch.from_numpy(ragged.query_starts.numpy().copy()),
        starts=torch.from_numpy(starts),
        indices=torch.from_numpy(tables[seen]),
        last_lens=torch.from_numpy((lens - 1) % size + 1),
        single=bool((counts == 1).all()),
    )
