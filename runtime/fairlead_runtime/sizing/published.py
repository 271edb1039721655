"""What a checkpoint's ``quantization_config`` says of its weights, and which of it is served.

Owns the refusals of published formats, by the name of the key that decides. Pure: reads the
configuration and, for models whose size is not known from it, the names of tensors. The values are
untrusted. ``models/published.py`` reads the tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fairlead_runtime.config import ConfigError, EngineConfig
from fairlead_runtime.sizing.config_json import ShapeError
from fairlead_runtime.supported import check_supported

KEY = "quantization_config"
# How compressed-tensors stores the numbers: as they are, or several in an int32.
_PLAIN, _PACKED = ("int-quantized", "float-quantized", "naive-quantized"), "pack-quantized"
_HEAD = ("lm_head", "re:.*lm_head", "embed_out")
# Beside a weight: what it is multiplied by, and what belongs to activations or to calibration.
SCALE, ZERO = "weight_scale", "weight_zero_point"
BESIDE = (SCALE, ZERO, "weight_shape", "input_scale", "input_zero_point")


class QuantizedError(ShapeError):
    """A quantized checkpoint that is not served; the message names the key of its configuration."""


# What a checkpoint's weights are, as the setting ``quantization`` names it; "": plain.
Stored = Literal["", "int8", "fp8"]


@dataclass(frozen=True, slots=True)
class Published:
    """How the matrices of all layers are stored. ``format``: the value of the setting
    ``quantization`` that serves them; ``weight``: the name of the tensor that holds the numbers of
    a matrix, several of them in each element if there are ``packed`` in one.
    """

    format: Literal["int8", "fp8"]
    weight: str = "weight"
    packed: int = 1

    def plain(self, name: str, dimensions: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
        """The tensor of the unquantized checkpoint in the place of this one, None for none."""
        module, _, leaf = name.rpartition(".")
        if leaf in BESIDE:
            return None
        if leaf == self.weight and self.packed > 1:
            *rows, columns = dimensions
            return f"{module}.weight", (*rows, columns * self.packed)
        return name, dimensions


def as_stored(config: EngineConfig, quantized: Stored) -> EngineConfig:
    """The settings with the format ``quantized`` of the checkpoint's weights, "" for plain ones.

    ``none`` means that nothing is rounded at load, so it serves every checkpoint. Raises
    ConfigError for another format than the checkpoint's.
    """
    if not quantized:
        return config
    if config.quantization not in ("none", quantized):
        raise ConfigError(
            "quantization",
            f"{config.quantization}, but the checkpoint's weights are {quantized} already "
            f"(config.json: {KEY})",
            f"use none or {quantized}, or the unquantized checkpoint",
        )
    return replace(config, quantization=quantized)


def check_stored(
    config: EngineConfig, quantized: Stored, dtype: str, device: str, *, experts: bool
) -> EngineConfig:
    """``as_stored``, checked as ``check_supported`` does: what a checkpoint brings is refused where
    the setting would be. Raises ConfigError, too, for int8 in float16 or with an fp8 cache on a
    CPU, for weights that would be rounded and split, and for rounding a model with ``experts``,
    whose layers are not fused.
    """
    stored = as_stored(config, quantized)
    try:
        check_supported(stored, dtype, device)
    except ConfigError as error:
        if error.field != "quantization" or stored.quantization == config.quantization:
            raise
        message = f"{error.message}; the checkpoint's weights are {quantized} (config.json: {KEY})"
        raise ConfigError(
            error.field, message, f"{error.hint}; none and int8 need the unquantized checkpoint"
        ) from error
    if stored.quantization == "int8" and (dtype, device) == ("float16", "cpu"):
        # The C++ kernels, which multiply them there, have no float16.
        problem = f"int8 is not supported in {dtype} on {device}"
        raise ConfigError("quantization", problem, "use dtype bfloat16 or float32")
    if stored.fp8_cache and (stored.quantization, device) == ("int8", "cpu"):
        problem = "fp8 is not supported with int8 weights on cpu: the C++ kernels lack it"
        raise ConfigError("cache_dtype", problem, "use auto")
    if not quantized and stored.quantization != "none":
        if stored.tensor_parallel > 1:
            problem = f"{stored.quantization} weights cannot be split over ranks"
            raise ConfigError("quantization", problem, "use none, or tensor parallel 1")
        if experts:
            problem = f"{stored.quantization} weights of experts are not supported"
            raise ConfigError("quantization", problem, "use none")
    return stored


def published(config: Mapping[str, Any]) -> Published | None:
    """How a quantized checkpoint stores its weights; None for one that is not quantized. Raises
    QuantizedError for one that is not served.
    """
    settings = config.get(KEY)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise QuantizedError(KEY, "must be an object")
    method = settings.get("quant_method")
    if method != "compressed-tensors":
        raise _refusal("quant_method", method, "compressed-tensors is served")
    return _compressed_tensors(config, settings)


def _compressed_tensors(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Published:
    if settings.get("quantization_status", "compressed") != "compressed":
        status = settings["quantization_status"]
        raise _refusal("quantization_status", status, "compressed is served")
    sparsity = _object(settings, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise _refusal("sparsity_config.format", sparsity["format"], "dense weights are served")
    groups = _object(settings, "config_groups")
    if len(groups) != 1:
        raise _refusal("config_groups", f"{len(groups)} groups", "one for all layers is served")
    group = _object(groups, next(iter(groups)))
    if group.get("targets") != ["Linear"]:
        raise _refusal("targets", group.get("targets"), '["Linear"] is served')
    _check_ignored(config, settings)
    if group.get("output_activations") is not None:
        raise _refusal("output_activations", "set", "rounded outputs are not served")
    weights = _object(group, "weights")
    _check_weights(weights)
    served: Literal["int8", "fp8"] = "int8" if weights["type"] == "int" else "fp8"
    stored = group.get("format") or settings.get("format")
    if stored == _PACKED and served == "int8":
        return Published(served, "weight_packed", 4)
    if stored not in _PLAIN:
        raise _refusal("format", stored, f"{', '.join(_PLAIN)} and 8-bit {_PACKED} are served")
    return Published(served)


def _check_weights(weights: Mapping[str, Any]) -> None:
    """Refuse all but 8-bit numbers with a scale per output row, or one for all of them."""
    for key, works in (
        ("num_bits", (8,)),
        ("type", ("int", "float")),
        ("strategy", ("channel", "tensor")),
        ("symmetric", (True,)),
        ("dynamic", (False, None)),
    ):
        value = weights.get(key)
        # JSON's true is no 1.
        if not any(value == x and isinstance(value, bool) is isinstance(x, bool) for x in works):
            raise _refusal(f"weights.{key}", value, " or ".join(map(str, works)) + " is served")


def _check_ignored(config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """The head must not be quantized, and every layer whole."""
    ignored = settings.get("ignore")
    names = ignored if isinstance(ignored, list) else []
    others = [name for name in names if name not in _HEAD]
    if others:
        raise _refusal("ignore", others[0], "models of which all layers are quantized are served")
    if not names and config.get("tie_word_embeddings") is not True:
        raise _refusal("ignore", ignored, "models whose lm_head is not quantized are served")


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise QuantizedError(KEY, f"{key[:40]} must be an object")
    return value


def _refusal(key: str, value: object, served: str) -> QuantizedError:
    return QuantizedError(KEY, f"{key} {str(value)[:60]!r} is not supported: {served}")
