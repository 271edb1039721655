"""Copies of whole blocks on one device: copy-on-write within a cache, and the gather and scatter of
blocks that leave it and come back.
"""

from collections.abc import Sequence

import torch

from fairlead_kernels.interface.cache_write import raw

# Copies between two tensors go in chunks of at most this size: sequences are offloaded when memory
# is short, so what is read first must not take as much as the sequence itself.
STAGING_BYTES = 64 << 20


def indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [len(values)] on ``device``, queued on the current stream: the host waits for nothing
    there.
    """
    host_indices = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host_indices.to(device, non_blocking=True)


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]], *, dim: int
) -> None:
    """Copy block ``a`` of ``source`` to block ``b`` of ``target`` for each pair (a, b); ``dim``
    counts blocks.

    ``source`` and ``target`` are on one device, agree in type and every other dimension and may be
    one tensor; then all sources are read before any target is written, so a block may be both. Work
    queued on the device after the call sees the complete copy. No element changes: 8-bit floats are
    copied as bytes.
    """
    if not pairs:
        return
    chunk = len(pairs)
    if source is not target:
        chunk = max(1, STAGING_BYTES * source.shape[dim] // source.nbytes)
    source, target = raw(source), raw(target)
    for at in range(0, len(pairs), chunk):
        sources, targets = zip(*pairs[at : at + chunk], strict=True)
        staged = source.index_select(dim, indices(sources, source.device))
        target.index_copy_(dim, indices(targets, target.device), staged)


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
    """``staged`` [N, slots, ...] becomes the blocks ``blocks`` int64 [N] of ``cache`` [slots,
    blocks, ...], one behind the other, by one kernel that allocates no more than their indices.

    Both are dense, on one device and of one type. No element changes: rows are moved as bytes.
    """
    places = _places(cache, blocks)
    torch.index_select(_rows(cache), 0, places, out=_rows(staged))


def scatter_blocks(staged: torch.Tensor, blocks: torch.Tensor, cache: torch.Tensor) -> None:
    """Copy ``staged`` [N, slots, ...] into the distinct blocks ``blocks`` of ``cache``."""
    _rows(cache).index_copy_(0, _places(cache, blocks), _rows(staged))


def _places(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """int64 [N * slots]: the rows of ``cache`` that hold the blocks, block by block."""
    slots, count = cache.shape[:2]
    offsets = torch.arange(0, slots * count, count, device=blocks.device)
    return (blocks[:, None] + offsets).view(-1)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """A dense [a, b, ...] as [a * b, width], in eights of bytes if its rows are whole numbers of
    them.
    """
    rows = x.view(x.shape[0] * x.shape[1], -1).view(torch.uint8)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows
