"""The product of a mixture's experts in Triton, for steps that wait for nothing.

Owns the launch of ``triton_expert_kernels``, its grid and the checks of what is handed to it. A
launch allocates its result and nothing else, asks nothing of the device, and its grid depends on
shapes alone, so that a CUDA graph can hold it.
"""

from typing import Any

import torch
from torch import Tensor

from fairlead_kernels.gpu import triton_package
from fairlead_kernels.gpu.triton_operations import MANY_TOKENS, PRODUCT_COLUMNS, PRODUCT_ROWS

LEAST_EXPERTS = 32  # to which fewer are padded where a program looks for its own


def load() -> "TritonExperts":
    """The product, not yet compiled. Raises NotAvailableError with the reason."""
    return TritonExperts(triton_package.load("fairlead_kernels.gpu.triton_expert_kernels"))


class TritonExperts:
    """``ExpertProduct`` in one kernel, with one tile for every number of tokens: a token's result
    is the same bits whatever others there are. Stateless: any thread may call it. ``wide`` as in
    TritonOperations.
    """

    def __init__(self, kernels: Any, *, wide: bool = False) -> None:
        self._kernels = kernels
        self._wide = wide

    def __call__(
        self, x: Tensor, weights: Tensor, expert_ends: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """``ExpertProduct``. Raises ValueError where a shape or a type does not fit."""
        experts, columns, rows = weights.shape
        count = x.shape[0]
        _check("x", x, (count, columns), weights.dtype)
        _check("expert_ends", expert_ends, (experts,), torch.int32)
        if bias is not None:
            _check("bias", bias, (experts, rows), weights.dtype)
        out = x.new_empty(count, rows)
        if not count:
            return out
        self._kernels.multiply_experts[(tiles(count, experts), -(-rows // PRODUCT_ROWS))](
            x.contiguous(),
            weights,
            expert_ends.contiguous(),
            weights if bias is None else bias.contiguous(),
            out,
            experts,
            rows,
            columns,
            *weights.stride(),
            BIAS=bias is not None,
            EXPERTS=max(LEAST_EXPERTS, 1 << (experts - 1).bit_length()),
            TOKENS=MANY_TOKENS,
            ROWS=PRODUCT_ROWS,
            COLUMNS=PRODUCT_COLUMNS,
            WIDE=self._wide or weights.dtype is torch.float32,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=True,
        )
        return out


def tiles(count: int, experts: int) -> int:
    """The most tiles of tokens that ``count`` > 0 tokens have, however the experts divide them: the
    first tokens of as many experts as can have some begin one each.
    """
    chosen = min(count, experts)
    return chosen + (count - chosen) // MANY_TOKENS


def _check(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(x.shape) != shape or x.dtype is not dtype:
        raise ValueError(f"{name}: {tuple(x.shape)} in {x.dtype}, not {shape} in {dtype}")
