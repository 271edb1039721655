"""Checks of the tensors of operations on states, and of rows and places, whose addresses C gets."""

import ctypes
import functools

import torch
from torch import Tensor

from fairlead_kernels.cpu.cpu_arguments import TYPES
from fairlead_kernels.cpu.library import StatePlaceStruct, StateRowsStruct
from fairlead_kernels.interface.states import StatePlace, StateRows

ALIGNMENT = 64  # bytes


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
    places, _ = _checked(rows)
    if places != (0, tokens):
        raise ValueError(f"starts: {rows.starts.tolist()} of {tokens} tokens")
    pool = place.pool
    if pool.dtype is not torch.uint8 or not pool.is_contiguous() or pool.device.type != "cpu":
        raise ValueError(f"pool: {pool.dtype} on {pool.device}; contiguous bytes are needed")
    if pool.shape[1] % ALIGNMENT or place.offset % ALIGNMENT:
        raise ValueError(f"offset: {place.offset} in units of {pool.shape[1]}: multiples of 64")
    units = rows.source.shape[1]
    if place.offset + nbytes > units * pool.shape[1]:
        raise ValueError(
            f"source: {units} units of {pool.shape[1]} bytes; {nbytes} bytes from {place.offset} "
            "on are needed"
        )


@functools.lru_cache(maxsize=1)  # all operations of a step have the same rows
def _checked(rows: StateRows) -> tuple[tuple[int, int], StateRowsStruct]:
    """The rows' first token and the end of their last, and the rows as C reads them. Raises
    ValueError.
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
    addresses = (rows.starts, rows.prompts, rows.begins, rows.source, rows.target)
    struct = StateRowsStruct(*(x.data_ptr() for x in addresses), count, units)
    return (int(rows.starts[0]), int(rows.starts[-1])), struct


def structs(rows: StateRows, place: StatePlace) -> tuple[object, object]:
    """Rows and place as C reads them."""
    return (
        ctypes.byref(_checked(rows)[1]),
        ctypes.byref(StatePlaceStruct(place.pool.data_ptr(), place.pool.shape[1], place.offset)),
    )
