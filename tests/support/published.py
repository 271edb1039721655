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
) -> tuple[Path, Path]:
    """A copy of the checkpoint ``model``, the matrices of its layers stored so; and one that holds
    the float32 matrices that they stand for.
    """
    quantized, plain = directory / "quantized", directory / "plain"
    for path in (quantized, plain):
        shutil.copytree(model, path)
    tensors = load_file(model / "model.safetensors")
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.dim() == 2:
            parts, tensors[name] = store(tensor.float())
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{leaf}": part.contiguous() for leaf, part in parts.items()}
        else:
            stored[name] = tensor
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    config = quantized / "config.json"
    value = json.loads(config.read_text()) | {"quantization_config": settings}
    config.write_text(json.dumps(value))
    return quantized, plain
