"""Model families as data: the default settings and layer structure of those that are served.

Owns the table of the families that are tested as a whole; ``family`` has the form of a row,
``families/`` those that the self-test judges, and those that are refused. Tests check them against
transformers' own classes. A family in no table is tried and tested by the self-test
(``models/unlisted.py``).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fairlead_runtime.sizing.family import (
    ATTENTION_BIAS,
    NO_RMS,
    Family,
    Parts,
    defaults,
)

_LLAMA = defaults(32000, 4096, 11008, 32, 32, 2048, partial_rotary_factor=1.0)
_QWEN = defaults(
    151936,
    4096,
    22016,
    32,
    32,
    32768,
    num_key_value_heads=32,
    sliding_window=4096,
    max_window_layers=28,
)
_GEMMA = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_MIXTRAL = defaults(
    32000,
    4096,
    14336,
    32,
    32,
    131072,
    num_key_value_heads=8,
    num_local_experts=8,
    num_experts_per_tok=2,
)
_QWEN_WINDOWS: dict[str, Any] = {
    "window": "types",
    "window_if": "use_sliding_window",
    "window_from": "max_window_layers",
}
_GEMMA4 = Family(
    defaults(262144, 2304, 9216, 30, 8, 131072, num_key_value_heads=4, sliding_window=512)
    | {"tie_word_embeddings": True, "head_dim": 256, "global_head_dim": 512}
    | {"attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
    | {"enable_moe_block": False},
    aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "top_k_experts"},
    fuses=False,
    fuses_nowhere=True,
    shardable=False,
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    norms=4,
    qk_norm="head",
    experts="moe_intermediate_size",
    experts_if="enable_moe_block",
    wide_shares=True,
    full_dim="global_head_dim",
    full_kv_heads="num_global_key_value_heads",
    full_if="attention_k_eq_v",
    window="types",
    full_every=6,
    last_full=True,
    shared="num_kv_shared_layers",
    wide_readers="use_double_wide_mlp",
    layer_inputs="hidden_size_per_layer_input",
    layer_buffers=1,
    scales=(1, 1),
    # Its configuration checks ``longrope`` by one width of all heads.
    rope_types=("default", "proportional", "linear", "dynamic", "yarn", "llama3"),
)

# One entry per model_type: the defaults of transformers 5.23's configuration class and what its
# layers hold.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(_LLAMA, even_heads=True, mlp_bias="mlp_bias", **ATTENTION_BIAS),
    "granite": Family(_LLAMA, logit_copies=2, mlp_bias="mlp_bias", **ATTENTION_BIAS),
    "mistral": Family(
        defaults(32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8, sliding_window=4096),
        window="all",
    ),
    "mixtral": Family(
        _MIXTRAL,
        experts="intermediate_size",
        wide_shares=True,
        window="all",
    ),
    "qwen2": Family(_QWEN, made=("num_key_value_heads",), qkv_bias=True, **_QWEN_WINDOWS),
    "qwen3": Family(
        _QWEN | {"head_dim": 128},
        made=("num_key_value_heads",),
        qk_norm="head",
        **ATTENTION_BIAS,
        **_QWEN_WINDOWS,
    ),
    "qwen3_moe": Family(
        defaults(151936, 2048, 6144, 24, 32, 32768, num_key_value_heads=4, sliding_window=4096)
        | {"moe_intermediate_size": 768, "num_local_experts": 128, "num_experts_per_tok": 8},
        qk_norm="head",
        experts="moe_intermediate_size",
        reads_sparse_steps=True,
        window="all",
        window_if="use_sliding_window",
        **ATTENTION_BIAS,
    ),
    "gpt_oss": Family(
        defaults(201088, 2880, 2880, 36, 64, 131072, num_key_value_heads=8, sliding_window=128)
        | {
            "head_dim": 64,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        shardable=False,
        experts="intermediate_size",
        expert_bias=True,
        mxfp4=True,
        mlp_copies=8,
        sinks=True,
        window="types",
        full_every=2,
        **ATTENTION_BIAS,
        wide_norms=True,
    ),
    "mimo_v2_flash": Family(
        defaults(152576, 4096, 16384, 48, 64, 131072, num_key_value_heads=4, sliding_window=129)
        | {"head_dim": 192, "v_head_dim": 128, "moe_intermediate_size": 2048}
        | {"num_local_experts": 256, "num_experts_per_tok": 8},
        aliases={"num_local_experts": "n_routed_experts"},
        needs=("sliding_window",),
        shardable=False,
        qkv_bias="attention_bias",
        experts="moe_intermediate_size",
        mlp_types=True,
        dense_first=1,
        windowed_sinks=True,
        value_dim="v_head_dim",
        windowed_kv_times=2,
        window="types",
        full_rule=lambda index, _: index == 0 or (index + 1) % 6 == 0,
        window_before="sliding_window_size",
        choice_buffer="float32",
        wide_shares=True,
    ),
    "gemma": Family(
        defaults(256000, 3072, 24576, 28, 16, 8192, num_key_value_heads=16) | _GEMMA,
        scales=(1, 0),
        **ATTENTION_BIAS,
    ),
    "gemma2": Family(
        defaults(256000, 2304, 9216, 26, 8, 8192, num_key_value_heads=4)
        | _GEMMA
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        even_heads=True,
        scales=(1, 0),
        norms=4,
        window="types",
        full_every=2,
        **ATTENTION_BIAS,
    ),
    "gemma3_text": Family(
        defaults(262208, 2304, 9216, 26, 8, 131072, num_key_value_heads=4) | _GEMMA,
        even_heads=True,
        scales=(1, 0),
        norms=4,
        qk_norm="head",
        window="types",
        full_every="sliding_window_pattern",
        **ATTENTION_BIAS,
    ),
    "gemma3n_text": Family(
        defaults(262400, 2048, 16384, 35, 8, 32768, num_key_value_heads=2)
        | _GEMMA
        | {"sliding_window": 512, "final_logit_softcapping": 30.0, "num_kv_shared_layers": 15}
        | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
        | {"altup_num_inputs": 4, "laurel_rank": 64},
        fuses=False,
        fuses_nowhere=True,
        shardable=False,  # an MLP keeps the largest of all gates of a token, and a rank has some
        even_heads=True,
        norms=7,
        qk_norm="head",
        mlp_copies=4,
        window="types",
        full_every=5,
        shared="num_kv_shared_layers",
        layer_inputs="hidden_size_per_layer_input",
        streams="altup_num_inputs",
        laurel="laurel_rank",
        layer_buffers=1,
        scales=(1, 3),
        **ATTENTION_BIAS,
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(
        _GEMMA4,
        defaults={**_GEMMA4.defaults, "max_position_embeddings": 262144, "sliding_window": 1024},
        layer_inputs="",
        experts="",
        experts_if="",
    ),
    "phi3": Family(
        defaults(32064, 3072, 8192, 32, 32, 4096, partial_rotary_factor=1.0),
        shardable=False,
        mlp_copies=4,
        window="all",
        rope_types=("default", "longrope"),
        rope_names={"su": "longrope", "yarn": "longrope"},
    ),
    "olmo2": Family(
        defaults(50304, 4096, 11008, 32, 32, 2048),
        wide_rotary="tables",
        fuses_nowhere=True,
        shardable=False,
        qk_norm="flat",
        **ATTENTION_BIAS,
    ),
    "cohere": Family(
        defaults(256000, 8192, 22528, 40, 64, 8192, tie_word_embeddings=True, use_qk_norm=False),
        norms=1,
        wide_rotary="queries",
        logit_copies=2,
        qk_norm="flat",
        qk_norm_if="use_qk_norm",
        **ATTENTION_BIAS,
    ),
    "cohere2": Family(
        defaults(256000, 8192, 22528, 40, 64, 8192, tie_word_embeddings=True)
        | {"sliding_window": 4096, "sliding_window_pattern": 4},
        norms=1,
        wide_rotary="queries",
        logit_copies=2,
        window="types",
        full_every="sliding_window_pattern",
        **ATTENTION_BIAS,
    ),
    "starcoder2": Family(
        defaults(49152, 3072, 12288, 30, 24, 4096, num_key_value_heads=2)
        | {"tie_word_embeddings": True, "use_bias": True},
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        gated=False,
        mlp_copies=2,
        norm_bias=True,
        window="all",
    ),
    "gpt2": Family(
        defaults(50257, 768, None, 12, 12, 1024, tie_word_embeddings=True),
        shardable=False,
        aliases={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated=False,
        mlp_copies=5,  # its activation is written out in five operations
        reads_kv_heads=False,
        norm_bias=True,
        positions=True,
    ),
    "gpt_neox": Family(
        defaults(50432, 6144, 24576, 44, 64, 2048, attention_bias=True),
        mlp_bias=True,
        gated=False,
        mlp_copies=2,
        reads_kv_heads=False,
        norm_bias=True,
        **ATTENTION_BIAS,
    ),
}

_QWEN_VL = Family(
    defaults(152064, 8192, 29568, 80, 64, 32768, num_key_value_heads=8)
    | {"sliding_window": 4096, "max_window_layers": 80},
    made=("num_key_value_heads", "use_sliding_window"),
    reads_head_dim=False,
    qkv_bias=True,
    rope_names={"mrope": "default"},
    **_QWEN_WINDOWS,
)
# The texts of models of several parts that are no models of their own, by the text's model_type.
TEXTS: Mapping[str, Family] = {
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen3_vl_text": Family(
        defaults(151936, 4096, 22016, 32, 32, 128000, num_key_value_heads=32, head_dim=128),
        made=("num_key_value_heads",),
        shardable=False,
        qk_norm="head",
        **ATTENTION_BIAS,
    ),
    "qwen3_vl_moe_text": Family(
        defaults(151936, 2048, 5632, 24, 16, 128000, num_key_value_heads=16)
        | {"moe_intermediate_size": 1408, "num_local_experts": 60, "num_experts_per_tok": 4},
        qk_norm="head",
        experts="moe_intermediate_size",
        reads_sparse_steps=True,
        **ATTENTION_BIAS,
    ),
    "glm4v_text": Family(
        defaults(151552, 4096, 13696, 40, 32, 32768, num_key_value_heads=2),
        made=("num_key_value_heads",),
        reads_head_dim=False,
        shardable=False,
        qkv_bias=True,
        norms=4,
        mlp_copies=4,
    ),
}

# Those that are tested as a whole, by its model_type; families/wholes.py has more.
PARTS: Mapping[str, Parts] = {
    "gemma3": Parts("gemma3_text", framed=True),
    "gemma3n": Parts("gemma3n_text", alone=True),
    "gemma4": Parts("gemma4_text", framed=True),
    "gemma4_unified": Parts("gemma4_unified_text"),
    "mistral3": Parts("mistral", any_text=True, never=NO_RMS),
    "qwen2_vl": Parts("qwen2_vl_text", tied=False, either=True, flat=True),
    "qwen2_5_vl": Parts("qwen2_5_vl_text", tied=False, either=True, flat=True),
    "qwen3_vl": Parts("qwen3_vl_text", tied=False),
    "qwen3_vl_moe": Parts("qwen3_vl_moe_text", tied=False),
    "glm4v": Parts("glm4v_text", tied=False, either=True),
    "internvl": Parts("qwen2", any_text=True),
    "smolvlm": Parts("llama", tied=False, any_text=True),
    "idefics3": Parts("llama", tied=False, any_text=True),
    "aya_vision": Parts("cohere2", any_text=True),
    "cohere2_vision": Parts("cohere2", any_text=True),
    "qwen3_5": Parts("qwen3_5_text", tied=False),
    "qwen3_5_moe": Parts("qwen3_5_moe_text", tied=False),
    "lfm2_vl": Parts("lfm2", any_text=True),
}

# Families of families/ that may be the text of a model of several parts: tests compare their text
# with transformers'.
JUDGED = frozenset(
    (
        *("apertus", "arcee", "ernie4_5", "exaone4", "glm", "glm4", "gpt_bigcode", "granitemoe"),
        *("helium", "hunyuan_v1_dense", "ministral", "ministral3", "nemotron", "olmo", "olmo3"),
        *("olmoe", "opt"),
        *("persimmon", "phi", "phimoe", "qwen2_moe", "seed_oss", "smollm3", "stablelm"),
    )
)

# A family that is not in the table is sized by the most that any family in it keeps alive at once.
UNKNOWN_DENSE = Family({}, mlp_copies=6, logit_copies=2, half_logit_copies=5)
UNKNOWN_EXPERTS = Family({}, mlp_copies=8, logit_copies=2)
