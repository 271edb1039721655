"""Weights of 4 bits with a scale and a zero point for each group of columns of a row, as GPTQ and
AWQ publish them.

Owns how such a matrix is held and what it stands for. Nothing here rounds to it: that takes a
calibration, which whoever published the checkpoint has made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fairlead_kernels.formats.quantize import Quantized


@dataclass(frozen=True, slots=True, eq=False)
class Int4Matrix(Quantized):
    """A matrix [N, K] of integers from 0 to 15: each minus its group's zero point, times its scale.

    ``bits`` uint8 [N, K / 2]: of each two neighbours in a row the first in the lower four bits.
    ``scales`` float32 [N, G] and ``zeros`` uint8 [N, G]: of each K / G neighbours. ``order`` int32
    [K]: the i-th column that is held is column order[i] of the matrix; None: they are as they were.
    """

    zeros: Tensor
    order: Tensor | None = None

    @property
    def numbers(self) -> Tensor:
        """The integers, uint8 [N, K / 2], two in a byte."""
        return self.bits

    @property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.bits, self.scales, self.zeros

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.bits.shape[0], 2 * self.bits.shape[1]))

    def rows(self, order: Tensor | slice) -> Self:
        """A matrix of these rows in this order."""
        bits, scales, zeros = (x[order] for x in self._tensors)
        return type(self)(self.format, bits, scales, zeros, self.order)

    def columns(self, span: slice) -> Self:
        """A matrix of the columns start:stop. Raises ValueError where these are no whole groups
        or bytes, or not neighbours.
        """
        if self.order is not None:
            raise ValueError("span: the columns are held in an order of their own")
        if span.start % 2 or span.stop % 2:
            raise ValueError(f"span: {span.start} to {span.stop} would cut a byte, which has two")
        groups_per_row = self.scales.shape[1]
        group_span = slice(None)
        if groups_per_row > 1:
            size = self.shape[1] // groups_per_row
            if span.start % size or span.stop % size:
                raise ValueError(f"span: {span.start} to {span.stop} are no whole groups of {size}")
            group_span = slice(span.start // size, span.stop // size)
        bits = self.bits[:, span.start // 2 : span.stop // 2]
        return type(self)(self.format, bits, self.scales[:, group_span], self.zeros[:, group_span])

    def clone(self) -> Self:
        """A copy in memory of its own."""
        order = None if self.order is None else self.order.clone()
        contiguous = torch.contiguous_format
        bits, scales, zeros = (x.clone(memory_format=contiguous) for x in self._tensors)
        return type(self)(self.format, bits, scales, zeros, order)

    def to(self, device: torch.device) -> Self:
        bits, scales, zeros = (x.to(device) for x in self._tensors)
        order = None if self.order is None else self.order.to(device)
        return type(self)(self.format, bits, scales, zeros, order)

    def dequantize(self) -> Tensor:
        """The matrix, float32 [N, K]."""
        values = widened(self.bits, self.scales, self.zeros, torch.float32)
        if self.order is None:
            return values
        matrix = torch.empty_like(values)
        matrix[:, self.order.long()] = values
        return matrix


def widened(bits: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that an ``Int4Matrix``'s tensors stand for, in this type [N, K], each rounded
    once; float32 has all of them whose scales are 16-bit floats.
    """
    rows, half = bits.shape
    pairs = torch.empty(rows, half, 2, dtype=dtype, device=bits.device)
    pairs[..., 0] = bits & 15
    pairs[..., 1] = bits >> 4
    column_groups = pairs.view(rows, scales.shape[1], -1)
    column_groups.sub_(zeros[..., None]).mul_(scales[..., None])
    return pairs.view(rows, 2 * half)


def paired(numbers: Tensor) -> Tensor:
    """Integers uint8 [N, K] from 0 to 15 → ``bits`` of an ``Int4Matrix``."""
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def as_int4(weights: Sequence[Quantized]) -> list[Int4Matrix]:
    """The ``weights`` if they are all ``Int4Matrix``, [] if none is. Raises ValueError for
    groups of several sizes.
    """
    matrices = [weight for weight in weights if isinstance(weight, Int4Matrix)]
    if len({weight.scales.shape[1] for weight in matrices}) > 1:
        raise ValueError("weights: their groups are of several sizes")
    return matrices
