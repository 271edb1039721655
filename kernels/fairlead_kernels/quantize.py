"""Rounds weights to 8-bit integers, with one scale per row.

Symmetric and per output channel, without calibration: the largest weight of a row becomes ±127
(Jacob et al., "Quantization and Training of Neural Networks", 2018). The only rule of it: what
packs weights and what computes with them in transformers both round here.
"""

import torch
from torch import Tensor

LARGEST = 127


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights float32 [N, K] → integers int8 [N, K] and scales float32 [N].

    Weights that are already integers times scales give the same integers again.
    """
    smallest = torch.finfo(torch.float32).tiny  # a row of zeros has a scale too
    scales = weight.abs().amax(dim=1).div_(LARGEST).clamp_(min=smallest)
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def dequantize(integers: Tensor, scales: Tensor) -> Tensor:
    """The weights float32 [N, K] that ``quantize`` stands for."""
    return integers.float().mul_(scales[:, None])
