"""What a checkpoint's ``quantization_config`` says of its weights, and which of it is served.

Owns the refusals of published formats, by the name of the key that decides. Pure: reads the
configuration and, for models whose size is not known from it, the names of tensors. The values are
untrusted. ``models/published.py`` reads the tensors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.settings.supported import check_supported
from fairlead_runtime.sizing.config_json import TEXT, has_parts, is_tied
from fairlead_runtime.sizing.stored import (
    GROUP_SIZES,
    HEAD,
    KEY,
    Published,
    QuantizedError,
    Stored,
    check_value,
    is_head,
    of_the_text,
    refusal,
)

# How compressed-tensors stores the numbers: as they are, or several in an int32.
_PLAIN, _PACKED = ("int-quantized", "float-quantized", "naive-quantized"), "pack-quantized"
_SORTED = ("group", "dynamic")  # columns before they were cut into groups
# Of GPTQ and AWQ: the name of a matrix, and how many integers an int32 of it holds.
WEIGHT, PACKED = "qweight", 8
_MXFP4_KEYS = ("quant_method", "modules_to_not_convert", "dequantize")
PARTLY = "models of which all layers are quantized alike are served"


def as_stored(config: EngineConfig, quantized: Stored) -> EngineConfig:
    """The settings with the format ``quantized`` of the checkpoint's weights, "" for plain ones.

    ``none`` means that nothing is rounded at load, so it serves every checkpoint; it stays where
    weights are widened. Raises ConfigError for another format than the checkpoint's.
    """
    if not quantized:
        return config
    works = "none" if quantized == "mxfp4" else f"none or {quantized}"
    if config.quantization not in ("none", quantized):
        raise ConfigError(
            "quantization",
            f"{config.quantization}, but the checkpoint's weights are {quantized} already "
            f"(config.json: {KEY})",
            f"use {works}, or the unquantized checkpoint",
        )
    return config if quantized == "mxfp4" else replace(config, quantization=quantized)


def check_stored(
    config: EngineConfig, quantized: Stored, dtype: str, device: str, *, unfused: str
) -> EngineConfig:
    """``as_stored``, checked as ``check_supported`` does: what a checkpoint brings is refused where
    the setting would be. Raises ConfigError, too, for int8 in float16 or with an fp8 cache on a
    CPU, and for rounding a model with ``unfused`` layers: what these have, "" for none.
    """
    stored = as_stored(config, quantized)
    if stored.quantization == "int4" and not quantized:
        problem = "int4: weights are not rounded to it at load, which takes a calibration"
        raise ConfigError("quantization", problem, "use none, or a GPTQ or AWQ checkpoint")
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
    if stored.quantization != "none" and unfused:
        problem = f"{stored.quantization} weights of {unfused} are not supported"
        hint = "use the unquantized checkpoint" if quantized else "use none"
        raise ConfigError("quantization", problem, hint)
    return stored


def published(config: Mapping[str, Any]) -> Published | None:
    """How a quantized checkpoint stores its weights; None for one that is not quantized. Raises
    QuantizedError for one that is not served.
    """
    settings, parts = _settings(config), has_parts(config)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise QuantizedError(KEY, "must be an object")
    method = settings.get("quant_method")
    if method == "gptq":
        return gptq(settings, parts=parts)
    if method == "awq":
        return awq(settings, parts=parts)
    if method == "mxfp4":
        return mxfp4(settings)
    if method != "compressed-tensors":
        raise refusal("quant_method", method, "compressed-tensors, gptq, awq and mxfp4 are served")
    return _compressed_tensors(config, settings)


def _settings(config: Mapping[str, Any]) -> object:
    """What is said of the weights: by the whole, or by its text alone."""
    whole, text = config.get(KEY), config.get(TEXT)
    own = text.get(KEY) if isinstance(text, Mapping) else None
    if whole is not None and own is not None and whole != own:
        raise QuantizedError(KEY, f"must be the same as in {TEXT}, or in one of them alone")
    return own if whole is None else whole


def _beside_head(names: Iterable[object], *, parts: bool) -> list[object]:
    """Of modules that are not quantized those that are not the head, and of a model of several
    ``parts`` those that may be matrices of its text.
    """
    others = [name for name in names if name not in HEAD]
    return of_the_text(others) if parts else others


def _compressed_tensors(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Published:
    # Exporters also leave the word for weights that no longer change; a format says what is stored.
    check_value(settings, "quantization_status", ("compressed", "frozen"))
    sparsity = _object(settings, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise refusal("sparsity_config.format", sparsity["format"], "dense weights are served")
    if _object(_object(settings, "transform_config"), "config_groups"):
        raise refusal("transform_config", "set", "weights as they multiply are served")
    schemes = _object(settings, "config_groups")
    if len(schemes) != 1:
        raise refusal("config_groups", f"{len(schemes)} groups", "one for all layers is served")
    scheme = _object(schemes, next(iter(schemes)))
    if scheme.get("targets") != ["Linear"]:
        raise refusal("targets", scheme.get("targets"), '["Linear"] is served')
    _check_ignored(config, settings)
    if scheme.get("output_activations") is not None:
        raise refusal("output_activations", "set", "rounded outputs are not served")
    weights = _object(scheme, "weights")
    stored = scheme.get("format") or settings.get("format")
    if weights.get("num_bits") == 4:
        return _four_bits(weights, stored)
    _check_weights(weights)
    served: Literal["int8", "fp8"] = "fp8" if weights.get("type") == "float" else "int8"
    if stored == _PACKED and served == "int8":
        return Published(served, "weight_packed", 4)
    if stored not in _PLAIN:
        raise refusal("format", stored, f"{', '.join(_PLAIN)} and 8-bit {_PACKED} are served")
    return Published(served)


def _check_weights(weights: Mapping[str, Any]) -> None:
    """Refuse all but 8-bit numbers with a scale per output row, or one for all of them. The first
    of the values that work is what compressed-tensors takes an absent key for.
    """
    for key, works in (
        ("num_bits", (8,)),
        ("type", ("int", "float")),
        ("strategy", ("tensor", "channel")),
        ("symmetric", (True,)),
        ("dynamic", (False, None)),
    ):
        check_value(weights, key, works, prefix="weights.")


def _four_bits(weights: Mapping[str, Any], stored: object) -> Published:
    """Integers of 4 bits with a scale per group of columns, or per row."""
    for key, works in (
        ("type", ("int",)),
        ("strategy", ("group", "channel")),
        ("symmetric", (True, False)),
        ("dynamic", (False, None)),
        ("actorder", (None, "static", "weight", *_SORTED)),
    ):
        check_value(weights, key, works, prefix="weights.")
    if stored != _PACKED:
        raise refusal("format", stored, f"4-bit {_PACKED} is served")
    int4_group_size = 0
    if weights.get("strategy", "group") == "group":
        int4_group_size = weights.get("group_size", 0)
        check_value({"group_size": int4_group_size}, "group_size", GROUP_SIZES, prefix="weights.")
    ordered = weights.get("actorder") in _SORTED and int4_group_size > 0
    return Published("int4", "weight_packed", 8, int4_group_size=int4_group_size, ordered=ordered)


def _check_ignored(config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """The head must not be quantized, and every layer whole."""
    ignored = settings.get("ignore")
    names = ignored if isinstance(ignored, list) else []
    if others := _beside_head(names, parts=has_parts(config)):
        raise refusal("ignore", others[0], "models of which all layers are quantized are served")
    if not any(map(is_head, names)) and not is_tied(config):
        raise refusal("ignore", ignored, "models whose lm_head is not quantized are served")


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise QuantizedError(KEY, f"{key[:40]} must be an object")
    return value


def gptq(settings: Mapping[str, Any], *, parts: bool = False) -> Published:
    """4 bits, packed in int32, of all layers and not the head; what a file omits is what
    transformers takes it for. Of a model of several ``parts`` the others may be left out. Raises
    QuantizedError.
    """
    check_value(settings, "bits", (4,))
    check_value(settings, "group_size", (*reversed(GROUP_SIZES), -1))
    for key in ("desc_act", "static_groups", "sym"):
        check_value(settings, key, (False, True))
    check_value(settings, "lm_head", (False, None))
    check_value(settings, "is_marlin_format", (False, None))
    check_value(settings, "pack_dtype", ("int32", None))
    for key in ("dynamic", "modules_in_block_to_quantize", "adapter"):
        if settings.get(key) and not (parts and key == "dynamic" and _leaves_parts(settings[key])):
            raise refusal(key, settings[key], PARTLY)
    form = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    layout: Literal["gptq", "gptq_v2"]
    if form == "gptq":
        layout = "gptq"
    elif form == "gptq_v2":
        layout = "gptq_v2"
    else:
        raise refusal("checkpoint_format", form, "gptq or gptq_v2 is served")
    size = int(settings.get("group_size", 128))
    # Groups that are fixed before columns are sorted, and a single one, have no order.
    ordered = bool(settings.get("desc_act")) and not settings.get("static_groups") and size > 0
    return Published("int4", WEIGHT, PACKED, layout, max(0, size), ordered)


def _leaves_parts(rules: object) -> bool:
    """Whether GPTQ's rules for single modules only leave out such that are not of the text."""
    left_out = "-:"
    if not isinstance(rules, Mapping) or not all(str(key).startswith(left_out) for key in rules):
        return False
    return not of_the_text(f"re:{str(key).removeprefix(left_out)}" for key in rules)


def awq(settings: Mapping[str, Any], *, parts: bool = False) -> Published:
    """4 bits with zero points, in the layout for products, of all layers and not the head. Of a
    model of several ``parts`` the others may be left out. Raises QuantizedError.
    """
    check_value(settings, "bits", (4,))
    check_value(settings, "group_size", tuple(reversed(GROUP_SIZES)))
    check_value(settings, "zero_point", (True,))
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version != "gemm":
        raise refusal("version", version, "gemm is served")
    plain = settings.get("modules_to_not_convert") or []
    if layers := _beside_head(plain, parts=parts) if isinstance(plain, list) else [plain]:
        raise refusal("modules_to_not_convert", layers[0], PARTLY)
    return Published("int4", WEIGHT, PACKED, "awq", int(settings.get("group_size", 128)))


def mxfp4(settings: Mapping[str, Any]) -> Published:
    """4-bit floats of experts alone. Which of them are stored so the files say; a config that names
    no type has bfloat16 beside them, as the method's authors publish it. Raises QuantizedError.
    """
    if unknown := sorted(map(str, settings.keys() - _MXFP4_KEYS)):
        value = settings[unknown[0]]
        raise refusal(unknown[0][:40], value, f"{' and '.join(_MXFP4_KEYS)} are served")
    plain = settings.get("modules_to_not_convert") or []
    if not isinstance(plain, list) or not all(isinstance(name, str) for name in plain):
        raise QuantizedError(KEY, "modules_to_not_convert must be a list of names")
    check_value(settings, "dequantize", (False, True, None))
    return Published("mxfp4", layout="mxfp4", dtype="bfloat16")
