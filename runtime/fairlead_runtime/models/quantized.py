"""A linear layer and an embedding on a quantized weight, in plain torch: what every kernel must
compute.

Owns the modules that stand in a transformers model for those with a plain weight. The linear layer
is slow, since it dequantizes its weight in each pass; fused layers take the weight out of it
(``device/fusion.py``).
"""

import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

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
        return F.linear(x, self.weight.dequantize().to(x.dtype), self.bias)


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
