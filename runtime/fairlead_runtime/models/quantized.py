"""A linear layer and an embedding on a quantized weight, in plain torch: what every kernel must
compute.

Owns the modules that stand in a transformers model for those with a plain weight. The linear layer
is slow, since it dequantizes its weight in each pass, a chunk after the other; fused layers take
the weight out of it (``device/conversion/fusion.py``).
"""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from fairlead_kernels.formats.int4 import Int4Matrix
from fairlead_kernels.formats.quantize import Quantized, StoredFormat
from fairlead_kernels.formats.row_chunks import row_chunks


class QuantizedLinear(nn.Module):
    """Multiplies x [..., K] by the weight [N, K] in the type of x, after it was dequantized in
    float32, and adds ``bias`` [N].
    """

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self._format: StoredFormat = weight.format
        int4 = weight if isinstance(weight, Int4Matrix) else None
        self.bits, self.scales = _freeze(weight.bits), _freeze(weight.scales)
        self.zeros = None if int4 is None else _freeze(int4.zeros)
        self.order = None if int4 is None or int4.order is None else _freeze(int4.order)
        self.bias = None if bias is None else _freeze(bias)

    @property
    def weight(self) -> Quantized:
        bits, scales = self.bits.data, self.scales.data
        if self.zeros is None:
            return Quantized(self._format, bits, scales)
        order = None if self.order is None else self.order.data
        return Int4Matrix(self._format, bits, scales, self.zeros.data, order)

    def forward(self, x: Tensor) -> Tensor:
        # A head's plain weights are as large as all quantized ones of a small model.
        return torch.cat([self._rows(x, chunk) for chunk in row_chunks(*self.weight.shape)], dim=-1)

    def _rows(self, x: Tensor, chunk: slice) -> Tensor:
        bias = None if self.bias is None else self.bias[chunk]
        return F.linear(x, self.weight.rows(chunk).dequantize().to(x.dtype), bias)


def _freeze(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class QuantizedEmbedding(nn.Module):
    """The rows of the weight [N, K] that ids name, dequantized, times ``factor``: float32 [..., K].
    Shares the memory of the weight.
    """

    def __init__(self, weight: Quantized, factor: float) -> None:
        super().__init__()
        self._format: StoredFormat = weight.format
        self._factor = factor
        self.bits = nn.Parameter(weight.bits, requires_grad=False)
        self.scales = nn.Parameter(weight.scales, requires_grad=False)

    @property
    def weight(self) -> Quantized:
        return Quantized(self._format, self.bits.data, self.scales.data)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.rows(ids.reshape(-1)).dequantize().mul_(self._factor)
        return rows.view(*ids.shape, -1)
