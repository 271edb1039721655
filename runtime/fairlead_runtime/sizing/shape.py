"""ModelShape: what a model's ``config.json`` says about size, without loading anything.

Owns the sizes of every layer, the sliding windows and the exact parameter count, as transformers
builds them. Reads one mapping; never a file, a network or torch. A config comes from strangers, so
every number is bounded before it is used.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairlead_runtime.sizing.family_table import (
    FAMILIES,
    REFUSED,
    UNKNOWN_DENSE,
    UNKNOWN_EXPERTS,
    Family,
)

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
LARGEST = {
    "num_hidden_layers": 1 << 12,
    **dict.fromkeys(("num_local_experts", "num_experts"), 1 << 14),
    "vocab_size": 1 << 26,
}
LARGEST_ELSE = 1 << 24
ROUTED = 16  # elements a token and chosen expert take for their indices and weights
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
# The settings that most families share, by the names that transformers gives them.
STANDARD = (
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "ffn_dim",
        "num_hidden_layers",
        "max_position_embeddings",
    ),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
    *("use_bidirectional_attention", "num_experts_per_tok", *EXPERTS),
)


class ShapeError(ValueError):
    """A config.json that cannot be sized. ``field`` names the key; the message says what would
    work.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"config.json: {field}: {message}")
        self.field = field


class UnknownFamilyError(ShapeError):
    """A family that is not in the table: what its layers hold, and so what they weigh, no
    config.json says.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            "model_type",
            f"{name[:100]!r} is not in the table of families: its weights' size is known once their files are there; "
            "a pod tries such a model, judges it by the self-test and measures it",
        )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model. All counts are elements; ``windows`` has one entry a layer, None for full
    attention.
    """

    model_type: str
    layers: int
    windows: tuple[int | None, ...]
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    mlp_width: int  # elements the widest MLP keeps per token, all its chosen experts together
    logit_copies: int  # tensors of vocabulary width alive at once
    explicit_scores: bool  # attention with a cap or sinks, which fused kernels for CPUs lack
    vocab: int
    max_len: int  # max_position_embeddings
    tied: bool  # the output matrix is the embedding
    experts: int  # 0 for a dense model
    experts_per_token: int
    dtype: str | None  # the checkpoint's own type, None when the config does not say
    quantized: str  # method of an already quantized checkpoint, "" when it is not
    parameters: int
    # parameters in the layers' matrices: what quantization packs and tensor parallel splits
    layer_matrices: int
    layer_channels: int  # output rows of those matrices: one scale each when quantized

    @property
    def kv_width(self) -> int:
        """Elements of one layer's key, or value, of one token."""
        return self.kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """The shape that transformers gives the model of this config.json.

        Keys that the file omits take the defaults of transformers' configuration classes. Raises
        UnknownFamilyError for a ``model_type`` that is in no table, ShapeError for one that is
        refused and for values no model can have.
        """
        name = config.get("model_type")
        if not isinstance(name, str) or name in REFUSED:
            reason = (
                REFUSED.get(name, "it is no name") if isinstance(name, str) else "it is no name"
            )
            known = ", ".join(sorted(FAMILIES))
            raise ShapeError(
                "model_type",
                f"{str(name)[:100]!r} is not supported: {reason}; supported are {known}, and ordinary decoders "
                "that pass the self-test",
            )
        if name not in FAMILIES:
            raise UnknownFamilyError(name)
        family = FAMILIES[name]
        s = _Settings(config, family)
        _refuse(s)
        layers, hidden, vocab = (
            s.whole(k) for k in ("num_hidden_layers", "hidden_size", "vocab_size")
        )
        tied = s.flag("tie_word_embeddings")
        counts = [_layer(s, family, i) for i in range(layers)]
        body = sum((c for c, _ in counts), _Count())
        outside = vocab * hidden * (1 if tied else 2)
        outside += s.whole("max_position_embeddings") * hidden if family.positions else 0
        outside += hidden * (2 if family.norm_bias else 1)
        return cls(
            model_type=name,
            layers=layers,
            windows=_windows(s, family, layers),
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            hidden=hidden,
            mlp_width=max(width for _, width in counts),
            logit_copies=2 if s.get("final_logit_softcapping") is not None else family.logit_copies,
            explicit_scores=family.sinks or s.get("attn_logit_softcapping") is not None,
            vocab=vocab,
            max_len=s.whole("max_position_embeddings"),
            tied=tied,
            experts=s.whole("num_local_experts") if family.experts else 0,
            experts_per_token=s.whole("num_experts_per_tok") if family.experts else 0,
            dtype=_dtype(config),
            quantized=_quantized(config),
            parameters=body.matrices + body.rest + outside,
            layer_matrices=body.matrices,
            layer_channels=body.channels,
        )

    @classmethod
    def judged(
        cls,
        config: Mapping[str, Any],
        settings: Mapping[str, Any],
        windows: Sequence[int | None],
        tensors: Iterable[tuple[str, tuple[int, ...]]],
    ) -> "ModelShape":
        """The shape of a model whose family no table holds: sizes by their usual names, parameters
        as they are stored.

        ``settings`` has STANDARD's keys where the model's configuration has them, ``tensors`` the
        name and dimensions of every stored one. What a layer keeps alive is a guess on the safe
        side, until the profiling run measures it. Raises ShapeError for a size that is missing or
        that no model can have.
        """
        experts = next((k for k in EXPERTS if settings.get(k)), "")
        s = _Settings(settings, UNKNOWN_EXPERTS if experts else UNKNOWN_DENSE)
        _refuse(s)
        layers, hidden, vocab = (
            s.whole(k) for k in ("num_hidden_layers", "hidden_size", "vocab_size")
        )
        inner = s.optional("intermediate_size") or s.optional("ffn_dim") or 4 * hidden
        chosen = (s.optional("num_experts_per_tok") or 1) if experts else 0
        width = (UNKNOWN_EXPERTS if experts else UNKNOWN_DENSE).mlp_copies * inner
        sizes = list(tensors)
        matrices = [
            (n, d) for n, d in sizes if len(d) > 1 and any(part.isdigit() for part in n.split("."))
        ]
        return cls(
            model_type=str(config.get("model_type")),
            layers=layers,
            windows=tuple(windows),
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            hidden=hidden,
            # No attention that was tried keeps more than ten times its queries.
            mlp_width=max(width + chosen * (width + 5 * hidden), 10 * s.heads * s.head_dim),
            logit_copies=UNKNOWN_DENSE.logit_copies,
            explicit_scores=True,
            vocab=vocab,
            max_len=s.whole("max_position_embeddings"),
            tied=bool(settings.get("tie_word_embeddings")),
            experts=s.whole(experts) if experts else 0,
            experts_per_token=chosen,
            dtype=_dtype(config),
            quantized=_quantized(config),
            parameters=sum(math.prod(dimensions) for _, dimensions in sizes),
            layer_matrices=sum(math.prod(dimensions) for _, dimensions in matrices),
            layer_channels=sum(math.prod(dimensions[:-1]) for _, dimensions in matrices),
        )


@dataclass(frozen=True, slots=True)
class _Count:
    """Parameters of a part: in matrices, those matrices' output rows, and all else (norms, biases,
    sinks).
    """

    matrices: int = 0
    channels: int = 0
    rest: int = 0

    def __add__(self, other: "_Count") -> "_Count":
        return _Count(
            self.matrices + other.matrices, self.channels + other.channels, self.rest + other.rest
        )

    def __mul__(self, times: int) -> "_Count":
        return _Count(self.matrices * times, self.channels * times, self.rest * times)


def _linear(inputs: int, outputs: int, *, bias: bool = False) -> _Count:
    return _Count(inputs * outputs, outputs, outputs if bias else 0)


class _Settings:
    """A config with its family's defaults beneath: every read is typed and bounded."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        self._config = config
        self._family = family
        self.heads = self.whole("num_attention_heads")
        kv_heads, head_dim = (
            (self.optional(k) for k in ("num_key_value_heads", "head_dim"))
            if family.grouped
            else (None, None)
        )
        self.kv_heads = kv_heads or self.heads
        self.head_dim = head_dim or max(1, self.whole("hidden_size") // self.heads)

    def get(self, name: str) -> Any:
        for key in (self._family.aliases.get(name, name), name):
            if key in self._config:
                return self._config[key]
        return self._family.defaults.get(name)

    def optional(self, name: str) -> int | None:
        return None if self.get(name) is None else self.whole(name)

    def whole(self, name: str, low: int = 1) -> int:
        value, high = self.get(name), LARGEST.get(name, LARGEST_ELSE)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ShapeError(
                name, f"must be a whole number from {low} to {high}, not {str(value)[:40]}"
            )
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise ShapeError(name, f"must be true or false, not {str(value)[:40]}")
        return value

    def trait(self, value: bool | str) -> bool:
        return self.flag(value) if isinstance(value, str) else value


def _layer(s: _Settings, family: Family, index: int) -> tuple[_Count, int]:
    """Parameters of one layer, and the elements its MLP keeps per token."""
    hidden = s.whole("hidden_size")
    mlp, width = _mlp(s, family, index)
    norms = family.norms * hidden * (2 if family.norm_bias else 1)
    return _attention(s, family) + mlp + _Count(rest=norms), width


def _attention(s: _Settings, family: Family) -> _Count:
    hidden, q, kv = s.whole("hidden_size"), s.heads * s.head_dim, s.kv_heads * s.head_dim
    count = _linear(hidden, q + 2 * kv, bias=s.trait(family.qkv_bias))
    count += _linear(q, hidden, bias=s.trait(family.out_bias))
    if family.qk_norm and (not family.qk_norm_if or s.flag(family.qk_norm_if)):
        count += _Count(rest=2 * s.head_dim if family.qk_norm == "head" else q + kv)
    return count + _Count(rest=s.heads if family.sinks else 0)


def _mlp(s: _Settings, family: Family, index: int) -> tuple[_Count, int]:
    hidden = s.whole("hidden_size")
    parts = 2 if family.gated else 1
    if not _sparse(s, family, index):
        inner, bias = s.optional("intermediate_size") or 4 * hidden, s.trait(family.mlp_bias)
        count = _linear(hidden, parts * inner, bias=bias) + _linear(inner, hidden, bias=bias)
        return count, family.mlp_copies * inner
    inner, experts, chosen = (
        s.whole(k) for k in (family.experts, "num_local_experts", "num_experts_per_tok")
    )
    expert = _linear(hidden, parts * inner, bias=family.expert_bias)
    expert += _linear(inner, hidden, bias=family.expert_bias)
    router = _Count(
        rest=hidden * experts + (experts if family.expert_bias else 0)
    )  # never quantized
    # Each chosen expert gets a copy of its tokens and gives one back; then those are weighted, put
    # in order and summed.
    inside = max(family.mlp_copies * inner + 2 * hidden, (family.mlp_copies + 1) * inner + hidden)
    summed = (5 if family.expert_bias else 4) * hidden
    return expert * experts + router, chosen * (max(inside, summed) + ROUTED)


def _sparse(s: _Settings, family: Family, index: int) -> bool:
    if not family.experts:
        return False
    dense = s.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise ShapeError("mlp_only_layers", "must be a list of layer numbers")
    return index not in dense and (index + 1) % s.whole("decoder_sparse_step") == 0


def _windows(s: _Settings, family: Family, layers: int) -> tuple[int | None, ...]:
    """Layer i sees keys p-W+1..p of position p when its entry is W, and all of 0..p when it is
    None.
    """
    on = bool(family.window) and (not family.window_if or s.flag(family.window_if))
    window = s.optional("sliding_window") if on else None
    if window is None or family.window == "all":
        return (window,) * layers
    types = s.get("layer_types")
    if types is None:
        return tuple(window if _slides(s, family, i) else None for i in range(layers))
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise ShapeError("layer_types", f"must be a list of {layers} names, one a layer")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ShapeError(
                "layer_types", f"{str(kind)[:40]!r} is neither full_attention nor sliding_attention"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _slides(s: _Settings, family: Family, index: int) -> bool:
    if family.window_from:
        return index >= s.whole(family.window_from, low=0)
    every = family.full_every if isinstance(family.full_every, int) else s.whole(family.full_every)
    return (index + 1) % every != 0


def _refuse(s: _Settings) -> None:
    if s.get("use_bidirectional_attention"):
        raise ShapeError(
            "use_bidirectional_attention", "such a model reads text, it does not write any"
        )
    if s.get("per_layer_config"):
        raise ShapeError("per_layer_config", "layers of different sizes are not supported")


def _dtype(config: Mapping[str, Any]) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    if value is None:
        return None
    name = str(value)[:40].removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ShapeError(
            "dtype", f"{name!r} is not supported; supported are {', '.join(DTYPE_BYTES)}"
        )
    return name


def _quantized(config: Mapping[str, Any]) -> str:
    found = config.get("quantization_config")
    return str(found.get("quant_method", "unknown"))[:40] if isinstance(found, Mapping) else ""
