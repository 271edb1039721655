"""The verdict on whether a model's architecture is served: decided from its config.json before any
weights are downloaded.

Owns the refusals of architectures. Imports transformers only for a model_type that is not in our
table.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fairlead_runtime.models.headers import Header
from fairlead_runtime.models.model_error import ModelError, unsupported_shape
from fairlead_runtime.settings.engine_config import ConfigError
from fairlead_runtime.sizing.config_json import (
    ShapeError,
    UnknownFamilyError,
    family_named,
    with_stored_head,
)
from fairlead_runtime.sizing.families.wholes import WHOLES
from fairlead_runtime.sizing.shape import ModelShape

_OWN_CODE_FIX = "serve a model whose architecture is part of transformers"


def check(
    config: Mapping[str, Any],
    auto_maps: Mapping[str, str] | None = None,
    *,
    trusted: bool = False,
    weights: Mapping[str, Header] | None = None,
) -> ModelShape:
    """The shape of a model that is served.

    ``auto_maps`` says where the model's files name their own Python code (``files.auto_maps``),
    ``trusted`` whether the user allows it. ``weights`` are the headers of its files; without them a
    family that is not in the table counts as having no parameters. Raises ModelError, or
    ConfigError for a setting that is not supported yet.
    """
    if auto_maps and not _in_transformers(config.get("model_type")):
        _refuse_own_code(config, auto_maps, trusted=trusted)
    names = [name for header in (weights or {}).values() for name in header.tensors]
    try:
        # transformers looks at the files, too, whatever the config says of the head.
        shape = ModelShape.from_config(with_stored_head(config, names) if names else config)
    except UnknownFamilyError:
        # Imports transformers, whose configuration classes decide.
        from fairlead_runtime.models import unlisted

        shape = unlisted.shape_of(config, weights or {})
    except ShapeError as error:
        raise unsupported_shape(error) from error
    if not shape.quantized and _has_wide_matrix(weights or {}):
        shape = replace(shape, packs_all=False)
    return shape


def _has_wide_matrix(weights: Mapping[str, Header]) -> bool:
    """Whether kernels that hold matrices in bfloat16 would round one."""
    entries = (entry for header in weights.values() for entry in header.tensors.values())
    return any(len(entry.shape) == 2 and entry.dtype != "BF16" for entry in entries)


def _in_transformers(model_type: object) -> bool:
    """Whether transformers has this architecture; an auto_map is then ignored."""
    if _in_table(model_type):
        return True
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def _in_table(model_type: object) -> bool:
    return isinstance(model_type, str) and (
        model_type in WHOLES or family_named(model_type) is not None
    )


def _refuse_own_code(
    config: Mapping[str, Any], auto_maps: Mapping[str, str], *, trusted: bool
) -> None:
    where = "; ".join(f"{name}: {keys}" for name, keys in auto_maps.items())[:200]
    if trusted:
        raise ConfigError(
            "trust_remote_code",
            f"running a model's own Python code ({where}) is not supported yet",
            _OWN_CODE_FIX,
        )
    raise ModelError(
        "RemoteCodeRefused",
        f"model_type {str(config.get('model_type'))[:100]!r} needs the model's own Python code "
        f"({where})",
        _OWN_CODE_FIX,
    )
