"""Settings under several names, and those that a family's class refuses: the plan says what the
class says.
"""

from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import CONFIG_MAPPING

from fairlead_runtime.sizing.config_json import ShapeError
from fairlead_runtime.sizing.families.judged import SIZED
from fairlead_runtime.sizing.families.other_names import OTHER_NAMES
from fairlead_runtime.sizing.families.with_states import WITH_STATES
from fairlead_runtime.sizing.family_table import FAMILIES, PARTS, TEXTS
from fairlead_runtime.sizing.shape import ModelShape
from support import tiny_any

ALONE = {**FAMILIES, **WITH_STATES, **SIZED}
PAIRS = [(kind, *pair) for kind, names in OTHER_NAMES.items() for pair in names.items()]


def test_other_names_are_those_of_the_classes() -> None:
    maps = {kind: CONFIG_MAPPING[kind].attribute_map for kind in {**ALONE, **TEXTS}}
    assert {kind: names for kind, names in maps.items() if names} == OTHER_NAMES


@pytest.mark.parametrize(("kind", "other", "name"), PAIRS)
def test_a_setting_given_twice_is_refused_by_both_names_where_the_two_differ(
    kind: str, other: str, name: str
) -> None:
    """Of a model of several parts, too."""
    own = {"model_type": kind, other: 4, name: 8}
    with pytest.raises(ShapeError, match=rf"{other}: is 4 where {name}, the same setting, is 8"):
        ModelShape.from_config(whole(own))


def whole(own: dict[str, Any]) -> dict[str, Any]:
    """The configuration itself, or that of a whole with it as its text."""
    if own["model_type"] != "qwen3_vl_moe_text":
        return own
    return {"model_type": "qwen3_vl_moe", "text_config": own}


@pytest.mark.parametrize(
    "kind", [kind for kind, names in OTHER_NAMES.items() if any("experts" in x for x in names)]
)
def test_experts_are_counted_by_either_name(kind: str) -> None:
    plain = tiny_any.settings_of(kind) if kind in ALONE else {"num_experts_per_tok": 2}
    for other, name in OTHER_NAMES[kind].items():
        if "experts" not in other:
            continue
        rest = {key: value for key, value in plain.items() if key not in (other, name)}
        of_name, of_other, of_both = (
            ModelShape.from_config(whole({"model_type": kind, **rest, **given}))
            for given in ({name: 3}, {other: 3}, {name: 3, other: 3})
        )
        assert of_name == of_other == of_both
        assert 3 in (of_name.experts, of_name.experts_per_token)


@pytest.mark.parametrize(("kind", "other"), [(kind, other) for kind, other, _ in PAIRS])
def test_null_by_another_name_is_refused(kind: str, other: str) -> None:
    """A class takes it last, over what it makes of its own name's null."""
    wholes = [name for name, parts in PARTS.items() if kind in TEXTS and parts.text == kind]
    text: dict[str, Any] = {"model_type": kind, other: None}
    config = {"model_type": wholes[0], "text_config": text} if wholes else text
    with pytest.raises(ShapeError, match=rf"{other}: must not be null"):
        ModelShape.from_config(config)


def test_no_layers_are_not_those_of_the_default() -> None:
    with pytest.raises(ShapeError, match="num_hidden_layers"):
        ModelShape.from_config({"model_type": "nemotron_h", "layers_block_type": []})


def test_a_name_that_a_class_does_not_know_is_not_read() -> None:
    config = {"model_type": "qwen2_moe", "num_local_experts": 3}
    assert ModelShape.from_config(config).experts == CONFIG_MAPPING["qwen2_moe"]().num_experts


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("internlm3", {"qkv_bias": True, "bias": False}, "attention_bias"),
    ("internlm3", {"mlp_bias": True}, "attention_bias"),
    ("iquestcoder", {"use_sliding_window": True}, "use_sliding_window"),
    ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv"),
    ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset"),
    ("jamba", {"expert_layer_offset": 2}, "expert_layer_offset"),
    (
        "olmo_hybrid",
        {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2},
        "layer_types",
    ),
    ("olmo_hybrid", {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}, "layer_types"),
]


@pytest.mark.parametrize(("kind", "change", "field"), REFUSED, ids=str)
def test_what_a_class_refuses_is_refused_by_name(
    kind: str, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(StrictDataclassClassValidationError):
        CONFIG_MAPPING[kind](**change)
    with pytest.raises(ShapeError, match=f"config.json: {field}"):
        ModelShape.from_config({"model_type": kind, **change})
    ModelShape.from_config({"model_type": kind})


@pytest.mark.parametrize("kind", ["helium", "olmoe"])
def test_heads_that_do_not_give_the_hidden_size_are_refused_where_a_class_cannot_run_them(
    kind: str,
) -> None:
    """It builds such a model."""
    own = {"model_type": kind, **tiny_any.settings_of(kind)}
    width = own["hidden_size"] // own["num_attention_heads"]
    assert ModelShape.from_config(own | {"head_dim": width}).head_dim == width
    with pytest.raises(ShapeError, match=f"head_dim: .* heads of {2 * width} are not the hidden"):
        ModelShape.from_config(own | {"head_dim": 2 * width})
