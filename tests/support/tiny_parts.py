"""Tiny random models of several parts, stored under the names of published checkpoints.

Owns their sizes, and the prefix that the tensors of each text have in published files. Weights are
filled as those of ``tiny``, so that the text depends on the whole context.
"""

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    Gemma3nConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from fairlead_runtime.models import text_model
from fairlead_runtime.sizing.family_table import PARTS
from support import tiny

_SIZES: dict[str, Any] = {**tiny._COMMON, "num_key_value_heads": 2}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]
_QWEN3: dict[str, Any] = {"head_dim": 16, "rope_parameters": _MROPE | {"mrope_interleaved": True}}
_COHERE2: dict[str, Any] = {
    "model_type": "cohere2",
    "sliding_window": tiny.WINDOW,
    "layer_types": _WINDOWED,
    "logit_scale": 1.0,
}
# Published matrices of experts are transposed, which transformers sees where they are not square.
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
_TOWER: dict[str, Any] = {**_LAYERS, "hidden_size": 32, "image_size": 32, "patch_size": 16}
_DEPTH: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "out_hidden_size": tiny.HIDDEN,
    "patch_size": 16,
}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model"}

# Not those of the class, which take gigabytes.
_SOUND = {
    "audio_config": {"hidden_size": 32, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2}
}

# By family: the text's settings, the tower's, and the prefix of the text's tensors as published.
_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gemma3": (
        {"model_type": "gemma3_text", **tiny._GEMMA, "num_hidden_layers": 3}
        | {"layer_types": _WINDOWED},
        _SIGLIP,
        "language_model.model.",
    ),
    "mistral3": (
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {**_TOWER, "model_type": "pixtral", "head_dim": 16},
        "language_model.model.",
    ),
    "qwen2_vl": (
        {"rope_parameters": _MROPE},
        {"depth": 1, "num_heads": 2, "embed_dim": 32, "hidden_size": tiny.HIDDEN},
        "model.",
    ),
    "qwen2_5_vl": ({"rope_parameters": _MROPE}, {**_DEPTH, "fullatt_block_indexes": [0]}, "model."),
    "qwen3_vl": (_QWEN3, {**_DEPTH, "deepstack_visual_indexes": [0]}, "model.language_model."),
    "qwen3_vl_moe": (
        {**_QWEN3, **_MOE},
        {**_DEPTH, "deepstack_visual_indexes": [0]},
        "model.language_model.",
    ),
    "glm4v": ({"rope_parameters": _MROPE}, {**_DEPTH, "image_size": 32}, "model.language_model."),
    "internvl": (
        {"model_type": "qwen2"},
        {**_TOWER, "image_size": [32, 32], "patch_size": [16, 16]},
        "language_model.model.",
    ),
    "smolvlm": ({"model_type": "llama"}, _TOWER, "model.text_model."),
    "idefics3": ({"model_type": "llama", "head_dim": 32}, _TOWER, "model.text_model."),
    "aya_vision": (_COHERE2, _SIGLIP, "language_model.model."),
    "cohere2_vision": (_COHERE2 | {"sliding_window": 20}, _SIGLIP, "model.language_model."),
    # Not in the table: tried, measured and judged by the self-test.
    "llava": ({"model_type": "llama"}, _SIGLIP, "language_model.model."),
    # Its text is loaded alone.
    "gemma3n": (
        {"model_type": "gemma3n_text", **tiny._SETTINGS["gemma3n_text"]},
        {"label_names": ["none"]},
        "model.language_model.",
    ),
    "gemma4": (
        {"model_type": "gemma4_text", **tiny._SETTINGS["gemma4_text"]}
        | {"use_bidirectional_attention": "vision"},
        {**_TOWER, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16}
        | {"position_embedding_size": 16},
        "model.language_model.",
    ),
    "gemma4_unified": (
        {"model_type": "gemma4_unified_text", **tiny._SETTINGS["gemma4_unified_text"]},
        {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32},
        "model.language_model.",
    ),
}
FAMILIES = tuple(_FAMILIES)
_OWN_TEXTS = ("model.text_model.", "model.language_model.")


class Tower(PreTrainedModel):  # type: ignore[misc] # transformers' is untyped
    """In the place of the tower of Gemma 3n's images, which timm builds: no text reads it."""

    config_class = Gemma3nConfig.sub_configs["vision_config"]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(8, 8)
        self.post_init()


AutoModel.register(Tower.config_class, Tower, exist_ok=True)


def build(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The whole random model in float32 on the CPU, in eval mode, eager attention. ``overrides``
    are settings of its text.
    """
    text, vision, _ = _FAMILIES[family]
    text = {**_SIZES, **text, **overrides}
    tied = bool(text["tie_word_embeddings"])
    config = AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=tied,
        **(_SOUND if family == "gemma3n" else {}),
    )
    factory: Any = AutoModelForImageTextToText  # transformers' classes are untyped
    model = factory.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in tiny.stored(model):
            tiny._fill(name, tensor, seed)
            # Heads whose queries and keys are normalized attend to all alike.
            if name.endswith(("q_norm.weight", "k_norm.weight")) and family.startswith("qwen3"):
                tensor.mul_(2.0)
        gemma = 1 / math.sqrt(tiny.HIDDEN)
        scale = gemma if family.startswith("gemma") else 0.5 if family.startswith("qwen3") else 1.0
        model.get_input_embeddings().weight.mul_(scale)
    model.generation_config.pad_token_id = 0
    model.eval()
    return cast("PreTrainedModel", model)


def build_text(family: str, **overrides: Any) -> PreTrainedModel:
    """What is loaded of the whole model: its text."""
    whole = build(family, **overrides)
    if family not in PARTS or not PARTS[family].alone:
        text_model.drop_other_parts(whole)
        return whole
    settings = json.loads(whole.config.to_json_string(use_diff=False))
    config = text_model.config_to_load(Path(), settings)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        text: Any = text_model.class_to_load(config)(config)
    setattr(text, text.base_model_prefix, whole.get_decoder())
    text.set_output_embeddings(whole.get_output_embeddings())
    text.generation_config.pad_token_id = 0
    return cast("PreTrainedModel", text.eval())


def save(family: str, folder: Path, **overrides: Any) -> Path:
    """Write the model as a checkpoint, its tensors named as published."""
    model = build(family, **overrides)
    tiny.save(model, folder)
    tensors = {_published(family, name): x for name, x in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors = {name: x for name, x in tensors.items() if not name.endswith("lm_head.weight")}
    if family == "gemma3n":
        tensors |= _unread_keys(model.get_decoder(), tensors)
    if family == "qwen3_vl_moe":
        experts = ("experts.gate_up_proj", "experts.down_proj")
        tensors = {n: x.transpose(1, 2) if n.endswith(experts) else x for n, x in tensors.items()}
    save_file({n: x.contiguous() for n, x in tensors.items()}, folder / "model.safetensors")
    return folder


def _unread_keys(text: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the published files also have of layers that keep no keys: those of the first layer."""
    first = "model.language_model.layers.0.self_attn."
    return {
        name.replace(".0.", f".{index}."): x + 1
        for index, layer in enumerate(text.layers)
        for name, x in tensors.items()
        if layer.self_attn.is_kv_shared_layer and name.startswith((f"{first}k_", f"{first}v_"))
    }


def flatten(folder: Path) -> None:
    """Write the text's settings among those of the whole, as Qwen2.5-VL was published."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    path.write_text(json.dumps({**text, **config}))


def stored_names(folder: Path) -> list[str]:
    return sorted(load_file(folder / "model.safetensors"))


def _published(family: str, name: str) -> str:
    prefix = _FAMILIES[family][2]
    own = next((own for own in _OWN_TEXTS if name.startswith(own)), None)
    if own is not None:
        return prefix + name.removeprefix(own)
    if prefix == "language_model.model.":
        name = "language_model.lm_head.weight" if name == "lm_head.weight" else name
        return name.removeprefix("model.")
    return name.removeprefix("model.") if prefix == "model." else name
