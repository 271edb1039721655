"""Other names of settings, as ``attribute_map`` of transformers' configuration classes has them.

Owns the table, by model_type: the other name → the one that the family's row knows.
A test holds it against the classes.
"""

from collections.abc import Mapping

_COUNTED = {"num_experts": "num_local_experts"}
_KEPT = {"num_local_experts": "num_experts"}
_ROUTED = {"num_local_experts": "n_routed_experts"}
_BLOCKS = {"layer_types": "layers_block_type"}
_MTP = {"num_mtp_layers": "num_nextn_predict_layers"}
_GPT2 = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}

OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("ctrl", "gpt-sw3", "gpt2", "gpt_bigcode"), _GPT2),
    **dict.fromkeys(("gpt_oss", "kolibri1", "minimax", "minimax_m2", "mixtral"), _COUNTED),
    **dict.fromkeys(("minimax_m3_vl_text", "qwen3_moe", "qwen3_vl_moe_text"), _COUNTED),
    **dict.fromkeys(("flex_olmo", "hy_v3", "jamba", "olmoe"), _KEPT),
    **dict.fromkeys(("dots1", "mimo_v2_flash", "solar_open"), _ROUTED),
    **dict.fromkeys(("bamba", "falcon_h1"), _BLOCKS),
    "dbrx": {
        "hidden_size": "d_model",
        "max_position_embeddings": "max_seq_len",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "glm4_moe": _ROUTED | _MTP,
    "granitemoehybrid": {"layers_block_type": "layer_types"},
    "hunyuan_v1_moe": _KEPT | {"num_experts_per_tok": "moe_topk"},
    "internlm3": {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    "jetmoe": {"head_dim": "kv_channels"},
    "lfm3": {"rms_norm_eps": "norm_eps"},
    "mellum": _COUNTED | _MTP,
    "nemotron_h": _BLOCKS | _ROUTED,
}
