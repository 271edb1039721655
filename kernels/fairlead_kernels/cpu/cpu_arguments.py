"""Checks of the tensors whose addresses the C++ kernels get."""

import torch
from torch import Tensor

from fairlead_kernels.cpu.library import NormStruct, WeightStruct
from fairlead_kernels.interface.layer import Activation, Norm, Packed

# As in csrc/activation.h.
ACTIVATIONS: dict[Activation, int] = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "relu2": 4,
}
# As in csrc/linear.h.
STORED = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
INT8_FOURS, INT8_TILES = 3, 4
CACHE_TYPES = (torch.float32, torch.bfloat16)


def dense(x: Tensor, name: str, width: int) -> Tensor:
    """``x`` itself, or a contiguous copy. Raises ValueError unless it is float32 [T, width]."""
    if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != width or x.is_cuda:
        raise ValueError(
            f"{name}: {tuple(x.shape)} of {x.dtype} on {x.device}; float32 [T, {width}] on the CPU "
            "is needed"
        )
    return x.contiguous()


def address(vector: Tensor | None, name: str, size: int) -> int | None:
    """The address of a float32 vector of ``size`` elements, which the caller keeps alive."""
    if vector is None:
        return None
    if vector.dtype is not torch.float32 or vector.shape != (size,) or vector.stride(0) != 1:
        raise ValueError(
            f"{name}: {tuple(vector.shape)} of {vector.dtype}; a float32 vector of {size} is needed"
        )
    return vector.data_ptr()


def norm_struct(norm: Norm | None, name: str, width: int) -> NormStruct:
    """A norm, which the caller keeps alive, as C reads it; None: no norm."""
    if norm is None:
        return NormStruct()
    return NormStruct(
        address(norm.weight, f"{name}.weight", width),
        address(norm.bias, f"{name}.bias", width),
        norm.eps,
        norm.offset,
        norm.centered,
    )


def in_fours(weight: Packed) -> bool:
    """Whether it is packed for VNNI or AMX, which multiply it by the digits of x (csrc/vnni.h):
    [panels, ceil(columns / 4), P, 4], for AMX with P as 2 tiles of 16.
    """
    return weight.data.dim() >= 4


def _stored(weight: Packed) -> int:
    return {4: INT8_FOURS, 5: INT8_TILES}.get(weight.data.dim(), STORED[weight.data.dtype])


def weight_struct(weight: Packed, bias: Tensor | None, name: str) -> WeightStruct:
    """A packed weight and its bias, which the caller keeps alive, as C reads them."""
    return WeightStruct(
        weight.data.data_ptr(),
        weight.rows,
        weight.columns,
        address(bias, name, weight.rows),
        address(weight.scales, "scales", weight.rows),
        _stored(weight),
    )


def check_caches(key_cache: Tensor, value_cache: Tensor) -> None:
    """Raise ValueError unless the caches are ones that the C functions read."""
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype not in CACHE_TYPES or cache.dtype is not key_cache.dtype:
            raise ValueError(f"{name}: {cache.dtype}; float32 or bfloat16 is needed")
        if not cache.is_contiguous() or cache.is_cuda:
            raise ValueError(f"{name}: must be contiguous, on the CPU")
