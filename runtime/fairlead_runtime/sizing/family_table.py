"""Model families as data: the default settings and layer structure of those that are served.

Owns the form of a row, and the table of the families that are tested as a whole; ``families/`` has
those that the self-test judges, and those that are refused. Tests check them against transformers'
own classes. A family in no table is tried and tested by the self-test (``models/unlisted.py``).
Counts nothing; ``parameters`` does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
    reads_head_dim: bool = True  # False: heads divide the hidden size, whatever head_dim says
    # Settings whose null stands for what its class makes of others, though it has numbers for them.
    made: tuple[str, ...] = ()
    even_heads: bool = False  # the heads must divide the hidden size, whatever head_dim says
    needs: tuple[str, ...] = ()  # settings for which its class has no default that works
    exact_heads: bool = False  # the heads must give just the hidden size
    # What its class refuses: two settings that differ, settings that are on, a setting that is not
    # less than another.
    same: tuple[str, str] | None = None
    never: tuple[str, ...] = ()
    less: tuple[tuple[str, str], ...] = ()
    at_most: tuple[tuple[str, str], ...] = ()  # the same of one that is more
    needs_both: bool = False  # its class refuses a model of one kind of layers
    reads_sparse_steps: bool = False  # whether decoder_sparse_step and mlp_only_layers are read
    norms: int = 2  # normalisations of the hidden state in one layer
    norm_bias: bool | str = False  # LayerNorm with a bias instead of RMSNorm
    qk_norm: str = ""  # "head": one weight per head_dim; "flat": one per projected element
    qk_norm_if: str = ""  # the setting that switches qk_norm on; "" for always
    positions: bool = False  # learned position embeddings
    experts: str = ""  # the setting that gives one expert's width; "" for a dense model
    experts_if: str = ""  # the setting that switches them on, each layer's beside its MLP
    expert_bias: bool = False
    sum_bias: bool = False  # added to what the chosen ones give together
    # Queries, and what attention gives, are the experts' own, each with as many heads as there are
    # of keys; keys are repeated for each that is chosen.
    query_experts: bool = False
    mxfp4: bool = False  # its experts are also published in MXFP4, under names of their own
    sinks: bool = False  # one attention sink per head
    windowed_sinks: bool = False  # the same in layers with a window alone
    heads_by_layer: str = ""  # the setting that lists the query heads of each layer
    value_dim: str = ""  # the setting that gives a value's width; "": it is a key's
    windowed_kv_times: int = 1  # layers with a window have so many times the key-value heads
    # The settings that give a full layer's width of a head and, where ``full_if`` is on, its
    # key-value heads, if it has others than layers with a window; there values are keys' products,
    # too. ``per_layer_config`` may give both for each layer instead.
    full_dim: str = ""
    full_kv_heads: str = ""
    full_if: str = ""
    # "": never; "all": one window in every layer; "types": as layer_types say; "none": they may say
    # full_attention alone.
    window: str = ""
    window_if: str = ""  # the setting that switches windows on
    # Default of layer_types: layers n, 2n, ... are full, the others slide.
    full_every: int | str = 0
    full_first: str = ""  # the same of layers 0, n, 2n, ...: the setting that says n
    last_full: bool = False  # whatever layer_types say
    window_from: str = ""  # default of layer_types: this layer and all above it slide
    window_before: str = ""  # the setting that counts the window without the query's own token
    window_twice: str = ""  # the setting that is twice the window, where that is not said
    fuses: bool = (
        True  # False: its layers are known to be no ones that a CPU's fused layers compute
    )
    gpus_fuse: bool = False  # those of GPUs compute all of them but the MLP
    fuses_nowhere: bool = False  # nor those of any device: they multiply plain weights alone
    # The setting that counts the last layers, which keep no keys: each reads those of the last
    # layer of its kind before them.
    shared: str = ""
    wide_readers: str = ""  # the setting that doubles the MLP of these layers
    # The setting that gives the width of the input that each layer has of its own, from a table of
    # ``vocab_size_per_layer_input`` rows and from the embedding.
    layer_inputs: str = ""
    framed: bool = False  # the whole's own code keeps these, and a copy of the embedding, beside
    # The setting that counts the residual streams of which each layer reads one and corrects all
    # (AltUp, arXiv:2301.13310), and that of the rank of a product beside attention (LAuReL,
    # arXiv:2411.07501).
    streams: str = ""
    laurel: str = ""
    shardable: bool = True  # transformers' plan for ranks has its layers: device/ranks/shards.py
    # Default of layer_types where no period says it: whether this layer, of so many, is full.
    full_rule: Callable[[int, int], bool] | None = None
    slides_rule: Callable[[int, int], bool] | None = (
        None  # of those that are not, in states' families
    )
    # Another default: layers slide where this list has 0, without it layers n, 2n, ... do.
    slides_without: str = ""
    window_below: str = ""  # layers from this setting's number on are full
    prefix_every: str = ""  # the period of the dense layers before the first mixture
    norms_if: tuple[str, int] | None = None  # the norms where that setting is on
    norms_weighted: bool | str = True  # whether norms have weights at all
    inner_norms: bool = False  # of attention's result and of what the MLP's activation returns
    qk_norm_bias: bool = False
    final_norm: bool | str = True
    out_gate: bool | str = False  # attention's result is gated, element by element
    out_gate_bias: bool = False  # with a number for each head
    one_kv_head_if: str = ""  # the setting that lets all heads share a key
    head_bias: bool | str = False
    position_offset: int = 0  # rows of the learned positions before the first
    position_table: bool = False  # they are a buffer that its class makes, and nothing is learned
    embedding_rows: int = 0  # of the embedding, beside those of the vocabulary
    # The setting for the bias of a matrix that hidden states take before the head, with a norm.
    before_head: str = ""
    embedding_width: str = ""  # the setting for embeddings narrower than the hidden state
    # Of each layer: parameters of its activation, and numbers of buffers that a checkpoint has.
    activation_parameters: int = 0
    layer_buffers: int = 0
    layer_rotary: bool = False  # its layers keep frequencies each, twice, in float32
    # Of a mixture: how many experts every token meets (or the setting that says it) and the width
    # of one; the layers before the first mixture, and whether mlp_layer_types says it instead; the
    # last mixture; the width of a dense layer.
    shared_experts: tuple[int | str, str] | None = None
    shared_gate: bool = False
    router_bias: bool = False
    # The same, as a buffer that is no parameter: "float32", or "typed" as the model.
    choice_buffer: str = ""
    # What a model in 16 bits has in float32 (``_keep_in_fp32_modules_strict``): routers, sinks; in
    # float16 alone (``_keep_in_fp32_modules``): norms of the hidden state, and with those of
    # queries and keys the router's biases.
    wide_router: bool = False
    wide_sinks: bool = False
    wide_norms: bool = False
    wide_qk_norms: bool = False
    # What a model in 16 bits computes in float32: the shares of chosen experts, and so what these
    # give; rotary embeddings, by "tables" in float32 or of "queries" and keys as copies.
    wide_shares: bool = False
    wide_rotary: str = ""
    # Of rotary embeddings: the types that its class takes, if not all; its names for some of them;
    # numbers that scaled ones need besides.
    rope_types: tuple[str, ...] = ()
    rope_names: Mapping[str, str] = field(default_factory=dict)
    rope_scales: tuple[str, ...] = ()
    dense_first: int | str = 0
    mlp_types: bool = False
    sparse_last: str = ""
    dense_width: str = "intermediate_size"
    sparse_every: tuple[str, str] = ("", "")  # settings: n and i, layers i, i + n, ... have experts
    expert_latent: str = ""  # the setting for the width of what experts take, if not the hidden one
    # Of a family with states: the mechanism, by its name in ``mixers.MIXERS``; the kind of the
    # layers that have it; what tells each layer's kind (``layer_kinds``).
    mixer: str = ""
    state_kind: str = "linear_attention"
    kinds: str = "types"
    one_part: bool = False  # a layer is attention, or a mixer, or an MLP, with one norm
    gate_in_queries: bool = False  # the projection of queries gives as many gates, with a bias
    head_gate_if: str = ""  # the setting that gates each head of attention's result
    # What older or smaller files say in other words: the row and the settings that they mean.
    variant: Callable[["Family", Mapping[str, Any]], tuple["Family", Mapping[str, Any]]] | None = (
        None
    )


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


_LLAMA = _defaults(32000, 4096, 11008, 32, 32, 2048, partial_rotary_factor=1.0)
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
# The same for the tables in families/.
defaults, ATTENTION_BIAS = _defaults, _ATTENTION_BIAS

_GEMMA4 = Family(
    _defaults(262144, 2304, 9216, 30, 8, 131072, num_key_value_heads=4, sliding_window=512)
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
)

# One entry per model_type: the defaults of transformers 5.23's configuration class and what its
# layers hold.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(_LLAMA, even_heads=True, mlp_bias="mlp_bias", **_ATTENTION_BIAS),
    "granite": Family(_LLAMA, logit_copies=2, mlp_bias="mlp_bias", **_ATTENTION_BIAS),
    "mistral": Family(
        _defaults(32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8, sliding_window=4096),
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
        **_ATTENTION_BIAS,
        **_QWEN_WINDOWS,
    ),
    "qwen3_moe": Family(
        _defaults(151936, 2048, 6144, 24, 32, 32768, num_key_value_heads=4, sliding_window=4096)
        | {"moe_intermediate_size": 768, "num_local_experts": 128, "num_experts_per_tok": 8},
        qk_norm="head",
        experts="moe_intermediate_size",
        reads_sparse_steps=True,
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
        experts="intermediate_size",
        expert_bias=True,
        mxfp4=True,
        mlp_copies=8,
        sinks=True,
        window="types",
        full_every=2,
        **_ATTENTION_BIAS,
        wide_norms=True,
    ),
    "mimo_v2_flash": Family(
        _defaults(152576, 4096, 16384, 48, 64, 131072, num_key_value_heads=4, sliding_window=129)
        | {"head_dim": 192, "v_head_dim": 128, "moe_intermediate_size": 2048}
        | {"num_local_experts": 256, "num_experts_per_tok": 8},
        aliases={"num_local_experts": "n_routed_experts"},
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
        _defaults(256000, 3072, 24576, 28, 16, 8192, num_key_value_heads=16) | _GEMMA,
        **_ATTENTION_BIAS,
    ),
    "gemma2": Family(
        _defaults(256000, 2304, 9216, 26, 8, 8192, num_key_value_heads=4)
        | _GEMMA
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        even_heads=True,
        norms=4,
        window="types",
        full_every=2,
        **_ATTENTION_BIAS,
    ),
    "gemma3_text": Family(
        _defaults(262208, 2304, 9216, 26, 8, 131072, num_key_value_heads=4) | _GEMMA,
        even_heads=True,
        norms=4,
        qk_norm="head",
        window="types",
        full_every="sliding_window_pattern",
        **_ATTENTION_BIAS,
    ),
    "gemma3n_text": Family(
        _defaults(262400, 2048, 16384, 35, 8, 32768, num_key_value_heads=2)
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
        **_ATTENTION_BIAS,
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
        _defaults(32064, 3072, 8192, 32, 32, 4096, partial_rotary_factor=1.0),
        shardable=False,
        mlp_copies=4,
        window="all",
        rope_types=("default", "longrope"),
        rope_names={"su": "longrope", "yarn": "longrope"},
    ),
    "olmo2": Family(
        _defaults(50304, 4096, 11008, 32, 32, 2048),
        wide_rotary="tables",
        fuses_nowhere=True,
        shardable=False,
        qk_norm="flat",
        **_ATTENTION_BIAS,
    ),
    "cohere": Family(
        _defaults(256000, 8192, 22528, 40, 64, 8192, tie_word_embeddings=True, use_qk_norm=False),
        norms=1,
        wide_rotary="queries",
        logit_copies=2,
        qk_norm="flat",
        qk_norm_if="use_qk_norm",
        **_ATTENTION_BIAS,
    ),
    "cohere2": Family(
        _defaults(256000, 8192, 22528, 40, 64, 8192, tie_word_embeddings=True)
        | {"sliding_window": 4096, "sliding_window_pattern": 4},
        norms=1,
        wide_rotary="queries",
        logit_copies=2,
        window="types",
        full_every="sliding_window_pattern",
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

_QWEN_VL = Family(
    _defaults(152064, 8192, 29568, 80, 64, 32768, num_key_value_heads=8)
    | {"sliding_window": 4096, "max_window_layers": 80},
    made=("num_key_value_heads",),
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
        _defaults(151936, 4096, 22016, 32, 32, 128000, num_key_value_heads=32, head_dim=128),
        made=("num_key_value_heads",),
        shardable=False,
        qk_norm="head",
        **_ATTENTION_BIAS,
    ),
    "qwen3_vl_moe_text": Family(
        _defaults(151936, 2048, 5632, 24, 16, 128000, num_key_value_heads=16)
        | {"moe_intermediate_size": 1408, "num_local_experts": 60, "num_experts_per_tok": 4},
        qk_norm="head",
        experts="moe_intermediate_size",
        reads_sparse_steps=True,
        **_ATTENTION_BIAS,
    ),
    "glm4v_text": Family(
        _defaults(151552, 4096, 13696, 40, 32, 32768, num_key_value_heads=2),
        made=("num_key_value_heads",),
        reads_head_dim=False,
        shardable=False,
        qkv_bias=True,
        norms=4,
        mlp_copies=4,
    ),
}


# Texts whose embedding has another name than the one by which a whole ties its head to it, and
# those without a setting that the code of some wholes reads.
NO_EMBEDDING = frozenset(("gpt2", "gpt_bigcode", "gpt_neox", "opt"))
NO_RMS = NO_EMBEDDING | {
    *("cohere", "cohere2", "nemotron", "olmo", "persimmon", "phi", "stablelm", "starcoder2")
}


@dataclass(frozen=True, slots=True)
class Parts:
    """How the config of a model of several parts describes its text. ``text``: the text's
    model_type where its settings do not name it.
    """

    text: str
    # Whether the head is the embedding where the whole does not say; None: what the text says.
    tied: bool | None = None
    either: bool = False  # the head is the embedding, too, where the text alone says so
    flat: bool = False  # older checkpoints have the text's settings among those of the whole
    formerly: str = ""  # another name of ``text``, which older files give it
    # Whether transformers builds the text of the type that its settings name, and the types that
    # lack what the whole's own code reads.
    any_text: bool = False
    never: frozenset[str] = NO_EMBEDDING
    # Whether the whole's own code needs its other parts for text, too: the text is loaded as the
    # model of its own that it is.
    alone: bool = False
    framed: bool = False  # its own code makes the inputs of layers, and keeps them: Family.framed
    # Settings of the whole, and their defaults, that size its head: they must be the text's.
    head: Mapping[str, int] = field(default_factory=dict)


# Those that are tested as a whole, by its model_type; families/wholes.py has more.
PARTS: Mapping[str, Parts] = {
    "gemma3": Parts("gemma3_text"),
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
UNKNOWN_DENSE = Family({}, mlp_copies=6, logit_copies=2)
UNKNOWN_EXPERTS = Family({}, mlp_copies=8, logit_copies=2)
