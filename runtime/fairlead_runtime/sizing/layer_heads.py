"""The attention heads of each layer, as a ``config.json`` says, and what is not served where layers
differ in them.

Owns the settings by which windowed and full layers have heads of other numbers and sizes. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.arithmetic import ceil_div
from fairlead_runtime.sizing.config_json import ConfigReader, ShapeError
from fairlead_runtime.sizing.family import Family

# Queries and keys of a token that are alive in a model in 16 bits, as multiples of them, where each
# is normalized, where rotary embeddings are made, and where each element of attention's result is
# gated, in float32: one takes two elements.
WIDE_NORMS = ((5, 1), (1, 5))
GATES = ((5, 1),)  # where each element of attention's result is gated, in any type
WIDE_GATES = ((6, 1),)
WIDE_ROTARY = {
    "tables": ((8, 1), (3, 8)),
    "queries": ((9, 3), (5, 9)),
    "products": ((8, 2), (2, 8)),
}
MIXED = "the model's layers differ in their heads"


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """``query`` heads share ``kv`` key-value heads; ``dim`` elements of a key, ``value_dim`` of a
    value. ``one_product``: a layer makes its values of the product that gives its keys.
    """

    query: int
    kv: int
    dim: int
    value_dim: int
    one_product: bool = False

    @property
    def width(self) -> int:
        """Elements of one token's key and value."""
        return self.key_width + self.value_width

    @property
    def query_width(self) -> int:
        """Elements of one token's queries."""
        return self.query * self.dim

    @property
    def attended_width(self) -> int:
        """Elements that attention gives for one token."""
        return self.query * self.value_dim

    @property
    def key_width(self) -> int:
        """Elements of one token's key."""
        return self.kv * self.dim

    @property
    def value_width(self) -> int:
        """Elements of one token's value."""
        return self.kv * self.value_dim

    @property
    def projected_width(self) -> int:
        """Elements of one token's queries, key and value."""
        return self.query_width + self.width

    def alive_width(self, moments: Iterable[tuple[int, int]] = ()) -> int:
        """Elements of one token that attention keeps alive, the most of three moments: a rotary
        embedding of queries and keys, one of queries, which has two products beside what it takes
        and gives, and the projection of what attention gives. ``moments``: multiples of queries and
        keys at others.
        """
        query, key = self.query_width, self.key_width
        embedded = max(3 * query + 3 * key, 4 * query + key, query + self.attended_width + key)
        others = (queries * query + keys * key for queries, keys in moments)
        return max([embedded, *others]) + self.value_width

    def share(self, ranks: int) -> "LayerHeads":
        """Those that one of so many ranks has."""
        return replace(self, query=ceil_div(self.query, ranks), kv=ceil_div(self.kv, ranks))

    @classmethod
    def of(
        cls,
        s: ConfigReader,
        family: Family,
        own: Mapping[str, int] | None,
        *,
        index: int,
        windowed: bool,
    ) -> "LayerHeads":
        """Those of one layer, with a window or a full one; ``own``: its settings where each layer
        has its own. Raises ShapeError.
        """
        query, kv, dim, one_product = s.heads, s.kv_heads, s.head_dim, False
        if family.heads_by_layer:
            query = _query_heads(s, family.heads_by_layer, index)
        if family.full_dim:
            one_product = not windowed and s.flag(family.full_if)
            kv, dim = _own_sizes(s, family, own, full=not windowed)
        value_dim = (s.own(family.value_dim) if family.value_dim else None) or dim
        times = family.windowed_kv_times if windowed else 1
        kv *= times
        if query % kv:
            problem = f"{query} query heads cannot share {kv} evenly"
            if times > 1:
                problem += f": layers with a window have {times} times num_key_value_heads"
            raise ShapeError("num_key_value_heads", problem)
        return cls(query, kv, dim, value_dim, one_product)


def _query_heads(s: ConfigReader, setting: str, index: int) -> int:
    value = s.get(setting)
    if value is not None and not isinstance(value, list | tuple):
        raise ShapeError(setting, "must be a list of numbers, one per layer")
    return s.of_layer(setting, index) or s.heads


def heads_of(s: ConfigReader, family: Family, windowed: Sequence[bool]) -> list[LayerHeads]:
    """The heads of each layer, with a window or without. Raises ShapeError."""
    own = _settings_by_layer(s, len(windowed)) if family.full_dim else None
    return [
        LayerHeads.of(
            s, family, None if own is None else own.get(index, {}), index=index, windowed=on
        )
        for index, on in enumerate(windowed)
    ]


def _settings_by_layer(s: ConfigReader, layers: int) -> dict[int, dict[str, int]] | None:
    """The settings of layers that have their own, None where ``per_layer_config`` says nothing."""
    field, entries = "per_layer_config", s.get("per_layer_config")
    if entries is None:
        return None
    if not isinstance(entries, Mapping):
        raise ShapeError(field, "must be an object with the settings of layers by their numbers")
    if len(entries) > layers:
        raise ShapeError(field, f"has {len(entries)} entries, more than the {layers} layers")
    own = dict[int, dict[str, int]]()
    for key, settings in entries.items():
        name = str(key)
        digits = name.lstrip("0") or "0"
        # A number of very many digits is none that Python reads.
        number = name.isascii() and name.isdecimal() and len(digits) <= len(str(layers))
        if not number or int(digits) >= layers or not isinstance(settings, Mapping):
            problem = f"{name[:40]!r} is not the number of one of {layers} layers, with settings"
            raise ShapeError(field, problem)
        if int(digits) in own:
            raise ShapeError(field, f"has the settings of layer {digits} twice")
        if other := settings.keys() - {"num_key_value_heads", "head_dim"}:
            word = min(map(str, other))[:40]
            raise ShapeError(field, f"{word!r} of a layer is not supported")
        own[int(digits)] = {name: s.checked(name, value) for name, value in settings.items()}
    return own


def _own_sizes(
    s: ConfigReader, family: Family, own: Mapping[str, int] | None, *, full: bool
) -> tuple[int, int]:
    """Key-value heads of one layer, and the width of a head."""
    if own is not None:
        return own.get("num_key_value_heads", s.kv_heads), own.get("head_dim", s.head_dim)
    if not full:
        return s.kv_heads, s.head_dim
    kv = s.optional(family.full_kv_heads) if s.flag(family.full_if) else None
    return kv or s.kv_heads, s.integer(family.full_dim)


def check_types(heads: Sequence[LayerHeads], windowed: Sequence[bool]) -> None:
    """Raise ShapeError where layers of one type differ, which transformers' code does not take."""
    for kind in {*windowed}:
        if is_mixed([layer for layer, own in zip(heads, windowed, strict=True) if own is kind]):
            raise ShapeError("per_layer_config", "layers of one type must have the same heads")


def is_mixed(layers: Sequence[LayerHeads]) -> bool:
    """Whether layers differ in their heads."""
    return len({(heads.query, heads.kv, heads.dim, heads.value_dim) for heads in layers}) > 1


def widest(layers: Sequence[LayerHeads]) -> LayerHeads:
    """The heads of the layer that keeps most of a token; some of no width where there is none."""
    return max(layers, key=lambda heads: heads.width, default=LayerHeads(1, 1, 0, 0))


def refuse_mixed(config: EngineConfig) -> None:
    """Raise ConfigError for a setting that a model is not served with whose layers differ in their
    heads.
    """
    if config.kernels == "flashinfer":
        problem = f"flashinfer: {MIXED}, which it does not know"
        raise ConfigError("kernels", problem, "use auto, cpu or torch")
    if config.deterministic:
        problem = f"{MIXED}, and some of them are computed by torch"
        raise ConfigError("deterministic", problem, "use false")
