"""The models that can run packed on a paged cache, and those that are refused before their weights
load.

Owns the verdict on a configuration and the windows of its layers. A model whose state is not keys
and values, or whose attention transformers does not let us replace, would generate wrong text
without an error: such models are refused by name, with the reason
(``fairlead_runtime.sizing.families``). A model_type that is in no table is checked by the
properties of its class in transformers, and must then pass the self-test.
"""

import functools
import inspect
import sys
from typing import Any

from transformers import PretrainedConfig

from fairlead_runtime.models import text_model
from fairlead_runtime.models.model_error import ModelError, first_line
from fairlead_runtime.sizing.config_json import CAUSAL_TEXT, of_the_maker
from fairlead_runtime.sizing.families.refusals import (
    BIDIRECTIONAL,
    ENCODER_DECODER,
    LATENT,
    NO_TEXT,
    OLD,
    REFUSED,
    STATE,
)
from fairlead_runtime.sizing.families.wholes import WHOLES
from fairlead_runtime.sizing.families.with_states import WITH_STATES
from fairlead_runtime.sizing.family_table import FAMILIES, JUDGED, TEXTS
from fairlead_runtime.sizing.layer_windows import narrow_window

SERVED = frozenset({*FAMILIES, *WITH_STATES})  # those that are tested as a whole
# Types of layers that keep a state, beside keys that all see or without any, or that keep nothing.
WITHOUT_WINDOW = ("linear_attention", "conv", "hybrid", "moe", "mlp")
MIXED = "its layers differ in the number or size of their heads"


def unsupported(model_type: str, reason: str) -> ModelError:
    """The error for a model that is not served: names its family, the reason and those served."""
    return ModelError(
        "UnsupportedModel",
        f"model_type {model_type[:100]!r} cannot be served: {reason}{of_the_maker(model_type)}",
        f"serve one of {', '.join(sorted(SERVED))}, or a decoder that passes the self-test",
    )


def refuse_by_name(model_type: str) -> None:
    """Raise ModelError for a family that is known not to work."""
    if model_type in REFUSED:
        raise unsupported(model_type, REFUSED[model_type])


def check(config: PretrainedConfig) -> tuple[int | None, ...]:
    """The window of every layer, None for full attention; raises ModelError.

    Reads the configuration and transformers' class for it, never weights.
    """
    name = str(config.model_type)
    text = text_model.text_of(config)
    # Of the class: a file may put another type into the settings of a text.
    kind = str(type(text).model_type)
    for part in (name, kind):
        refuse_by_name(part)
    parts = WHOLES.get(name)
    if text is not config and kind not in {*SERVED, *TEXTS, *JUDGED, parts and parts.text}:
        raise unsupported(kind, NO_TEXT)
    if config.is_encoder_decoder:
        raise unsupported(name, ENCODER_DECODER)
    # Except for gpt_neox, only encoders have is_decoder in their configuration: they are decoders
    # on request.
    is_encoder = kind not in SERVED and getattr(text, "is_decoder", True) is False
    bidirectional = getattr(text, "use_bidirectional_attention", None) or None
    if is_encoder or bidirectional not in (None, *CAUSAL_TEXT):
        raise unsupported(name, BIDIRECTIONAL)
    # A family that is served has none.
    if getattr(text, "kv_lora_rank", None):
        raise unsupported(name, LATENT)
    if text.is_heterogeneous and kind not in SERVED:
        raise unsupported(name, "its layers have settings of their own (per_layer_config)")
    model_class, text_class = text_model.class_of(config), text_model.text_class_of(config)
    if model_class is None or text_class is None:
        kind = "no class of text with images" if text is not config else "no causal language model"
        raise unsupported(name, f"transformers has {kind} of that type")
    if getattr(text_class, "_is_stateful", False) and kind not in WITH_STATES:
        raise unsupported(name, STATE)
    for code in (model_class, text_class):
        if name not in SERVED and not code._can_set_attn_implementation():  # noqa: SLF001 - there is no public method
            raise unsupported(name, OLD)
    return _windows(text, text_class)


def sources_of(config: PretrainedConfig) -> tuple[int, ...]:
    """By layer of this text the one whose keys it reads, its own where it keeps them. Raises
    ModelError.
    """
    name, layers = str(config.model_type), range(int(config.num_hidden_layers))
    try:
        modes = getattr(config, "kv_sharing_modes", None) or [None] * len(layers)
    except ValueError as error:
        raise unsupported(name, first_line(error)) from error
    kinds: Any = getattr(config, "layer_types", None)
    for field, value in (("kv_sharing_modes", modes), ("layer_types", kinds)):
        used = value is modes or any(modes)
        if used and not (isinstance(value, list | tuple) and len(value) == len(layers)):
            problem = f"its {field} must be a list of {len(layers)} names, one per layer"
            raise unsupported(name, problem)
    stored: dict[str, int] = {}
    sources: list[int] = []
    for layer, mode in zip(layers, modes, strict=True):
        kind = str(kinds[layer]) if mode else ""
        if mode not in (None, "store", "reuse") or (mode == "reuse" and kind not in stored):
            raise unsupported(name, f"layer {layer} shares keys in a way of its own, {mode!r}")
        if mode == "store":
            stored[kind] = layer
        sources.append(stored[kind] if mode == "reuse" else layer)
    return tuple(sources)


def _windows(config: PretrainedConfig, model_class: Any) -> tuple[int | None, ...]:
    """layer_types decide; without them a window counts if the model's own code masks by it.

    A model may pass ``sliding_window`` to its attention and still mask fully, as olmoe does.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        raise unsupported(str(config.model_type), "its configuration has no num_hidden_layers")
    window, kinds = _own(config, "sliding_window"), _own(config, "layer_types")
    if kinds is not None:
        return tuple(_window_of(kind, window, config) for kind in kinds)
    if window is None or not _own(config, "use_sliding_window", True):
        return (None,) * layers
    code = inspect.getsource(sys.modules[model_class.__module__])
    slides = "create_sliding_window_causal_mask" in code
    return (_check_window(window, config) if slides else None,) * layers


def _check_window(window: int, config: PretrainedConfig) -> int:
    if problem := narrow_window(window):
        raise unsupported(str(config.model_type), f"its sliding_window, {window}, {problem}")
    return int(window)


def _own(config: PretrainedConfig, name: str, absent: Any = None) -> Any:
    """A setting that its class knows: what else a file has the class does not read."""
    return getattr(config, name, absent) if knows(config, name) else absent


def knows(config: PretrainedConfig, name: str) -> bool:
    """Whether its class has this setting, or makes it of others."""
    fields = getattr(config, "__dataclass_fields__", {})
    kind: Any = type(config)  # mypy takes no class of an untyped package for hashable
    return hasattr(kind, name) or name in fields or name in _made_by(kind)


@functools.cache
def _made_by(config_class: type[PretrainedConfig]) -> frozenset[str]:
    """What a configuration of this class has of no file at all."""
    try:
        return frozenset(vars(config_class()))
    except Exception:  # noqa: BLE001 - some classes have no defaults: their errors are their own
        return frozenset()


def _window_of(kind: str, window: int | None, config: PretrainedConfig) -> int | None:
    if kind == "full_attention":
        return None
    if kind in ("sliding_attention", "hybrid_sliding") and window is not None:
        return _check_window(window, config)
    if kind in WITHOUT_WINDOW and config.model_type in WITH_STATES:
        return None
    raise unsupported(
        str(config.model_type), f"its layer type {kind!r} is neither full nor sliding attention"
    )
