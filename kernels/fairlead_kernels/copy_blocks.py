"""Moving whole blocks: copy-on-write within a cache, offload to host memory and back."""

from collections.abc import Sequence

import torch


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]], *, dim: int
) -> None:
    """Copy block ``a`` of ``source`` to block ``b`` of ``target`` for each pair (a, b); ``dim`` counts blocks.

    ``source`` and ``target`` agree in every other dimension and may be one tensor. All sources are read before any
    target is written, so a block may be both. Between devices the copy goes through one staging gather, which keeps
    it a single transfer; it is complete when this returns.
    """
    if not pairs:
        return
    sources = torch.tensor([a for a, _ in pairs], dtype=torch.int64)
    targets = torch.tensor([b for _, b in pairs], dtype=torch.int64)
    staged = source.index_select(dim, sources.to(source.device)).to(target.device)
    target.index_copy_(dim, targets.to(target.device), staged)
