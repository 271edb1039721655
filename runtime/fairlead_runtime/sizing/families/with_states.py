"""Families of which layers keep a state of fixed size beside keys or instead of them.

Owns their rows; ``mixers`` has the sizes of the mechanisms that they name. A configuration that
names no longest text, as a model without attention has none, is served up to LONGEST tokens.
Tests hold each row against transformers' class on the meta device.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fairlead_runtime.sizing.families.patterns import always, never
from fairlead_runtime.sizing.family import ATTENTION_BIAS, Family, defaults

LONGEST = 32768
_EXPERTS = {"num_local_experts": "num_experts"}
_BLOCKS = {"layer_types": "layers_block_type"}

_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "head_dim": 256,
}
_QWEN: dict[str, Any] = {
    **ATTENTION_BIAS,
    "mixer": "gated_delta",
    "full_every": "full_attention_interval",
    "qk_norm": "head",
    "gate_in_queries": True,
    "shardable": False,
    "fuses": False,
}
_MIXTURE: dict[str, Any] = {
    "aliases": _EXPERTS,
    "experts": "moe_intermediate_size",
    "shared_experts": (1, "shared_expert_intermediate_size"),
    "shared_gate": True,
}
_STATE: dict[str, Any] = {"shardable": False, "fuses": False}
# Without attention: one head of no use, whose sizes nothing reads.
_ALONE: dict[str, Any] = {
    **_STATE,
    "kinds": "all",
    "one_part": True,
    "norms": 1,
    "reads_kv_heads": False,
}
_MAMBA2 = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def _of_lfm2(family: Family, settings: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """The width of the MLP is computed of one that older files name otherwise."""
    meant = {**family.defaults, **settings}
    width, multiple = (
        meant.get("block_ff_dim", meant["intermediate_size"]),
        meant["block_multiple_of"],
    )
    factor = meant["block_ffn_dim_multiplier"]
    counts = all(isinstance(x, int) and x > 0 for x in (width, multiple))
    if meant["block_auto_adjust_ff_dim"] and counts:
        width = int(2 * width / 3)
        if isinstance(factor, int | float):
            width = -(-int(factor * width) // multiple) * multiple
    layers, numbers = meant["num_hidden_layers"], meant.get("full_attn_idxs")
    kinds = meant.get("layer_types")
    if kinds is None and isinstance(numbers, list | tuple) and isinstance(layers, int):
        kinds = ["full_attention" if i in numbers else "conv" for i in range(min(layers, 1 << 12))]
    own = {**settings, "intermediate_size": width} | (
        {} if kinds is None else {"layer_types": kinds}
    )
    return family, _with_tie(own)


def _of_lfm2_moe(family: Family, settings: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    if settings.get("use_expert_bias", True):
        family = replace(family, choice_buffer="float32")
    return family, _with_tie(settings)


def _with_tie(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    tied = settings.get("tie_embedding")
    return settings if tied is None else {**settings, "tie_word_embeddings": tied}


def _of_granite(family: Family, settings: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """Without experts the shared one is the MLP."""
    if settings.get("num_local_experts", 8) != 0:
        return family, settings
    width = settings.get("shared_intermediate_size", 1024)
    return replace(family, experts="", shared_experts=None), {
        **settings,
        "intermediate_size": width,
    }


_NEMOTRON_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
}
_NEMOTRON_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _of_nemotron(family: Family, settings: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """The number of layers is that of their kinds, which older files give as one text."""
    kinds = settings.get("layers_block_type")
    pattern = settings.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = [_NEMOTRON_KINDS.get(letter, letter) for letter in pattern]
    if kinds is None:
        kinds = list(_NEMOTRON_KINDS.values())
    named = {new: settings[old] for old, new in _NEMOTRON_NAMES.items() if old in settings}
    count = len(kinds) if isinstance(kinds, list | tuple) else 0
    return family, {**settings, **named, "layers_block_type": kinds, "num_hidden_layers": count}


WITH_STATES: Mapping[str, Family] = {
    "qwen3_next": Family(
        defaults(151936, 2048, 5632, 48, 16, 32768, num_key_value_heads=2)
        | _DELTA
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
        | {"num_local_experts": 512, "num_experts_per_tok": 10},
        reads_sparse_steps=True,
        **{**_QWEN, "mixer": "joined_gated_delta"},
        **_MIXTURE,
    ),
    "qwen3_5_text": Family(
        defaults(248320, 4096, 12288, 32, 16, 32768, num_key_value_heads=4) | _DELTA, **_QWEN
    ),
    "qwen3_5_moe_text": Family(
        defaults(248320, 2048, None, 40, 16, 32768, num_key_value_heads=2)
        | _DELTA
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
        | {"num_local_experts": 256, "num_experts_per_tok": 8},
        **_QWEN,
        **_MIXTURE,
    ),
    "olmo_hybrid": Family(
        defaults(100352, 3840, 11008, 32, 30, 65536, linear_conv_kernel_dim=4),
        mixer="olmo_gated_delta",
        full_rule=lambda index, layers: index % 4 == 3 or index == layers - 1 < 3,
        needs_both=True,
        qk_norm="flat",
        **ATTENTION_BIAS,
        **_STATE,
        wide_rotary="tables",
    ),
    "mamba2": Family(
        defaults(32768, 4096, None, 64, 1, LONGEST, num_heads=128, head_dim=64)
        | {"state_size": 128, "expand": 2, "conv_kernel": 4, "n_groups": 8, "chunk_size": 256}
        | {"use_bias": False, "use_conv_bias": True},
        mixer="mamba2",
        **_ALONE,
    ),
    "falcon_mamba": Family(
        defaults(50280, 768, None, 32, 1, LONGEST, tie_word_embeddings=True)
        | {"state_size": 16, "expand": 2, "conv_kernel": 4, "time_step_rank": "auto"}
        | {"use_bias": False, "use_conv_bias": True},
        mixer="falcon_mamba1",
        **_ALONE,
    ),
    "nemotron_h": Family(
        defaults(131072, 4096, 21504, 4, 32, 4096, num_key_value_heads=8, head_dim=128)
        | {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}
        | {"conv_kernel": 4, "chunk_size": 128, "use_bias": False, "use_conv_bias": True}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
        | {"moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None},
        aliases=_BLOCKS | {"num_local_experts": "n_routed_experts"},
        mixer="nemotron_mamba2",
        one_part=True,
        norms=1,
        gated=False,
        mlp_copies=4,
        mlp_bias="mlp_bias",
        experts="moe_intermediate_size",
        shared_experts=(1, "moe_shared_expert_intermediate_size"),
        expert_latent="moe_latent_size",
        full_rule=always,
        variant=_of_nemotron,
        **_STATE,
        choice_buffer="float32",
        wide_shares=True,
    ),
    "falcon_h1": Family(
        defaults(128000, 4096, 14336, 32, 32, 8192, num_key_value_heads=8)
        | _MAMBA2
        | {"mamba_d_ssm": 1024, "mamba_rms_norm": False, "projectors_bias": False},
        mixer="falcon_mamba2",
        made=("num_key_value_heads",),
        kinds="all",
        state_kind="hybrid",
        mlp_bias="mlp_bias",
        logit_copies=2,
        **ATTENTION_BIAS,
        **_STATE,
    ),
    "granitemoehybrid": Family(
        defaults(32000, 4096, 11008, 32, 32, 2048)
        | _MAMBA2
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
        mixer="prefixed_mamba2",
        full_rule=never,
        experts="intermediate_size",
        shared_experts=(1, "shared_intermediate_size"),
        joined_gate=True,
        logit_copies=2,
        variant=_of_granite,
        **ATTENTION_BIAS,
        **_STATE,
    ),
    "bamba": Family(
        defaults(128000, 4096, 14336, 32, 32, 262144, num_key_value_heads=8) | _MAMBA2,
        mixer="prefixed_mamba2",
        made=("num_key_value_heads",),
        kinds="numbers",
        mlp_bias="mlp_bias",
        **ATTENTION_BIAS,
        **_STATE,
    ),
    "jamba": Family(
        defaults(65536, 4096, 14336, 32, 32, 262144, num_key_value_heads=8)
        | {"num_local_experts": 16, "num_experts_per_tok": 2}
        | {"expert_layer_period": 2, "expert_layer_offset": 1}
        | {"attn_layer_period": 8, "attn_layer_offset": 4}
        | {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto"}
        | {"mamba_conv_bias": True, "mamba_proj_bias": False},
        aliases=_EXPERTS,
        mixer="jamba_mamba1",
        kinds="period",
        experts="intermediate_size",
        sparse_every=("expert_layer_period", "expert_layer_offset"),
        less=(
            ("attn_layer_offset", "attn_layer_period"),
            ("expert_layer_offset", "expert_layer_period"),
        ),
        **_STATE,
    ),
    "lfm2": Family(
        defaults(65536, 2560, 12288, 32, 32, 128000, num_key_value_heads=8)
        | {"tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3}
        | {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
        | {"block_auto_adjust_ff_dim": True},
        mixer="short_convolution",
        state_kind="conv",
        full_rule=always,
        qk_norm="head",
        variant=_of_lfm2,
        **_STATE,
    ),
    "lfm2_moe": Family(
        defaults(65536, 2048, 7168, 32, 32, 128000, num_key_value_heads=8)
        | {"tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3}
        | {"moe_intermediate_size": 1792, "num_local_experts": 32, "num_experts_per_tok": 4}
        | {"num_dense_layers": 2},
        aliases=_EXPERTS,
        mixer="short_convolution",
        state_kind="conv",
        qk_norm="head",
        experts="moe_intermediate_size",
        dense_first="num_dense_layers",
        variant=_of_lfm2_moe,
        **_STATE,
    ),
    "lfm3": Family(
        defaults(128000, 2048, 7680, 24, 16, 128000, num_key_value_heads=4, head_dim=128)
        | {"tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 7}
        | {"sliding_window": 256, "use_sandwich_norm": True, "use_attention_gate": True},
        mixer="short_convolution",
        state_kind="conv",
        full_rule=lambda index, _: index % 4 == 2,
        slides_rule=lambda index, _: index % 4 == 0 and index > 0,
        window="types",
        norms_if=("use_sandwich_norm", 4),
        qk_norm="head",
        head_gate_if="use_attention_gate",
        **ATTENTION_BIAS,
        **_STATE,
    ),
    "minimax": Family(
        defaults(32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8, block_size=256)
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        mixer="lightning",
        full_rule=lambda index, _: index % 2 == 0,
        experts="intermediate_size",
        **_STATE,
        wide_shares=True,
    ),
}
