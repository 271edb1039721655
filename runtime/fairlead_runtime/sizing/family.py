"""The form of a row of the tables of families: how one ``model_type`` is built, and how a model of
several parts describes its text.

Counts nothing; ``parameters`` does.
"""

from collections.abc import Callable, Mapping
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
    joined_gate: bool = False  # a layer of a family with states has gate and up in one matrix
    # Tensors of the MLP's inner width alive at once; measured, see the profiling run.
    mlp_copies: int = 3
    half_mlp_copies: int = 0  # the same in 16 bits, where some are in float32 and count as two
    more_hidden: int = 0  # hidden states that a layer keeps alive beside the usual four
    logit_copies: int = 1  # the same for logits: 2 where they are scaled or capped afterwards
    half_logit_copies: int = 0  # the same in 16 bits, where some are in float32 and count as two
    # Queries and keys that its attention keeps alive at once, as multiples, where that is more than
    # usual, and those of a model in 16 bits; measured.
    moments: tuple[tuple[int, int], ...] = ()
    half_moments: tuple[tuple[int, int], ...] = ()
    repeats_tables: bool = False  # each layer makes rotary tables of those that all share
    reads_kv_heads: bool = True  # whether num_key_value_heads and head_dim are read at all
    reads_head_dim: bool = True  # False: heads divide the hidden size, whatever head_dim says
    # Settings whose null stands for what its class makes of others, though it has numbers for them;
    # of those that switch something on, for false.
    made: tuple[str, ...] = ()
    even_heads: bool = False  # the heads must divide the hidden size, whatever head_dim says
    needs: tuple[str, ...] = ()  # settings that must be numbers, whatever else the class has
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
    # How its own code runs them, where transformers' grouped products do not: "each" after another,
    # of all tokens, or "sorted": tokens are put in their order, and cut.
    expert_loop: str = ""
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
    listed_slide: bool = False  # layers that layer_types lists slide whether it is on or off
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
    # The whole's own code keeps ids and masks of them, and these with a copy of the embedding.
    framed: bool = False
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
    position_mask: bool = False  # its class keeps which of them sees which, a byte for each pair
    # Numbers that its class multiplies embeddings by, and further ones where layers have inputs.
    scales: tuple[int, int] = (0, 0)
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
    linear_router: bool = False  # a linear layer of torch, with its one input
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
    # give; rotary embeddings, by "tables" in float32, of "queries" and keys as copies, or in their
    # "products" alone.
    wide_shares: bool = False
    wide_gates: bool = False  # what gates attention's result, too
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


def defaults(
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


ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}


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
    framed: bool = False  # its own code keeps what it hands on: ``Family.framed``
    # Settings of the whole, and their defaults, that size its head: they must be the text's.
    head: Mapping[str, int] = field(default_factory=dict)
