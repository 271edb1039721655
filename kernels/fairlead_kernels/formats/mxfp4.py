"""MXFP4: 4-bit floats of which 32 neighbours share a scale, a power of two.

Owns what their codes stand for, as the microscaling formats (MX) of the Open Compute Project say in
version 1.0: numbers are E2M1, scales E8M0.
"""

from functools import lru_cache

import torch
from torch import Tensor

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # a fourth bit is the sign
_BIAS, NAN = 127, 255  # of a scale


def widen(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows that are stored as ``blocks`` (uint8 [N, G, 16], two numbers a byte, the first in
    the lower bits) and ``scales`` (uint8 [N, G]), in ``dtype`` [N, 32 G].

    float32 and bfloat16 hold each number exactly. Raises ValueError for a scale that is no number
    and for a number beyond the type.
    """
    if bool((scales == NAN).any()):
        raise ValueError(f"a scale of {NAN}, which is no number")
    pairs, powers = _tables(blocks.device)
    numbers = pairs.index_select(0, blocks.flatten().int()).view(torch.float32)
    factors = powers.index_select(0, scales.flatten().int())
    numbers = numbers.view(*scales.shape, -1).mul_(factors.view(*scales.shape, 1))
    rows = numbers.flatten(1).to(dtype)
    if not bool(rows.isfinite().all()):
        raise ValueError(f"a number beyond {str(dtype).removeprefix('torch.')}")
    return rows


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The two float32 of each byte as one integer of 64 bits [256], which is taken at once, and
    what each scale but NAN stands for [255].
    """
    numbers = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)])
    codes = torch.arange(256)
    pairs = torch.stack([numbers[codes & 15], numbers[codes >> 4]], dim=1)
    # Of Python's floats: torch's exponentials need not be exact.
    powers = torch.tensor([2.0 ** (code - _BIAS) for code in range(NAN)])
    return pairs.view(torch.int64).flatten().to(device), powers.to(device)
