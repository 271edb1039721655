"""Families that the self-test judges, whose files say sizes in a form of their own, or whose layers
have parts that no other family has: by what the plan sizes them from ``config.json`` alone.

Owns the rows of these, and what their settings mean in the words of other families.
Tests hold each row against transformers' class on the meta device.
"""

from collections.abc import Mapping
from typing import Any

from fairlead_runtime.sizing.families.patterns import always
from fairlead_runtime.sizing.family import ATTENTION_BIAS, Family, defaults

Settings = Mapping[str, Any]
Meant = tuple[Family, Settings]


def _of_dbrx(family: Family, settings: Settings) -> Meant:
    """Its attention and its experts have objects of their own."""
    attention, experts = (settings.get(key) for key in ("attn_config", "ffn_config"))
    names = {"kv_n_heads": "num_key_value_heads", "rope_theta": "attn_config.rope_theta"}
    more = {
        "ffn_hidden_size": "moe_intermediate_size",
        "moe_num_experts": "num_local_experts",
        "moe_top_k": "num_experts_per_tok",
    }
    rest = {key: settings[key] for key in settings.keys() - {*names.values(), *more.values()}}
    named = _renamed(attention, names, "attn_config") | _renamed(experts, more, "ffn_config")
    return family, rest | named


def _renamed(part: object, names: Mapping[str, str], field: str) -> dict[str, Any]:
    """The settings of a part that it gives, by the names that the row knows. What is no object
    stands for a value that is refused.
    """
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        return {names[min(names)]: {field: part}}
    return {names[key]: part[key] for key in names if key in part}


def _of_jetmoe(family: Family, settings: Settings) -> Meant:
    """Each chosen expert has as many query heads as there are of keys, which are repeated for it:
    the cache has them so.
    """
    heads, chosen = (
        settings.get(key, family.defaults[key])
        for key in ("num_key_value_heads", "num_experts_per_tok")
    )
    counts = all(isinstance(x, int) and 0 < x < 1 << 14 for x in (heads, chosen))
    total = heads * chosen if counts else heads
    return family, {**settings, "num_attention_heads": total, "num_key_value_heads": total}


def _of_laguna(family: Family, settings: Settings) -> Meant:
    """Its gate is one for each head or for each element."""
    by_head = settings.get("gating", True) in (True, "per-head")
    return family, {**settings, "gate_heads": by_head, "gate_elements": not by_head}


def _of_minimax_m3(family: Family, settings: Settings) -> Meant:
    """Which layers choose keys by an index, and which have experts, older files say by numbers."""
    named: dict[str, Any] = {}
    index = settings.get("sparse_attention_config")
    if settings.get("layer_types") is None and isinstance(index, Mapping):
        flags = index.get("sparse_attention_freq")
        if isinstance(flags, list | tuple):
            named["layer_types"] = ["minimax_m3_sparse" if f else "full_attention" for f in flags]
        elif "sparse_attention_freq" in index:
            named["layer_types"] = flags
    flags = settings.get("moe_layer_freq")
    if settings.get("mlp_layer_types") is None and flags is not None:
        listed = isinstance(flags, list | tuple)
        named["mlp_layer_types"] = ["sparse" if f else "dense" for f in flags] if listed else flags
    return family, {**settings, **named}


def _of_moshi(family: Family, settings: Settings) -> Meant:
    """Its first matrix gives both halves of the MLP."""
    both = settings.get("ffn_dim", family.defaults["intermediate_size"] * 2)
    even = isinstance(both, int) and both % 2 == 0
    audio = settings.get("audio_encoder_config")
    count = audio.get("num_quantizers", 32) if isinstance(audio, Mapping) else 32
    return family, {
        **settings,
        "ffn_dim": both // 2 if even else {"ffn_dim": both},
        "audio_encoder_config.num_quantizers": count,
    }


OWN_FORMS: Mapping[str, Family] = {
    "cohere_compass_text": Family(
        defaults(256000, 8192, 22528, 40, 64, 8192, tie_word_embeddings=True, sliding_window=4096),
        norms=1,
        logit_copies=2,
        window="types",
        full_rule=always,
        **ATTENTION_BIAS,
    ),
    "ctrl": Family(
        defaults(246534, 1280, 8192, 48, 16, 256, tie_word_embeddings=True),
        shardable=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated=False,
        mlp_copies=2,
        more_hidden=3,
        norm_bias=True,
        reads_kv_heads=False,
        positions=True,
        position_table=True,
        head_bias=True,
        aliases={
            "hidden_size": "n_embd",
            "intermediate_size": "dff",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
    ),
    "dbrx": Family(
        defaults(32000, 2048, None, 24, 16, 2048, num_key_value_heads=1)
        | {"moe_intermediate_size": 3584, "num_local_experts": 4, "num_experts_per_tok": 1},
        shardable=False,
        experts="moe_intermediate_size",
        expert_loop="each",
        reads_head_dim=False,
        even_heads=True,
        needs=("attn_config.rope_theta",),
        never=("tie_word_embeddings", "head_dim"),
        variant=_of_dbrx,
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
    ),
    "jetmoe": Family(
        defaults(32000, 2048, 5632, 12, 32, 4096, num_key_value_heads=16, head_dim=128)
        | {"tie_word_embeddings": True, "num_local_experts": 8, "num_experts_per_tok": 2},
        shardable=False,
        experts="intermediate_size",
        expert_loop="sorted",
        more_hidden=1,
        query_experts=True,
        linear_router=True,
        sum_bias=True,
        at_most=(("num_experts_per_tok", "num_local_experts"),),
        variant=_of_jetmoe,
        aliases={"head_dim": "kv_channels"},
    ),
    "laguna": Family(
        defaults(100352, 2048, 8192, 40, 48, 131072, num_key_value_heads=8, head_dim=128)
        | {"sliding_window": 512, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512}
        | {"num_local_experts": 256, "num_experts_per_tok": 8},
        shardable=False,
        qk_norm="head",
        heads_by_layer="num_attention_heads_per_layer",
        head_gate_if="gate_heads",
        out_gate="gate_elements",
        wide_gates=True,
        experts="moe_intermediate_size",
        shared_experts=(1, "shared_expert_intermediate_size"),
        router_bias=True,
        mlp_types=True,
        dense_first=1,
        needs=("sliding_window",),
        window="types",
        full_rule=always,
        never=("moe_apply_router_weight_on_input",),
        variant=_of_laguna,
        aliases={"num_local_experts": "num_experts"},
        **ATTENTION_BIAS,
    ),
    "minimax_m3_vl_text": Family(
        defaults(200064, 6144, 3072, 60, 64, 524288, num_key_value_heads=4, head_dim=128)
        | {"dense_intermediate_size": 12288, "shared_intermediate_size": 3072}
        | {"num_local_experts": 128, "num_experts_per_tok": 4},
        shardable=False,
        qk_norm="head",
        experts="intermediate_size",
        shared_experts=(1, "shared_intermediate_size"),
        dense_width="dense_intermediate_size",
        mlp_types=True,
        mlp_copies=7,
        window="none",
        full_rule=always,
        choice_buffer="typed",
        wide_shares=True,
        variant=_of_minimax_m3,
    ),
    "modernbert-decoder": Family(
        defaults(50368, 768, 1152, 22, 12, 8192, tie_word_embeddings=True)
        | {"norm_bias": False, "decoder_bias": True, "classifier_bias": False}
        | {"local_attention": 128, "global_attn_every_n_layers": 3},
        shardable=False,
        mlp_copies=4,
        more_hidden=1,
        # The first layer has one, and the embedding the other.
        norm_bias="norm_bias",
        mlp_bias="mlp_bias",
        reads_kv_heads=False,
        before_head="classifier_bias",
        head_bias="decoder_bias",
        window="types",
        window_twice="local_attention",
        full_first="global_attn_every_n_layers",
        never=("head_dim",),
        wide_rotary="products",
        **ATTENTION_BIAS,
    ),
    "moshi": Family(
        defaults(32000, 4096, 11264, 32, 32, 3000, num_codebooks=8, sliding_window=3000),
        needs=("sliding_window",),
        shardable=False,
        fuses=False,
        fuses_nowhere=True,
        mlp_copies=4,
        embedding_rows=1,
        layer_rotary=True,
        even_heads=True,
        at_most=(("num_codebooks", "audio_encoder_config.num_quantizers"),),
        never=("tie_word_embeddings",),
        variant=_of_moshi,
        aliases={"intermediate_size": "ffn_dim"},
    ),
    "phi4_multimodal": Family(
        defaults(200064, 3072, 8192, 32, 32, 131072, num_key_value_heads=8),
        shardable=False,
        mlp_copies=4,
        made=("num_key_value_heads",),
        window="all",
        rope_types=("default", "longrope"),
        rope_names={"su": "longrope", "yarn": "longrope"},
    ),
}
