"""Settings of rotary embeddings that no pod can build are refused before any file is read, and only
these: transformers' own classes are the oracle.
"""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fairlead_runtime.models import architecture, rope
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.sizing.shape import ModelShape

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FIT, LONG = [1.0] * 8, [2.0] * 8
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": FIT, "long_factor": LONG}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.2}


def without(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != name}


def scaling(**more: Any) -> dict[str, Any]:
    return {"rope_scaling": {**LONGROPE, **more}}


# The family, its settings, and the field that is refused; "" for what a pod builds.
CASES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("phi3", scaling(), ""),
    ("phi3", {"rope_scaling": {**without("rope_type", LONGROPE), "type": "yarn"}}, ""),
    ("phi3", scaling(original_max_position_embeddings=256), ""),
    ("phi3", {**scaling(), "original_max_position_embeddings": 256}, ""),
    ("phi3", {"rope_parameters": {**LONGROPE, "rope_theta": 10000.0}}, ""),
    ("phi3", {"rope_scaling": {}}, ""),
    ("phi3", {"rope_scaling": None, "partial_rotary_factor": 0.75}, ""),
    (
        "phi3",
        {**scaling(short_factor=FIT[:6], long_factor=LONG[:6]), "partial_rotary_factor": 0.75},
        "",
    ),
    ("phi3", scaling(rope_type="su", original_max_position_embeddings=256), ""),
    ("phi3", scaling(rope_type="su"), "rope_scaling.original_max_position_embeddings"),
    ("phi3", {**scaling(), "partial_rotary_factor": 0.75}, "rope_scaling.short_factor"),
    *(
        ("phi3", {**scaling(), "original_max_position_embeddings": value}, field)
        for field in ("original_max_position_embeddings",)
        for value in (None, 0, "256")
    ),
    ("phi3", {"rope_scaling": without("short_factor", LONGROPE)}, "rope_scaling.short_factor"),
    ("phi3", {"rope_scaling": without("long_factor", LONGROPE)}, "rope_scaling.long_factor"),
    ("phi3", scaling(short_factor=FIT[:7]), "rope_scaling.short_factor"),
    ("phi3", scaling(long_factor=[*LONG, 2.0]), "rope_scaling.long_factor"),
    ("phi3", scaling(long_factor=["1"] * 8), "rope_scaling.long_factor"),
    ("phi3", scaling(attention_factor="x"), "rope_scaling.attention_factor"),
    ("phi3", {"rope_theta": "x"}, "rope_theta"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ("phi3", {"rope_scaling": [1]}, "rope_scaling"),
    ("phi3", {"rope_scaling": "longrope"}, "rope_scaling"),
    ("phimoe", scaling(**MSCALES, original_max_position_embeddings=256), ""),
    ("phimoe", scaling(), "rope_scaling.short_mscale"),
    ("phimoe", scaling(short_mscale=1.1), "rope_scaling.long_mscale"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ""),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, ""),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 4.0}}, ""),
    ("llama", {"rope_scaling": LLAMA3}, "rope_scaling.high_freq_factor"),
    ("llama", {"rope_scaling": {"type": "banana"}}, "rope_scaling"),
    ("llama", {"rope_scaling": {"type": "su", **without("rope_type", LONGROPE)}}, "rope_scaling"),
    ("llama", scaling(original_max_position_embeddings=0), "rope_scaling.original_max_position"),
)


@pytest.mark.parametrize(("family", "more", "field"), CASES)
def test_what_the_plan_refuses_of_rotary_embeddings_is_what_transformers_cannot_build(
    family: str, more: dict[str, Any], field: str
) -> None:
    config = {"model_type": family, **BASE, **more}
    if not field:
        assert ModelShape.from_config(config).layers == 1
        build(family, {**BASE, **more})
        return
    with pytest.raises(ModelError, match=rf"config\.json: {field}"):
        architecture.check(config)
    # A class raises what it likes: errors of keys, of types, of its own validation.
    with pytest.raises(Exception, match=r"."):
        build(family, {**BASE, **more})


def build(family: str, settings: dict[str, Any]) -> None:
    """Build the model, and run it for one token."""
    copies = {k: dict(v) if isinstance(v, dict) else v for k, v in settings.items()}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**copies))
    rope.pin(model, 1024)
    with torch.no_grad():
        model(input_ids=torch.tensor([[3]]))


@pytest.mark.parametrize(
    "factor", [None, True, "4", 0, -4, float("nan"), float("inf"), 1e300, 10**400]
)
def test_a_factor_that_is_no_number_above_0_is_refused(factor: object) -> None:
    config = {"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": factor}}
    with pytest.raises(ModelError, match=r"config\.json: rope_scaling\.factor: must be a number"):
        architecture.check(config)


def test_layers_of_two_types_are_each_checked() -> None:
    nested: dict[str, dict[str, Any]] = {
        "full_attention": {"rope_type": "linear"},
        "sliding_attention": {"rope_theta": 1e4},
    }
    config = {"model_type": "gemma3_text", "rope_parameters": nested}
    with pytest.raises(ModelError, match=r"rope_parameters\.factor"):
        architecture.check(config)
    nested["full_attention"]["factor"] = 8.0
    assert ModelShape.from_config(config).max_len
