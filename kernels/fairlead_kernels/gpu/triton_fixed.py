"""A layer's operations and attention on GPUs whose sums have one order, for ``deterministic``.

Owns the launches of ``triton_fixed_kernels`` and their proof at start. No product is torch's: how
its libraries cut a sum depends on the number of rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels.gpu import triton_package
from fairlead_kernels.gpu.triton_operations import (
    MANY_TOKENS,
    PRODUCT_COLUMNS,
    PRODUCT_ROWS,
    TILE,
    TritonOperations,
)
from fairlead_kernels.interface.attention import GroupKinds, Heads, LayerSpec, RaggedRows
from fairlead_kernels.interface.cache_write import raw
from fairlead_kernels.interface.layer import Packed
from fairlead_kernels.proofs.attention_proof import prove_attention
from fairlead_kernels.proofs.triton_proof import prove_operations

# Of a program's shared memory, of which the least GPUs from compute capability 8.0 on have 99 KiB.
SHARED_BYTES = 80 << 10


def load(
    heads: Heads, kinds: GroupKinds, device: torch.device
) -> "tuple[FixedAttention, FixedOperations]":
    """The attention and the operations, proven on this device, which compiles the kernels. Raises
    NotAvailableError.
    """
    kernels, fixed = (triton_package.load(f"fairlead_kernels.gpu.{name}") for name in MODULES)
    operations = FixedOperations(kernels, fixed)
    attention = FixedAttention(heads, device, fixed)
    prove_operations(operations, heads.dtype, device, heads.cache_dtype)
    prove_attention(attention, heads, kinds, device)
    return attention, operations


MODULES = ("triton_kernels", "triton_fixed_kernels")


class FixedOperations(TritonOperations):
    """``TritonOperations`` with a kernel of ours for plain products, too, and one tile for every
    number of tokens. Other tiles may take other instructions of a GPU, which sum otherwise.
    """

    few_tokens = MANY_TOKENS
    fixed_order = True

    def __init__(self, kernels: Any, fixed: Any, tile: int = TILE, *, wide: bool = False) -> None:
        super().__init__(kernels, tile, wide=wide)
        self._fixed = fixed

    def linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        """``LayerOperations.linear``. Raises ValueError for fp8 weights."""
        if weight.data.dtype is torch.int8 or weight.int4_groups is not None:
            return super().linear(x, weight, bias)
        if weight.scales is not None:
            raise ValueError("weight: fp8 products have no fixed order")
        if x.shape[1:] != (weight.columns,) or not weight.data.is_contiguous():
            raise ValueError(f"x: {tuple(x.shape)} for dense weights of {weight.columns} columns")
        data = weight.data if weight.data.dtype is x.dtype else weight.data.to(x.dtype)
        out = x.new_empty(x.shape[0], weight.rows)
        grid = -(-x.shape[0] // MANY_TOKENS), -(-weight.rows // PRODUCT_ROWS)
        if not x.shape[0]:
            return out
        self._fixed.multiply[grid](
            x.contiguous(),
            data,
            data if bias is None else bias.contiguous(),
            out,
            x.shape[0],
            weight.rows,
            weight.columns,
            weight.factor,
            BIAS=bias is not None,
            TOKENS=MANY_TOKENS,
            ROWS=PRODUCT_ROWS,
            COLUMNS=PRODUCT_COLUMNS,
            WIDE=self._wide or x.dtype is torch.float32,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=True,
        )
        return out


@dataclass(frozen=True, slots=True, eq=False)
class TritonPlan:
    """A step's tiles int32 [N, 4] and block tables, on the device."""

    tiles: Tensor
    tables: Tensor
    block_size: int
    window: int | None


class FixedAttention:
    """``AttentionBackend`` in Triton, for every size of heads, window, cap and sinks. ``wide`` as
    in TritonOperations.
    """

    name = "triton in order"

    def __init__(
        self, heads: Heads, device: torch.device, fixed: Any, *, wide: bool = False
    ) -> None:
        self.heads = heads
        self.device = device
        self._kernels = fixed
        self._wide = wide or heads.dtype is torch.float32
        self._per_kv = _power(heads.per_kv)
        rows, self._keys, self._stages = _tile(heads, self._per_kv, wide=self._wide)
        self._tokens = rows // self._per_kv

    def plan(self, ragged: RaggedRows) -> TritonPlan:
        starts, lens = ragged.query_starts.numpy(), ragged.kv_lens.numpy()
        counts = np.diff(starts)
        pieces = -(-counts // self._tokens)
        row = np.repeat(np.arange(len(lens)), pieces)
        # Each tile's place among those of its row.
        place = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begin = place * self._tokens
        queries = np.minimum(counts[row] - begin, self._tokens)
        position = (lens - counts)[row] + begin
        tiles = np.stack([row, starts[row] + begin, position, queries], axis=1).astype(np.int32)
        tables = ragged.tables.to(self.device).contiguous()
        device_tiles = torch.from_numpy(tiles).to(self.device)
        return TritonPlan(device_tiles, tables, ragged.block_size, ragged.window)

    def run(
        self,
        plan: TritonPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        spec: LayerSpec,
    ) -> Tensor:
        spec.check_window(plan.window)
        h, dtype = self.heads, query.dtype
        query = query.to(h.dtype).contiguous()
        if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
            raise ValueError("key_cache: it and value_cache must be dense")
        out = query.new_empty(query.shape[0], h.query, h.value_dim)
        sinks = query if spec.sinks is None else spec.sinks.float().contiguous()
        self._kernels.attend_in_order[(plan.tiles.shape[0], h.kv)](
            query,
            raw(key_cache),
            raw(value_cache),
            plan.tables,
            plan.tiles,
            sinks,
            out,
            plan.tables.shape[1],
            plan.block_size,
            plan.window or 0,
            h.per_kv,
            h.kv,
            h.dim,
            h.value_dim,
            spec.scale,
            spec.softcap or 0.0,
            WINDOW=plan.window is not None,
            SOFTCAP=spec.softcap is not None,
            SINKS=spec.sinks is not None,
            FP8_CACHE=h.fp8_cache,
            PER_KV=self._per_kv,
            TOKENS=self._tokens,
            KEYS=self._keys,
            DIM=max(16, _power(h.dim)),
            VALUE_DIM=max(16, _power(h.value_dim)),
            WIDE=self._wide,
            num_warps=4 if h.dim <= 128 else 8,
            num_stages=self._stages,
            enable_fp_fusion=True,
        )
        return out.to(dtype)


def _tile(heads: Heads, per_kv: int, *, wide: bool) -> tuple[int, int, int]:
    """Rows of a tile of scores, queries times the ``per_kv`` that share keys, its keys, and how
    many tiles of keys and values are in shared memory at once. They follow from the model alone.
    """
    row = max(16, _power(max(heads.dim, heads.value_dim))) * (4 if wide else heads.dtype.itemsize)
    for rows, keys, stages in ((64, 64, 2), (64, 64, 1), (64, 32, 1), (32, 32, 1), (16, 16, 1)):
        rows = max(rows, per_kv)  # noqa: PLW2901 - these are never cut
        if rows * row + 2 * stages * keys * row + 4 * rows * keys <= SHARED_BYTES:
            break
    return rows, keys, stages


def _power(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
