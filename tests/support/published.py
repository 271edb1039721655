"""Writes checkpoints in the formats in which quantized models are published.

Owns the layouts, written from their packages' code: the names, types and packing of tensors and
the ``quantization_config``. Nothing of the runtime is used for them, so that a test that reads one
compares two sources.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Tensors = dict[str, Tensor]
# The tensors of a matrix, and the matrix that they stand for, float32 [N, K].
Stored = tuple[Tensors, Tensor]


def compressed_tensors(
    *, kind: str = "int", packed: bool = False, strategy: str = "channel", activations: bool = False
) -> tuple[dict[str, Any], Callable[[Tensor], Stored]]:
    """compressed-tensors' ``quantization_config`` of 8-bit weights (``kind`` int or float) with
    lm_head left out, and what stores a weight so: "int-quantized", "float-quantized" or, four
    integers in an int32, "pack-quantized". With ``activations`` they are to be rounded, too
    (W8A8).
    """
    stored = "pack-quantized" if packed else f"{kind}-quantized"
    inputs = {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}
    weights = {
        "num_bits": 8,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "observer": "minmax",
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs if activations else None,
                "output_activations": None,
            }
        },
    }

    def store(weight: Tensor) -> Stored:
        largest = weight.abs().amax(1, keepdim=True)
        if strategy == "tensor":
            largest = largest.max().reshape(1)
        # Of 255 steps, so that -128 is used. bfloat16 as most checkpoints have it.
        scale = (largest / (127.5 if kind == "int" else 448.0)).to(torch.bfloat16)
        scaled = weight / scale.float()
        if kind == "int":
            numbers = scaled.round().clamp(-128, 127).to(torch.int8)
        else:
            numbers = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
        plain = numbers.float() * scale.float()
        if not packed:
            return {"weight": numbers, "weight_scale": scale}, plain
        shape = torch.tensor(weight.shape)
        words = _words(numbers.to(torch.int64) + 128, 8)
        return {"weight_packed": words, "weight_scale": scale, "weight_shape": shape}, plain

    return settings, store


def compressed_int4(
    *, group: int = 32, symmetric: bool = True, sorts: bool = False
) -> tuple[dict[str, Any], Callable[[Tensor], Stored]]:
    """The same of 4-bit integers in int32, a scale for each ``group`` columns, -1: for each row.
    ``sorts``: which columns are a group is stored.
    """
    settings, _ = compressed_tensors(packed=True)
    settings["config_groups"]["group_0"]["weights"] |= {
        "num_bits": 4,
        "strategy": "channel" if group < 0 else "group",
        "group_size": None if group < 0 else group,
        "symmetric": symmetric,
        "actorder": "group" if sorts else None,
    }

    def store(weight: Tensor) -> Stored:
        index = _index(weight.shape[1], group, sorts=sorts)
        numbers, scales, zeros, plain = _in_groups(weight, index, symmetric=symmetric)
        tensors = {
            "weight_packed": _words(numbers, 4),
            "weight_scale": scales.to(torch.bfloat16),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _words(zeros.T.contiguous(), 4).T
        if sorts:
            tensors["weight_g_idx"] = index.int()
        return tensors, plain

    return settings, store


def gptq(
    *,
    group: int = 32,
    symmetric: bool = True,
    sorts: bool = False,
    second: bool = False,
    alone: bool = False,
    indexed: bool = True,
) -> tuple[dict[str, Any], Callable[[Tensor], Stored]]:
    """GPTQ's, with groups of so many columns, -1: rows. ``sorts``: its columns were sorted before
    they were cut into groups (``desc_act``), ``alone``: those of each matrix in an order of their
    own. ``second``: in the format that stores zero points as they are; ``indexed``: ``g_idx`` is
    stored even if it says nothing.
    """
    settings = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "desc_act": sorts,
        "sym": symmetric,
        "lm_head": False,
        "checkpoint_format": "gptq_v2" if second else "gptq",
        "damp_percent": 0.01,
        "true_sequential": True,
    }
    stored = 0

    def store(weight: Tensor) -> Stored:
        nonlocal stored
        stored += 1
        index = _index(weight.shape[1], group, sorts=sorts, seed=stored if alone else 0)
        numbers, scales, zeros, plain = _in_groups(weight, index, symmetric=symmetric)
        tensors = {
            "qweight": _words(numbers, 4).T,
            "qzeros": _words(zeros.T.contiguous(), 4),
            "scales": scales.T.to(torch.float16),
        }
        if not second:
            ones = torch.full_like(tensors["qzeros"], 0x11111111)
            tensors["qzeros"] = tensors["qzeros"] - ones
        if indexed or sorts:
            tensors["g_idx"] = index.int()
        return tensors, plain

    return settings, store


def awq(*, group: int = 32) -> tuple[dict[str, Any], Callable[[Tensor], Stored]]:
    """AWQ's, with groups of so many columns and zero points."""
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }

    def across(integers: Tensor) -> Tensor:
        """Eight neighbours of a row in an int32: the even ones, then the odd ones."""
        eights = integers.view(len(integers), -1, 8)
        mixed = torch.cat([eights[..., ::2], eights[..., 1::2]], dim=2)
        return _words(mixed.reshape(integers.shape), 4)

    def store(weight: Tensor) -> Stored:
        index = _index(weight.shape[1], group, sorts=False)
        numbers, scales, zeros, plain = _in_groups(weight, index, symmetric=False)
        tensors = {
            "qweight": across(numbers.T.contiguous()),
            "qzeros": across(zeros.T.contiguous()),
            "scales": scales.T.to(torch.float16),
        }
        return tensors, plain

    return settings, store


def _index(columns: int, group: int, *, sorts: bool, seed: int = 0) -> Tensor:
    """The group of each column."""
    index = torch.arange(columns) // (columns if group < 0 else group)
    if not sorts:
        return index
    generator = torch.Generator().manual_seed(columns + seed)
    return index[torch.randperm(columns, generator=generator)]


def _in_groups(
    weight: Tensor, index: Tensor, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rounded to 4 bits: integers [N, K] from 0 to 15, scales [N, G] that float16 and bfloat16
    hold, zero points [N, G], and the matrix that they stand for.
    """
    numbers, plain = torch.empty_like(weight, dtype=torch.int64), torch.empty_like(weight)
    scales, zeros = [], []
    for group in range(int(index.max()) + 1):
        own = index == group
        values = weight[:, own]
        low, high = values.amin(1), values.amax(1)
        if symmetric:
            scale, zero = values.abs().amax(1) / 8, torch.full_like(low, 8)
        else:
            scale = (high - low) / 15
            zero = (-low / scale).round().clamp(0, 15)
            zero[3], zero[5] = 0, 15  # the least and the most
        scale = (scale.view(torch.int32) & -65536).view(torch.float32).half().float()
        integers = (values / scale[:, None] + zero[:, None]).round().clamp(0, 15)
        numbers[:, own] = integers.long()
        plain[:, own] = (integers - zero[:, None]) * scale[:, None]
        scales.append(scale)
        zeros.append(zero.long())
    return numbers, torch.stack(scales, 1), torch.stack(zeros, 1), plain


def _words(values: Tensor, bits: int) -> Tensor:
    """Integers [N, K] from 0 to 2^bits - 1 as int32 [N, K * bits / 32], the first in the lowest
    bits.
    """
    each = 32 // bits
    groups = values.view(values.shape[0], -1, each) << (bits * torch.arange(each))
    return groups.sum(2).to(torch.uint32).view(torch.int32)


def publish(
    model: Path,
    directory: Path,
    settings: Mapping[str, Any],
    store: Callable[[Tensor], Stored],
    *,
    beside: str = "",
    inside: bool = False,
) -> tuple[Path, Path]:
    """A copy of the checkpoint ``model``, the matrices of its layers stored so; and one that holds
    the float32 matrices that they stand for. Tensors whose name has ``beside`` in it stay plain.
    ``inside``: the settings are in those of the model's text.
    """
    quantized, plain = directory / "quantized", directory / "plain"
    for path in (quantized, plain):
        shutil.copytree(model, path)
    tensors = load_file(model / "model.safetensors")
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.dim() == 2 and not (beside and beside in name):
            parts, tensors[name] = store(tensor.float())
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{leaf}": part.contiguous() for leaf, part in parts.items()}
        else:
            stored[name] = tensor
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    config = quantized / "config.json"
    value = json.loads(config.read_text())
    (value["text_config"] if inside else value)["quantization_config"] = settings
    config.write_text(json.dumps(value))
    return quantized, plain


MXFP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_settings() -> dict[str, Any]:
    """The ``quantization_config`` of the checkpoints that OpenAI published."""
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    return {"modules_to_not_convert": [*plain, "lm_head"], "quant_method": "mxfp4"}


def mxfp4_blocks(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices [E, K, N] of experts, which have a row for each input, rounded: blocks uint8 [E, N,
    K / 32, 16] and scales uint8 [E, N, K / 32]. Numbers that round to 0 keep their sign.
    """
    experts, inputs, outputs = matrices.shape
    rows = matrices.transpose(1, 2).reshape(experts, outputs, inputs // 32, 32).double()
    largest = rows.abs().amax(3, keepdim=True)
    # The largest number of a block lies between 4 and 8, of which 6 is the format's largest.
    exponents = largest.clamp(min=2.0**-100).log2().floor() - 2
    sizes = rows.abs() / 2.0**exponents
    codes = (sizes[..., None] - torch.tensor(MXFP4_NUMBERS)).abs().argmin(-1)
    codes += 8 * (rows < 0)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return blocks, (exponents[..., 0] + 127).to(torch.uint8)


def publish_mxfp4(model: Path, directory: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    """A copy of the checkpoint ``model`` of gpt_oss as OpenAI publishes it: its experts in MXFP4,
    all else in ``dtype``, without a type in its config. And one that holds the float32 experts that
    transformers' own code makes of the stored tensors.
    """
    quantized, plain = directory / "quantized", directory / "plain"
    for path in (quantized, plain):
        shutil.copytree(model, path)
    tensors = {k: v.to(dtype) for k, v in load_file(model / "model.safetensors").items()}
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        blocks, scales = mxfp4_blocks(tensor)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    config = quantized / "config.json"
    value = json.loads(config.read_text()) | {"quantization_config": mxfp4_settings()}
    del value["dtype"]
    config.write_text(json.dumps(value))
    return quantized, plain
