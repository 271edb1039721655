"""How many parameters one layer of a family has, and how many elements its MLP keeps per token.

Counts layers as transformers builds them; embeddings and the final norm are ``shape``'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fairlead_runtime.sizing.arithmetic import PANEL
from fairlead_runtime.sizing.config_json import ConfigReader, ShapeError
from fairlead_runtime.sizing.declared import declares
from fairlead_runtime.sizing.family import Family
from fairlead_runtime.sizing.layer_heads import LayerHeads
from fairlead_runtime.sizing.layer_kinds import FULL, MLPS, attends, mixes
from fairlead_runtime.sizing.mixers import MIXERS

# Elements in float32 that indices and weights take for each token and chosen expert.
ROUTING_ELEMENTS = 16


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of one part of a model: ``matrices`` those in matrices, ``channels`` the output
    rows of those matrices, ``rest`` all others (norms, biases, sinks). Of all these, ranks that
    share the model divide ``sharded`` evenly, and ``kv``, those of keys and values, by heads.
    ``wide``: those that a model in 16 bits keeps in float32, ``wide_norms``: further ones in
    float16; numbers beside all these: ``buffers`` in float32 in any model, ``typed`` in its type,
    and what whole panels add to the matrices of torch's linear layers, ``padding`` to those that
    are packed in any model, ``narrow`` to those that are so where they are quantized or sums have
    one order; ``joined`` to those of a fused layer, which has all products of one input in one;
    ``fours``: the most that columns to whole fours add where products are of integers.
    """

    matrices: int = 0
    channels: int = 0
    rest: int = 0
    sharded: int = 0
    kv: int = 0
    wide: int = 0
    wide_norms: int = 0
    buffers: int = 0
    typed: int = 0
    padding: int = 0
    narrow: int = 0
    joined: int = 0
    fours: int = 0

    def __add__(self, addend: "ParameterCount") -> "ParameterCount":
        return ParameterCount(
            self.matrices + addend.matrices,
            self.channels + addend.channels,
            self.rest + addend.rest,
            self.sharded + addend.sharded,
            self.kv + addend.kv,
            self.wide + addend.wide,
            self.wide_norms + addend.wide_norms,
            self.buffers + addend.buffers,
            self.typed + addend.typed,
            self.padding + addend.padding,
            self.narrow + addend.narrow,
            self.joined + addend.joined,
            self.fours + addend.fours,
        )

    def __mul__(self, times: int) -> "ParameterCount":
        return ParameterCount(
            self.matrices * times,
            self.channels * times,
            self.rest * times,
            self.sharded * times,
            self.kv * times,
            self.wide * times,
            self.wide_norms * times,
            self.buffers * times,
            self.typed * times,
            self.padding * times,
            self.narrow * times,
            self.joined * times,
            self.fours * times,
        )


def _columns(
    inputs: int, outputs: int, *, bias: bool = False, widths: Sequence[int] = ()
) -> ParameterCount:
    """A matrix that ranks split by its outputs, with its bias; several of these ``widths``."""
    biases = outputs if bias else 0
    count = ParameterCount(inputs * outputs, outputs, biases, inputs * outputs + biases)
    return count + _panels(inputs, *(widths or (outputs,)))


def _rows(inputs: int, outputs: int, *, bias: bool = False) -> ParameterCount:
    """A matrix that ranks split by its inputs; each has the whole bias."""
    count = ParameterCount(inputs * outputs, outputs, outputs if bias else 0, inputs * outputs)
    return count + _panels(inputs, outputs)


def _panels(inputs: int, *widths: int, least: int = PANEL) -> ParameterCount:
    """What whole panels add to matrices of so many columns and of these rows each, products of one
    input. One of fewer rows than ``least`` would be mostly padding: it is packed where it is
    quantized, or where all are.
    """
    added = [inputs * (-width % PANEL) for width in widths if width >= least]
    total = inputs * sum(-width % PANEL for width in widths)
    joined = inputs * (-sum(widths) % PANEL)
    fours = -inputs % 4 * sum(width + -width % PANEL for width in widths)
    return ParameterCount(padding=sum(added), narrow=total - sum(added), joined=joined, fours=fours)


def _without_panels(count: ParameterCount) -> ParameterCount:
    """The same where no linear layer of torch holds the matrices."""
    return replace(count, padding=0, narrow=0, joined=0, fours=0)


def count_layer(
    s: ConfigReader,
    family: Family,
    index: int,
    heads: LayerHeads,
    *,
    windowed: bool,
    kind: str = FULL,
) -> tuple[ParameterCount, int, int]:
    """Parameters of one layer with these heads, the elements its MLP keeps per token, and its MLP's
    inner width. ``kind``: of a layer in a family with states.
    """
    mlp, width, inner = ParameterCount(), 0, 0
    if not family.one_part or kind in MLPS:
        mlp, width, inner = _mlp(s, family, index, sparse=kind == "moe" or None)
    if family.experts_if and has_experts(s, family):
        beside, more = _experts_beside(s, family)
        mlp, width = mlp + beside, width + more
    normed = _norms(s, family) * count_norm(s, family)
    norms = ParameterCount(rest=normed, wide_norms=normed * family.wide_norms)
    keeps = index < layers_with_keys(s, family)
    attention = ParameterCount()
    if attends(kind):
        attention = _attention(s, family, heads, keeps=keeps)
    if mixes(family, kind):
        mixer = MIXERS[family.mixer](s)
        attention += ParameterCount(
            mixer.matrices, mixer.channels, mixer.rest, wide=mixer.wide, typed=mixer.buffers
        )
        for rows, columns in mixer.products:
            attention += _panels(columns, rows, least=PANEL // 2)
    if family.sinks or (family.windowed_sinks and windowed):
        attention += ParameterCount(rest=heads.query, wide=heads.query * family.wide_sinks)
    return attention + mlp + norms + _beside(s, family), width, inner


def layers_with_keys(s: ConfigReader, family: Family) -> int:
    """The first layers, which keep keys of their own."""
    layers = s.integer("num_hidden_layers")
    shared = s.integer(family.shared, low=0) if family.shared else 0
    if shared >= layers:
        raise ShapeError(family.shared, f"must be less than the {layers} layers")
    return layers - shared


def layer_input_width(s: ConfigReader, family: Family) -> int:
    """Elements of the input that each layer has of its own, 0 without. Where the layers also have
    streams they have its norms in any case, so that none is refused.
    """
    if not family.layer_inputs:
        return 0
    return s.integer(family.layer_inputs, low=1 if family.streams else 0)


def _count_layer_inputs(s: ConfigReader, family: Family) -> int:
    """Parameters outside the layers that make the input that each layer has of its own: a table, a
    projection of the embedding, its norm.
    """
    width = layer_input_width(s, family)
    if not width:
        return 0
    rows = s.integer("vocab_size_per_layer_input") + s.integer("hidden_size")
    return rows * width * s.integer("num_hidden_layers") + width


def _count_streams(s: ConfigReader, family: Family) -> int:
    """Parameters outside the layers that make further residual streams of the embedding, and one
    hidden state of all.
    """
    if not family.streams:
        return 0
    streams, active = s.integer(family.streams), s.get("altup_active_idx")
    if active is not None and not s.integer("altup_active_idx", low=0) < streams:
        raise ShapeError("altup_active_idx", f"must be less than {family.streams}, {streams}")
    layers, sparse = s.integer("num_hidden_layers"), s.get("activation_sparsity_pattern")
    if sparse is not None and not (
        isinstance(sparse, list | tuple)
        and len(sparse) == layers
        and all(isinstance(share, int | float) and 0 <= share < 1 for share in sparse)
    ):
        problem = f"must be a list of {layers} shares from 0 to less than 1, one per layer"
        raise ShapeError("activation_sparsity_pattern", problem)
    return 2 * (streams - 1) * s.integer("hidden_size") ** 2


def _beside(s: ConfigReader, family: Family) -> ParameterCount:
    """What a layer has beside attention, MLP and norms: products by which its own input comes in,
    with a norm, and one beside attention; the coefficients of its streams.
    """
    hidden, count = s.integer("hidden_size"), ParameterCount()
    laurel = s.integer(family.laurel, low=0) if family.laurel else 0
    for inner, normed in ((layer_input_width(s, family), hidden), (laurel, 0)):
        if inner:
            count += ParameterCount(2 * hidden * inner, hidden + inner, normed)
            count += _panels(hidden, inner) + _panels(inner, hidden)
    if family.streams:
        streams = s.integer(family.streams)
        coefficients = ParameterCount(streams**2 + streams**3, streams + streams**2)
        count += coefficients + ParameterCount(hidden * streams, streams)
    return count


def count_norm(s: ConfigReader, family: Family) -> int:
    """Parameters of one normalization of the hidden state."""
    weighted = s.flag_or_constant(family.norms_weighted)
    biased = s.flag_or_constant(family.norm_bias)
    return s.integer("hidden_size") * ((2 if biased else 1) if weighted else 0)


def count_outside(s: ConfigReader, family: Family, *, tied: bool) -> int:
    """Parameters outside the layers: embeddings, the head, positions, the last norm, and what makes
    inputs of layers and residual streams.
    """
    hidden, vocab = s.integer("hidden_size"), s.integer("vocab_size")
    wide = (s.optional(family.embedding_width) if family.embedding_width else None) or hidden
    # Narrower embeddings are widened before the layers and narrowed after them.
    count = vocab * wide * (1 if tied else 2) + (0 if wide == hidden else 2 * wide * hidden)
    count += family.embedding_rows * wide
    count += vocab if s.flag_or_constant(family.head_bias) else 0
    if family.positions and not family.position_table:
        count += (s.integer("max_position_embeddings") + family.position_offset) * hidden
    if family.before_head:
        count += hidden**2 + hidden * s.flag(family.before_head) + count_norm(s, family)
    count += _count_layer_inputs(s, family) + _count_streams(s, family)
    return count + count_last_norm(s, family)


def numbers_outside(s: ConfigReader, family: Family) -> int:
    """Numbers outside the layers that its class makes, in the type of the model: the positions'
    table, and by what embeddings are multiplied.
    """
    table = s.integer("max_position_embeddings") * s.integer("hidden_size")
    scales, of_inputs = family.scales
    scales += of_inputs * (layer_input_width(s, family) > 0)
    return scales + table * family.position_table


def count_last_norm(s: ConfigReader, family: Family) -> int:
    """Parameters of the norm after all layers."""
    return count_norm(s, family) if s.flag_or_constant(family.final_norm) else 0


def _norms(s: ConfigReader, family: Family) -> int:
    if family.norms_if is not None and s.flag(family.norms_if[0]):
        return family.norms_if[1]
    return family.norms


def has_flat_norm(s: ConfigReader, family: Family) -> bool:
    """Whether queries and keys are normalized over all heads together."""
    return family.qk_norm == "flat" and (not family.qk_norm_if or s.flag(family.qk_norm_if))


def _attention(
    s: ConfigReader, family: Family, heads: LayerHeads, *, keeps: bool
) -> ParameterCount:
    if family.query_experts:
        return _expert_attention(s, heads)
    hidden, q, kv = s.integer("hidden_size"), heads.query_width, heads.key_width
    bias = s.flag_or_constant(family.qkv_bias)
    made = kv if heads.one_product else heads.width
    widths = (kv,) if heads.one_product else (kv, heads.value_width)
    keys = _columns(hidden, made, bias=bias, widths=widths) if keeps else ParameterCount()
    queries = _columns(hidden, q * (1 + family.gate_in_queries), bias=bias)
    count = queries + replace(keys, sharded=0, kv=keys.sharded)
    count = replace(count, joined=_panels(hidden, count.channels).joined)
    count += _rows(heads.attended_width, hidden, bias=s.flag_or_constant(family.out_bias))
    if family.qk_norm and (not family.qk_norm_if or s.flag(family.qk_norm_if)):
        normed = (heads.dim, heads.dim) if family.qk_norm == "head" else (q, kv)
        weights = (sum(normed) if keeps else normed[0]) * (2 if family.qk_norm_bias else 1)
        count += ParameterCount(rest=weights, wide_norms=weights * family.wide_qk_norms)
    if s.flag_or_constant(family.out_gate):
        count += _columns(hidden, q)
    if family.head_gate_if and s.flag(family.head_gate_if):
        count += _columns(hidden, heads.query)
    rest = heads.query * family.out_gate_bias + (hidden if family.inner_norms else 0)
    return count + ParameterCount(rest=rest)


def _expert_attention(s: ConfigReader, heads: LayerHeads) -> ParameterCount:
    """Of mixtures of attention (arXiv:2404.07413): keys and values of all experts, of each the
    queries and what it makes of the result; their router, and a bias of their sum.
    """
    hidden, experts = s.integer("hidden_size"), s.integer("num_local_experts")
    width = heads.query_width // s.integer("num_experts_per_tok")
    count = _without_panels(_columns(hidden, width) + _rows(width, hidden)) * experts
    router = _panels(hidden, experts) + ParameterCount(rest=hidden * (experts + 1))
    return count + _columns(hidden, 2 * width) + router


def has_experts(s: ConfigReader, family: Family) -> bool:
    """Whether its layers have experts."""
    return bool(family.experts) and (not family.experts_if or s.flag(family.experts_if))


def has_mixtures(s: ConfigReader, family: Family, kinds: Sequence[str]) -> bool:
    """Whether some layer of a family with states, of these kinds, has experts."""
    return has_experts(s, family) and any(
        kind == "moe" or _sparse(s, family, index) for index, kind in enumerate(kinds)
    )


def _mlp(
    s: ConfigReader, family: Family, index: int, *, sparse: bool | None = None
) -> tuple[ParameterCount, int, int]:
    """``sparse``: whether it has experts, where not the usual settings tell it."""
    hidden = s.integer("hidden_size")
    if not (_sparse(s, family, index) if sparse is None else sparse):
        setting = family.dense_width if family.experts else "intermediate_size"
        inner = s.of_layer(setting, index) or s.own("intermediate_size") or 4 * hidden
        if index >= layers_with_keys(s, family) and s.flag_or_constant(
            family.wide_readers or False
        ):
            inner *= 2
        rest = family.activation_parameters + (inner if family.inner_norms else 0)
        count = _dense(s, family, inner)
        count += ParameterCount(rest=rest, typed=family.layer_buffers)
        return count, family.mlp_copies * inner, inner
    return *_experts(s, family), s.integer(family.experts)


def _experts(s: ConfigReader, family: Family) -> tuple[ParameterCount, int]:
    """Parameters of one layer's experts and their router, and the elements they keep per token."""
    hidden = s.integer("hidden_size")
    inner, experts = (s.integer(k) for k in (family.experts, "num_local_experts"))
    _check_choice(s, experts)
    latent = s.optional(family.expert_latent) if family.expert_latent else None
    taken = latent or hidden
    expert = _columns(taken, (2 if family.gated else 1) * inner, bias=family.expert_bias)
    expert += _rows(inner, taken, bias=family.expert_bias)
    # The router is never quantized. No linear layer holds the matrices of experts.
    per_expert = hidden + family.expert_bias + family.router_bias
    count = _without_panels(expert) * experts + ParameterCount(
        rest=experts * per_expert + hidden * family.sum_bias,
        wide=experts * per_expert * family.wide_router,
        wide_norms=experts * family.router_bias * family.wide_qk_norms,
        buffers=experts * (family.choice_buffer == "float32"),
        typed=experts * (family.choice_buffer == "typed"),
    )
    if family.linear_router:
        count += _panels(hidden, experts)
    if latent:
        biased = s.flag_or_constant(family.mlp_bias)
        count += _columns(hidden, latent, bias=biased) + _rows(latent, hidden, bias=biased)
    count += ParameterCount(rest=hidden * family.shared_gate)  # of a shared expert of no width, too
    if shared := _shared_width(s, family):
        count += _dense(s, family, shared)
    return count, experts_width(s, family)


def _check_choice(s: ConfigReader, experts: int) -> None:
    """Raise ShapeError unless so many experts are as many as each token meets, and make the groups
    of which routers choose some first, by the best two of each.
    """
    chosen = s.integer("num_experts_per_tok")
    if chosen > experts:
        problem = f"{chosen} experts a token are more than there are, {experts}"
        raise ShapeError("num_experts_per_tok", problem)
    kind = str(s.get("model_type"))
    chooses = declares(kind, "n_group")  # another class has no use for it
    groups, taken = (
        s.integer(k) if chooses and s.says(k) else 1 for k in ("n_group", "topk_group")
    )
    if groups > 1 and (experts % groups or experts < 2 * groups):
        raise ShapeError("n_group", f"{groups} groups of two or more are not {experts} experts")
    if taken > groups:
        raise ShapeError("topk_group", f"{taken} groups are more than there are, {groups}")


def experts_width(s: ConfigReader, family: Family, *, half: bool = False) -> int:
    """Elements of one token that its experts keep, in a model in float32 or, ``half``, in 16 bits:
    there an element in float32 counts as two.
    """
    hidden, inner, experts, chosen = (
        s.integer(k)
        for k in ("hidden_size", family.experts, "num_local_experts", "num_experts_per_tok")
    )
    wide = 2 if half else 1
    if family.expert_loop:
        return (
            _looped_width(family, hidden, inner, experts, chosen) + chosen * ROUTING_ELEMENTS * wide
        )
    copies = (half and family.half_mlp_copies) or family.mlp_copies
    # Each chosen expert takes a copy of its tokens and returns one; the copies are then weighted,
    # reordered and summed.
    inside = max(copies * inner + 2 * hidden, (copies + 1) * inner + hidden)
    weighted = 2 * (wide if family.wide_shares else 1)
    summed = ((3 if family.expert_bias else 2) + weighted) * hidden
    # The router's logits are kept until its experts are done.
    width = chosen * (max(inside, summed) + ROUTING_ELEMENTS * wide) + experts * wide
    if shared := _shared_width(s, family):
        # What the chosen experts gave is kept beside it.
        width = max(width, copies * shared) + hidden
    return width


def _looped_width(family: Family, hidden: int, inner: int, experts: int, chosen: int) -> int:
    """The same of experts that the model's own code runs, measured; all tokens may choose one."""
    if family.expert_loop == "sorted":
        return chosen * max(hidden + 4 * inner, 3 * hidden + 3 * inner) + hidden
    # Integers say for each expert which tokens chose it.
    return 3 * inner + 5 * hidden + 4 * (experts + 1) * chosen


def _dense(s: ConfigReader, family: Family, inner: int) -> ParameterCount:
    hidden, bias = s.integer("hidden_size"), s.flag_or_constant(family.mlp_bias)
    widths = (2 * inner,) if family.joined_gate else (inner,) * (2 if family.gated else 1)
    columns = _columns(hidden, sum(widths), bias=bias, widths=widths)
    return columns + _rows(inner, hidden, bias=bias)


def _shared_width(s: ConfigReader, family: Family) -> int:
    """The inner width of the experts that every token meets, which are one MLP."""
    if family.shared_experts is None:
        return 0
    count, width = family.shared_experts
    if isinstance(count, str):
        count = s.optional(count, low=0) or 0
    return count * (s.optional(width, low=0) or 0) if count else 0


def _experts_beside(s: ConfigReader, family: Family) -> tuple[ParameterCount, int]:
    """The same where they stand beside the MLP: with norms of the MLP's result, of what experts
    take and of what they give, a factor for each element that the router takes and for each expert.
    """
    count, width = _experts(s, family)
    hidden = s.integer("hidden_size")
    return count + ParameterCount(rest=4 * hidden + s.integer("num_local_experts")), width


def _sparse(s: ConfigReader, family: Family, index: int) -> bool:
    if not family.experts or family.experts_if:
        return False
    kinds = s.get("mlp_layer_types") if family.mlp_types else None
    if kinds is not None:
        return _is_sparse_kind(kinds, s.integer("num_hidden_layers"), index)
    if family.one_part:
        return False
    if family.sparse_every[0]:
        period, first = s.integer(family.sparse_every[0]), s.integer(family.sparse_every[1], low=0)
        return index % period == first and s.integer("num_local_experts") > 1
    if index < first_mixture(s, family) or _after_last(s, family, index):
        return False
    return not family.reads_sparse_steps or _is_in_step(s, index)


def _is_in_step(s: ConfigReader, index: int) -> bool:
    dense = s.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise ShapeError("mlp_only_layers", "must be a list of layer numbers")
    return index not in dense and (index + 1) % s.integer("decoder_sparse_step") == 0


def first_mixture(s: ConfigReader, family: Family) -> int:
    """The number of dense layers before the first mixture of experts."""
    first = family.dense_first
    return first if isinstance(first, int) else s.integer(first, low=0)


def _after_last(s: ConfigReader, family: Family, index: int) -> bool:
    last = s.get(family.sparse_last) if family.sparse_last else -1
    return last != -1 and index > s.integer(family.sparse_last, low=0)


def _is_sparse_kind(kinds: object, layers: int, index: int) -> bool:
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        raise ShapeError("mlp_layer_types", f"must be a list of {layers} names, one per layer")
    if kinds[index] not in ("dense", "sparse"):
        raise ShapeError("mlp_layer_types", f"{str(kinds[index])[:40]!r} is not dense or sparse")
    return bool(kinds[index] == "sparse")
