"""Operations on states of sequences in C++ on CPUs.

Owns the hand-over of tensors to the C functions and its checks. The functions are in ``csrc``; what
they compute is in ``interface.states`` and ``reference``.
"""

import ctypes
from typing import Literal

import torch
from torch import Tensor

from fairlead_kernels.cpu.library import (
    ConvolutionStruct,
    DeltaStruct,
    Library,
    StatePlaceStruct,
    StateRowsStruct,
)
from fairlead_kernels.interface.states import StatePlace, StateRows

TYPES = (torch.float32, torch.bfloat16)
ALIGNMENT = 64  # bytes


class CpuStates:
    """``StateOperations`` of a library."""

    def __init__(self, library: Library) -> None:
        self.library = library

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


def token_rows(vectors: Tensor) -> Tensor:
    """Vectors [T, heads, dim] whose heads and elements lie side by side: themselves, or a copy."""
    _, heads, dim = vectors.shape
    lie_so = vectors.stride(2) == 1 and (heads == 1 or vectors.stride(1) == dim)
    return vectors if lie_so else vectors.contiguous()


def check_type(x: Tensor, name: str) -> None:
    """Raise ValueError unless it has a type that the C functions read."""
    if x.dtype not in TYPES:
        raise ValueError(f"{name}: {x.dtype}; float32 or bfloat16 is needed")


def check(x: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless it has this shape and type and is on the CPU."""
    if x.shape != shape or x.dtype is not dtype or x.device.type != "cpu":
        raise ValueError(
            f"{name}: {tuple(x.shape)} of {x.dtype} on {x.device}; {dtype} {shape} on the CPU is "
            "needed"
        )


def check_rows(rows: StateRows, place: StatePlace, tokens: int, nbytes: int) -> None:
    """Raise ValueError unless these are rows of so many tokens, and a tensor of ``nbytes`` lies at
    the place in their units.
    """
    count, units = rows.source.shape
    for name, x, shape, dtype in (
        ("starts", rows.starts, (count + 1,), torch.int64),
        ("prompts", rows.prompts, (count,), torch.int64),
        ("begins", rows.begins, (count,), torch.bool),
        ("source", rows.source, (count, units), torch.int64),
        ("target", rows.target, (count, units), torch.int64),
    ):
        check(x, name, shape, dtype)
        if not x.is_contiguous():
            raise ValueError(f"{name}: must be contiguous")
    if int(rows.starts[-1]) != tokens or int(rows.starts[0]) != 0:
        raise ValueError(f"starts: {rows.starts.tolist()} of {tokens} tokens")
    pool = place.pool
    if pool.dtype is not torch.uint8 or not pool.is_contiguous() or pool.device.type != "cpu":
        raise ValueError(f"pool: {pool.dtype} on {pool.device}; contiguous bytes are needed")
    if pool.shape[1] % ALIGNMENT or place.offset % ALIGNMENT:
        raise ValueError(f"offset: {place.offset} in units of {pool.shape[1]}: multiples of 64")
    if place.offset + nbytes > units * pool.shape[1]:
        raise ValueError(
            f"source: {units} units of {pool.shape[1]} bytes; {nbytes} bytes from {place.offset} "
            "on are needed"
        )


def structs(rows: StateRows, place: StatePlace) -> tuple[object, object]:
    """Rows and place as C reads them."""
    count, units = rows.source.shape
    addresses = (rows.starts, rows.prompts, rows.begins, rows.source, rows.target)
    return (
        ctypes.byref(StateRowsStruct(*(x.data_ptr() for x in addresses), count, units)),
        ctypes.byref(StatePlaceStruct(place.pool.data_ptr(), place.pool.shape[1], place.offset)),
    )
