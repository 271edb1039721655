"""Settings of rotary embeddings that no pod can build are refused before any file is read, and only
these: transformers' own classes are the oracle.
"""

import copy
import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fairlead_runtime.models import architecture, rope, text_model
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.sizing.families.judged import SIZED
from fairlead_runtime.sizing.families.rotaries import ROTARIES, Rotary
from fairlead_runtime.sizing.families.with_states import WITH_STATES
from fairlead_runtime.sizing.family_table import FAMILIES, TEXTS
from fairlead_runtime.sizing.shape import ModelShape
from support import tiny_parts

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
ABSENT = object()
FIT, LONG = [1.0] * 8, [2.0] * 8
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": FIT, "long_factor": LONG}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.2}
HUNYUAN: dict[str, Any] = {
    "type": "dynamic",
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
DEFAULT, BANANA = {"rope_type": "default"}, {"rope_type": "banana"}
NESTED = {"full_attention": {**DEFAULT, "rope_theta": 1e4}, "sliding_attention": DEFAULT}
THETA: dict[str, Any] = {**DEFAULT, "rope_theta": 1e4}
HALF = {**THETA, "partial_rotary_factor": 0.5}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2}
MIMO: dict[str, Any] = {"v_head_dim": 16, "num_key_value_heads": 1, "n_routed_experts": 4}
OWN: dict[str, dict[str, Any]] = {
    "laguna": {},
    "mimo_v2_flash": MIMO,
    "gemma4_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
}
LINEAR_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
TYPES = {"head_dim": 16, "layer_types": ["full_attention"], "sliding_window": 32}


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
    ("hunyuan_v1_dense", {"rope_scaling": HUNYUAN, "head_dim": 16}, ""),
    *(
        ("llama", {"rope_scaling": {**YARN, **more}}, "")
        for more in (
            *({"mscale": 1.0, "mscale_all_dim": 0}, {"mscale": 0}, {"mscale": "x"}),
            *({"beta_fast": 0}, {"beta_slow": 0}, {"attention_factor": 0}, {"factor": None}),
            {"original_max_position_embeddings": 256.0},
        )
    ),
    ("llama", {"rope_scaling": {**YARN, "attention_factor": "x"}}, "rope_scaling.attention_factor"),
    ("llama", {"rope_scaling": {**YARN, "beta_fast": "x"}}, "rope_scaling.beta_fast"),
    ("llama", {"rope_scaling": {**YARN, "beta_slow": -1}}, "rope_scaling.beta_slow"),
    (
        "llama",
        {"rope_scaling": {**YARN, "mscale": "x", "mscale_all_dim": 1}},
        "rope_scaling.mscale",
    ),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor"),
    *(
        ("llama", {"rope_scaling": {**YARN, "original_max_position_embeddings": value}}, field)
        for field in ("rope_scaling.original_max_position_embeddings",)
        for value in (None, "256")
    ),
    *(
        (family, {**more, "rope_theta": None}, "rope_theta")
        for family, more in (("llama", {}), ("phi3", {}), ("stablelm", {}), ("gpt_oss", TYPES))
    ),
    ("gemma3_text", {**TYPES, "rope_theta": None}, "rope_theta"),
    (
        "gemma3_text",
        {**TYPES, "layer_types": ["sliding_attention"], "rope_local_base_freq": "x"},
        "rope_local_base_freq",
    ),
    ("olmo3", {**TYPES, "rope_theta": None}, "rope_theta"),
    ("gpt_neox", {"rope_theta": None}, ""),
    ("gpt_neox", {"rotary_emb_base": None}, "rotary_emb_base"),
    ("gpt_neox", {"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta"),
    ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta"),
    ("llama", {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4}}, ""),
    ("llama", {"rope_theta": "x", "rope_parameters": {"rope_theta": 1e4}}, ""),
    ("llama", {"rope_theta": 0, "rope_parameters": {"rope_theta": 1e15}}, ""),
    ("llama", {"partial_rotary_factor": "x"}, ""),
    (
        "llama",
        {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "partial_rotary_factor",
    ),
    *(
        ("stablelm", {"partial_rotary_factor": value}, "partial_rotary_factor")
        for value in ("x", None, 3.0)
    ),
    ("gpt_neox", {"rotary_pct": None}, "rotary_pct"),
    ("gpt_oss", {**TYPES, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    *(
        (
            "phi3",
            {"rope_parameters": {**DEFAULT, "partial_rotary_factor": value}},
            "rope_parameters.partial_rotary_factor",
        )
        for value in ("x", None, 2.0)
    ),
    ("stablelm", scaling(), "rope_scaling.short_factor"),
    ("stablelm", scaling(short_factor=FIT[:2], long_factor=LONG[:2]), ""),
    ("gpt_neox", scaling(), "rope_scaling.short_factor"),
    ("gpt_oss", {**TYPES, **scaling(short_factor=FIT[:3])}, "rope_scaling.short_factor"),
    ("gemma3_text", {**TYPES, **scaling(short_factor=FIT[:3])}, "rope_scaling.short_factor"),
    ("olmo3", {**TYPES, **scaling(short_factor=FIT[:3])}, "rope_scaling.short_factor"),
    ("qwen3", {"head_dim": 32, **scaling(short_factor=[1.0] * 16, long_factor=[1.0] * 16)}, ""),
    ("llama", scaling(factor="4"), "rope_scaling.factor"),
    ("llama", scaling(factor=0), ""),
    ("llama", {"rope_scaling": {"rope_type": "proportional"}}, ""),
    *(
        (
            "llama",
            {"rope_scaling": {"rope_type": "proportional", "factor": factor}},
            "rope_scaling.factor",
        )
        for factor in (None, "x")
    ),
    ("gpt_oss", {**TYPES, "rope_parameters": NESTED}, "rope_parameters"),
    ("gemma3_text", {**TYPES, "rope_parameters": NESTED}, ""),
    ("gemma4_text", {**TYPES, "rope_parameters": DEFAULT}, "rope_parameters.full_attention"),
    (
        "gemma4_text",
        {**TYPES, **OWN["gemma4_text"], "rope_parameters": {"full_attention": {**LONGROPE}}},
        "rope_parameters",
    ),
    ("llama", {"rope_parameters": {**DEFAULT, "extra": BANANA}}, ""),
    ("llama", {"rope_parameters": {**BANANA, "extra": {"a": 1}}}, "rope_parameters"),
    ("llama", {"rope_parameters": []}, "rope_parameters"),
    ("llama", {"rope_parameters": False}, "rope_parameters"),
    ("llama", {"rope_scaling": False}, ""),
    *(
        (family, {**TYPES, **more}, field)
        for family in ("gemma3_text", "olmo3")
        for more, field in (
            ({"rope_scaling": False}, "rope_scaling"),
            ({"rope_scaling": 0}, "rope_scaling"),
            ({"rope_scaling": []}, ""),
            ({"rope_scaling": {"type": "banana"}}, ""),
            ({"rope_scaling": BANANA}, "rope_scaling"),
            ({"rope_parameters": BANANA}, ""),
            ({"rope_scaling": DEFAULT, "rope_parameters": BANANA}, "rope_parameters"),
        )
    ),
    # Of families that complete no settings that they are given.
    *(
        (family, {**TYPES, **OWN[family], "rope_parameters": {"full_attention": nest}}, field)
        for family in ("laguna", "mimo_v2_flash", "gemma4_text")
        for nest, field in (
            (THETA, ""),
            (DEFAULT, "rope_parameters.rope_theta"),
            (None, "rope_parameters.full_attention"),
            ({**THETA, "rope_type": "yarn", "factor": 2.0}, "rope_parameters.original_max"),
        )
    ),
    ("laguna", {**TYPES, "rope_scaling": {"full_attention": THETA}, "rope_parameters": []}, "rope"),
    ("mimo_v2_flash", {**TYPES, **MIMO, "rope_scaling": None}, "rope_scaling.full_attention"),
    ("beam", {**TYPES, "rope_parameters": {"full_attention": None}}, ""),
    ("cohere_compass_text", {"rope_parameters": {"full_attention": None}}, ""),
    ("cohere_compass_text", {"rope_parameters": {"full_attention": THETA}}, ""),
    ("cohere_compass_text", {}, "rope_parameters.full_attention"),
    ("mellum", {**TYPES, "rope_parameters": {"full_attention": HALF}}, "rope_parameters.partial"),
    ("laguna", {**TYPES, "rope_parameters": {"full_attention": HALF}}, ""),
    ("gemma3_text", {**TYPES, "partial_rotary_factor": 0.5, **LINEAR}, "partial_rotary_factor"),
    ("modernbert-decoder", LINEAR, ""),
    ("modernbert-decoder", {"rope_parameters": {"full_attention": None}}, "rope_parameters.full"),
    ("modernbert-decoder", {"rope_parameters": DEFAULT}, "rope_parameters"),
    *(
        (family, {"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling")
        for family in ("stablelm", "phi", "persimmon")
    ),
    *(
        (family, {"partial_rotary_factor": None}, "partial_rotary_factor")
        for family in ("phi", "nemotron", "persimmon")
    ),
    ("minimax_m2", {**TYPES, **EXPERTS, "rotary_dim": 8}, ""),
    # Where nothing says it a third of a head is rotated, and all of it where it is scaled.
    *(
        ("mimo_v2_flash", {**TYPES, **MIMO, "rope_parameters": {"full_attention": nest}}, "")
        for nest in (THETA, {**THETA, "rope_type": "linear", "factor": 2.0})
    ),
    # It makes frequencies of a part of a head, and its layers rotate all of it.
    *(
        ("solar_open", {**ROUTED, "partial_rotary_factor": share}, field)
        for share, field in ((1.0, ""), (0.5, "partial_rotary_factor"))
    ),
    # Its layers read numbers besides, whatever the type.
    *(
        ("ministral3", {"head_dim": 16, "rope_parameters": {**THETA, **more}}, field)
        for more, field in (
            ({"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}, ""),
            ({"original_max_position_embeddings": 64}, "rope_parameters.llama_4_scaling_beta"),
            ({"llama_4_scaling_beta": 0.1}, "rope_parameters.original_max"),
            ({**YARN, "llama_4_scaling_beta": 0}, ""),
            (YARN, "rope_parameters.llama_4_scaling_beta"),
        )
    ),
    ("ministral3", {"head_dim": 16}, ""),
    # As OLMo Hybrid is published: nothing is rotated.
    ("olmo_hybrid", {**LINEAR_LAYERS, "rope_theta": None}, ""),
    ("olmo_hybrid", {**LINEAR_LAYERS, "rope_parameters": {**DEFAULT, "rope_theta": None}}, ""),
    ("olmo_hybrid", {**LINEAR_LAYERS, "rope_theta": "x"}, "rope_theta"),
    ("falcon_mamba", {"rope_theta": None}, ""),
    *(
        ("granite_swa", {**TYPES, "layer_rope_theta": thetas}, field)
        for thetas, field in (
            (None, ""),
            ([0], ""),
            ([1e5], ""),
            ([], "layer_rope_theta"),
            (1e5, "layer_rope_theta"),
            (["x"], "layer_rope_theta"),
            ([None, 1e4], "layer_rope_theta"),
        )
    ),
    *(("minimax_m2", {**TYPES, **EXPERTS, "rotary_dim": x}, "rotary_dim") for x in ("x", 32)),
)


@pytest.mark.parametrize(("family", "more", "field"), CASES)
def test_what_the_plan_refuses_of_rotary_embeddings_is_what_transformers_cannot_build(
    family: str, more: dict[str, Any], field: str
) -> None:
    config = {"model_type": family, **BASE, **more}
    if not field:
        shape = ModelShape.from_config(config)
        assert shape.layers == config["num_hidden_layers"]
        held = sum(buffer.numel() for buffer in build(family, {**BASE, **more}).buffers())
        assert shape.buffers + shape.typed_buffers == held
        return
    with pytest.raises(ModelError, match=rf"config\.json: {field}"):
        architecture.check(config)
    # A class raises what it likes: errors of keys, of types, of its own validation.
    with pytest.raises(Exception, match=r"."):
        build(family, {**BASE, **more})


def build(family: str, settings: dict[str, Any]) -> torch.nn.Module:
    """The model, after one token."""
    copies = copy.deepcopy(settings)
    factory: Any = AutoModelForCausalLM  # transformers' classes are untyped
    model: torch.nn.Module = factory.from_config(CONFIG_MAPPING[family](**copies))
    rope.pin(model, 1024)
    with torch.no_grad():
        model(input_ids=torch.tensor([[3]]))
    return model


@pytest.mark.parametrize(
    "factor", [None, True, "4", 0, -4, float("nan"), float("inf"), 1e300, 10**400]
)
def test_a_factor_that_is_no_number_above_0_is_refused(factor: object) -> None:
    config = {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": factor}}
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
    longest = ModelShape.from_config(config).max_len
    nested["full_attention"] = {"rope_type": "yarn", "factor": 4.0}
    assert ModelShape.from_config(config).max_len == 4 * longest


WIDE: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "sections", "fits"),
    [
        ("qwen2_vl", ABSENT, False),
        ("qwen2_5_vl", ABSENT, False),
        ("glm4v", ABSENT, False),
        ("qwen2_5_vl", [2, 3, 3], True),
        ("qwen2_5_vl", [8], True),
        ("qwen2_5_vl", [2, 3, 2], False),
        ("qwen2_5_vl", [9, -1], False),
        ("qwen2_5_vl", None, False),
        ("glm4v", [2, 3, 4], False),
        ("qwen3_vl", [2, 3, 2], True),
        ("qwen3_vl", ABSENT, True),
        ("qwen3_vl", [2, 3], False),
        ("qwen3_vl", [2, 3, 0.5], False),
    ],
)
def test_axes_of_positions_have_the_pairs_of_a_head(
    kind: str, sections: object, *, fits: bool
) -> None:
    config = tiny_parts.build(kind).config.to_dict()
    settings = config["text_config"]["rope_parameters"]
    del settings["mrope_section"]
    if sections is not ABSENT:
        settings["mrope_section"] = sections
    if fits:
        assert ModelShape.from_config(config).layers
    else:
        with pytest.raises(ModelError, match=r"config\.json: rope_parameters\.mrope_section"):
            architecture.check(config)
    with nullcontext() if fits else pytest.raises((RuntimeError, TypeError, IndexError)):
        run_its_class(kind, config)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "glm4v"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_axes_that_no_setting_gives_have_the_pairs_of_their_class(kind: str, share: float) -> None:
    """Of heads of 128: Qwen's class has 64 pairs, GLM's the 32 of half a head."""
    config = tiny_parts.build(kind, **WIDE).config.to_dict()
    text = config["text_config"]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    if kind == "glm4v":
        text["rope_parameters"]["partial_rotary_factor"] = share
    fits = kind != "glm4v" or share == 0.5
    if fits:
        assert architecture.check(config).layers
    else:
        with pytest.raises(ModelError, match=r"not 32, as .* class are, \[8, 12, 12\]: set it"):
            architecture.check(config)
    with nullcontext() if fits else pytest.raises(RuntimeError):
        run_its_class(kind, config)


def run_its_class(kind: str, config: dict[str, Any]) -> None:
    """One token through transformers' model of this configuration."""
    factory: Any = CONFIG_MAPPING[kind]
    whole = factory.from_dict(copy.deepcopy(config))
    text_model.class_to_load(whole)._from_config(whole)(input_ids=torch.tensor([[3]]))


def test_the_table_of_families_says_what_their_classes_read() -> None:
    for family in {**FAMILIES, **WITH_STATES, **SIZED, **TEXTS}:
        if family not in CONFIG_MAPPING:
            continue
        config = CONFIG_MAPPING[family]()
        settings = getattr(config, "rope_parameters", None)
        if not settings:
            continue
        row = ROTARIES.get(family, Rotary())
        nested = "full_attention" in settings
        assert (row.by_type in ("each", "raw", "added", "both")) is nested, family
        assert row.scaled is (settings.get("rope_type", "default") != "default"), family
        types = {"full_attention", "sliding_attention"}
        if not nested and not types.isdisjoint(getattr(config, "layer_types", None) or ()):
            assert row.by_type == "never", family
        if not nested and row.share is not None:
            assert settings.get("partial_rotary_factor", 1.0) == row.share, family
        path = type(config).__module__.replace(".configuration_", ".modeling_")
        spec = importlib.util.find_spec(path)
        if spec is not None and spec.origin is not None:
            source = Path(spec.origin).read_text(encoding="utf-8")
            assert ("partial_rotary_factor" in source) is row.reads_share, family
