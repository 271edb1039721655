"""The cuts of sampled rows in one Triton kernel.

Owns the launch of ``triton_cut_kernels`` and the checks of what is handed to it. A launch asks
nothing of the device, and its grid depends on shapes alone, so that a CUDA graph can hold it.
"""

from typing import Any

import torch
from torch import Tensor

from fairlead_kernels.gpu import triton_package
from fairlead_kernels.sampling.sample import MASS_BITS
from fairlead_kernels.sampling.sample_rows import RowParameters

# Scores of a row that a program reads at a time, and its warps: each thread has eight of them, and
# for each a sum of 64 bits for four ends. More bits a pass do not fit into its registers.
BLOCK, WARPS, BITS = 4096, 16, 2


def load() -> "TritonCuts":
    """The kernel, not yet compiled. Raises NotAvailableError with the reason."""
    return TritonCuts(triton_package.load("fairlead_kernels.gpu.triton_cut_kernels"))


class TritonCuts:
    """``sample_rows.cut_of`` in one kernel: the same cuts on the same device, but for a row with a
    NaN, which gets no token. Stateless: any thread may call it. ``block``: scores that a program
    reads at a time, a power of two.
    """

    def __init__(self, kernels: Any, block: int = BLOCK) -> None:
        self._kernels = kernels
        self._block = block

    def __call__(self, scores: Tensor, rows: RowParameters) -> Tensor:
        """``sample_rows.cut_of``. Raises ValueError where a shape or a type does not fit."""
        count, width = scores.shape
        _check("scores", scores, (count, width), torch.float32)
        _check("min_cut", rows.min_cut, (count,), torch.float32)
        _check("top_k", rows.top_k, (count,), torch.int64)
        _check("top_p", rows.top_p, (count,), torch.float64)
        scores, cuts = scores.contiguous(), scores.new_empty(count)
        if not count:
            return cuts
        self._kernels.find_cuts[(count,)](
            scores,
            # torch's, whose bits are those of the other form; Triton's own differ.
            scores.exp(),
            rows.min_cut,
            rows.top_k,
            rows.top_p,
            cuts,
            width,
            rows.min_cut.stride(0),
            rows.top_k.stride(0),
            rows.top_p.stride(0),
            UNIT=2.0**MASS_BITS,
            BITS=BITS,
            BLOCK=self._block,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
        return cuts


def _check(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(x.shape) != shape or x.dtype is not dtype:
        raise ValueError(f"{name}: {tuple(x.shape)} in {x.dtype}, not {shape} in {dtype}")
