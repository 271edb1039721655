"""Quantized weights: integers or 8-bit floats of each row, times the row's scale.

Owns how such a weight is held, what it stands for, and the only rule by which weights of a plain
checkpoint are rounded: symmetric and per output channel, without calibration, the largest weight of
a row becomes the largest number of the format (Jacob et al., "Quantization and Training of Neural
Networks", 2018).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from fairlead_kernels.formats.row_chunks import row_chunks

Format = Literal["int8", "fp8"]  # what weights are rounded to
StoredFormat = Format | Literal["int4"]  # which only checkpoints bring
FP8 = torch.float8_e4m3fn
STORED: dict[StoredFormat, torch.dtype] = {"int8": torch.int8, "fp8": FP8}
# The largest number that rounding gives. A published checkpoint may hold -128, too.
LARGEST: dict[Format, float] = {"int8": 127.0, "fp8": torch.finfo(FP8).max}


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix [N, K], each row its row of ``numbers`` times its scale.

    ``bits`` int8 [N, K]: integers, or the bits of numbers in float8_e4m3fn, which thus stay as they
    are wherever floating-point tensors are cast. ``scales`` float32 [N].
    """

    format: StoredFormat
    bits: Tensor
    scales: Tensor

    @property
    def numbers(self) -> Tensor:
        """The numbers [N, K] in int8 or float8_e4m3fn."""
        return self.bits.view(STORED[self.format])

    @property
    def shape(self) -> torch.Size:
        return self.bits.shape

    def rows(self, order: Tensor | slice) -> Self:
        """A matrix of these rows in this order."""
        return type(self)(self.format, self.bits[order], self.scales[order])

    def columns(self, span: slice) -> Self:
        """A matrix of the columns start:stop."""
        return type(self)(self.format, self.bits[:, span], self.scales)

    def clone(self) -> Self:
        """A copy in memory of its own."""
        return type(self)(self.format, _copied(self.bits), _copied(self.scales))

    def to(self, device: torch.device) -> Self:
        return type(self)(self.format, self.bits.to(device), self.scales.to(device))

    def dequantize(self) -> Tensor:
        """The matrix, float32 [N, K]."""
        return self.numbers.float().mul_(self.scales[:, None])


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def quantize(weight: Tensor, to: Format = "int8", row_largest: Tensor | None = None) -> Quantized:
    """Round weights [N, K] of any floating type. Those that are already numbers of the format times
    scales, and use its largest one, give the same numbers again.

    ``row_largest`` [N], from ``largest_of_rows``: those of the whole rows, where these are some of
    their columns, which then get the numbers that they have in the whole matrix.
    """
    bits = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    largest = largest_of_rows(weight) if row_largest is None else row_largest.to(weight.device)
    smallest = torch.finfo(torch.float32).tiny  # a row of zeros has a scale too
    scales = (largest / LARGEST[to]).clamp_(min=smallest)
    chunks = list(row_chunks(*weight.shape))
    # One room for all chunks: malloc may keep each one that is freed.
    room = torch.empty_like(weight[chunks[0]], dtype=torch.float32)
    for chunk in chunks:
        scaled = room[: chunk.stop - chunk.start].copy_(weight[chunk]).div_(scales[chunk, None])
        if to == "int8":
            bits[chunk] = scaled.round_()
        else:
            # Rounding may carry a row's largest weight past the largest number, which has no
            # successor.
            bits[chunk] = scaled.clamp_(-LARGEST[to], LARGEST[to]).to(FP8).view(torch.int8)
    return Quantized(to, bits, scales)


def largest_of_rows(weight: Tensor) -> Tensor:
    """The size of the largest weight of each row of [N, K], float32 [N]."""
    chunks = row_chunks(*weight.shape)
    norm = torch.linalg.vector_norm  # makes no tensor of absolute values
    return torch.cat([norm(weight[chunk].float(), torch.inf, dim=1) for chunk in chunks])


def as_quantized(weights: Sequence[Tensor | Quantized]) -> list[Quantized] | None:
    """The ``weights`` if all are quantized to one format, None if none is. Raises ValueError for
    a mixture, which no operation multiplies.
    """
    quantized = [weight for weight in weights if isinstance(weight, Quantized)]
    if not quantized:
        return None
    if len(quantized) != len(weights) or len({weight.format for weight in quantized}) > 1:
        raise ValueError("weights: they are of several formats")
    return quantized
