"""A decoder layer's operations in plain torch, in the model's own type, on any device.

Owns how weights are kept for torch's matrix products, and the operations of every layer where no
kernels of our own run. Nothing waits for the device, and no shape depends on data. Within an
operation numbers are float32; each result is rounded once.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from torch.nn.functional import ScalingType

from fairlead_kernels.formats.int4 import as_int4
from fairlead_kernels.formats.quantize import FP8, Quantized, as_quantized, quantize
from fairlead_kernels.interface.cache_write import write
from fairlead_kernels.interface.layer import Activation, Int4Groups, Norm, Packed
from fairlead_kernels.interface.reference import ACTIVATIONS
from fairlead_kernels.plain import torch_int4
from fairlead_kernels.proofs.comparison import prove


class TorchOperations:
    """``LayerOperations`` in torch. Stateless: any thread may call any method.

    ``fp8``: the device multiplies 8-bit floats, so fp8 weights meet activations that are rounded to
    fp8, too, with a scale per token. Else, and for int8, activations keep their type.
    """

    name = "torch"
    in_float32 = fixed_order = False
    int8_rounding = 0.0
    model_operations = None

    def __init__(self, *, fp8: bool = False) -> None:
        self.rounds = fp8

    def pack(
        self,
        weights: Sequence[Tensor | Quantized],
        *,
        dtype: torch.dtype = torch.float32,
        factor: float = 1.0,
    ) -> Packed:
        """``LayerOperations.pack``: row after row."""
        quantized = as_quantized(weights)
        if quantized is not None and (int4_matrices := as_int4(quantized)):
            return torch_int4.pack(int4_matrices, factor)
        # torch concatenates integers of any kind, but not every kind of float.
        matrices = [x.bits if isinstance(x, Quantized) else x for x in weights]
        first, rows = matrices[0], sum(matrix.shape[0] for matrix in matrices)
        data = first.new_empty(
            rows, first.shape[1], dtype=dtype if quantized is None else first.dtype
        )
        at = 0
        for matrix in matrices:
            data[at : at + len(matrix)] = matrix
            at += len(matrix)
        if quantized is None:
            return Packed(data, rows, first.shape[1], factor=factor)
        scales = torch.cat([x.scales for x in quantized]).mul_(factor)
        return Packed(data.view(quantized[0].numbers.dtype), rows, first.shape[1], scales)

    def linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        """``LayerOperations.linear``. An ``x`` of another type than the weights', as in the
        comparison of a layer with its original, takes a copy of them in its own; so does every
        ``x`` of quantized ones, but for those in a package's layout.
        """
        if (product := weight.multiply(x, bias)) is not None:
            return product
        if weight.int4_groups is not None and weight.scales is not None:
            return self._multiply_int4(x, weight, weight.scales, weight.int4_groups, bias)
        if weight.scales is not None:
            return self._scaled(x, weight, weight.scales, bias)
        data = weight.data
        if data.dtype is not x.dtype:
            data = data.to(x.dtype)
        if weight.factor == 1:
            return F.linear(x, data, bias)
        added = x.new_empty(weight.rows) if bias is None else bias
        return torch.addmm(added, x, data.T, beta=bias is not None, alpha=weight.factor)

    def _multiply_int4(
        self,
        x: Tensor,
        weight: Packed,
        scales: Tensor,
        int4_groups: Int4Groups,
        bias: Tensor | None,
    ) -> Tensor:
        """The product with 4-bit weights."""
        return torch_int4.linear(x, weight, scales, int4_groups, bias)

    def _scaled(self, x: Tensor, weight: Packed, scales: Tensor, bias: Tensor | None) -> Tensor:
        """The product with quantized weights: in 8-bit floats where the GPU has them, else with a
        copy of the weights in the type of ``x``.
        """
        data, sixteenths = weight.data, (weight.rows | weight.columns) % 16 == 0
        if self.rounds and data.dtype is FP8 and x.dtype is torch.bfloat16 and sixteenths:
            out = _fp8_product(x, data, scales)
            return out if bias is None else out.add_(bias)
        # Float16 could not hold the sums of unscaled numbers; bfloat16 would round them once more.
        out = _sums(x, data).mul_(scales)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``LayerOperations.norm``. The sum is written into ``residual``."""
        total = x if residual is None else residual.add_(x)
        return _normalized(total, norm).to(norm.weight.dtype), total

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
        """``LayerOperations.rope_write``."""
        kv, dim = key_cache.shape[2:]
        heads = qkv.view(qkv.shape[0], -1, dim)
        query, key, value = heads[:, : -2 * kv], heads[:, -2 * kv : -kv], heads[:, -kv:]
        query, key = (
            _rotated(head if norm is None else _normalized(head, norm), cos, sin).to(qkv.dtype)
            for head, norm in ((query, q_norm), (key, k_norm))
        )
        write(key_cache, value_cache, slots, key, value)
        return query

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """``LayerOperations.gated``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (ACTIVATIONS[activation](gate.float()) * up).to(gate_up.dtype)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """``LayerOperations.activate``."""
        return ACTIVATIONS[activation](x.float()).to(x.dtype)


def _sums(x: Tensor, numbers: Tensor) -> Tensor:
    """Multiply x [T, K] by 8-bit numbers [N, K], which all types hold exactly → float32 [T, N]."""
    if x.dtype is torch.float32 or not x.is_cuda:
        return F.linear(x.float(), numbers.float())
    return torch.mm(x, numbers.to(x.dtype).T, out_dtype=torch.float32)


def prove_fp8(device: torch.device) -> None:
    """Multiply 8-bit floats on this device once. Raises NotAvailableError with the reason where it
    does not, or computes something else.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator).bfloat16()
    weight = quantize(torch.randn(32, 64, generator=generator), "fp8")
    expected = quantize(x.float(), "fp8").dequantize() @ weight.dequantize().T

    def compute() -> Tensor:
        return _fp8_product(x.to(device), weight.numbers.to(device), weight.scales.to(device))

    prove("the product of 8-bit floats", compute, expected, x.dtype, "operation")


def _fp8_product(x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    """Multiply x bfloat16 [T, K], rounded to fp8 with a scale per row, by float8_e4m3fn [N, K] with
    a scale per row → bfloat16 [T, N]. Sums are float32.
    """
    largest = x.abs().amax(dim=1, keepdim=True).float()
    x_scales = largest.div_(torch.finfo(FP8).max).clamp_(min=torch.finfo(torch.float32).tiny)
    rows = ScalingType.RowWise
    rounded = (x / x_scales).to(FP8)
    return F.scaled_mm(
        rounded, numbers.T, x_scales, rows, scales[None], rows, output_dtype=torch.bfloat16
    )


def _normalized(x: Tensor, norm: Norm) -> Tensor:
    """The norm of the last dimension, in float32."""
    x, weight = x.float(), norm.weight.float()
    if norm.offset:
        weight = weight + norm.offset
    bias = None if norm.bias is None else norm.bias.float()
    if norm.centered:
        return F.layer_norm(x, weight.shape, weight, bias, norm.eps)
    normal = F.rms_norm(x, weight.shape, weight, norm.eps)
    return normal if bias is None else normal + bias


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, dim] by cos and sin [T, R], in float32."""
    half = cos.shape[1] // 2
    if not half:
        return x
    x, cos, sin = x.float(), cos.float()[:, None], sin.float()[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat([-second, first], dim=-1)
    return torch.cat([x[..., : 2 * half] * cos + turned * sin, rest], dim=-1)
