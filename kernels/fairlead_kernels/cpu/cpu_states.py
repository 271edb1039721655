"""Operations on states of sequences in C++ on CPUs.

Owns the hand-over of tensors to the C functions and its checks. The functions are in ``csrc``; what
they compute is in ``interface.states`` and ``reference``.
"""

import ctypes
from typing import Literal

import torch
from torch import Tensor

from fairlead_kernels.cpu.cpu_scans import CpuScans
from fairlead_kernels.cpu.library import ConvolutionStruct, DeltaStruct
from fairlead_kernels.cpu.state_arguments import (
    check,
    check_rows,
    check_type,
    structs,
    token_rows,
)
from fairlead_kernels.interface.states import StatePlace, StateRows


class CpuStates(CpuScans):
    """``StateOperations`` of a library."""

    def causal_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Literal["silu"] | None,
        rows: StateRows,
        place: StatePlace,
    ) -> Tensor:
        """``StateOperations.causal_convolution``."""
        channels, taps = weight.shape
        check_type(weight, "weight")
        check(x, "x", (len(x), channels), weight.dtype)
        if taps < 2:
            raise ValueError(f"weight: {taps} taps; a convolution with a state has 2 or more")
        if bias is not None:
            check(bias, "bias", (channels,), weight.dtype)
            bias = bias.contiguous()
        x, weight = x.contiguous(), weight.contiguous()
        check_rows(rows, place, len(x), channels * (taps - 1) * weight.dtype.itemsize)
        out = torch.empty_like(x)
        arguments = ConvolutionStruct(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            channels,
            taps,
            weight.dtype is torch.bfloat16,
            activation is not None,
        )
        self.library.convolution(
            ctypes.byref(arguments), *structs(rows, place), torch.get_num_threads()
        )
        return out

    def gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        rows: StateRows,
        place: StatePlace,
        *,
        normalizes: bool,
    ) -> Tensor:
        """``StateOperations.gated_delta_rule``."""
        tokens, value_heads, value_dim = v.shape
        _, key_heads, key_dim = k.shape
        check_type(v, "v")
        if value_heads % key_heads:
            raise ValueError(f"v: {value_heads} heads cannot share {key_heads} of keys evenly")
        for name, vectors in (("q", q), ("k", k)):
            check(vectors, name, (tokens, key_heads, key_dim), v.dtype)
        for name, values in (("g", g), ("beta", beta)):
            check(values, name, (tokens, value_heads), torch.float32)
        q, k, v = (token_rows(vectors) for vectors in (q, k, v))
        g, beta = g.contiguous(), beta.contiguous()
        check_rows(rows, place, tokens, value_heads * key_dim * value_dim * 4)
        out = torch.empty(tokens, value_heads, value_dim, dtype=v.dtype)
        arguments = DeltaStruct(
            *(x.data_ptr() for x in (q, k, v, g, beta, out)),
            *(x.stride(0) for x in (q, k, v)),
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            v.dtype is torch.bfloat16,
            normalizes,
            scale,
        )
        self.library.gated_delta(
            ctypes.byref(arguments), *structs(rows, place), torch.get_num_threads()
        )
        return out
