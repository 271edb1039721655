"""Products with 4-bit weights in plain torch, and how such weights are kept on a GPU.

Owns the layout that its product and the Triton kernel read: rows of bits, and scales and zero
points group after group, so that those of neighbouring rows lie side by side.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from fairlead_kernels.formats.int4 import Int4Matrix, widened
from fairlead_kernels.interface.layer import Int4Groups, Packed


def pack(weights: Sequence[Int4Matrix], factor: float) -> Packed:
    """Matrices below each other as one, times ``factor``, as ``LayerOperations.pack``."""
    data = torch.cat([x.bits for x in weights])
    scales = torch.cat([x.scales for x in weights]).mul_(factor).T.contiguous()
    zeros = torch.cat([x.zeros for x in weights]).T.contiguous()
    orders: list[tuple[int, Tensor | None]] = []
    for weight in weights:
        rows, order = len(weight.bits), weight.order
        if orders and _same(orders[-1][1], order):
            before, order = orders.pop()
            rows += before
        orders.append((rows, order))
    int4_groups = Int4Groups(zeros, tuple(orders))
    return Packed(data, len(data), 2 * data.shape[1], scales, int4_groups=int4_groups)


def linear(
    x: Tensor, weight: Packed, scales: Tensor, int4_groups: Int4Groups, bias: Tensor | None
) -> Tensor:
    """Multiply x [T, columns] by a copy of the weights in its type, as the packages that publish
    them do.
    """
    matrix = widened(weight.data, scales.T, int4_groups.zeros.T, x.dtype)
    products, first = [], 0
    for rows, order in int4_groups.orders:
        span = slice(first, first + rows)
        inputs = x if order is None else x[:, order]
        products.append(F.linear(inputs, matrix[span], None if bias is None else bias[span]))
        first += rows
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
