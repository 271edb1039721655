"""Attention kernels of GPUs, proven where they will run: each runs once before it serves.

Owns a few random rows and the comparison with the reference. It finds at start what else the first
request would find: a module that is neither built nor compilable here, a driver or a GPU that its
kernels were not built for.
"""

from dataclasses import replace

import torch

from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import (
    NULL,
    AttentionBackend,
    GroupKinds,
    Heads,
    LayerKind,
    LayerSpec,
    RaggedRows,
)
from fairlead_kernels.proofs.comparison import prove

BLOCK_SIZE = 16
# Rows as (cached tokens before the step, tokens of the step): decodes alone, then a mixed step.
# Of the long row, kernels may split the keys.
STEPS = ((5, 1), (20, 1), (600, 1)), ((0, 7), (13, 6), (20, 1))


def prove_attention(
    attention: AttentionBackend,
    heads: Heads,
    kinds: GroupKinds,
    device: torch.device,
    block_size: int = BLOCK_SIZE,
) -> None:
    """Compare both forms of a step with the reference, for each kind of layer in each group.
    Kernels may be compiled for a size of blocks: this one is.

    Compiles or loads the kernels' modules, which can take minutes. Raises NotAvailableError with
    the reason where one does not run or computes something else.
    """
    for group, group_kinds in enumerate(kinds):
        for kind in group_kinds:
            for rows in STEPS:
                _prove(attention, heads, group, kind, rows, device, block_size)


def _prove(
    attention: AttentionBackend,
    heads: Heads,
    group: int,
    kind: LayerKind,
    rows: tuple[tuple[int, int], ...],
    device: torch.device,
    size: int,
) -> None:
    h, generator = heads, torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    lens = [before + count for before, count in rows]
    width = -(-max(lens) // size)
    blocks = torch.randperm(len(rows) * width, generator=generator).int().view(len(rows), width)
    used = torch.arange(width) * size < torch.tensor(lens)[:, None]
    starts = torch.tensor([0, *(count for _, count in rows)], dtype=torch.int32)
    ragged = RaggedRows(
        query_starts=starts.cumsum(0, dtype=torch.int32),
        kv_lens=torch.tensor(lens, dtype=torch.int32),
        tables=blocks.masked_fill(~used, NULL),
        block_size=size,
        window=kind.window,
        group=group,
    )
    query = random(int(starts.sum()), h.query, h.dim) / (kind.scale * h.dim**0.5)
    keys, values = (
        random(len(rows) * width, size, h.kv, dim).to(h.cache_dtype) for dim in (h.dim, h.value_dim)
    )
    query = query.to(h.dtype)
    sinks = random(h.query).to(h.dtype) if kind.sinks else None
    spec = LayerSpec(kind.scale, kind.window, kind.softcap, sinks)
    expected = reference.attend(ragged, query, keys, values, spec)

    def compute() -> torch.Tensor:
        caches = keys.to(device), values.to(device)
        device_spec = spec if sinks is None else replace(spec, sinks=sinks.to(device))
        return attention.run(attention.plan(ragged), query.to(device), *caches, device_spec)

    # Scores are about 1, and so are results.
    name, scale = f"{attention.name}'s kernel for {kind}", torch.ones(())
    prove(name, compute, expected, h.dtype, "sum", scale)
