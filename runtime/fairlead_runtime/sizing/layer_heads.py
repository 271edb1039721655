"""The attention heads of each layer, as a ``config.json`` says, and what is not served where layers
differ in them.

Owns the settings by which windowed and full layers have heads of other numbers and sizes. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.config_json import ConfigReader, ShapeError
from fairlead_runtime.sizing.family_table import Family

MIXED = "the model's layers differ in their heads, which plain torch alone serves"


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """``query`` heads share ``kv`` key-value heads; ``dim`` elements of a key, ``value_dim`` of a
    value.
    """

    query: int
    kv: int
    dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Elements of one token's key and value."""
        return self.kv * (self.dim + self.value_dim)

    @classmethod
    def of(cls, s: ConfigReader, family: Family, *, windowed: bool) -> "LayerHeads":
        """Those of a layer with a window, or of a full one. Raises ShapeError."""
        kv, dim = s.kv_heads, s.head_dim
        value_dim = (s.optional(family.value_dim) if family.value_dim else None) or dim
        if windowed:
            kv *= family.windowed_kv_times
        if s.heads % kv:
            raise ShapeError(
                "num_key_value_heads", f"{s.heads} query heads cannot share {kv} evenly"
            )
        return cls(s.heads, kv, dim, value_dim)


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
