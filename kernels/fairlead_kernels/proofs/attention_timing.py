"""The time that attention takes on the chosen kernels, measured once at start.

Owns one step of decodes, and its time and rate in words. A fallback's price is then in the log
beside its reason, before any request pays it.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fairlead_kernels.interface.attention import (
    AttentionBackend,
    GroupKinds,
    Heads,
    LayerKind,
    LayerSpec,
    RaggedRows,
)

ROWS, KEYS = 32, 1024
LAYERS, REPEATS = 8, 5  # launched in a row, as a step does; how often


def timing(
    attention: AttentionBackend,
    heads: Heads,
    kinds: GroupKinds,
    device: torch.device,
    rows: int,
    block_size: int,
    now: Callable[[], float] = time.perf_counter,
) -> str:
    """The time per layer of ROWS decodes, or of ``rows`` if these are fewer, of KEYS tokens each,
    and the bytes of keys and values read per second, for the layers that see most. Takes some
    milliseconds, and the memory of their keys and values for as long; without that memory it says
    so.
    """
    group, kind = _widest(kinds)
    rows = min(ROWS, rows)
    try:
        plan, arguments = _step(attention, heads, group, kind, rows, block_size, device)
    except torch.OutOfMemoryError:
        return f"not measured, {rows} decodes of {KEYS:,} tokens do not fit in memory"

    def run() -> float:
        begin = now()
        for _ in range(LAYERS):
            attention.run(plan, *arguments)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (now() - begin) / LAYERS

    run()
    seconds = statistics.median(run() for _ in range(REPEATS))
    visible_keys = min(KEYS, kind.window or KEYS)
    per_key = heads.kv * (heads.dim + heads.value_dim) * heads.cache_dtype.itemsize
    rate = rows * visible_keys * per_key / seconds / 1e9
    return (
        f"{rows} decodes of {KEYS:,} tokens take {seconds * 1e3:.3f} ms a layer, {rate:,.0f} GB/s"
    )


def _widest(kinds: GroupKinds) -> tuple[int, LayerKind]:
    """The kind of layer whose window is the largest, and its group."""
    pairs = [(group, kind) for group, group_kinds in enumerate(kinds) for kind in group_kinds]
    return max(pairs, key=lambda pair: (pair[1].window is None, pair[1].window or 0, pair[1].scale))


def _step(
    attention: AttentionBackend,
    heads: Heads,
    group: int,
    kind: LayerKind,
    rows: int,
    block_size: int,
    device: torch.device,
) -> tuple[Any, tuple[Any, ...]]:
    """A plan of the decodes, and what ``run`` takes beside it."""
    width = -(-KEYS // block_size)
    ragged = RaggedRows(
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        kv_lens=torch.full((rows,), KEYS, dtype=torch.int32),
        tables=torch.arange(rows * width, dtype=torch.int32).view(rows, width),
        block_size=block_size,
        window=kind.window,
        group=group,
    )
    query = torch.zeros(rows, heads.query, heads.dim, dtype=heads.dtype, device=device)
    keys, values = (
        torch.zeros(rows * width, block_size, heads.kv, dim, dtype=heads.cache_dtype, device=device)
        for dim in (heads.dim, heads.value_dim)
    )
    sinks = query.new_zeros(heads.query) if kind.sinks else None
    spec = LayerSpec(kind.scale, kind.window, kind.softcap, sinks)
    return attention.plan(ragged), (query, keys, values, spec)
