"""Reads the ``quantization_config`` of a GPTQ or AWQ checkpoint, of which only a part is served.

Owns the refusals of what is not, by the name of the key that decides. Pure; the values are
untrusted. What a file omits is what transformers takes it for.
"""

from collections.abc import Mapping
from typing import Any, Literal

from fairlead_runtime.sizing.stored import (
    GROUP_SIZES,
    HEAD,
    Published,
    check_value,
    refusal,
)

WEIGHT, PACKED = "qweight", 8
PARTLY = "models of which all layers are quantized alike are served"


def gptq(settings: Mapping[str, Any]) -> Published:
    """4 bits, packed in int32, of all layers and not the head. Raises QuantizedError."""
    check_value(settings, "bits", (4,))
    check_value(settings, "group_size", (*reversed(GROUP_SIZES), -1))
    for key in ("desc_act", "static_groups", "sym"):
        check_value(settings, key, (False, True))
    check_value(settings, "lm_head", (False, None))
    check_value(settings, "is_marlin_format", (False, None))
    check_value(settings, "pack_dtype", ("int32", None))
    for key in ("dynamic", "modules_in_block_to_quantize", "adapter"):
        if settings.get(key):
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


def awq(settings: Mapping[str, Any]) -> Published:
    """4 bits with zero points, in the layout for products, of all layers and not the head. Raises
    QuantizedError.
    """
    check_value(settings, "bits", (4,))
    check_value(settings, "group_size", tuple(reversed(GROUP_SIZES)))
    check_value(settings, "zero_point", (True,))
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version != "gemm":
        raise refusal("version", version, "gemm is served")
    plain = settings.get("modules_to_not_convert") or []
    layers = [name for name in plain if name not in HEAD] if isinstance(plain, list) else [plain]
    if layers:
        raise refusal("modules_to_not_convert", layers[0], PARTLY)
    return Published("int4", WEIGHT, PACKED, "awq", int(settings.get("group_size", 128)))
