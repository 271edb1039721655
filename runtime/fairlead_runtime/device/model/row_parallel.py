"""A linear layer whose inputs are split over the ranks.

Owns how the ranks' results become one: a sum, then the bias. Layers that are recognized by what
they compute take the weights out of it (``recognize_layer``), and place the sum themselves.
"""

import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from fairlead_kernels.formats.int4 import Int4Matrix
from fairlead_kernels.formats.quantize import Quantized, StoredFormat
from fairlead_runtime.device.model.rank_group import RankGroup


class RowParallel(nn.Module):
    """A linear layer of which each rank has the columns for its share of the inputs: the ranks'
    results are summed, then the bias is added once.
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, ranks: RankGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias
        self._ranks = ranks

    @property
    def stored(self) -> Tensor | Quantized:
        """The weights of this rank [outputs, inputs / ranks]."""
        return self.weight.data

    def forward(self, x: Tensor) -> Tensor:
        """X [..., inputs / ranks] → [..., outputs], equal on every rank."""
        out = self._ranks.sum(self._multiply(x))
        return out if self.bias is None else out + self.bias

    def _multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class QuantizedRowParallel(RowParallel):
    """A row-parallel product on quantized weights, whose scales are those of the whole rows or of
    groups of columns.
    """

    def __init__(self, weight: Quantized, bias: nn.Parameter | None, ranks: RankGroup) -> None:
        super().__init__(weight.bits, bias, ranks)
        self._format: StoredFormat = weight.format
        self.scales = nn.Parameter(weight.scales, requires_grad=False)
        self.zeros: nn.Parameter | None = None
        if isinstance(weight, Int4Matrix):
            self.zeros = nn.Parameter(weight.zeros, requires_grad=False)

    @property
    def stored(self) -> Quantized:
        bits, scales = self.weight.data, self.scales.data
        if self.zeros is None:
            return Quantized(self._format, bits, scales)
        return Int4Matrix(self._format, bits, scales, self.zeros.data)

    def _multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.stored.dequantize().to(x.dtype))
