"""Families that no table holds: an ordinary decoder that transformers knows is tried, and judged by
the self-test.

Owns what must be true of its configuration before its weights are fetched, and its shape once their
headers are there. Loads no weight; whether its text is right is the self-test's to say
(``selftest``), and a wrong one never gets ready.
"""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from fairlead_runtime.models import families
from fairlead_runtime.models.headers import Header
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.sizing.config_json import STANDARD, ShapeError
from fairlead_runtime.sizing.shape import ModelShape

MOST = 1 << 14
COUNTED = frozenset({"layer", "layers", "head", "heads", "experts", "groups", "blocks", "depth"})


def measure(config: Mapping[str, Any], weights: Mapping[str, Header]) -> ModelShape:
    """The shape of a model by its configuration and the headers of its weights; without any, of no
    parameters.

    Raises ModelError for what cannot be tried: a class whose attention is not replaceable, a
    recurrent state, an encoder, sizes that are missing.
    """
    resolved = _resolved(config)
    windows = families.check(resolved)
    settings = {name: getattr(resolved, name, None) for name in STANDARD}
    sizes = ((name, t.shape) for header in weights.values() for name, t in header.tensors.items())
    try:
        shape = ModelShape.from_tensors(config, settings, windows, sizes)
    except ShapeError as error:
        raise ModelError(
            "UnsupportedModel", str(error), "serve one of the supported families"
        ) from error
    if len(windows) != shape.layers:
        raise families.refused(
            shape.model_type, f"{len(windows)} layer types for {shape.layers} layers"
        )
    return shape


def _bound(config: Mapping[str, Any]) -> None:
    """Refuse counts that no model has: a configuration class makes lists of them, before anybody
    can look.
    """
    for key, value in config.items():
        if (
            isinstance(value, int)
            and value > MOST
            and any(part in key.split("_") for part in COUNTED)
        ):
            raise ModelError(
                "UnsupportedModel",
                f"config.json: {key[:100]}: {value:.3g} is more than {MOST}",
                "fetch the model again",
            )


def _resolved(config: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration as transformers' class for it completes it."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        raise families.refused(str(name), "transformers has no architecture of that name")
    _bound(config)
    factory: Any = CONFIG_MAPPING[name]  # transformers' classes are untyped
    try:
        found = factory.from_dict(dict(config))
    # The values are a stranger's: whatever their class raises, they are at fault.
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        raise ModelError(
            "UnsupportedModel", f"config.json: {line}", "fetch the model again"
        ) from error
    if not isinstance(found, PretrainedConfig):
        raise families.refused(name, "its configuration is none of transformers'")
    return found
