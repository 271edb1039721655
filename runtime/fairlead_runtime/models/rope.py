"""Pinning rotary embeddings that depend on the longest sequence.

``longrope`` and ``dynamic`` rotary embeddings choose their frequencies by the largest position of a
forward pass. In a packed batch that position belongs to any request: a short prompt's result would
change with its batch mates, and cached keys would mix two sets of frequencies. So the frequencies
are chosen once, at load, for sequences of ``max_model_len`` tokens, as vLLM does
(`phi3_long_rope_scaled_rope.py`).

Consequence for users: a longrope model served with a max_model_len above its original context uses
the long factors for short prompts too, where plain transformers would use the short ones. The
self-test and the tests of token equality compare with transformers *with the same pinned
frequencies*; set max_model_len to the original context to get the short factors.

PhiMoE's computes its frequencies in each pass, on the host, and chooses a factor of its results by
the largest position even where the frequencies are fixed: both are pinned, and nothing is sent to
the device in a pass.
"""

import copy
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

PINNED = "pinned"


def pin(model: torch.nn.Module, max_model_len: int) -> int:
    """Fix every length-dependent rotary embedding of ``model`` for ``max_model_len``; returns their
    number.

    Changes buffers in place, so the model must not be saved. A second call changes nothing.
    """
    pinned = 0
    for submodule in model.modules():
        module: Any = submodule  # torch types every attribute of a module as a tensor or a module
        recomputes = type(module).__name__ == "PhimoeRotaryEmbedding"
        scaling = _factor_of_phimoe(module, max_model_len) if recomputes else None
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _depends_on_length(kinds):
            _pin_one(module, kinds, max_model_len, None)
            module.rope_type = PINNED
            pinned += 1
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if _depends_on_length(kind):
                    _pin_one(module, kind, max_model_len, layer_type)
                    kinds[layer_type] = PINNED
                    pinned += 1
        if recomputes:
            _keep_what_phimoe_computes(module, scaling)
    return pinned


def _factor_of_phimoe(module: Any, max_model_len: int) -> float | None:
    """The factor that PhiMoE's forward pass multiplies with; None: the one that comes with the
    frequencies.
    """
    parameters = module.config.rope_parameters
    if parameters["rope_type"] == "default" or module.rope_type == PINNED:
        return None
    original = parameters["original_max_position_embeddings"]
    return float(parameters["long_mscale" if max_model_len > original else "short_mscale"])


def _keep_what_phimoe_computes(module: Any, scaling: float | None) -> None:
    if scaling is not None:
        module.attention_scaling = scaling
    module.config = copy.copy(module.config)
    module.config.rope_parameters = {**module.config.rope_parameters, "rope_type": "default"}
    module.rope_init_fn = lambda *_, **__: (module.inv_freq, module.attention_scaling)


def _depends_on_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _pin_one(module: Any, kind: str, max_model_len: int, layer_type: str | None) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    extra = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
        module.config, buffer.device, seq_len=max_model_len, **extra
    )
    buffer.copy_(frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
