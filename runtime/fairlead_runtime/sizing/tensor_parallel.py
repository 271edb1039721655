"""Which models can be split over several accelerators, as far as a config.json tells.

Owns the arithmetic of heads and widths; transformers' plan for the loaded model is read in
``device/ranks/shards.py``. Pure.
"""

from fairlead_runtime.settings.engine_config import ConfigError
from fairlead_runtime.sizing.shape import ModelShape

COUNTS = (1, 2, 4, 8)
UNSHARDED = 0.02  # the largest share of the layers' matrices that may stay whole: routers


def refuse(shape: ModelShape, count: int) -> None:
    """Raise ConfigError when ``count`` accelerators cannot share this model."""
    if reason := reason_against(shape, count):
        others = [n for n in COUNTS if n < count and not reason_against(shape, n)]
        raise ConfigError("tensor_parallel", f"{count}: {reason}", f"use {others[-1]}")


def reason_against(shape: ModelShape, count: int) -> str:
    """Why they cannot; "" when they can."""
    if count == 1:
        return ""
    if shape.reordered_columns:
        return (
            "the columns of its int4 weights are in an order of their own (desc_act, actorder), in "
            "which ranks have no whole groups"
        )
    if shape.states:
        return "the model's layers keep states, which ranks do not share yet"
    if shape.mixed:
        return "the model's layers differ in their heads"
    if not shape.shardable:
        return f"transformers has no plan to split {shape.model_type!r}"
    if shape.heads % count:
        return f"the model's {shape.heads} attention heads are not a multiple of it"
    if shape.kv_heads % count and count % shape.kv_heads:
        return (
            f"the model's {shape.kv_heads} key-value heads are neither a multiple nor a divisor "
            "of it"
        )
    if (inner := shape.mlp_width_unit) % count:
        return f"the inner width of the model's MLP, {inner}, is not a multiple of it"
    if shape.quantized != "int4":
        return ""
    size = shape.int4_group_size or 2  # a byte has two columns
    for width in (shape.heads * shape.head_dim, inner):
        if width // count % size:
            return (
                f"its int4 weights are held {size} columns at a time, and a rank would have "
                f"{width // count} of {width}"
            )
    return ""
