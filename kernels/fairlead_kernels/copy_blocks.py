"""Copies of whole blocks: copy-on-write within a cache, offload to host memory and back."""

from collections.abc import Sequence

import torch

from fairlead_kernels.cache_write import raw

# Copies between memories go in parts of at most this size: sequences are offloaded when memory is
# short, so the staging buffer must not take as much as the sequence itself.
STAGING_BYTES = 64 << 20


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]], *, dim: int
) -> None:
    """Copy block ``a`` of ``source`` to block ``b`` of ``target`` for each pair (a, b); ``dim``
    counts blocks.

    ``source`` and ``target`` agree in type and every other dimension and may be one tensor; then
    all sources are read before any target is written, so a block may be both. Each part is gathered
    first, so that it crosses between devices in one transfer. Work queued on the device after the
    call sees the complete copy. No element changes: 8-bit floats are copied as bytes.
    """
    if not pairs:
        return
    part = len(pairs)
    if source is not target:
        part = max(1, STAGING_BYTES * source.shape[dim] // source.nbytes)
    source, target = raw(source), raw(target)
    for at in range(0, len(pairs), part):
        sources, targets = torch.tensor(pairs[at : at + part], dtype=torch.int64).unbind(1)
        staged = source.index_select(dim, sources.to(source.device)).to(target.device)
        target.index_copy_(dim, targets.to(target.device), staged)
