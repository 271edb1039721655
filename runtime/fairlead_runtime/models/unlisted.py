"""Families that are not in the table: an ordinary decoder of transformers is tried, and must pass
the self-test.

Owns the checks of its configuration before its weights are downloaded, and its shape from their
headers. Loads no weight. The self-test decides whether its text is right
(``device/proof/selftest.py``); a model that fails it never becomes ready.
"""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from fairlead_runtime.models import families
from fairlead_runtime.models.headers import Header
from fairlead_runtime.models.model_error import ModelError, first_line, unsupported_shape
from fairlead_runtime.sizing.checkpoint_formats import published
from fairlead_runtime.sizing.config_json import STANDARD, ShapeError, nearest_family
from fairlead_runtime.sizing.shape import ModelShape


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
    return shape


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
