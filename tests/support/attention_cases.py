"""Random steps for attention: rows, scattered blocks, and caches whose other bytes are NaN."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fairlead_kernels.interface.attention import (
    NULL,
    AttentionBackend,
    Heads,
    LayerSpec,
    RaggedRows,
)


@dataclass
class Case:
    """The input of the backend for a random step."""

    heads: Heads
    ragged: RaggedRows
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor


def make_case(
    rows: list[tuple[int, int]],
    *,
    block_size: int = 4,
    window: int | None = None,
    heads: Heads | None = None,
    contiguous: bool = False,
    seed: int = 0,
    shared: dict[int, tuple[int, int]] | None = None,
) -> Case:
    """Rows as (cached tokens before the step, tokens of the step); all other bytes are NaN.

    ``shared``: rows that begin with so many blocks of an earlier row, {row: (earlier row, blocks)}:
    as many of them as both have filled before the step.
    """
    heads = heads or Heads(4, 2, 8, 8, torch.float32)
    generator = np.random.default_rng(seed)
    widths = [-(-(before + count) // block_size) for before, count in rows]
    total = sum(widths) + 3
    order = np.arange(total) if contiguous else generator.permutation(total)
    torch.manual_seed(seed)
    cached = heads.cache_dtype
    key_cache = torch.full((total, block_size, heads.kv, heads.dim), torch.nan)
    value_cache = torch.full((total, block_size, heads.kv, heads.value_dim), torch.nan)
    tables = np.full((len(rows), max(widths) + 2), NULL, dtype=np.int32)
    at = 0
    full = list[np.ndarray]()  # every row's blocks, those that are freed below, too
    for row, (before, count) in enumerate(rows):
        source, most = (shared or {}).get(row, (0, 0))
        same = min(most, before // block_size, rows[source][0] // block_size)
        begin = full[source][:same] if same else order[:0]
        blocks = np.concatenate([begin, order[at : at + widths[row] - same]])
        at += widths[row] - same
        full.append(blocks)
        tables[row, : widths[row]] = blocks
        slots = [
            int(blocks[p // block_size]) * block_size + p % block_size
            for p in range(same * block_size, before + count)
        ]
        key_cache.view(-1, heads.kv, heads.dim)[slots] = torch.randn(
            len(slots), heads.kv, heads.dim
        )
        value = torch.randn(len(slots), heads.kv, heads.value_dim)
        value_cache.view(-1, heads.kv, heads.value_dim)[slots] = value
        if window is not None:
            # Blocks that the window has passed are freed: the backend must not read them.
            tables[row, : max(0, before - window + 1) // block_size] = NULL
    counts = [count for _, count in rows]
    ragged = RaggedRows(
        query_starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        kv_lens=torch.tensor([before + count for before, count in rows], dtype=torch.int32),
        tables=torch.from_numpy(tables),
        block_size=block_size,
        window=window,
    )
    query = torch.randn(sum(counts), heads.query, heads.dim).to(heads.dtype)
    return Case(heads, ragged, query, key_cache.to(cached), value_cache.to(cached))


def in_places(
    keys: torch.Tensor, values: torch.Tensor, before: int, behind: int, together: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches whose slots lie apart, with so many NaNs before and behind each one's keys or values;
    ``together``: both in one tensor, a slot's values behind its keys, else those further apart.
    """

    def placed(*parts: torch.Tensor, behind: int = behind) -> list[torch.Tensor]:
        widths = [part.shape[2] * part.shape[3] for part in parts]
        size = (*parts[0].shape[:2], before + sum(widths) + behind)
        places = torch.full(size, torch.nan, dtype=parts[0].dtype)
        found, at = list[torch.Tensor](), before
        for part, width in zip(parts, widths, strict=True):
            view = places[..., at : at + width].view(part.shape)
            found.append(view.copy_(part))
            at += width
        return found

    if together:
        first, second = placed(keys, values)
        return first, second
    return placed(keys)[0], placed(values, behind=behind + 5)[0]


@dataclass(frozen=True)
class Cut:
    """Queries ``begin:begin + count`` of those that a case has for a row."""

    row: int
    begin: int
    count: int


def attend_cut(
    backend: AttentionBackend, case: Case, spec: LayerSpec, cuts: Sequence[Cut]
) -> torch.Tensor:
    """Attention of a step with these parts of a case's rows, in this order; blocks that the window
    has passed are freed.
    """
    rows, size = case.ragged, case.ragged.block_size
    starts = rows.query_starts.tolist()
    first = rows.kv_lens - rows.query_starts.diff()
    lens = [int(first[cut.row]) + cut.begin + cut.count for cut in cuts]
    tables = torch.stack([rows.tables[cut.row] for cut in cuts])
    for table, cut, length in zip(tables, cuts, lens, strict=True):
        if spec.window is not None:
            table[: max(0, length - cut.count - spec.window + 1) // size] = NULL
        table[-(-length // size) :] = NULL
    query = torch.cat(
        [
            case.query[starts[cut.row] + cut.begin : starts[cut.row] + cut.begin + cut.count]
            for cut in cuts
        ]
    )
    ragged = RaggedRows(
        query_starts=torch.tensor([0, *np.cumsum([c.count for c in cuts])], dtype=torch.int32),
        kv_lens=torch.tensor(lens, dtype=torch.int32),
        tables=tables,
        block_size=size,
        window=spec.window,
    )
    return backend.run(backend.plan(ragged), query, case.key_cache, case.value_cache, spec)
