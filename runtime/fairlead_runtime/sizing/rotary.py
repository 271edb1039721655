"""Rotary embeddings as a ``config.json`` says: how far they reach, and what no pod can build.

Owns the keys that each of transformers' types of them needs (``modeling_rope_utils.py``). Pure.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from fairlead_runtime.sizing.config_json import LARGEST_OTHER, ConfigReader, ShapeError

# The numbers that each type needs; lists of numbers; further numbers that it reads.
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "proportional": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_LISTS = ("short_factor", "long_factor")
_READ = ("rope_theta", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
LARGEST_NUMBER = 1e12
_ORIGINAL, _PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"


def check_rope(s: ConfigReader) -> None:
    """Raise ShapeError for settings of rotary embeddings of which transformers builds none."""
    if s.family.positions:
        return
    if s.get("rope_theta") is not None:
        _check_number("rope_theta", s.get("rope_theta"))
    for field in ("rope_scaling", "rope_parameters"):
        value = s.get(field)
        if not value:
            continue
        if not isinstance(value, Mapping):
            raise ShapeError(field, f"must be an object, not {str(value)[:40]}")
        if field == "rope_parameters" and s.get("rope_scaling"):
            continue  # the older name comes first
        for parameters in _layers(value):
            _check(s, field, parameters)


def _layers(value: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The settings of all layers, or of each type of layers."""
    layers = [part for part in value.values() if isinstance(part, Mapping)]
    return layers or (value,)


def _check(s: ConfigReader, field: str, parameters: Mapping[str, Any]) -> None:
    name = parameters.get("rope_type", parameters.get("type", "default"))
    kind = s.family.rope_names.get(str(name), name)
    types = s.family.rope_types or tuple(_NUMBERS)
    if kind not in types:
        words = ", ".join(sorted({*types, *s.family.rope_names}))
        raise ShapeError(field, f"rope_type {str(name)[:40]!r} is not one of {words}")
    scales = s.family.rope_scales if kind != "default" else ()
    for key in (*_NUMBERS[kind], *scales):
        _check_number(f"{field}.{key}", parameters.get(key))
    for key in _READ:
        if parameters.get(key) is not None:
            _check_number(f"{field}.{key}", parameters[key])
    if kind == "longrope":
        for key in _LISTS:
            _check_list(s, f"{field}.{key}", parameters.get(key), parameters.get(_PARTIAL))
    if kind in ("yarn", "longrope", "llama3"):
        _check_original(s, field, parameters, name)


def _check_original(
    s: ConfigReader, field: str, parameters: Mapping[str, Any], name: object
) -> None:
    """The tokens before scaling: those of the model, if it says any, come first."""
    if s.says(_ORIGINAL):
        s.integer(_ORIGINAL)
    elif _ORIGINAL in parameters:
        s.checked(f"{field}.{_ORIGINAL}", parameters[_ORIGINAL])
    if name == "su" and _ORIGINAL not in parameters:
        raise ShapeError(f"{field}.{_ORIGINAL}", f"must be set beside rope_type {name!r}")


def _check_number(field: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= LARGEST_NUMBER:  # type: ignore[operator]
        raise ShapeError(field, f"must be a number above 0, not {str(value)[:40]}")


def _check_list(s: ConfigReader, field: str, value: object, partial: object) -> None:
    """A factor for each pair of a head's rotated elements."""
    if not isinstance(value, list | tuple):
        raise ShapeError(field, f"must be a list of numbers, not {str(value)[:40]}")
    for factor in value:
        _check_number(field, factor)
    share: Any = s.get(_PARTIAL) if partial is None else partial
    if share is None:
        return
    _check_number(_PARTIAL, share)
    widths = {s.head_dim, s.integer("hidden_size") // s.heads}
    pairs = {int(width * share) // 2 for width in widths}
    if pairs != {len(value)}:
        counts = " and ".join(str(count) for count in sorted(pairs))
        raise ShapeError(field, f"must have {counts} numbers, one per pair, not {len(value)}")


def longest_text(s: ConfigReader, *, rotary: bool = True) -> int:
    """Tokens that the model reads: those of its positions, and where its ``rotary`` embedding is
    scaled beyond these by ``yarn`` or ``dynamic``, as many times more as the factor says.

    Follows vLLM's derivation of a model's length; transformers has no limit. ``longrope`` and
    ``llama3`` name the scaled length in max_position_embeddings, ``linear`` either one.
    """
    positions = s.integer("max_position_embeddings")
    if not rotary:
        return positions
    parameters = s.get("rope_scaling") or s.get("rope_parameters")
    layers = _layers(parameters) if isinstance(parameters, Mapping) else ()
    lengths = [_scaled(layer, positions) for layer in layers]
    return min(max(positions, *lengths) if lengths else positions, LARGEST_OTHER)


def _scaled(parameters: Mapping[str, Any], positions: int) -> int:
    """The tokens that scaled rotary embeddings reach; 0 where they are not scaled beyond these."""
    kind, factor = parameters.get("rope_type", parameters.get("type")), parameters.get("factor")
    if kind not in ("yarn", "dynamic") or isinstance(factor, bool):
        return 0
    if not isinstance(factor, int | float) or not 1 <= factor <= LARGEST_OTHER:
        return 0
    original = parameters.get("original_max_position_embeddings")
    if kind == "yarn" and isinstance(original, int):
        # More than all positions: the default of a class, for a larger model.
        return int(original * factor) if 0 < original <= positions else 0
    return int(positions * factor)
