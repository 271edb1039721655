"""The models that are measured: a stated shape with random weights, made on the device.

The engine gets a directory as any other, whose weight file has the right header and no content: it
is as long as it says and takes no room on the disk. Only the reading of weights is replaced, by
random ones that never were in a file.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks import models
from benchmarks.gpu.patch import replaced
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import PreTrainedModel

from fairlead_runtime.models import loading

LLAMA = "Llama-3-8B shape"
TINY = "tiny"
SHAPES: dict[str, dict[str, Any]] = {
    LLAMA: {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    TINY: {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
}
DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def config(name: str, dtype: torch.dtype) -> LlamaConfig:
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    return LlamaConfig(**SHAPES[name], tie_word_embeddings=False, dtype=dtype, **ids)


def make(name: str, dtype: torch.dtype, device: torch.device, attention: str) -> PreTrainedModel:
    """Random weights whose logits have a spread, in the memory of ``device`` from the start."""
    factory: Any = AutoModelForCausalLM  # transformers' classes are untyped
    with torch.device(device):
        model = factory.from_config(config(name, dtype), dtype=dtype, attn_implementation=attention)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    made: PreTrainedModel = model.requires_grad_(False).eval()
    return made


def save(name: str, dtype: torch.dtype, folder: Path) -> models.Size:
    """Write config.json, a tokenizer and the header of the weights. Returns what a step reads."""
    shape = config(name, dtype)
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        empty = factory.from_config(shape, dtype=dtype)
    shape.architectures = [type(empty).__name__]
    shape.save_pretrained(folder)
    models.save_tokenizer(folder, shape.vocab_size)
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in empty.state_dict().items():
        size = tensor.numel() * dtype.itemsize
        kind = DTYPES[str(dtype).removeprefix("torch.")]
        header[key] = {"dtype": kind, "shape": [*tensor.shape], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return models.size(empty)


@contextmanager
def weights_made_on(name: str, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Inside it the engine's reading of weights makes them."""

    def read(_inspected: object, *_: object, **__: object) -> PreTrainedModel:
        return make(name, dtype, device, "eager")

    with replaced(loading, "_read_weights", read):
        yield
