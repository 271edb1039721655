"""Families that are not in the table: an ordinary decoder of transformers is tried, and must pass
the self-test.

Owns the checks of its configuration before its weights are downloaded, and its shape from their
headers. Loads no weight. The self-test decides whether its text is right
(``device/proof/selftest.py``); a model that fails it never becomes ready.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from fairlead_runtime.models import families
from fairlead_runtime.models.headers import Header
from fairlead_runtime.models.model_error import ModelError, first_line, unsupported_shape
from fairlead_runtime.sizing.checkpoint_formats import published
from fairlead_runtime.sizing.config_json import STANDARD, ShapeError, nearest_family
from fairlead_runtime.sizing.shape import ModelShape

# The word of a tensor's name for a matrix with rows or columns for each head.
_OF_HEADS = re.compile(
    r"w?[qkvo]|w?qkv|kv|to_\w+|c_attn|query_key_value|query|key|value|dense|proj|out|output"
    r"|(q|k|v|o|qkv|kv|c|out|in)_(proj|lin|linear)",
    re.IGNORECASE,
)
_LAYER = re.compile(r"(^|\.)\d+\.")


def shape_of(config: Mapping[str, Any], weights: Mapping[str, Header]) -> ModelShape:
    """The shape of a model from its configuration and its weights' headers; without headers it has
    no parameters.

    Raises ModelError for a model that cannot be tried: its attention is not replaceable, it has a
    recurrent state, it is an encoder, or sizes are missing.
    """
    full_config = _complete(config)
    windows = families.check(full_config)
    try:
        settings = {name: getattr(full_config, name, None) for name in STANDARD}
    # transformers refuses to read one value of a setting that layers have each for themselves.
    except Exception as error:
        raise families.unsupported(str(config.get("model_type")), first_line(error)) from error
    sizes = [(name, t.shape) for header in weights.values() for name, t in header.tensors.items()]
    try:
        stored = published(config)
        if stored is not None:
            sizes = [plain for size in sizes if (plain := stored.plain(*size)) is not None]
        sources = families.sources_of(full_config)
        shape = ModelShape.from_tensors(config, settings, windows, sources, sizes)
    except ShapeError as error:
        raise unsupported_shape(error) from error
    if len(windows) != shape.layers:
        raise families.unsupported(
            shape.model_type, f"{len(windows)} layer types for {shape.layers} layers"
        )
    if _differ_in_heads(full_config, sizes):
        raise families.unsupported(shape.model_type, families.MIXED)
    return shape


def _differ_in_heads(
    config: PretrainedConfig, sizes: Iterable[tuple[str, tuple[int, ...]]]
) -> bool:
    """Whether layers have other numbers or sizes of heads than others: as a list of the
    configuration says, or as the same projection of their attention does, by ``sizes``, the names
    and dimensions of stored tensors.
    """
    for name, value in config.to_dict().items():
        if not {"head", "heads"}.isdisjoint(name.split("_")) and _has_several(value):
            return True
    found: dict[str, tuple[int, ...]] = {}
    for name, dimensions in sizes:
        _, _, rest = name.replace("attention", "attn").partition("attn")
        if len(dimensions) > 1 and any(map(_OF_HEADS.fullmatch, rest.split("."))):
            # Other numbers than the layer's tell matrices of one layer apart.
            matrix = _LAYER.sub(".", name, count=1)
            if found.setdefault(matrix, dimensions) != dimensions:
                return True
    return False


def _has_several(value: object) -> bool:
    if not isinstance(value, list | tuple):
        return False
    numbers = [number for number in value if isinstance(number, int)]
    return len(numbers) == len(value) and len({*numbers}) > 1


def _complete(config: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration as transformers' class for it completes it."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        reason = "transformers has no architecture of that name"
        raise families.unsupported(str(name), reason + nearest_family(str(name)[:100]))
    factory: Any = CONFIG_MAPPING[name]  # transformers' classes are untyped
    try:
        full_config = factory.from_dict(dict(config))
    # The values are untrusted: any error of their class is theirs.
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        raise ModelError(
            "UnsupportedModel", f"config.json: {line}", "fetch the model again"
        ) from error
    if not isinstance(full_config, PretrainedConfig):
        raise families.unsupported(name, "its configuration is not one of transformers'")
    return full_config
