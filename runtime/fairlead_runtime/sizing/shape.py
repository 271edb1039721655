"""ModelShape: what a model's ``config.json`` says about size, without loading anything.

Owns the sizes of every layer, the sliding windows and the exact parameter count, as transformers
builds them. Reads one mapping; never a file, a network or torch.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairlead_runtime.sizing.arithmetic import PANEL
from fairlead_runtime.sizing.checkpoint_formats import published
from fairlead_runtime.sizing.config_json import (
    EXPERTS,
    ConfigReader,
    ShapeError,
    UnknownFamilyError,
    check_traits,
    dtype_of,
    family_of,
)
from fairlead_runtime.sizing.family import Family
from fairlead_runtime.sizing.family_table import FAMILIES, UNKNOWN_DENSE, UNKNOWN_EXPERTS
from fairlead_runtime.sizing.groups import NO_KEYS, LayerGroup, group_layers
from fairlead_runtime.sizing.layer_heads import (
    WIDE_ROTARY,
    LayerHeads,
    check_types,
    heads_of,
    is_mixed,
    widest,
)
from fairlead_runtime.sizing.layer_kinds import FULL, SLIDING, attends, kinds_of, mixes
from fairlead_runtime.sizing.layer_windows import sources_of, windows_by_kind, windows_of
from fairlead_runtime.sizing.mixers import MIXERS, Mixer
from fairlead_runtime.sizing.parameters import (
    ParameterCount,
    count_last_norm,
    count_layer,
    count_outside,
    experts_width,
    has_experts,
    has_flat_norm,
    has_mixtures,
    layers_with_keys,
    numbers_outside,
)
from fairlead_runtime.sizing.rotary import check_rope, count_frequencies, longest_text
from fairlead_runtime.sizing.states import StatePart
from fairlead_runtime.sizing.stored import (
    KEY,
    MXFP4_BLOCK,
    Published,
    QuantizedError,
    Stored,
    refusal,
)
from fairlead_runtime.sizing.token_widths import (
    live_layers,
    moments_of,
    slab_width,
    widths_beside,
)

STATES = "layers with states"
MOST_PARAMETERS = 1 << 50  # their bytes are numbers that a status takes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model. All counts are elements; ``windows`` has one entry per layer, None for
    full attention, and ``sources`` the layer whose keys it reads, its own where it keeps them.
    Layers without attention have NO_KEYS there and no window; ``states`` has, by its number, what a
    layer keeps of a sequence beside keys or instead of them.
    """

    model_type: str
    layers: int
    windows: tuple[int | None, ...]
    sources: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    # Of each layer: elements of one token's key and value. Of layers that differ in their heads
    # (``mixed``) the four sizes before are those of the widest.
    kv_widths: tuple[int, ...]
    mixed: bool
    head_kinds: tuple[LayerHeads, ...]  # the heads of its layers, each kind once
    rotary_width: int  # elements of a token's rotary tables, which each kind of layers has
    hidden: int
    # Elements of each token that lie beside a layer: further residual streams, inputs of layers,
    # keys and values that later layers read.
    beside_width: int
    # Elements the widest MLP keeps per token, all its chosen experts together, or what takes more
    # where an MLP is not running.
    mlp_width: int
    # The same of a model in 16 bits, where an element in float32 counts as two, and what attention
    # keeps beside the usual, as multiples of queries and keys.
    half_mlp_width: int
    moments: tuple[tuple[int, int], ...]
    half_moments: tuple[tuple[int, int], ...]
    # Elements that a layer in the C++ kernels keeps of each token of a slab for attention or the
    # MLP; 0 where it is not known that they compute its layers.
    slab_width: int
    logit_copies: int  # tensors of vocabulary width alive at once
    half_logit_copies: int  # in 16 bits
    unfused: str  # what its layers have that fused ones are known to lack; ""
    plain: str  # what its layers have that no product with quantized weights is known to serve; ""
    plain_on_cpus: str  # the same of a CPU's products
    explicit_scores: bool  # attention with a cap or sinks, which fused kernels for CPUs lack
    vocab: int
    max_len: int  # tokens that it reads, with those that scaled rotary embeddings add
    tied: bool  # the output matrix is the embedding
    experts: int  # 0 for a dense model
    experts_per_token: int
    dtype: str | None  # the checkpoint's own type, None when the config does not say
    quantized: Stored  # format of an already quantized checkpoint's weights, "" when it is not
    parameters: int
    layer_matrices: int  # parameters in the layers' matrices: what quantization packs
    largest_layer: int  # the most of them in one layer
    layer_channels: int  # output rows of those matrices: one scale each when quantized
    most_channels: int  # the most of them in one layer
    padding: int  # elements of rows that make whole panels of those that are packed in any model
    narrow_padding: int  # of those of few rows, which are packed where quantized or deterministic
    joined_padding: int  # of those of fused layers
    # Of a checkpoint in int4: scales of groups of columns, the columns of one (0: all of a row's),
    # and columns that a product orders.
    int4_groups: int
    int4_group_size: int
    reordered_columns: int
    mlp_width_unit: int  # a multiple of it is the inner width of every layer's MLP
    shardable: bool  # False: it is known that ranks cannot share the model
    # Of the parameters: what ranks divide evenly, and what they divide by key-value heads.
    sharded_parameters: int
    kv_parameters: int
    # Parameters that are float32 in a model of 16 bits, in one of float16 alone; buffers that are
    # in any, and those of its type.
    wide: int = 0
    wide_norms: int = 0
    buffers: int = 0
    typed_buffers: int = 0
    fours_padding: int = 0  # elements that columns to whole fours add, where rounded to int8
    mask_bytes: int = 0  # of a mask of positions that its class keeps
    states: Mapping[int, tuple[StatePart, ...]] = field(default_factory=dict)
    # Elements in float32 that a layer with a state keeps alive per token, of a row that is filled
    # up to a multiple of the chunk.
    mixer_width: int = 0
    mixer_chunk: int = 1
    reads_weights: bool = False  # its mixers' code, of their linear layers itself
    packs_all: bool = False  # a CPU's kernels multiply by all matrices of its layers, and its head

    @property
    def kv_width(self) -> int:
        """Elements of one layer's key of one token, or of its value where that is wider."""
        return self.kv_heads * max(self.head_dim, self.value_dim)

    def plain_on(self, device: str) -> str:
        """What its layers have that no product with quantized weights on a device of this kind is
        known to serve, "" for nothing: those of layers with states need none, and what of them
        stays whole is refused by ``verdict``.
        """
        if self.states:
            return ""
        return self.plain_on_cpus if device == "cpu" else self.plain

    def heads_on(self, ranks: int) -> tuple[LayerHeads, ...]:
        """Each kind of its layers' heads, as one of so many ranks has them."""
        return tuple(kind.share(ranks) for kind in self.head_kinds)

    @property
    def kept_width(self) -> int:
        """Elements of one token's keys and values in all layers that keep theirs."""
        return sum(self.kv_widths[layer] for layer in {*self.sources} - {NO_KEYS})

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups of layers that share block tables."""
        return group_layers(self.windows, self.kv_widths, self.sources)

    @property
    def held(self) -> Stored:
        """The format of a quantized checkpoint's weights once they are loaded, "" for plain."""
        return "" if self.quantized == "mxfp4" else self.quantized

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """The shape that transformers gives the model of this config.json.

        Keys that the file omits take the defaults of transformers' configuration classes. Raises
        UnknownFamilyError for a ``model_type`` that is not in the table, ShapeError for one that is
        refused and for values out of bounds.
        """
        try:
            family, text = family_of(config)
        except UnknownFamilyError:
            _quantized(config, UNKNOWN_DENSE, "")  # a pod would refuse it as well
            raise
        s = ConfigReader(text, family)
        check_traits(s)
        check_rope(s)
        layers, hidden, vocab = (
            s.integer(k) for k in ("num_hidden_layers", "hidden_size", "vocab_size")
        )
        kinds = kinds_of(s, family, layers) if family.mixer else (FULL,) * layers
        windows = windows_by_kind(s, kinds) if family.mixer else windows_of(s, family, layers)
        windowed = [window is not None for window in windows]
        heads = heads_of(s, family, windowed)
        if family.full_dim:
            check_types(heads, windowed)
        attending = [layer for layer, kind in enumerate(kinds) if attends(kind)]
        mixing = [layer for layer, kind in enumerate(kinds) if mixes(family, kind)]
        experts = has_mixtures(s, family, kinds) if family.mixer else has_experts(s, family)
        mixer = MIXERS[family.mixer](s) if mixing else None
        unfused = STATES if mixing else _unfused(family, heads, experts=experts)
        plain = unfused or ("layers that no kernel fuses" if family.fuses_nowhere else "")
        unserved = plain if mixer is None else _in_no_linear(mixer, experts=experts)
        stored = _quantized(config, family, unserved)
        if mixer is not None and stored.format == "int4":
            raise QuantizedError(KEY, f"4-bit {STATES} are not supported: 8-bit ones are")
        tied = s.flag("tie_word_embeddings")
        if stored.format == "mxfp4":
            _check_blocks({"hidden_size": hidden, family.experts: s.integer(family.experts)})
        counts = [
            count_layer(s, family, i, heads[i], windowed=windowed[i], kind=kinds[i])
            for i in range(layers)
        ]
        body = sum((c for c, _, _ in counts), ParameterCount())
        attention = [heads[layer] for layer in attending]
        dims = {SLIDING if windowed[layer] else FULL: heads[layer].dim for layer in attending}
        most, inners = widest(attention), [inner for _, _, inner in counts]
        parameters = body.matrices + body.rest + count_outside(s, family, tied=tied)
        if parameters > MOST_PARAMETERS:
            raise ShapeError(
                "hidden_size", f"{parameters:.1e} parameters are more than any model's"
            )
        if family.mixer:
            sources = tuple(i if attends(kind) else NO_KEYS for i, kind in enumerate(kinds))
        else:
            sources = sources_of(windows, layers_with_keys(s, family), family.shared)
        keys = sum(heads[layer].width for layer in live_layers(windows, sources))
        beside, inside = widths_beside(s, family, layers, keys)
        most_inside = max(width for _, width, _ in counts)
        return cls(
            model_type=str(config["model_type"]),
            layers=layers,
            windows=windows,
            sources=sources,
            heads=most.query,
            kv_heads=most.kv,
            head_dim=most.dim,
            value_dim=most.value_dim,
            kv_widths=tuple(
                layer.width if attends(kind) else 0
                for layer, kind in zip(heads, kinds, strict=True)
            ),
            mixed=len(attention) > 0 and is_mixed(attention),
            head_kinds=tuple(dict.fromkeys(attention)),
            rotary_width=(4 if family.repeats_tables else 2)
            * sum({windows[i]: heads[i].dim for i in attending}.values()),
            hidden=hidden,
            beside_width=beside,
            mlp_width=max(inside, most_inside),
            half_mlp_width=max(
                inside + (2 * hidden if family.streams else 0),  # the norm of one of them
                most_inside,
                family.half_mlp_copies * max(inners),
                experts_width(s, family, half=True) if experts else 0,
            ),
            moments=moments_of(s, family),
            half_moments=moments_of(s, family, half=True),
            slab_width=slab_width(s, family, max(inners)) if family.fuses and not unfused else 0,
            logit_copies=2 if s.get("final_logit_softcapping") is not None else family.logit_copies,
            half_logit_copies=family.half_logit_copies,
            unfused=unfused,
            plain=plain,
            plain_on_cpus=plain
            or ("layers that no CPU's kernel fuses" if family.gpus_fuse else ""),
            explicit_scores=family.sinks
            or family.windowed_sinks
            or s.get("attn_logit_softcapping") is not None,
            vocab=vocab,
            max_len=longest_text(s, rotary=not family.positions),
            tied=tied,
            experts=s.integer("num_local_experts") if experts else 0,
            experts_per_token=s.integer("num_experts_per_tok") if experts else 0,
            dtype=dtype_of(text) or stored.dtype,
            quantized=stored.format,
            parameters=parameters,
            layer_matrices=body.matrices,
            largest_layer=max(c.matrices for c, _, _ in counts),
            layer_channels=body.channels,
            most_channels=max(c.channels for c, _, _ in counts),
            padding=body.padding,
            narrow_padding=body.narrow,
            joined_padding=body.joined,
            int4_groups=stored.int4_groups(
                body.matrices, body.channels, (hidden, most.query_width, *inners)
            ),
            int4_group_size=stored.int4_group_size,
            reordered_columns=stored.ordered
            * (layers * (2 * hidden + most.query_width) + sum(inners)),
            mlp_width_unit=math.gcd(*inners),
            shardable=family.shardable and not has_flat_norm(s, family),
            sharded_parameters=body.sharded,
            kv_parameters=body.kv,
            wide=body.wide,
            wide_norms=body.wide_norms + count_last_norm(s, family) * family.wide_norms,
            fours_padding=body.fours,
            buffers=body.buffers + count_frequencies(s, dims),
            typed_buffers=body.typed + numbers_outside(s, family),
            mask_bytes=s.integer("max_position_embeddings") ** 2 * family.position_mask,
            states=dict.fromkeys(mixing, mixer.state) if mixer else {},
            mixer_width=mixer.alive if mixer else 0,
            mixer_chunk=mixer.chunk if mixer else 1,
            reads_weights=mixer is not None and mixer.reads_weights,
            # No linear layer holds the matrices of experts. Those of inputs of layers are too small
            # to gain, and a projected embedding is narrower than the head that shares it.
            packs_all=not (experts or family.layer_inputs or family.embedding_width)
            and not (mixer is not None and mixer.reads_weights),
        )

    @classmethod
    def from_tensors(
        cls,
        config: Mapping[str, Any],
        settings: Mapping[str, Any],
        windows: Sequence[int | None],
        sources: Sequence[int],
        tensors: Iterable[tuple[str, tuple[int, ...]]],
    ) -> "ModelShape":
        """The shape of a model whose family is not in the table: sizes from the usual settings,
        parameters from the stored tensors.

        ``settings`` has STANDARD's keys where the model's configuration has them, ``tensors`` the
        name and dimensions of every stored tensor. What a layer keeps alive is estimated high,
        until the profiling run measures it. Raises ShapeError for a size that is missing or out of
        bounds.
        """
        experts_setting = next((k for k in EXPERTS if settings.get(k)), "")
        unfused = "experts" if experts_setting else ""
        family = UNKNOWN_EXPERTS if experts_setting else UNKNOWN_DENSE
        stored = _quantized(config, family, unfused)
        s = ConfigReader(settings, family)
        check_traits(s)
        layers, hidden, vocab = (
            s.integer(k) for k in ("num_hidden_layers", "hidden_size", "vocab_size")
        )
        inner = s.optional("intermediate_size") or s.optional("ffn_dim") or 4 * hidden
        chosen = (s.optional("num_experts_per_tok") or 1) if experts_setting else 0
        width = family.mlp_copies * inner
        sizes = list(tensors)
        matrices = [
            (n, d) for n, d in sizes if len(d) > 1 and any(word.isdigit() for word in n.split("."))
        ]
        in_layers = sum(math.prod(dimensions) for _, dimensions in matrices)
        channels = sum(math.prod(dimensions[:-1]) for _, dimensions in matrices)
        keys = min(in_layers, 2 * layers * s.kv_heads * s.head_dim * hidden)
        return cls(
            model_type=str(config.get("model_type")),
            layers=layers,
            windows=tuple(windows),
            sources=tuple(sources),
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            value_dim=s.head_dim,
            kv_widths=(2 * s.kv_heads * s.head_dim,) * layers,
            mixed=False,
            head_kinds=(LayerHeads(s.heads, s.kv_heads, s.head_dim, s.head_dim),),
            rotary_width=2 * s.head_dim * len({*windows}),
            hidden=hidden,
            beside_width=0,
            slab_width=0,
            # No attention measured so far keeps more than ten times its queries.
            mlp_width=max(width + chosen * (width + 5 * hidden), 10 * s.heads * s.head_dim),
            half_mlp_width=max(width + chosen * (width + 8 * hidden), 10 * s.heads * s.head_dim),
            moments=(),
            half_moments=WIDE_ROTARY["queries"],
            logit_copies=UNKNOWN_DENSE.logit_copies,
            half_logit_copies=UNKNOWN_DENSE.half_logit_copies,
            unfused=unfused,
            plain=unfused,
            plain_on_cpus=unfused,
            explicit_scores=True,
            vocab=vocab,
            max_len=longest_text(s),
            tied=bool(settings.get("tie_word_embeddings")),
            experts=s.integer(experts_setting) if experts_setting else 0,
            experts_per_token=chosen,
            dtype=dtype_of(config),
            quantized=stored.format,
            parameters=sum(math.prod(dimensions) for _, dimensions in sizes),
            layer_matrices=in_layers,
            largest_layer=_largest_layer(matrices),
            layer_channels=channels,
            most_channels=channels,
            padding=sum(
                d[1] * (-d[0] % PANEL) for _, d in matrices if len(d) == 2 and d[0] >= PANEL
            ),
            narrow_padding=0,
            joined_padding=0,
            int4_groups=stored.int4_groups(in_layers, channels, {d[-1] for _, d in matrices}),
            int4_group_size=stored.int4_group_size,
            # Matrices that share their input may share one.
            reordered_columns=stored.ordered * sum(d[-1] for _, d in matrices),
            mlp_width_unit=inner,
            shardable=True,  # the plan of the loaded model decides
            sharded_parameters=in_layers - keys,
            kv_parameters=keys,
        )


def _largest_layer(matrices: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """The most elements of a layer's matrices, of which a name's first number is the layer's."""
    layers = Counter[str]()
    for name, dimensions in matrices:
        number = next(word for word in name.split(".") if word.isdigit())
        layers[number] += math.prod(dimensions)
    return max(layers.values(), default=0)


def _unfused(family: Family, heads: Sequence[LayerHeads], *, experts: bool) -> str:
    if experts:
        return "experts"
    if is_mixed(heads) or heads[0].value_dim != heads[0].dim:
        return "layers with heads of several sizes"
    return "layers with inputs of their own" if family.layer_inputs else ""


def _in_no_linear(mixer: Mixer, *, experts: bool) -> str:
    """What of a model with such mixers no linear layer holds, so that a quantized checkpoint is not
    served; "" for nothing.
    """
    if experts:
        return f"experts beside {STATES}"
    return f"{STATES} whose code reads their weights" if mixer.reads_weights else ""


def _quantized(config: Mapping[str, Any], family: Family, unfused: str) -> Published:
    stored = published(config)
    if stored is not None and stored.format == "mxfp4":
        if not family.mxfp4:
            works = " and ".join(f"{name!r}" for name, other in FAMILIES.items() if other.mxfp4)
            name = str(config.get("model_type"))[:100]
            served = f"experts of {works} are served, those of {name!r} are not"
            raise refusal("quant_method", "mxfp4", served)
    elif stored is not None and unfused:
        raise QuantizedError(KEY, f"quantized {unfused} are not supported")
    return stored or Published("")


def _check_blocks(widths: Mapping[str, int]) -> None:
    """Raise ShapeError for a width of experts, by setting, that MXFP4's blocks do not divide."""
    for name, width in widths.items():
        if width % MXFP4_BLOCK:
            problem = f"{width} is no multiple of {MXFP4_BLOCK}, the numbers of a block of MXFP4"
            raise ShapeError(name, problem)
