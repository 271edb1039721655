"""Norms whose arguments are made once, alone and with a gate.

Owns what a model's own code calls in every step in the place of its norms. The functions are in
``csrc``; ``reference`` has them in torch. Both keep their vectors alive.
"""

import ctypes

import torch
from torch import Tensor

from fairlead_kernels.cpu.cpu_arguments import TYPES, dense_rows, norm_struct
from fairlead_kernels.cpu.library import Library
from fairlead_kernels.interface.layer import GatedNorm, Norm


class CpuNorm:
    """A norm of vectors in float32 or bfloat16. Sums are float32, results are rounded once. Raises
    ValueError for other vectors.
    """

    def __init__(self, library: Library, norm: Norm) -> None:
        self.norm = norm
        self._library = library
        self._width, self._struct = _checked(norm)

    def __call__(self, x: Tensor) -> Tensor:
        """Give [..., width] for x [..., width], both of the type of the norm's vectors."""
        x = dense_rows(x, "x", self._width, (self.norm.weight.dtype,))
        out = torch.empty_like(x)
        self._library.norm(
            x.data_ptr(),
            None,
            ctypes.byref(self._struct),
            x.numel() // self._width,
            self._width,
            None,
            out.data_ptr(),
            x.dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
        return out


class CpuGatedNorm:
    """``GatedNorm`` of vectors in float32 or bfloat16. Sums and the gated numbers are float32,
    results are rounded once. Raises ValueError for other vectors.
    """

    def __init__(self, library: Library, gated: GatedNorm) -> None:
        self.gated = gated
        self._library = library
        self._width, self._struct = _checked(gated.norm)
        if gated.group < 1 or self._width % gated.group:
            raise ValueError(f"group: {gated.group} of {self._width} columns")

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Give [..., width] for x [..., width] of its type, float32 or bfloat16, and a gate
        [..., width] of the type of the norm's vectors.
        """
        vectors = self.gated.norm.weight.dtype
        if x.shape != gate.shape:
            raise ValueError(f"gate: {tuple(gate.shape)} for x {tuple(x.shape)}")
        x = dense_rows(x, "x", self._width)
        gate = dense_rows(gate, "gate", self._width, (vectors,))
        out = torch.empty_like(x)
        self._library.gated_norm(
            x.data_ptr(),
            gate.data_ptr(),
            ctypes.byref(self._struct),
            x.numel() // self._width,
            self._width,
            self.gated.group,
            self.gated.gate_last,
            out.data_ptr(),
            x.dtype is torch.bfloat16,
            vectors is torch.bfloat16,
            torch.get_num_threads(),
        )
        return out


def _checked(norm: Norm) -> tuple[int, ctypes.Structure]:
    """The width of a norm, and the norm as C reads it."""
    if norm.weight.dtype not in TYPES:
        raise ValueError(f"norm: vectors of {norm.weight.dtype}; float32 or bfloat16 is needed")
    width = len(norm.weight)
    return width, norm_struct(norm, "norm", width, norm.weight.dtype)
