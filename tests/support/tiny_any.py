"""Tiny random models of any type that transformers has, by the settings that its configuration
knows.

Owns the sizes that a setting has in a tiny model, by its name, and the few types of which these are
not enough. Weights are filled as those of ``tiny``.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from fairlead_runtime.models import text_model
from support import tiny

_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_routed_experts",
)
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k")
_WIDTHS = (
    *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
    *("dense_intermediate_size", "prefix_dense_intermediate_size"),
)
# By the name of a setting of a configuration that has it.
_SIZES: Mapping[str, Any] = {
    **tiny._COMMON,
    "num_hidden_layers": 4,  # the classes let every fourth see all, or the first of four
    "num_key_value_heads": 2,
    "head_dim": 16,
    "ffn_dim": 128,
    "word_embed_proj_dim": tiny.HIDDEN,
    "sliding_window": tiny.WINDOW,
    "query_pre_attn_scalar": 16,
    "n_embd": tiny.HIDDEN,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": tiny.CONTEXT,
    "n_inner": 128,
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_CHOSEN, 2),
    **dict.fromkeys(_WIDTHS, 64),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    "original_max_position_embeddings": tiny.CONTEXT,
    "logit_scale": 1.0,
}
# Settings that are left as they are: transformers' cache has this window, and its mask has not.
_LEFT: Mapping[str, tuple[str, ...]] = {"moshi": ("sliding_window",)}
# Settings of classes whose own do not make a model.
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {
        "d_model": tiny.HIDDEN,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": tiny.CONTEXT,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": tiny.HIDDEN,
            "ffn_hidden_size": 96,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "phi4_multimodal": {  # with towers that its class builds, and no text reads
        "vision_config": {"hidden_size": 32, "num_attention_heads": 2, "image_size": 28}
        | {"intermediate_size": 32, "num_hidden_layers": 1},
        "audio_config": {"hidden_size": 32, "num_attention_heads": 2, "num_blocks": 1}
        | {"intermediate_size": 32, "ext_pw_out_channel": 32, "nemo_conv_channels": 32}
        | {"depthwise_separable_out_channel": 32},
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN}
    },
}


def settings_of(kind: str, **overrides: Any) -> dict[str, Any]:
    """Settings of a tiny model for the configuration class of ``kind``."""
    default = CONFIG_MAPPING[kind]()
    known = {
        key: value
        for key, value in _SIZES.items()
        if hasattr(default, key)
        and key not in _LEFT.get(kind, ())
        and not isinstance(getattr(type(default), key, None), property)
        # A family that has none is left without.
        and (key != "sliding_window" or default.sliding_window)
    }
    if kind == "dbrx":  # the usual names stand for its own
        known = {"vocab_size": known["vocab_size"]}
    return {**known, **_NEEDED.get(kind, {}), **overrides}


def config_of(kind: str, **overrides: Any) -> PretrainedConfig:
    factory: Any = CONFIG_MAPPING[kind]
    return cast("PretrainedConfig", factory(**settings_of(kind, **overrides)))


def build(kind: str, **overrides: Any) -> PreTrainedModel:
    """A random model in float32 on the CPU, in eval mode, eager attention."""
    config = config_of(kind, **overrides)
    model = text_model.class_of(config)._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, tensor in tiny.stored(model):
            tiny._fill(name, tensor, 0)
        model.get_input_embeddings().weight.div_(_scale(config))
    if model.generation_config is not None:
        model.generation_config.pad_token_id = 0
    model.eval()
    return cast("PreTrainedModel", model)


def _scale(config: PretrainedConfig) -> float:
    """What embeddings are multiplied by: without this the last token alone decides the output."""
    multiplied = config.model_type.startswith(("gemma", "vaultgemma")) or getattr(
        config, "scale_embedding", False
    )
    return math.sqrt(tiny.HIDDEN) if multiplied else 1.0
