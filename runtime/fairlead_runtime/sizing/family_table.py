"""Model families as data: the default settings and layer structure of those that are served, and
the reasons for which others are refused.

Owns both tables; tests check them against transformers' own classes. A family in neither table is
tried and tested by the self-test (``models/unlisted.py``). Counts nothing; ``parameters`` does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """How one ``model_type`` is built. A bias is a constant or the name of the setting that
    switches it on.
    """

    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)  # our name → the family's
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    gated: bool = True
    # Tensors of the MLP's inner width alive at once; measured, see the profiling run.
    mlp_copies: int = 3
    logit_copies: int = 1  # the same for logits: 2 where they are scaled or capped afterwards
    reads_kv_heads: bool = True  # whether num_key_value_heads and head_dim are read at all
    norms: int = 2  # normalisations of the hidden state in one layer
    norm_bias: bool = False  # LayerNorm with a bias instead of RMSNorm
    qk_norm: str = ""  # "head": one weight per head_dim; "flat": one per projected element
    qk_norm_if: str = ""  # the setting that switches qk_norm on; "" for always
    positions: bool = False  # learned position embeddings
    experts: str = ""  # the setting that gives one expert's width; "" for a dense model
    expert_bias: bool = False
    sinks: bool = False  # one attention sink per head
    window: str = ""  # "": never; "all": one window in every layer; "types": as layer_types say
    window_if: str = ""  # the setting that switches windows on
    # Default of layer_types: layers n, 2n, ... are full, the others slide.
    full_every: int | str = 0
    window_from: str = ""  # default of layer_types: this layer and all above it slide
    shardable: bool = True  # transformers' plan for ranks has its layers: device/ranks/shards.py


def _defaults(
    vocab: int, hidden: int, inner: int | None, layers: int, heads: int, longest: int, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": longest,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
    } | more


_LLAMA = _defaults(32000, 4096, 11008, 32, 32, 2048)
_QWEN = _defaults(
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
_MIXTRAL = _defaults(
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
_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}

# One entry per model_type: the defaults of transformers 5.23's configuration class and what its
# layers hold.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(_LLAMA, mlp_bias="mlp_bias", **_ATTENTION_BIAS),
    "granite": Family(_LLAMA, logit_copies=2, mlp_bias="mlp_bias", **_ATTENTION_BIAS),
    "mistral": Family(
        _defaults(32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8, sliding_window=4096),
        window="all",
    ),
    "mixtral": Family(_MIXTRAL, experts="intermediate_size", window="all"),
    "qwen2": Family(_QWEN, qkv_bias=True, **_QWEN_WINDOWS),
    "qwen3": Family(_QWEN | {"head_dim": 128}, qk_norm="head", **_ATTENTION_BIAS, **_QWEN_WINDOWS),
    "qwen3_moe": Family(
        _defaults(151936, 2048, 6144, 24, 32, 32768, num_key_value_heads=4, sliding_window=4096)
        | {"moe_intermediate_size": 768, "num_local_experts": 128, "num_experts_per_tok": 8},
        aliases={"num_local_experts": "num_experts"},
        qk_norm="head",
        experts="moe_intermediate_size",
        window="all",
        window_if="use_sliding_window",
        **_ATTENTION_BIAS,
    ),
    "gpt_oss": Family(
        _defaults(201088, 2880, 2880, 36, 64, 131072, num_key_value_heads=8, sliding_window=128)
        | {
            "head_dim": 64,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        shardable=False,
        aliases={"num_local_experts": "num_experts"},
        experts="intermediate_size",
        expert_bias=True,
        mlp_copies=8,
        sinks=True,
        window="types",
        full_every=2,
        **_ATTENTION_BIAS,
    ),
    "gemma": Family(
        _defaults(256000, 3072, 24576, 28, 16, 8192, num_key_value_heads=16) | _GEMMA,
        **_ATTENTION_BIAS,
    ),
    "gemma2": Family(
        _defaults(256000, 2304, 9216, 26, 8, 8192, num_key_value_heads=4)
        | _GEMMA
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        norms=4,
        window="types",
        full_every=2,
        **_ATTENTION_BIAS,
    ),
    "gemma3_text": Family(
        _defaults(262208, 2304, 9216, 26, 8, 131072, num_key_value_heads=4) | _GEMMA,
        norms=4,
        qk_norm="head",
        window="types",
        full_every="sliding_window_pattern",
        **_ATTENTION_BIAS,
    ),
    "phi3": Family(
        _defaults(32064, 3072, 8192, 32, 32, 4096), shardable=False, mlp_copies=4, window="all"
    ),
    "olmo2": Family(
        _defaults(50304, 4096, 11008, 32, 32, 2048),
        shardable=False,
        qk_norm="flat",
        **_ATTENTION_BIAS,
    ),
    "cohere": Family(
        _defaults(256000, 8192, 22528, 40, 64, 8192, tie_word_embeddings=True, use_qk_norm=False),
        norms=1,
        logit_copies=2,
        qk_norm="flat",
        qk_norm_if="use_qk_norm",
        **_ATTENTION_BIAS,
    ),
    "starcoder2": Family(
        _defaults(49152, 3072, 12288, 30, 24, 4096, num_key_value_heads=2)
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
        _defaults(50257, 768, None, 12, 12, 1024, tie_word_embeddings=True),
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
        _defaults(50432, 6144, 24576, 44, 64, 2048, attention_bias=True),
        mlp_bias=True,
        gated=False,
        mlp_copies=2,
        reads_kv_heads=False,
        norm_bias=True,
        **_ATTENTION_BIAS,
    ),
}

# A family that is not in the table is sized by the most that any family in it keeps alive at once.
UNKNOWN_DENSE = Family({}, mlp_copies=6, logit_copies=2)
UNKNOWN_EXPERTS = Family({}, mlp_copies=8, logit_copies=2)

# Families that do not work on a paged cache, and would generate wrong text without an error.
STATE = "it keeps a recurrent state instead of, or beside, keys and values"
OLD = "its attention does not go through transformers' attention interface"
_SHARED = "its layers share keys and values or differ in head size"
_LATENT = "its latent attention has keys and values of different sizes"
_CHUNKED = "its chunked attention is neither full nor a sliding window"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        [
            "rwkv",
            "mamba",
            "mamba2",
            "falcon_mamba",
            "xlstm",
            "qwen3_next",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            "bamba",
            "jamba",
            "zamba",
            "zamba2",
            "nemotron_h",
            "falcon_h1",
            "granitemoehybrid",
            "lfm2",
            "lfm2_moe",
            "minimax",
            "kimi_linear",
            "olmo_hybrid",
            "recurrent_gemma",
            "bailing_hybrid",
        ],
        STATE,
    ),
    **dict.fromkeys(
        [
            "bloom",
            "mpt",
            "falcon",
            "gptj",
            "codegen",
            "gpt_neo",
            "gpt_neox_japanese",
            "xglm",
            "rembert",
            "roformer",
            "big_bird",
            "cpmant",
            "openai-gpt",
            "xlnet",
            "xlm",
            "flaubert",
            "prophetnet",
            "megatron-bert",
        ],
        OLD,
    ),
    **dict.fromkeys(["gemma3n", "gemma3n_text", "gemma4", "gemma4_text"], _SHARED),
    **dict.fromkeys(["llama4", "llama4_text"], _CHUNKED),
    **dict.fromkeys(["deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "youtu"], _LATENT),
}
