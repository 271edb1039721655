"""The scans of Mamba 1 and 2 in C++ on CPUs.

Owns the hand-over of tensors to the C functions and its checks. The functions are in ``csrc``; what
they compute is in ``interface.states`` and ``reference``.
"""

import ctypes
import math

import torch
from torch import Tensor

from fairlead_kernels.cpu.cpu_arguments import address
from fairlead_kernels.cpu.library import Library, SelectiveStruct, SsdStruct
from fairlead_kernels.cpu.state_arguments import check, check_rows, check_type, structs
from fairlead_kernels.interface.states import StatePlace, StateRows


class CpuScans:
    """The scans among ``StateOperations``, of a library."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        rows: StateRows,
        place: StatePlace,
        *,
        d: Tensor | None = None,
        bias: Tensor | None = None,
        softplus: bool = False,
        bounds: tuple[float, float] = (-math.inf, math.inf),
    ) -> Tensor:
        """``StateOperations.ssd``."""
        (count, heads, dim), (groups, size) = x.shape, b.shape[1:]
        check_type(x, "x")
        check_tokens(x, "x", (count, heads, dim), x.dtype)
        check_tokens(dt, "dt", (count, heads), x.dtype)
        for name, matrix in (("b", b), ("c", c)):
            check_tokens(matrix, name, (count, groups, size), x.dtype)
        if not groups or heads % groups:
            raise ValueError(f"b: {heads} heads cannot share {groups} groups evenly")
        check_rows(rows, place, count, heads * dim * size * 4)
        out = torch.empty(count, heads, dim)
        arguments = SsdStruct(
            *(tensor.data_ptr() for tensor in (x, dt, b, c)),
            *(tensor.stride(0) for tensor in (x, dt, b, c)),
            *(address(v, name, heads) for v, name in ((a, "a"), (d, "d"), (bias, "bias"))),
            out.data_ptr(),
            *(heads, dim, groups, size),
            *bounds,
            softplus,
            x.dtype is torch.bfloat16,
        )
        self.library.ssd(ctypes.byref(arguments), *structs(rows, place), torch.get_num_threads())
        return out

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        rows: StateRows,
        place: StatePlace,
        *,
        d: Tensor | None = None,
        z: Tensor | None = None,
        bias: Tensor | None = None,
        softplus: bool = False,
    ) -> Tensor:
        """``StateOperations.selective_scan``."""
        (count, channels), size = x.shape, b.shape[1]
        check_type(x, "x")
        check_tokens(x, "x", (count, channels), x.dtype)
        if z is not None:
            check_tokens(z, "z", (count, channels), x.dtype)
        check(dt, "dt", (count, channels), x.dtype)
        for name, matrix in (("b", b), ("c", c)):
            check_tokens(matrix, name, (count, size), x.dtype)
        check(a, "a", (channels, size), torch.float32)
        a = a.contiguous()
        check_rows(rows, place, count, channels * size * 4)
        out = torch.empty(count, channels)
        arguments = SelectiveStruct(
            *(tensor.data_ptr() for tensor in (x, dt, b, c)),
            None if z is None else z.data_ptr(),
            *(x.stride(0), *dt.stride(), b.stride(0), c.stride(0)),
            0 if z is None else z.stride(0),
            a.data_ptr(),
            *(address(v, name, channels) for v, name in ((d, "d"), (bias, "bias"))),
            out.data_ptr(),
            *(channels, size, softplus, x.dtype is torch.bfloat16),
        )
        self.library.selective(
            ctypes.byref(arguments), *structs(rows, place), torch.get_num_threads()
        )
        return out


def check_tokens(x: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless it is such a tensor [T, ...], a token's elements side by side."""
    check(x, name, shape, dtype)
    if len(x) and not x[0].is_contiguous():
        raise ValueError(f"{name}: a token's elements do not lie side by side")
