"""Tiny random models whose layers keep a state of fixed size.

Owns their sizes and what their states forget. A state fades over some tens of tokens, so a lost or
stale one changes the text; convolutions are long and strong enough that one input less shows.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from fairlead_runtime.models import text_model
from support import tiny, tiny_any, tiny_mixture

_LINEAR, _FULL, _CONV = "linear_attention", "full_attention", "conv"
_DELTA = {
    "layer_types": [_LINEAR, _FULL, _LINEAR, _LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
}
_LFM = {"layer_types": [_CONV, _FULL, _CONV, _CONV], "conv_L_cache": 4}
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_next": _DELTA,
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 12,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "falcon_h1": {
        **_MAMBA2,
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "ssm_out_multiplier": 0.8,
        "attention_out_multiplier": 0.9,
    },
    "granitemoehybrid": {**_MAMBA2, "layer_types": [_LINEAR, _FULL, _LINEAR, _LINEAR]},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    # Layers with a state, with keys, with experts and with an MLP, two of which keep nothing.
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 12,
        "chunk_size": 16,
        "head_dim": 16,
        "intermediate_size": 96,
        "layers_block_type": [_LINEAR, "moe", _LINEAR, _FULL, "mlp", _LINEAR],
        "num_hidden_layers": 6,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
    },
    "falcon_mamba": {"state_size": 8, "time_step_rank": 6},
    "jamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 6,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
    },
    "lfm2": _LFM,
    "lfm2_moe": _LFM,
    "lfm3": {"layer_types": [_CONV, _FULL, _CONV, "sliding_attention"], "sliding_window": 12},
    "minimax": {"layer_types": [_LINEAR, _FULL, _LINEAR, _LINEAR], "block_size": 8},
}
FAMILIES = tuple(_SETTINGS)


def config_of(family: str, **overrides: Any) -> PretrainedConfig:
    factory: Any = CONFIG_MAPPING[family]
    return cast("PretrainedConfig", factory(**settings_of(family, **overrides)))


def settings_of(family: str, **overrides: Any) -> dict[str, Any]:
    """What the configuration of its model is made of."""
    settings = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **_SETTINGS[family],
        **overrides,
    }
    return tiny_any.settings_of(family, **settings)


def build(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of ``family`` in float32 on the CPU, in eval mode, eager attention. Equal
    arguments give equal weights. ``mixture``: what ``tiny_mixture`` changes of one of LFM3.
    """
    mixture = overrides.pop("mixture", None)
    config = config_of(family, **overrides)
    model = text_model.class_of(config)._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    if mixture is not None:
        tiny_mixture.change(model, **mixture)
    fill(model, seed)
    if model.generation_config is not None:
        model.generation_config.pad_token_id = 0
    return cast("PreTrainedModel", model.eval())


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Give a model its weights."""
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "A_log":  # those of transformers are random, or grow with the head
            parameter.fill_(math.log(0.3))
            parameter.add_(0.3 * _noise(name, parameter, seed))
        elif leaf == "dt_bias" or name.endswith("dt_proj.bias"):
            parameter.fill_(-2.0)
            parameter.add_(0.3 * _noise(name, parameter, seed))
        elif leaf == "D":
            parameter.fill_(0.2)
        elif parameter.dim() == 3 and "conv" in name and "experts" not in name:
            parameter.copy_(0.6 * _noise(name, parameter, seed))
        else:
            tiny._fill(name, parameter, seed)


def _noise(name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
    noise = torch.nn.Parameter(torch.empty(*parameter.shape, 1), requires_grad=False)
    tiny._fill(name, noise, seed)
    return noise[..., 0] * math.sqrt(tiny.HIDDEN)


_DEPTH: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "patch_size": 16,
    "out_hidden_size": tiny.HIDDEN,
}
_TOWER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_size": 32,
    "patch_size": 16,
}
# Models of several parts: the text's type, and the tower's settings.
WHOLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", _DEPTH),
    "qwen3_5_moe": ("qwen3_5_moe_text", _DEPTH),
    "lfm2_vl": ("lfm2", {**_TOWER, "model_type": "siglip2_vision_model"}),
    "lfm3_vl": ("lfm3", {**_TOWER, "num_key_value_heads": 2}),
    "minicpmv4_6": ("qwen3_5_text", {**_TOWER, "insert_layer_id": 0}),
}


def build_whole(family: str) -> PreTrainedModel:
    """A random model of several parts, whose text keeps states."""
    text, vision = WHOLES[family]
    config = AutoConfig.for_model(
        family,
        text_config={"model_type": text, **settings_of(text)},
        vision_config=dict(vision),
        tie_word_embeddings=False,
    )
    factory: Any = AutoModelForImageTextToText
    model = factory.from_config(config, dtype=torch.float32, attn_implementation="eager")
    fill(model)
    model.generation_config.pad_token_id = 0
    return cast("PreTrainedModel", model.eval())
