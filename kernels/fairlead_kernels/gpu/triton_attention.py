"""Paged attention by Triton's kernels, on GPUs: for what flashinfer lacks.

Owns the plans, the tiles and the launches; ``triton_attention_kernels`` has the kernels. A plan is
where each piece of the step's rows is, so it needs nothing from the device, and no grid depends on
a row's length: a captured launch reads lengths and block ids where a later plan has put them.

Rows of one query have their keys split over SPLITS programs, in every step, whatever the other
rows are. A split's keys depend on its row's length alone, so does its result. Other rows are cut
into pieces of as many queries as a tile holds.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels.gpu import triton_package
from fairlead_kernels.interface.attention import DecodeRows, Heads, LayerSpec, RaggedRows
from fairlead_kernels.interface.cache_write import raw

# Programs that share the keys of one query, a power of two: with 8 key-value heads one row alone
# keeps a GPU of 132 multiprocessors busy.
SPLITS = 16
# Keys of a split, unless the row has fewer: its result is written, and read again to be merged.
LEAST_KEYS = 256
FIELDS = 4  # of a piece: its row of the tables, first token, position, queries


def load(heads: Heads, device: torch.device) -> "TritonAttention":
    """The backend, not yet compiled. Raises NotAvailableError with the reason."""
    return TritonAttention(
        heads, device, triton_package.load("fairlead_kernels.gpu.triton_attention_kernels")
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes that one program has at a time, powers of two: ``tall`` queries times heads, 16 at
    least, and ``keys``.
    """

    tall: int
    keys: int

    @classmethod
    def of(cls, heads: Heads) -> "Tiles":
        """The tiles for these heads: as many keys as 16 KiB hold, but 16 to 64, and at most 8,192
        sums of a result.
        """
        columns = max(_columns(heads.dim), _columns(heads.value_dim))
        keys = (1 << 14) // (columns * heads.dtype.itemsize)
        return cls(max(16, min(64, (1 << 13) // columns)), max(16, min(64, keys)))


def _columns(width: int) -> int:
    """The power of two that holds a row of so many elements; products need 16."""
    return max(16, 1 << (width - 1).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Memory for the splits of ``rows`` rows of one query, float32 on the device: ``parts``, their
    sums of values, ``peaks`` and ``totals``, as the kernels have them.
    """

    rows: int
    parts: Tensor
    peaks: Tensor
    totals: Tensor

    @classmethod
    def new(cls, rows: int, heads: Heads, splits: int, device: torch.device) -> "Partial":
        shape = rows, heads.query, splits
        parts = torch.empty(*shape, heads.value_dim, device=device)
        return cls(rows, parts, *(torch.empty(shape, device=device) for _ in range(2)))

    @property
    def nbytes(self) -> int:
        return self.parts.nbytes + self.peaks.nbytes + self.totals.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class TritonPlan:
    """A step's rows of one group on the device: ``tables`` int32 [R, W] with the blocks of rows,
    and pieces int32 [FIELDS, pieces] as the kernels have them: ``decodes`` of one query each,
    ``prefills`` of more.
    """

    window: int | None
    block_size: int
    tables: Tensor
    decodes: Tensor
    prefills: Tensor
    partial: Partial


class TritonAttention:
    """``DecodeAttention`` by kernels with the signatures of ``triton_attention_kernels``.

    Any heads, types of GPUs and layers. All work is queued on the current stream, so that steps
    share the memory of their splits. ``wide`` as in TritonOperations; ``splits``, a power of two,
    and ``least_keys`` as SPLITS and LEAST_KEYS.
    """

    name = "triton"

    def __init__(
        self,
        heads: Heads,
        device: torch.device,
        kernels: Any,
        *,
        tiles: Tiles | None = None,
        splits: int = SPLITS,
        least_keys: int = LEAST_KEYS,
        wide: bool = False,
    ) -> None:
        self.heads = heads
        self._device = device
        self._kernels = kernels
        self._tiles = tiles or Tiles.of(heads)
        self._splits, self._least_keys = splits, least_keys
        self._wide = wide or heads.dtype is torch.float32
        self._partial = Partial.new(0, heads, splits, device)
        self._reserved = 0  # bytes
        # By group and number of rows, the pieces of steps at fixed addresses, all as large as the
        # largest before them, so that two sizes tell what all take; and what graphs may still
        # write to since a larger step has needed more.
        self._fixed: dict[tuple[int, int], Tensor] = {}
        self._largest = 0
        self._outgrown: list[Partial] = []

    # -- memory

    def reserve(self, rows: int) -> int:
        """``DecodeAttention.reserve``: the partial results of so many rows."""
        self._reserved = self._room(rows).nbytes
        return self._reserved

    @property
    def fixed_nbytes(self) -> int:
        """``DecodeAttention.fixed_nbytes``: pieces, and what splits take beyond the reserve."""
        splits = sum(partial.nbytes for partial in (*self._outgrown, self._partial))
        return sum(pieces.nbytes for pieces in self._fixed.values()) + splits - self._reserved

    def _room(self, rows: int) -> Partial:
        """Memory for the splits of so many rows: the same for all steps, until one needs more."""
        if rows > self._partial.rows:
            if self._fixed:
                self._outgrown.append(self._partial)
            self._partial = Partial.new(rows, self.heads, self._splits, self._device)
        return self._partial

    def _fixed_pieces(self, group: int, rows: int) -> Tensor:
        pieces = self._fixed.get((group, rows))
        if pieces is None:
            self._largest = max(self._largest, rows)
            pieces = self._fixed[group, rows] = self._single(self._largest)
        return pieces

    def _single(self, rows: int) -> Tensor:
        """Pieces of one query each, without their rows of the tables and positions."""
        pieces = torch.ones(FIELDS, rows, dtype=torch.int32, device=self._device)
        torch.arange(rows, out=pieces[1])
        return pieces

    # -- plans

    def plan(self, ragged: RaggedRows) -> TritonPlan:
        """Copy the rows to the device at once, from memory that the next step does not write to."""
        starts, lens = ragged.query_starts.numpy(), ragged.kv_lens.numpy()
        counts = np.diff(starts)
        rows = np.arange(len(lens), dtype=np.int32)
        places = rows if ragged.rows is None else ragged.rows.numpy()
        single, several = rows[counts == 1], rows[counts != 1]
        decodes = np.stack([places[single], starts[single], lens[single] - 1, counts[single]])
        tile_queries = self._tiles.tall // self._heads_of(self._tiles.tall)
        pieces = -(-counts[several] // tile_queries)
        row = np.repeat(several, pieces)
        # Of each piece its place in its row.
        at = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        first = (at * tile_queries).astype(np.int32)
        queries = np.minimum(tile_queries, counts[row] - first)
        position = lens[row] - counts[row] + first
        prefills = np.stack([places[row], starts[row] + first, position, queries])
        fields = [torch.from_numpy(decodes), torch.from_numpy(prefills)]
        if ragged.rows is None:
            fields.append(ragged.tables[:, : -(-int(lens.max()) // ragged.block_size)])
        packet = torch.cat([field.reshape(-1).to(torch.int32) for field in fields])
        if self._device.type == "cuda":
            # The copy of a large pageable one waits for the kernels before it.
            packet = packet.pin_memory()
        sent = packet.to(self._device, non_blocking=True)
        sizes = [field.numel() for field in fields]
        decode_pieces, prefill_pieces, *copies = (
            x.view(field.shape) for x, field in zip(torch.split(sent, sizes), fields, strict=True)
        )
        (tables,) = copies or (ragged.tables,)
        partial = self._room(len(single))
        return TritonPlan(
            ragged.window, ragged.block_size, tables, decode_pieces, prefill_pieces, partial
        )

    def plan_decodes(self, decodes: DecodeRows, room: int = 0) -> TritonPlan:
        count = len(decodes.kv_lens)
        partial = self._room(count)
        pieces = self._fixed_pieces(decodes.group, count) if room else self._single(count)
        pieces[0, :count].copy_(decodes.rows)
        pieces[2, :count].copy_(decodes.lens).sub_(1)
        window, size, tables = decodes.window, decodes.block_size, decodes.tables
        return TritonPlan(window, size, tables, pieces[:, :count], pieces[:, :0], partial)

    def _heads_of(self, tall: int) -> int:
        """Query heads that a program has, of those that share a key-value head."""
        return min(self.heads.per_kv, tall)

    # -- a layer

    def run(
        self,
        plan: TritonPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        spec: LayerSpec,
    ) -> Tensor:
        spec.check_window(plan.window)
        if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
            raise ValueError("key_cache: it and value_cache must be dense")
        h, dtype, query = self.heads, query.dtype, query.to(self.heads.dtype)
        if query.stride(-1) != 1:
            query = query.contiguous()
        out = query.new_empty(query.shape[0], h.query, h.value_dim)
        sinks = query if spec.sinks is None else spec.sinks.contiguous()
        layer = plan, query, raw(key_cache), raw(value_cache), sinks, out, spec
        if plan.decodes.shape[1]:
            self._attend(*layer, plan.decodes, self._splits)
            self._merge(plan, sinks, out, spec)
        if plan.prefills.shape[1]:
            self._attend(*layer, plan.prefills, 1)
        return out.to(dtype)

    def _attend(
        self,
        plan: TritonPlan,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor,
        out: Tensor,
        spec: LayerSpec,
        pieces: Tensor,
        splits: int,
    ) -> None:
        h, room, heads = self.heads, plan.partial, self._heads_of(self._tiles.tall)
        tall = self._tiles.tall if splits == 1 else _columns(heads)
        self._kernels.attend[pieces.shape[1], h.kv * -(-h.per_kv // heads), splits](
            query,
            keys,
            values,
            out,
            room.parts,
            room.peaks,
            room.totals,
            pieces,
            plan.tables,
            sinks,
            pieces.stride(0),
            plan.tables.stride(0),
            spec.window or 0,
            spec.scale,
            spec.softcap or 0.0,
            query.stride(0),
            query.stride(1),
            BLOCK=plan.block_size,
            KV=h.kv,
            PER_KV=h.per_kv,
            DIM=h.dim,
            VALUE_DIM=h.value_dim,
            WINDOW=spec.window is not None,
            SOFTCAP=spec.softcap is not None,
            SINKS=spec.sinks is not None,
            FP8_CACHE=h.fp8_cache,
            WIDE=self._wide,
            SPLITS=splits,
            LEAST_KEYS=self._least_keys,
            HEADS=heads,
            TALL=tall,
            KEYS=self._tiles.keys,
            COLUMNS=_columns(h.dim),
            VALUE_COLUMNS=_columns(h.value_dim),
            num_warps=4,
            num_stages=2,
        )

    def _merge(self, plan: TritonPlan, sinks: Tensor, out: Tensor, spec: LayerSpec) -> None:
        h, room, pieces = self.heads, plan.partial, plan.decodes
        self._kernels.merge[pieces.shape[1], h.query](
            room.parts,
            room.peaks,
            room.totals,
            pieces,
            sinks,
            out,
            pieces.stride(0),
            QUERY_HEADS=h.query,
            VALUE_DIM=h.value_dim,
            SINKS=spec.sinks is not None,
            SPLITS=self._splits,
            VALUE_COLUMNS=_columns(h.value_dim),
            num_warps=4,
        )
