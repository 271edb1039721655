"""The scans of Mamba 1 and 2 in C++ on CPUs.

Owns the hand-over of tensors to the C functions and its checks. What they compute is in
``interface.states`` and ``reference``.
"""

import math

import torch
from torch import Tensor

from fairlead_kernels.cpu import library
from fairlead_kernels.cpu.cpu_arguments import address
from fairlead_kernels.cpu.state_arguments import place_struct, rows_struct
from fairlead_kernels.interface.states import StatePlace, StateRows

UNBOUNDED = (-math.inf, math.inf)
_TYPES = (torch.float32, torch.bfloat16)


def ssd(
    functions: library.Library,
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
    bounds: tuple[float, float] = UNBOUNDED,
) -> Tensor:
    """``StateOperations.ssd``."""
    (count, heads, dim), (groups, size) = x.shape, b.shape[1:]
    _check_inputs({"x": x, "dt": dt, "b": b, "c": c})
    for name, tensor, shape in (
        ("dt", dt, (count, heads)),
        ("b", b, (count, groups, size)),
        ("c", c, (count, groups, size)),
    ):
        _check_shape(name, tensor, shape)
    if not groups or heads % groups:
        raise ValueError(f"b: {groups} groups for {heads} heads")
    out = torch.empty(count, heads, dim)
    struct = library.SsdStruct(
        *(tensor.data_ptr() for tensor in (x, dt, b, c)),
        *(tensor.stride(0) for tensor in (x, dt, b, c)),
        address(a, "a", heads),
        address(d, "d", heads),
        address(bias, "bias", heads),
        out.data_ptr(),
        *(heads, dim, groups, size),
        *bounds,
        softplus,
        x.dtype is torch.bfloat16,
    )
    shape = (heads, dim, size)
    functions.ssd(struct, *_states(rows, place, shape), torch.get_num_threads())
    return out


def selective_scan(
    functions: library.Library,
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
    gate = {} if z is None else {"z": z}
    _check_inputs({"x": x, "b": b, "c": c, **gate})
    if dt.dtype is not x.dtype or dt.is_cuda:
        raise ValueError(f"dt: {dt.dtype} on {dt.device}, x has {x.dtype}")
    for name, tensor in {"dt": dt, **gate}.items():
        _check_shape(name, tensor, (count, channels))
    for name, tensor in (("b", b), ("c", c)):
        _check_shape(name, tensor, (count, size))
    _check_shape("a", a, (channels, size))
    out = torch.empty(count, channels)
    struct = library.SelectiveStruct(
        *(tensor.data_ptr() for tensor in (x, dt, b, c)),
        None if z is None else z.data_ptr(),
        *(x.stride(0), *dt.stride(), b.stride(0), c.stride(0)),
        0 if z is None else z.stride(0),
        address(a.reshape(-1), "a", channels * size),
        address(d, "d", channels),
        address(bias, "bias", channels),
        out.data_ptr(),
        *(channels, size, softplus, x.dtype is torch.bfloat16),
    )
    shape = (channels, size)
    functions.selective(struct, *_states(rows, place, shape), torch.get_num_threads())
    return out


def _states(
    rows: StateRows, place: StatePlace, shape: tuple[int, ...]
) -> tuple[library.StateRowsStruct, library.StatePlaceStruct]:
    return rows_struct(rows), place_struct(place, rows, shape, torch.float32)


def _check_inputs(inputs: dict[str, Tensor]) -> None:
    """Raise ValueError unless they are of one type, dense but for the stride between tokens."""
    dtype = inputs["x"].dtype
    for name, tensor in inputs.items():
        if tensor.dtype is not dtype or dtype not in _TYPES or tensor.is_cuda:
            raise ValueError(
                f"{name}: {tensor.dtype} on {tensor.device}; one of {_TYPES} is needed"
            )
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: a token's elements do not lie side by side")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name}: {tuple(tensor.shape)}, not {shape}")
