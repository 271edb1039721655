"""Checks of states' places and of sequences' rows, whose addresses the C++ kernels get."""

import math

import torch
from torch import Tensor

from fairlead_kernels.cpu.library import StatePlaceStruct, StateRowsStruct
from fairlead_kernels.interface.states import StatePlace, StateRows

ALIGNMENT = 64  # bytes


def place_struct(
    place: StatePlace, rows: StateRows, shape: tuple[int, ...], dtype: torch.dtype
) -> StatePlaceStruct:
    """A place, which the caller keeps alive, as C reads it. Raises ValueError unless a state of
    this shape and type lies there, in the units that each of the sequences has.
    """
    pool = place.pool
    if pool.dtype is not torch.uint8 or pool.dim() != 2 or not pool.is_contiguous() or pool.is_cuda:
        raise ValueError(
            f"pool: {tuple(pool.shape)} of {pool.dtype}; dense uint8 on the CPU needed"
        )
    unit_bytes, nbytes = pool.shape[1], math.prod(shape) * dtype.itemsize
    if unit_bytes % ALIGNMENT or place.offset % ALIGNMENT:
        raise ValueError(f"offset: {place.offset} in units of {unit_bytes} bytes, not of 64 each")
    if place.offset < 0 or place.offset + nbytes > rows.source.shape[1] * unit_bytes:
        raise ValueError(
            f"offset: {nbytes} bytes from {place.offset} on, of {rows.source.shape[1]} units"
        )
    return StatePlaceStruct(pool.data_ptr(), unit_bytes, place.offset)


def rows_struct(rows: StateRows) -> StateRowsStruct:
    """Rows, which the caller keeps alive, as C reads them. What they hold is not checked."""
    count, width = rows.source.shape
    for name, shape, dtype in (
        ("starts", (count + 1,), torch.int64),
        ("prompts", (count,), torch.int64),
        ("begins", (count,), torch.bool),
        ("source", (count, width), torch.int64),
        ("target", (count, width), torch.int64),
    ):
        given: Tensor = getattr(rows, name)
        if given.shape != shape or given.dtype is not dtype or not given.is_contiguous():
            raise ValueError(
                f"{name}: {tuple(given.shape)} of {given.dtype}; dense {dtype} {shape} is needed"
            )
    return StateRowsStruct(
        rows.starts.data_ptr(),
        rows.prompts.data_ptr(),
        rows.begins.data_ptr(),
        rows.source.data_ptr(),
        rows.target.data_ptr(),
        count,
        width,
    )
