"""A linear layer on a quantized weight, in plain torch: what every kernel must compute.

Owns the module that stands in a transformers model for one with a plain weight. It is slow, since
it dequantizes its weight in each pass; fused layers take the weight out of it
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
