"""A decoder layer's operations on GPUs: torch's matrix products, and Triton kernels between them
and for products with integers of 8 and 4 bits.

Owns the launches, their tiles and the checks of what is handed to a kernel. ``triton_kernels`` has
the kernels. A launch allocates its result and nothing else, asks nothing of the device, and its
grid depends on shapes alone, so that a CUDA graph can hold it.
"""

from typing import Any

import torch
from torch import Tensor

from fairlead_kernels.formats.quantize import FP8
from fairlead_kernels.gpu import triton_package
from fairlead_kernels.interface.cache_write import raw
from fairlead_kernels.interface.layer import Activation, Int4Groups, Norm, Packed
from fairlead_kernels.plain.torch_operations import TorchOperations

# Elements of a tile, unless a row is longer: a row of 4,096 is a program's, small heads share one.
TILE = 1024
# A tile of a product: tokens (tensor cores take 16 at least), outputs, and inputs at a time.
FEW_TOKENS, MANY_TOKENS, PRODUCT_ROWS, PRODUCT_COLUMNS = 16, 64, 64, 64


def load(*, fp8: bool = False) -> "TritonOperations":
    """The operations, not yet compiled; ``fp8`` as in TorchOperations. Raises NotAvailableError
    with the reason.
    """
    kernels = triton_package.load("fairlead_kernels.gpu.triton_kernels")
    return TritonOperations(kernels, fp8=fp8)


class TritonOperations(TorchOperations):
    """``LayerOperations`` with a kernel for each but the products of plain and fp8 weights.
    Stateless: any thread may call any method. ``tile``: elements that one program computes, a power
    of two; ``fp8`` as in TorchOperations; ``wide``: products in float32, as in Triton's
    interpreter, which multiplies the bits of bfloat16.
    """

    name = "triton"
    few_tokens = FEW_TOKENS

    def __init__(
        self, kernels: Any, tile: int = TILE, *, fp8: bool = False, wide: bool = False
    ) -> None:
        super().__init__(fp8=fp8)
        self._wide = wide
        self._kernels = kernels
        self._tile = tile

    def _scaled(self, x: Tensor, weight: Packed, scales: Tensor, bias: Tensor | None) -> Tensor:
        if weight.data.dtype is not torch.int8:
            return super()._scaled(x, weight, scales, bias)
        _check("x", x, (x.shape[0], weight.columns))
        _check("scales", scales, (weight.rows,))
        if bias is not None:
            _check("bias", bias, (weight.rows,))
        out = x.new_empty(x.shape[0], weight.rows)
        # Decodes wait for weights: few tokens, and many rows at a time in flight. A prompt's tiles
        # are wide in both.
        tokens = self.few_tokens if x.shape[0] <= self.few_tokens else MANY_TOKENS
        self._kernels.multiply_int8[(-(-x.shape[0] // tokens), -(-weight.rows // PRODUCT_ROWS))](
            x.contiguous(),
            weight.data,
            scales,
            scales if bias is None else bias,
            out,
            x.shape[0],
            weight.rows,
            weight.columns,
            BIAS=bias is not None,
            TOKENS=tokens,
            ROWS=PRODUCT_ROWS,
            COLUMNS=PRODUCT_COLUMNS,
            WIDE=self._wide or x.dtype is torch.float32,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=True,
        )
        return out

    def _multiply_int4(
        self,
        x: Tensor,
        weight: Packed,
        scales: Tensor,
        int4_groups: Int4Groups,
        bias: Tensor | None,
    ) -> Tensor:
        count, rows = x.shape[0], weight.rows
        _check("x", x, (count, weight.columns))
        _check("scales", scales, tuple(int4_groups.zeros.shape))
        if bias is not None:
            _check("bias", bias, (rows,))
        x, out = x.contiguous(), x.new_empty(count, rows)
        size = weight.columns // len(scales)
        # Of one group at a time: their sizes are powers of two, unless a row is one.
        chunk_bytes = PRODUCT_COLUMNS if len(scales) == 1 else min(PRODUCT_COLUMNS, size // 2)
        tokens = self.few_tokens if count <= self.few_tokens else MANY_TOKENS
        first = 0
        # One launch, unless rows differ in the order of their columns.
        for length, order in int4_groups.orders:
            span = slice(first, first + length)
            first += length
            self._kernels.multiply_int4[(-(-count // tokens), -(-length // PRODUCT_ROWS))](
                x,
                weight.data[span],
                scales[:, span],
                int4_groups.zeros[:, span],
                scales if order is None else order,
                scales if bias is None else bias[span],
                out[:, span],
                count,
                length,
                weight.columns,
                size,
                rows,
                ORDERED=order is not None,
                BIAS=bias is not None,
                TOKENS=tokens,
                ROWS=PRODUCT_ROWS,
                BYTES=chunk_bytes,
                WIDE=self._wide or x.dtype is torch.float32,
                num_warps=4,
                num_stages=3,
                enable_fp_fusion=True,
            )
        return out

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``LayerOperations.norm``. The sum is written into ``residual``, if it is dense."""
        x = x.contiguous()
        count, width = x.shape
        total = x if residual is None else residual.contiguous()
        _check("residual", total, (count, width))
        _check_norm("norm", norm, width)
        out = torch.empty_like(x, dtype=norm.weight.dtype)
        rows, columns, launch = self._tiles(width)
        self._kernels.norm[(-(-count // rows),)](
            x,
            total,
            norm.weight,
            norm.weight if norm.bias is None else norm.bias,
            out,
            count,
            width,
            norm.eps,
            norm.offset,
            RESIDUAL=residual is not None,
            BIAS=norm.bias is not None,
            CENTERED=norm.centered,
            ROWS=rows,
            COLUMNS=columns,
            **launch,
        )
        return out, total

    def rope_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> Tensor:
        """``LayerOperations.rope_write``. Raises ValueError where the caches are not dense."""
        kv, dim = key_cache.shape[2:]
        count, rotated = cos.shape
        heads = qkv.shape[1] // dim
        _check("qkv", qkv, (count, heads * dim))
        _check("sin", sin, (count, rotated))
        _check("slots", slots, (count,))
        _check("value_cache", value_cache, tuple(key_cache.shape))
        if rotated % 2 or rotated > dim:
            raise ValueError(f"cos: {rotated} elements to rotate in heads of {dim}")
        if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
            raise ValueError("key_cache: it and value_cache must be dense")
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                _check_norm(name, norm, dim)
        out = qkv.new_empty(count, heads - 2 * kv, dim)
        rows, columns, launch = self._tiles(dim)
        none = Norm(qkv, 1.0)  # of which nothing is read
        q, k = q_norm or none, k_norm or none
        self._kernels.rope_write[(-(-count * heads // rows),)](
            qkv.contiguous(),
            cos.contiguous(),
            sin.contiguous(),
            slots.contiguous(),
            raw(key_cache),
            raw(value_cache),
            out,
            q.weight,
            q.weight if q.bias is None else q.bias,
            k.weight,
            k.weight if k.bias is None else k.bias,
            count,
            heads - 2 * kv,
            kv,
            dim,
            rotated,
            q.eps,
            q.offset,
            k.eps,
            k.offset,
            Q_NORM=q_norm is not None,
            Q_BIAS=q.bias is not None,
            Q_CENTERED=q.centered,
            K_NORM=k_norm is not None,
            K_BIAS=k.bias is not None,
            K_CENTERED=k.centered,
            FP8_CACHE=key_cache.dtype is FP8,
            ROWS=rows,
            COLUMNS=columns,
            **launch,
        )
        return out

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """``LayerOperations.gated``."""
        return self._activated(gate_up, gate_up.shape[1] // 2, activation, gated=True)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """``LayerOperations.activate``."""
        return self._activated(x, x.shape[1], activation, gated=False)

    def _activated(self, x: Tensor, width: int, activation: Activation, *, gated: bool) -> Tensor:
        out = x.new_empty(x.shape[0], width)
        rows, columns, launch = self._tiles(min(width, self._tile))
        self._kernels.activate[(-(-x.shape[0] // rows), -(-width // columns))](
            x.contiguous(),
            out,
            x.shape[0],
            width,
            ACTIVATION=activation,
            GATED=gated,
            ROWS=rows,
            COLUMNS=columns,
            **launch,
        )
        return out

    def _tiles(self, width: int) -> tuple[int, int, dict[str, Any]]:
        """Rows and columns of a tile, powers of two, of which a row has ``width`` elements; and how
        it is compiled: a warp for every 512 elements, 4 to 16, and a product with a sum as one.
        """
        columns = 1 << max(0, width - 1).bit_length()
        rows = max(1, self._tile // columns)
        warps = min(16, max(4, rows * columns // 512))
        return rows, columns, {"num_warps": warps, "enable_fp_fusion": True}


def _check(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: {tuple(x.shape)}, not {shape}")


def _check_norm(name: str, norm: Norm, width: int) -> None:
    for vector in (norm.weight, norm.bias):
        if vector is not None:
            _check(name, vector, (width,))
            if not vector.is_contiguous():
                raise ValueError(f"{name}: its weights are not dense")
