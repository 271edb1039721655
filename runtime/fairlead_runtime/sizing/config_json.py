"""A model's ``config.json``, read key by key: every value is typed and bounded before it is used.

Owns the errors that name a key, the limits, and the defaults of a family beneath the file's own
values. The values are untrusted. Reads one mapping; never a file or a network.
"""

from collections.abc import Mapping
from typing import Any

from fairlead_runtime.sizing.family_table import Family

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
LARGEST = {
    "num_hidden_layers": 1 << 12,
    **dict.fromkeys(("num_local_experts", "num_experts"), 1 << 14),
    "vocab_size": 1 << 26,
}
LARGEST_OTHER = 1 << 24
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
    """A config.json that cannot be sized. ``field`` names the key, the message what it must be."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"config.json: {field}: {message}")
        self.field = field


class UnknownFamilyError(ShapeError):
    """A family that is not in the table: config.json alone does not give its size."""

    def __init__(self, name: str) -> None:
        super().__init__(
            "model_type",
            f"{name[:100]!r} is not in the table of families: its weights' size is known once the "
            "files are downloaded; a pod loads such a model, runs the self-test and measures it",
        )


class ConfigReader:
    """A config over its family's defaults: every read checks the type and the bounds."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        self._config = config
        self._family = family
        self.heads = self.integer("num_attention_heads")
        kv_heads, head_dim = (
            (self.optional(k) for k in ("num_key_value_heads", "head_dim"))
            if family.reads_kv_heads
            else (None, None)
        )
        self.kv_heads = kv_heads or self.heads
        self.head_dim = head_dim or max(1, self.integer("hidden_size") // self.heads)

    def get(self, name: str) -> Any:
        for key in (self._family.aliases.get(name, name), name):
            if key in self._config:
                return self._config[key]
        return self._family.defaults.get(name)

    def optional(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def integer(self, name: str, low: int = 1) -> int:
        value, high = self.get(name), LARGEST.get(name, LARGEST_OTHER)
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

    def flag_or_constant(self, value: bool | str) -> bool:
        """``value`` itself, or the setting that it names."""
        return self.flag(value) if isinstance(value, str) else value


def check_traits(s: ConfigReader) -> None:
    """Raise ShapeError for a setting that paged attention does not support."""
    if s.get("use_bidirectional_attention"):
        raise ShapeError(
            "use_bidirectional_attention", "such a model encodes text and does not generate any"
        )
    if s.get("per_layer_config"):
        raise ShapeError("per_layer_config", "layers of different sizes are not supported")


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """The checkpoint's own type, None when the config does not name one."""
    value = config.get("dtype") or config.get("torch_dtype")
    if value is None:
        return None
    name = str(value)[:40].removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ShapeError(
            "dtype", f"{name!r} is not supported; supported are {', '.join(DTYPE_BYTES)}"
        )
    return name
