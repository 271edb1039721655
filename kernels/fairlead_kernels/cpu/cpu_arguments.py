"""Checks of the tensors whose addresses the C++ kernels get."""

import torch
from torch import Tensor

from fairlead_kernels.cpu.library import CachesStruct, Library, NormStruct, WeightStruct
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
INT8_FOURS, INT8_TILES, BFLOAT16_PAIRS = 3, 4, 5
ONE_TYPE = (torch.float32,)
TYPES = (torch.float32, torch.bfloat16)  # of caches, and of what some operations take and give


def dense(
    x: Tensor,
    name: str,
    width: int,
    types: tuple[torch.dtype, ...] = ONE_TYPE,
    leading: str = "T",
) -> Tensor:
    """``x`` itself, or a contiguous copy. Raises ValueError unless it is [T, width] of one of these
    types; with "..." for ``leading`` it may have any dimensions before the last.
    """
    fits = x.shape[-1:] == (width,) and (x.dim() == 2 or leading == "...")
    if x.dtype not in types or not fits or x.is_cuda:
        raise ValueError(
            f"{name}: {tuple(x.shape)} of {x.dtype} on {x.device}; {_names(types)} "
            f"[{leading}, {width}] on the CPU is needed"
        )
    return x.contiguous()


def dense_rows(x: Tensor, name: str, width: int, types: tuple[torch.dtype, ...] = TYPES) -> Tensor:
    """The same of rows [..., width]."""
    return dense(x, name, width, types, "...")


def _names(types: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(kind).removeprefix("torch.") for kind in types)


def address(
    vector: Tensor | None, name: str, size: int, dtype: torch.dtype = torch.float32
) -> int | None:
    """The address of a vector of ``size`` elements of this type, which the caller keeps alive."""
    if vector is None:
        return None
    if vector.dtype is not dtype or vector.shape != (size,) or vector.stride(0) != 1:
        raise ValueError(
            f"{name}: {tuple(vector.shape)} of {vector.dtype}; a {_names((dtype,))} vector of "
            f"{size} is needed"
        )
    return vector.data_ptr()


def norm_struct(
    norm: Norm | None, name: str, width: int, dtype: torch.dtype = torch.float32
) -> NormStruct:
    """A norm of vectors of this type, which the caller keeps alive, as C reads it; None: none."""
    if norm is None:
        return NormStruct()
    return NormStruct(
        address(norm.weight, f"{name}.weight", width, dtype),
        address(norm.bias, f"{name}.bias", width, dtype),
        norm.eps,
        norm.offset,
        norm.centered,
    )


def stored_as(weight: Packed) -> int:
    """How its elements lie: for VNNI or AMX, which multiply them by the digits of x (csrc/vnni.h),
    [panels, ceil(columns / 4), P, 4], for AMX with P as 2 tiles of 16; for AVX-512 BF16
    (csrc/pairs.h) [panels, ceil(columns / 2), P, 2]; else [panels, columns, P].
    """
    if weight.data.dim() == 3:
        return STORED[weight.data.dtype]
    if weight.data.dtype is torch.bfloat16:
        return BFLOAT16_PAIRS
    return INT8_FOURS if weight.data.dim() == 4 else INT8_TILES


def digits_bytes(library: Library, weight: Packed, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of what a row of this type becomes before it is multiplied by the weight."""
    half = dtype is torch.bfloat16
    size: int = library.digits_bytes(weight.columns, stored_as(weight), half)
    return size


def weight_struct(weight: Packed, bias: Tensor | None, name: str) -> WeightStruct:
    """A packed weight and its bias, which the caller keeps alive, as C reads them."""
    return WeightStruct(
        weight.data.data_ptr(),
        weight.rows,
        weight.columns,
        address(bias, name, weight.rows),
        address(weight.scales, "scales", weight.rows),
        stored_as(weight),
    )


def caches_struct(key_cache: Tensor, value_cache: Tensor) -> CachesStruct:
    """Caches [blocks, block_size, kv heads, dim], which the caller keeps alive, as C reads them.
    Raises ValueError unless each slot's heads are in one piece and all slots equally far apart.
    """
    strides = []
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype not in TYPES or cache.dtype is not key_cache.dtype:
            raise ValueError(f"{name}: {cache.dtype}; float32 or bfloat16 is needed")
        blocks, block_size, kv, dim = cache.shape
        block, slot, head, element = cache.stride()
        stride = slot if block_size > 1 else block
        steps = (blocks, block, block_size * stride), (kv, head, dim), (dim, element, 1)
        if cache.is_cuda or any(size > 1 and step != even for size, step, even in steps):
            raise ValueError(
                f"{name}: strides {cache.stride()}; a slot's heads in one piece, and all slots "
                "equally far apart, are needed, on the CPU"
            )
        strides.append(stride)
    half = key_cache.dtype is torch.bfloat16
    return CachesStruct(key_cache.data_ptr(), value_cache.data_ptr(), *strides, half)
