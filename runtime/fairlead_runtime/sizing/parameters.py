"""How many parameters one layer of a family has, and how many elements its MLP keeps per token.

Counts layers as transformers builds them; embeddings and the final norm are ``shape``'s.
"""

from dataclasses import dataclass, replace

from fairlead_runtime.sizing.config_json import ConfigReader, ShapeError
from fairlead_runtime.sizing.family_table import Family

# Elements that indices and weights take for each token and chosen expert.
ROUTING_ELEMENTS = 16


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of one part of a model: ``matrices`` those in matrices, ``channels`` the output
    rows of those matrices, ``rest`` all others (norms, biases, sinks). Of all these, ranks that
    share the model divide ``sharded`` evenly, and ``kv``, those of keys and values, by heads.
    """

    matrices: int = 0
    channels: int = 0
    rest: int = 0
    sharded: int = 0
    kv: int = 0

    def __add__(self, addend: "ParameterCount") -> "ParameterCount":
        return ParameterCount(
            self.matrices + addend.matrices,
            self.channels + addend.channels,
            self.rest + addend.rest,
            self.sharded + addend.sharded,
            self.kv + addend.kv,
        )

    def __mul__(self, times: int) -> "ParameterCount":
        return ParameterCount(
            self.matrices * times,
            self.channels * times,
            self.rest * times,
            self.sharded * times,
            self.kv * times,
        )


def _columns(inputs: int, outputs: int, *, bias: bool = False) -> ParameterCount:
    """A matrix that ranks split by its outputs, with its bias."""
    biases = outputs if bias else 0
    return ParameterCount(inputs * outputs, outputs, biases, inputs * outputs + biases)


def _rows(inputs: int, outputs: int, *, bias: bool = False) -> ParameterCount:
    """A matrix that ranks split by its inputs; each has the whole bias."""
    return ParameterCount(inputs * outputs, outputs, outputs if bias else 0, inputs * outputs)


def count_layer(s: ConfigReader, family: Family, index: int) -> tuple[ParameterCount, int, int]:
    """Parameters of one layer, the elements its MLP keeps per token, and its MLP's inner width."""
    mlp, width, inner = _mlp(s, family, index)
    norms = _norms(s, family) * count_norm(s, family)
    return _attention(s, family) + mlp + ParameterCount(rest=norms), width, inner


def count_norm(s: ConfigReader, family: Family) -> int:
    """Parameters of one normalization of the hidden state."""
    weighted = s.flag_or_constant(family.norms_weighted)
    return s.integer("hidden_size") * ((2 if family.norm_bias else 1) if weighted else 0)


def count_outside(s: ConfigReader, family: Family, *, tied: bool) -> int:
    """Parameters outside the layers: embeddings, the head, positions and the last norm."""
    hidden, vocab = s.integer("hidden_size"), s.integer("vocab_size")
    wide = (s.optional(family.embedding_width) if family.embedding_width else None) or hidden
    # Narrower embeddings are widened before the layers and narrowed after them.
    count = vocab * wide * (1 if tied else 2) + (0 if wide == hidden else 2 * wide * hidden)
    count += vocab if s.flag_or_constant(family.head_bias) else 0
    if family.positions:
        count += (s.integer("max_position_embeddings") + family.position_offset) * hidden
    return count + (count_norm(s, family) if s.flag_or_constant(family.final_norm) else 0)


def _norms(s: ConfigReader, family: Family) -> int:
    if family.norms_if is not None and s.flag(family.norms_if[0]):
        return family.norms_if[1]
    return family.norms


def has_flat_norm(s: ConfigReader, family: Family) -> bool:
    """Whether queries and keys are normalized over all heads together."""
    return family.qk_norm == "flat" and (not family.qk_norm_if or s.flag(family.qk_norm_if))


def _attention(s: ConfigReader, family: Family) -> ParameterCount:
    hidden, q, kv = s.integer("hidden_size"), s.heads * s.head_dim, s.kv_heads * s.head_dim
    bias = s.flag_or_constant(family.qkv_bias)
    keys = _columns(hidden, 2 * kv, bias=bias)
    count = _columns(hidden, q, bias=bias) + replace(keys, sharded=0, kv=keys.sharded)
    count += _rows(q, hidden, bias=s.flag_or_constant(family.out_bias))
    if family.qk_norm and (not family.qk_norm_if or s.flag(family.qk_norm_if)):
        weights = 2 * s.head_dim if family.qk_norm == "head" else q + kv
        count += ParameterCount(rest=weights * (2 if family.qk_norm_bias else 1))
    if family.out_gate:
        count += _columns(hidden, q)
    count += ParameterCount(rest=hidden if family.inner_norms else 0)
    return count + ParameterCount(rest=s.heads * (family.sinks + family.out_gate_bias))


def _mlp(s: ConfigReader, family: Family, index: int) -> tuple[ParameterCount, int, int]:
    hidden = s.integer("hidden_size")
    if not _sparse(s, family, index):
        setting = family.dense_width if family.experts else "intermediate_size"
        inner = s.optional(setting) or s.optional("intermediate_size") or 4 * hidden
        rest = family.activation_parameters + (inner if family.inner_norms else 0)
        count = _dense(s, family, inner) + ParameterCount(rest=rest)
        return count, family.mlp_copies * inner, inner
    inner, experts, chosen = (
        s.integer(k) for k in (family.experts, "num_local_experts", "num_experts_per_tok")
    )
    expert = _columns(hidden, (2 if family.gated else 1) * inner, bias=family.expert_bias)
    expert += _rows(inner, hidden, bias=family.expert_bias)
    # The router is never quantized.
    per_expert = hidden + family.expert_bias + family.router_bias
    count = expert * experts + ParameterCount(rest=experts * per_expert)
    # Each chosen expert takes a copy of its tokens and returns one; the copies are then weighted,
    # reordered and summed.
    inside = max(family.mlp_copies * inner + 2 * hidden, (family.mlp_copies + 1) * inner + hidden)
    summed = (5 if family.expert_bias else 4) * hidden
    width = chosen * (max(inside, summed) + ROUTING_ELEMENTS)
    if shared := _shared_width(s, family):
        gate = ParameterCount(rest=hidden if family.shared_gate else 0)
        count += _dense(s, family, shared) + gate
        # What the chosen experts gave is kept beside it.
        width = max(width, family.mlp_copies * shared) + hidden
    return count, width, inner


def _dense(s: ConfigReader, family: Family, inner: int) -> ParameterCount:
    hidden, bias = s.integer("hidden_size"), s.flag_or_constant(family.mlp_bias)
    columns = _columns(hidden, (2 if family.gated else 1) * inner, bias=bias)
    return columns + _rows(inner, hidden, bias=bias)


def _shared_width(s: ConfigReader, family: Family) -> int:
    """The inner width of the experts that every token meets, which are one MLP."""
    if family.shared_experts is None:
        return 0
    count, width = family.shared_experts
    if isinstance(count, str):
        count = s.optional(count, low=0) or 0
    return count * (s.optional(width, low=0) or 0) if count else 0


def _sparse(s: ConfigReader, family: Family, index: int) -> bool:
    if not family.experts:
        return False
    kinds = s.get("mlp_layer_types") if family.mlp_types else None
    if kinds is not None:
        return _is_sparse_kind(kinds, s.integer("num_hidden_layers"), index)
    dense = s.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise ShapeError("mlp_only_layers", "must be a list of layer numbers")
    if index < first_mixture(s, family) or index in dense or _after_last(s, family, index):
        return False
    return (index + 1) % s.integer("decoder_sparse_step") == 0


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
