"""A stand-in for the package humming-kernels, in plain torch, for machines without a GPU.

Written from humming-kernels 0.1.19, with the package's own signatures (a test compares them). It
checks what it is given as the package's launcher does, rounds as its kernels do, and keeps weights
in a layout that nobody else can read.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairlead_kernels.packages.humming_package import HummingPackage
from fairlead_kernels.packages.humming_products import HummingProducts

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(kw_only=True)
class HummingWeightSchema:
    quant_method: str = "humming"
    b_dtype: Any
    bs_dtype: Any = None
    weight_scale_group_size: int = 0
    weight_scale_group_size_n: int = 0
    weight_scale_type: Any = None
    weight_scale_2_type: Any = None
    has_zero_point: bool = False
    is_fp_zero_point: bool = False
    hadamard_block_size: int = 0


@dataclass(frozen=True)
class LayerConfig:
    """What the package's has of such a layer."""

    rows: int
    columns: int
    group: int
    dtype: torch.dtype


def prepare_and_transform_humming_tensors(
    tensors: dict[str, Tensor],
    shape_n: int,
    shape_k: int,
    weight_schema: Any,
    input_schema: Any = None,
    num_experts: int | None = None,
    pad_n_to_multiple: int = 1,
    pad_k_to_multiple: int = 1,
    has_bias: bool = False,
    torch_dtype: torch.dtype | None = None,
    device: Any = None,
) -> tuple[LayerConfig, dict[str, Tensor]]:
    schema: HummingWeightSchema = weight_schema
    assert (input_schema, num_experts, has_bias) == (None, None, False)
    assert (pad_n_to_multiple, pad_k_to_multiple) == (1, 1)
    assert schema.b_dtype == "uint4"
    assert schema.has_zero_point
    assert torch_dtype is TYPES[schema.bs_dtype]
    assert shape_n % 128 == shape_k % 64 == 0, "as its tiles for compute capability 9.0 need"
    group = schema.weight_scale_group_size or shape_k
    wanted = {
        "weight": ((shape_n, shape_k // 8), torch.int32),
        "weight_scale": ((shape_n, shape_k // group), torch_dtype),
        "zero_point": ((shape_n // 8, shape_k // group), torch.int32),
    }
    for name, tensor in tensors.items():
        assert (tuple(tensor.shape), tensor.dtype) == wanted[name], name
        assert tensor.is_contiguous(), name
        assert tensor.device == device, name
    held = {
        "weight": tensors["weight"].flip(1).reshape(shape_k // 16, shape_n * 2),
        "weight_scale": tensors["weight_scale"].T.contiguous(),
        "zero_point": tensors["zero_point"].T.contiguous(),
    }
    return LayerConfig(shape_n, shape_k, group, torch_dtype), held


def get_heuristics_config(
    layer_config: Any,
    shape_m: int | None = None,
    use_f16_accum: bool = False,
    use_batch_invariant: bool = False,
    use_m_major_input_scale: bool = False,
    gemm_type: Any = "dense",
    device: Any = None,
) -> dict[str, Any]:
    assert not any((use_f16_accum, use_m_major_input_scale))
    assert use_batch_invariant, "else it may choose kernels whose programs share sums"
    assert gemm_type == "dense"
    assert device is not None
    assert shape_m is not None
    return {"block_shape": (min(shape_m, 128), 128, 64), "rows": layer_config.rows}


def humming_forward(
    config: Any,
    inputs: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    weight_scale_2: Tensor | None = None,
    outputs: Tensor | None = None,
    input_scale: Tensor | None = None,
    input_scale_2: Tensor | None = None,
    sorted_ids: Tensor | None = None,
    expert_ids: Tensor | None = None,
    num_tokens_padded: Tensor | None = None,
    expert_layout: Tensor | None = None,
    locks: Tensor | None = None,
    top_k: int = 1,
    valid_shape_m: int = 0,
    compute_config: Any = None,
    tuning_config: Any = None,
    hadamard_block_size: int | None = None,
    use_pdl: bool | None = None,
) -> Tensor:
    layer: LayerConfig = config
    assert inputs.dtype is layer.dtype
    assert len(inputs), "a launch of no program"
    assert inputs.shape[1] == layer.columns
    assert json.loads(compute_config) == {"use_batch_invariant": True}
    assert weight_scale is not None
    assert zero_point is not None
    assert isinstance(tuning_config, str), "else each call would write it anew"
    kernels = [x for above, upto, x in json.loads(tuning_config) if above < len(inputs) <= upto]
    assert [x["rows"] for x in kernels] == [layer.rows], "one kernel for each number of tokens"
    numbers = unpacked(weight.reshape(layer.rows, -1).flip(1))
    zeros = unpacked(zero_point).T
    scales = weight_scale.T
    groups = (numbers.view(layer.rows, -1, layer.group) - zeros[..., None]).to(layer.dtype)
    matrix = (groups * scales[..., None]).view(layer.rows, layer.columns)
    return (inputs.float() @ matrix.float().T).to(layer.dtype)


def unpacked(words: Tensor) -> Tensor:
    """Eight integers of each int32, the first in the lowest bits: [N, W] → [N, 8 W]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).flatten(1)


def int4_products(
    _operations: Any, dtype: torch.dtype, device: torch.device, compilers: int
) -> tuple[HummingProducts, str]:
    """In the place of ``backend.int4_products``, on any device."""
    return HummingProducts(package(), dtype, device, compilers), ""


def package(forward: Callable[..., Any] = humming_forward) -> HummingPackage:
    return HummingPackage(
        "stand-in",
        HummingWeightSchema,
        prepare_and_transform_humming_tensors,
        get_heuristics_config,
        forward,
    )
