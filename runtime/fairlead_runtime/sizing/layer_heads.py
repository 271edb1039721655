"""The attention heads of each layer, as a ``config.json`` says, and what is not served where layers
differ in them.

Owns the settings by which windowed and full layers have heads of other numbers and sizes. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.arithmetic import ceil_div
from fairlead_runtime.sizing.config_json import ConfigReader, ShapeError
from fairlead_runtime.sizing.family_table import Family

MIXED = "the model's layers differ in their heads, which plain torch alone serves"


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

    @property
    def alive_width(self) -> int:
        """Elements of one token that attention keeps alive, the most of three moments: a rotary
        embedding of queries and keys, one of queries, which has two products beside what it takes
        and gives, and the projection of what attention gives.
        """
        query, key = self.query_width, self.key_width
        embedded = max(3 * query + 3 * key, 4 * query + key, query + self.attended_width + key)
        return embedded + self.value_width

    def share(self, ranks: int) -> "LayerHeads":
        """Those that one of so many ranks has."""
        return replace(self, query=ceil_div(self.query, ranks), kv=ceil_div(self.kv, ranks))

    @classmethod
    def of(cls, s: ConfigReader, family: Family, index: int, *, windowed: bool) -> "LayerHeads":
        """Those of one layer, with a window or a full one. Raises ShapeError."""
        kv, dim, one_product = s.kv_heads, s.head_dim, False
        if family.full_dim:
            one_product = not windowed and s.flag(family.full_if)
            kv, dim = _own_sizes(s, family, index, full=not windowed)
        value_dim = (s.optional(family.value_dim) if family.value_dim else None) or dim
        if windowed:
            kv *= family.windowed_kv_times
        if s.heads % kv:
            raise ShapeError(
                "num_key_value_heads", f"{s.heads} query heads cannot share {kv} evenly"
            )
        return cls(s.heads, kv, dim, value_dim, one_product)


def _own_sizes(s: ConfigReader, family: Family, index: int, *, full: bool) -> tuple[int, int]:
    """Key-value heads of one layer, and the width of a head."""
    layers = s.get("per_layer_config")
    if layers is None:
        if not full:
            return s.kv_heads, s.head_dim
        own = s.optional(family.full_kv_heads) if s.flag(family.full_if) else None
        return own or s.kv_heads, s.integer(family.full_dim)
    field = "per_layer_config"
    if not isinstance(layers, Mapping):
        raise ShapeError(field, "must be an object with the settings of layers by their numbers")
    sizes = {"num_key_value_heads": s.kv_heads, "head_dim": s.head_dim}
    for key, settings in layers.items():
        if not str(key).isdecimal() or not isinstance(settings, Mapping):
            raise ShapeError(field, f"{str(key)[:40]!r} is not the number of a layer with settings")
        if other := settings.keys() - sizes.keys():
            raise ShapeError(field, f"{str(min(other))[:40]!r} of a layer is not supported")
        if int(key) == index:
            sizes |= {name: s.checked(name, value) for name, value in settings.items()}
    return sizes["num_key_value_heads"], sizes["head_dim"]


def check_types(heads: Sequence[LayerHeads], windowed: Sequence[bool]) -> None:
    """Raise ShapeError where layers of one type differ, which transformers' code does not take."""
    for kind in {*windowed}:
        if is_mixed([layer for layer, own in zip(heads, windowed, strict=True) if own is kind]):
            raise ShapeError("per_layer_config", "layers of one type must have the same heads")


def is_mixed(layers: Sequence[LayerHeads]) -> bool:
    """Whether layers differ in their heads."""
    return len({(heads.kv, heads.dim, heads.value_dim) for heads in layers}) > 1


def widest(layers: Sequence[LayerHeads]) -> LayerHeads:
    """The heads of the layer that keeps most of a token."""
    return max(layers, key=lambda heads: heads.width)


def refuse_mixed(config: EngineConfig) -> None:
    """Raise ConfigError for a setting that a model is not served with whose layers differ in their
    heads: it needs kernels that know one size.
    """
    if config.kernels in ("cpu", "flashinfer"):
        raise ConfigError("kernels", f"{config.kernels}: {MIXED}", "use auto or torch")
    if config.deterministic:
        raise ConfigError("deterministic", MIXED, "use false")
