"""A linear layer and an embedding on a quantized weight, in plain torch: what every kernel must
compute.

Owns the modules that stand in a transformers model for those with a plain weight. The linear layer
is slow, since it dequantizes its weight in each pass, a part after the other; fused layers take the
weight out of it (``device/fusion.py``).
"""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from fairlead_kernels.parts import row_parts
from fairlead_kernels.quantize import Format, Quantized


class QuantizedLinear(nn.Module):
    """Multiplies x [..., K] by the weight [N, K] in the type of x, after it was dequantized in
    float32, and adds ``bias`` [N].
    """

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self._format: Format = weight.format
        self.bits = nn.Parameter(weight.bits, requires_grad=False)
        self.scales = nn.Parameter(weight.scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> Quantized:
        return Quantized(self._format, self.bits.data, self.scales.data)

    def forward(self, x: Tensor) -> Tensor:
        # A head's plain weights are as large as all quantized ones of a small model.
        return torch.cat([self._rows(x, part) for part in row_parts(*self.bits.shape)], dim=-1)

    def _rows(self, x: Tensor, part: slice) -> Tensor:
        weight = Quantized(self._format, self.bits.data[part], self.scales.data[part])
        bias = None if self.bias is None else self.bias[part]
        return F.linear(x, weight.dequantize().to(x.dtype), bias)


class QuantizedEmbedding(nn.Module):
    """The rows of the weight [N, K] that ids name, dequantized, times ``factor``: float32 [..., K].
    Shares the memory of the weight.
    """

    def __init__(self, weight: Quantized, factor: float) -> None:
        super().__init__()
        self._format: Format = weight.format
        self._factor = factor
        self.bits = nn.Parameter(weight.bits, requires_grad=False)
        self.scales = nn.Parameter(weight.scales, requires_grad=False)

    @property
    def weight(self) -> Quantized:
        return Quantized(self._format, self.bits.data, self.scales.data)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.rows(ids.reshape(-1)).dequantize().mul_(self._factor)
        return rows.view(*ids.shape, -1)
