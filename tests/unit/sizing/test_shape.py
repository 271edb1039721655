"""ModelShape against transformers itself: the same config built on the meta device, parameter for
parameter.
"""

import copy
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from fairlead_runtime.models import architecture, families, text_model
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.sizing.config_json import ShapeError, UnknownFamilyError
from fairlead_runtime.sizing.families.judged import SIZED
from fairlead_runtime.sizing.families.rotaries import ROTARIES, Rotary
from fairlead_runtime.sizing.families.wholes import TRIED, WHOLES
from fairlead_runtime.sizing.families.with_states import WITH_STATES
from fairlead_runtime.sizing.family_table import FAMILIES, JUDGED, PARTS, TEXTS
from fairlead_runtime.sizing.shape import ModelShape
from support import tiny, tiny_parts
from support.full import LONG_FORM

assert tiny_parts.FAMILIES  # it registers what stands for a tower that timm builds

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MOE = {"num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# What a family needs with so few layers.
FEW_LAYERS: dict[str, dict[str, Any]] = {"gemma3n_text": {"num_kv_shared_layers": 2}}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SWITCHES = {
    "llama": (
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16, "tie_word_embeddings": True},
    ),
    "granite": ({"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}),
    "mistral": ({"sliding_window": 32, "head_dim": 12}, {"sliding_window": None}),
    "mixtral": ({"sliding_window": 16}, {"tie_word_embeddings": True, "head_dim": 4}),
    "qwen2": (
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 64, "tie_word_embeddings": True},
        {
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "qwen3": (
        {"use_sliding_window": True, "max_window_layers": 2, "attention_bias": True},
        {"head_dim": 24, "tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        {"mlp_only_layers": [0, 3], "attention_bias": True},
        {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 40},
        {"head_dim": 20, "tie_word_embeddings": True},
    ),
    "gpt_oss": ({"sliding_window": 8}, {"attention_bias": False, "tie_word_embeddings": True}),
    "gemma": ({"attention_bias": True}, {"tie_word_embeddings": False}),
    "gemma2": ({"sliding_window": 8}, {"layer_types": ["full_attention"] * 7}),
    "gemma3_text": ({"sliding_window_pattern": 3}, {"attention_bias": True, "head_dim": 12}),
    "gemma3n_text": (
        {"num_kv_shared_layers": 0, "attention_bias": True, "tie_word_embeddings": False},
        {"num_kv_shared_layers": 4, "layer_types": [*_KINDS, *_KINDS, "full_attention"]},
        {"intermediate_size": [80, 64, 80, 64, 96, 80, 48], "altup_num_inputs": 1},
        {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 89, "laurel_rank": 8},
        {"sliding_window": 8, "altup_num_inputs": 6, "final_logit_softcapping": 20.0},
    ),
    "phi3": ({"sliding_window": 20}, {"tie_word_embeddings": True, "num_key_value_heads": None}),
    "olmo2": ({"attention_bias": True}, {"num_key_value_heads": None}),
    "cohere": ({"use_qk_norm": True}, {"attention_bias": True, "tie_word_embeddings": False}),
    "cohere2": (
        {"attention_bias": True, "sliding_window": 16},
        {"layer_types": ["full_attention"] * 7, "tie_word_embeddings": False},
    ),
    "starcoder2": ({"use_bias": False}, {"sliding_window": 10, "tie_word_embeddings": False}),
    "gpt2": ({"n_inner": 50}, {"tie_word_embeddings": False}),
    "gpt_neox": ({"attention_bias": False}, {"tie_word_embeddings": True}),
    "mimo_v2_flash": (
        {"v_head_dim": 5, "head_dim": 9, "attention_bias": True},
        {"sliding_window_size": 32, "mlp_layer_types": ["sparse", "dense"] * 3 + ["sparse"]},
        {"layer_types": ["full_attention"] * 7, "v_head_dim": 12},
        {"layer_types": ["sliding_attention"] * 7, "tie_word_embeddings": True},
    ),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"),
        (
            {"global_head_dim": 24, "head_dim": 16, "attention_bias": True},
            {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "sliding_window": 8},
            {"num_global_key_value_heads": 3, "tie_word_embeddings": False},
            {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "attention_k_eq_v": True}
            | {"layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"]},
            {"layer_types": ["sliding_attention"] * 7, "final_logit_softcapping": 30.0},
            {"per_layer_config": {key: {"head_dim": 64} for key in ("5", "06")}},
            {"per_layer_config": {"6": {"head_dim": 8, "num_key_value_heads": 1}}}
            | {"layer_types": ["sliding_attention"] * 7},
            {"hidden_size_per_layer_input": 0},
            {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 31},
            {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2}
            | {"moe_intermediate_size": 24},
        ),
    ),
}
# Of a family whose layers cannot have SMALL's.
OWN_SMALL = {"mimo_v2_flash": {"num_key_value_heads": 3}}
GEMMA_3N: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "head_dim": 256,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "laurel_rank": 64,
    "max_position_embeddings": 32768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
}
GEMMA_3N_E2B = GEMMA_3N | {
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    "intermediate_size": [8192] * 30,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 6,
    "num_hidden_layers": 30,
    "num_kv_shared_layers": 10,
}
GEMMA_3N_E4B = GEMMA_3N | {
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
    "intermediate_size": [16384] * 35,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 15,
}
# The public checkpoints' own config.json, cut to what decides sizes.
REAL: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3-8B": (
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        },
        8_030_261_248,
    ),
    "Qwen2.5-0.5B": (
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 21,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        494_032_768,
    ),
    "gemma-2-2b": ({"model_type": "gemma2", "torch_dtype": "float32"}, 2_614_341_888),
    "gpt2": ({"model_type": "gpt2"}, 124_439_808),
    "gemma-3n-E2B-it, its text": (GEMMA_3N_E2B, 4_435_182_688),
    "gemma-3n-E4B-it, its text": (GEMMA_3N_E4B, 6_835_235_568),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "experts_per_token": 4,
            "num_experts_per_tok": 4,
            "torch_dtype": "bfloat16",
        },
        20_914_757_184,
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "vocab_size": 151936,
        },
        30_532_122_624,
    ),
    "Mixtral-8x7B": ({"model_type": "mixtral", "vocab_size": 32000}, 46_702_792_704),
}


def build(config: dict[str, Any]) -> tuple[Any, torch.nn.Module]:
    """transformers' own configuration and model, without weights."""
    plain = {k: v for k, v in config.items() if k != "model_type"}
    resolved = AutoConfig.for_model(config["model_type"], **plain)
    with torch.device("meta"):
        return resolved, AutoModelForCausalLM.from_config(resolved)


def windows_of(model: torch.nn.Module, layers: int) -> tuple[int | None, ...]:
    """The window that each attention module passes to its kernel, which the mask follows."""
    config: Any = model.config
    everywhere = (
        getattr(config, "sliding_window", None) if not hasattr(config, "layer_types") else None
    )
    windows = []
    for index in range(layers):
        attention = next(
            (
                m
                for n, m in model.named_modules()
                if n.endswith((f".{index}.self_attn", f".{index}.attn"))
            ),
            None,
        )
        windows.append(getattr(attention, "sliding_window", everywhere))
    return tuple(windows)


def compare(config: dict[str, Any], shape: ModelShape) -> None:
    resolved, model = build(config)
    resolved.allow_global_per_layer_attribute_access = True
    heads = resolved.num_attention_heads
    kv_heads = getattr(resolved, "num_key_value_heads", None) or heads
    head_dim = getattr(resolved, "head_dim", None) or resolved.hidden_size // heads
    matrices = [p for n, p in model.named_parameters() if is_layer_matrix(n, p)]
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layer_matrices == sum(p.numel() for p in matrices)
    widths = widths_of(model, shape.sources)
    if widths is None:
        widths = (2 * kv_heads * head_dim,) * resolved.num_hidden_layers
    assert shape.kv_widths == widths
    assert shape.mixed or len({*widths}) == 1
    assert shape.kv_heads * (shape.head_dim + shape.value_dim) == max(widths)
    assert (shape.layers, shape.heads) == (resolved.num_hidden_layers, heads)
    assert shape.mixed or shape.head_dim == head_dim
    assert (shape.hidden, shape.vocab, shape.max_len) == (
        resolved.hidden_size,
        resolved.vocab_size,
        resolved.max_position_embeddings,
    )
    assert shape.windows == windows_of(model, shape.layers)
    assert shape.sources == families.sources_of(resolved)
    assert shape.tied == bool(resolved.tie_word_embeddings)


def widths_of(model: torch.nn.Module, sources: tuple[int, ...]) -> tuple[int, ...] | None:
    """Outputs of each layer's projections of keys and of values, where they have a matrix each, or
    one for both; a layer that has none reads those of another.
    """
    rows = {n: x.shape[0] for n, x in model.named_parameters()}
    widths = []
    for source in sources:
        place = f"model.layers.{source}.self_attn."
        keys = rows.get(f"{place}k_proj.weight")
        if keys is None:
            return None
        widths.append(keys + rows.get(f"{place}v_proj.weight", keys))
    return tuple(widths)


def is_layer_matrix(name: str, parameter: torch.Tensor) -> bool:
    inside = ".layers." in name or ".h." in name
    router = name.endswith(("mlp.gate.weight", "mlp.router.weight", ".router.proj.weight"))
    # Cohere's per-head norm is two-dimensional, but not a matrix product.
    head_norm = "_norm.weight" in name
    # Nor are the taps of a convolution, and what weighs a shared expert is never quantized.
    head_norm |= ".conv1d." in name or "shared_expert_gate" in name
    return (
        inside
        and parameter.dim() >= 2
        and not router
        and not head_norm
        and not name.endswith("bias")
    )


CASES = [
    (family, change) for family in sorted(FAMILIES) for change in ({}, *SWITCHES.get(family, ()))
]


@pytest.mark.parametrize(
    ("family", "change"), CASES, ids=lambda v: v if isinstance(v, str) else ",".join(v) or "plain"
)
def test_every_family_and_switch_equals_transformers(family: str, change: dict[str, Any]) -> None:
    names = FAMILIES[family].aliases
    small = SMALL | FEW_LAYERS.get(family, {})
    own = {names.get(k, k): v for k, v in small.items() if k not in change}
    if family in ("gpt2", "gpt_neox"):
        del own["num_key_value_heads"]
    own |= OWN_SMALL.get(family, {})
    has_experts = FAMILIES[family].experts and not FAMILIES[family].experts_if
    config = {"model_type": family} | own | (MOE if has_experts else {}) | change
    compare(config, ModelShape.from_config(config))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_empty_config_takes_the_class_defaults(family: str) -> None:
    compare({"model_type": family}, ModelShape.from_config({"model_type": family}))


@pytest.mark.parametrize(
    ("family", "change"), CASES, ids=lambda v: v if isinstance(v, str) else ",".join(v) or "plain"
)
def test_a_saved_config_without_its_defaults_has_the_same_shape(
    family: str, change: dict[str, Any]
) -> None:
    names = FAMILIES[family].aliases
    hidden, layers = (
        names.get("hidden_size", "hidden_size"),
        names.get("num_hidden_layers", "num_hidden_layers"),
    )
    small = {hidden: 384, layers: 7}  # 384: a multiple of every family's default number of heads
    config = {"model_type": family} | small | FEW_LAYERS.get(family, {}) | change
    saved, _ = build(config)
    shortest = json.loads(json.dumps(saved.to_diff_dict(), default=str))
    assert ModelShape.from_config(shortest) == ModelShape.from_config(config)
    assert ModelShape.from_config(
        json.loads(saved.to_json_string(use_diff=False))
    ) == ModelShape.from_config(config)


@pytest.mark.parametrize("name", REAL)
def test_public_checkpoints_have_their_published_size(name: str) -> None:
    config, parameters = REAL[name]
    shape = ModelShape.from_config(config)
    assert shape.parameters == parameters
    compare(config, shape)


def test_gemma_3ns_text_and_other_parts_are_the_published_checkpoints() -> None:
    """The checkpoints also store keys that no layer of theirs reads, and have the same towers."""
    towers = []
    for config, whole in ((GEMMA_3N_E2B, 5_439_438_272), (GEMMA_3N_E4B, 7_849_978_192)):
        shape = ModelShape.from_config(
            {"model_type": "gemma3n", "text_config": config, "torch_dtype": "bfloat16"}
        )
        assert shape == replace(ModelShape.from_config(config), model_type="gemma3n")
        unread = (shape.layers - len({*shape.sources})) * (2 * shape.kv_width * shape.hidden + 256)
        towers.append(whole - shape.parameters - unread)
    assert towers[0] == towers[1]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": True}, "num_kv_shared_layers"),
        # The one full layer is among those that read.
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 6 + _KINDS[:1]}, "a wind"),
        ({"intermediate_size": [80] * 6}, "intermediate_size"),
        ({"intermediate_size": [80] * 6 + [0]}, "intermediate_size"),
        ({"activation_sparsity_pattern": [0.5] * 6}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": 0.5}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": [0.5] * 6 + [1.0]}, "activation_sparsity_pattern"),
        ({"sliding_window": None}, "sliding_window"),
        ({"altup_num_inputs": 0}, "altup_num_inputs"),
        ({"altup_active_idx": 4}, "altup_active_idx"),
        ({"laurel_rank": "64"}, "laurel_rank"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input"),
        # transformers' code has its norms even so.
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
    ],
    ids=str,
)
def test_what_no_gemma_3n_has_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    small = {"model_type": "gemma3n_text", **SMALL, "num_kv_shared_layers": 2}
    with pytest.raises(ShapeError, match=field):
        ModelShape.from_config(small | change)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"9" * 5000: {}}, "is not the number of one of 7 layers"),
        ({"0" * 5000 + "7": {}}, "is not the number of one of 7 layers"),
        ({"7": {}}, "is not the number of one of 7 layers"),
        ({"-1": {}}, "is not the number of one of 7 layers"),
        ({"\u0661": {}}, "is not the number of one of 7 layers"),
        ({"": {}}, "is not the number of one of 7 layers"),
        ({"1": None}, "is not the number of one of 7 layers"),
        ({"1": {}, "01": {}}, "the settings of layer 1 twice"),
        ({str(number): {} for number in range(20_000)}, "has 20000 entries, more than the 7"),
        ({"1": {"sliding_window": 3}}, "'sliding_window' of a layer is not supported"),
        ({"1": {3: 3, "a": 3}}, "'3' of a layer is not supported"),
        ({"1": {"head_dim": 0}}, "head_dim"),
        ([], "must be an object"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_settings_of_layers_that_gemma_4_has_not_are_refused(entries: Any, problem: str) -> None:
    small = {"model_type": "gemma4_text", **SMALL, "num_hidden_layers": 7}
    with pytest.raises(ShapeError, match=problem):
        ModelShape.from_config(small | {"per_layer_config": entries})


def test_zeros_before_the_number_of_a_layer_say_nothing() -> None:
    small: dict[str, Any] = {"model_type": "gemma4_text", **SMALL, "num_hidden_layers": 2}
    small |= {"layer_types": ["sliding_attention", "full_attention"]}
    shapes = {
        ModelShape.from_config(small | {"per_layer_config": {key: {"head_dim": 64}}}).kv_widths
        for key in ("1", "01", "0" * 5000 + "1")
    }
    [widths] = shapes
    assert widths[1] == 2 * small["num_key_value_heads"] * 64 != widths[0]


def test_settings_of_very_many_layers_are_read_once() -> None:
    class Entries(dict[str, Any]):
        read = 0

        def items(self) -> Any:
            Entries.read += 1
            return super().items()

    small = {"model_type": "gemma4_text", **SMALL, "num_hidden_layers": 100}
    ModelShape.from_config(small | {"per_layer_config": Entries({"5": {}, "99": {}})})
    assert Entries.read < 5  # by each part of the plan, not for each layer


def test_heads_that_windowed_layers_cannot_share_are_said_to_be_twice_as_many() -> None:
    small = {"model_type": "mimo_v2_flash", **SMALL, "num_attention_heads": 4}
    with pytest.raises(ShapeError, match="have 2 times num_key_value_heads"):
        ModelShape.from_config(small | {"num_key_value_heads": 4})


TEXT = {**SMALL, "hidden_size": 48, "num_attention_heads": 6}


def sections(kind: str, pairs: int = 4) -> dict[str, Any]:
    """Those of small heads, where the class has some of larger ones."""
    if not ROTARIES.get(kind, Rotary()).own_sections:
        return {}
    return {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [pairs]}}


SMALL_PARTS = [
    *((family, {}) for family in sorted(PARTS)),
    *((family, {"tie_word_embeddings": True}) for family in sorted(PARTS)),
    ("gemma3", {"sliding_window_pattern": 3, "sliding_window": 16}),
    ("cohere2_vision", {"sliding_window": 16}),
    ("mistral3", {"sliding_window": 16}),
    ("qwen2_5_vl", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}),
    ("qwen3_vl_moe", {**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("qwen3_vl", {"attention_bias": True, "head_dim": 16}),
]


def build_whole(config: dict[str, Any], *, tied: bool) -> tuple[Any, torch.nn.Module]:
    """transformers' configuration and whole model, without weights."""
    plain = {k: v for k, v in config.items() if k not in ("model_type", "tie_word_embeddings")}
    resolved = AutoConfig.for_model(config["model_type"], **plain, tie_word_embeddings=tied)
    with torch.device("meta"):
        return resolved, text_model.class_of(resolved)(resolved)


@pytest.mark.parametrize(("family", "change"), SMALL_PARTS, ids=str)
def test_the_text_of_a_model_of_several_parts_equals_transformers(
    family: str, change: dict[str, Any]
) -> None:
    kind = PARTS[family].text
    text = {"model_type": kind, "tie_word_embeddings": False, **TEXT, **change}
    text |= FEW_LAYERS.get(kind, {}) | sections(kind)
    tied = bool(text["tie_word_embeddings"])
    config = {"model_type": family, "text_config": text, "tie_word_embeddings": tied}
    if family == "aya_vision":  # the sizes that its class has for images do not divide
        config["vision_config"] = {"model_type": "siglip_vision_model"}
    shape = ModelShape.from_config(config)
    compare_text(config, shape)
    assert (shape.model_type, shape.tied) == (family, tied)


OWN_INNER = ("gpt2", "gpt_bigcode", "opt")  # transformers has another name for the MLP's width
OWN_INPUTS = {name for name, family in FAMILIES.items() if family.layer_inputs}
FOREIGN = [
    (whole, kind)
    for whole, parts in sorted(WHOLES.items())
    for kind in sorted({*FAMILIES, *TEXTS, *JUDGED} - parts.never)
    if parts.any_text and kind != parts.text and kind not in OWN_INPUTS
]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(*case, marks=[pytest.mark.full] * bool(number % 29))
        for number, case in enumerate(FOREIGN)
    ],
)
def test_a_text_of_another_family_than_the_published_equals_transformers(
    family: str, kind: str
) -> None:
    size = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "pad_token_id": 0}
    # transformers has other names for these in some: what it does not know counts for nothing.
    plain = {
        k: v for k, v in (TEXT | size).items() if k != "intermediate_size" or kind not in OWN_INNER
    }
    text = {"model_type": kind, **plain, "tie_word_embeddings": False, **sections(kind, 8)}
    config: dict[str, Any] = {"model_type": family, "text_config": text}
    if family == "aya_vision":
        config["vision_config"] = {"model_type": "siglip_vision_model"}
    config |= {key: text[key] for key in WHOLES[family].head}
    resolved, model = build_whole(config, tied=False)
    windows = families.check(resolved)
    text_model.drop_other_parts(model)
    shape = ModelShape.from_config(config | {"tie_word_embeddings": False})
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.windows == windows


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.full] * bool(number % 4))
        for number, family in enumerate(sorted(TRIED))
    ],
)
@pytest.mark.parametrize("outer", [None, True, False])
def test_a_whole_that_the_self_test_judges_is_sized_as_transformers_builds_it(
    family: str, outer: bool | None
) -> None:
    """But for a head of its own where nothing says whether it has one."""
    parts = WHOLES[family]
    every = list(itertools.product(("llama", "qwen3"), (None, True, False)))
    # In the short form every other one, with another value of ``outer`` those between.
    for kind, own in every if LONG_FORM else every[int(outer is True) :: 2]:
        text = {"model_type": kind, **TEXT, "head_dim": 16, "pad_token_id": 0}
        text |= {} if own is None else {"tie_word_embeddings": own}
        config: dict[str, Any] = {"model_type": family, "text_config": text}
        config |= {} if outer is None else {"tie_word_embeddings": outer}
        config |= {key: text[key] for key in parts.head}
        resolved = CONFIG_MAPPING[family].from_dict(copy.deepcopy(config))
        with torch.device("meta"):
            model = text_model.class_to_load(resolved)(resolved)
        shape, held = ModelShape.from_config(config), sum(p.numel() for p in model.parameters())
        head = shape.vocab * shape.hidden
        assert shape.parameters - held in ((0,) if outer is own is not None else (0, head))
        if outer is own is None and parts.tied is False:
            assert shape.parameters == held
        assert shape.windows == families.check(resolved)


@pytest.mark.parametrize(
    ("family", "stray"),
    [
        ("gpt_neox", {"head_dim": 24}),
        *(("qwen3_moe", {"n_group": n, "topk_group": 4}) for n in (None, 0, 8, False)),
        *((f, {"decoder_sparse_step": 2}) for f in ("mixtral", "gpt_oss", "olmoe", "hy_v3")),
        *((family, {"mlp_only_layers": [1, 2]}) for family in ("mixtral", "granitemoe", "mellum")),
    ],
    ids=str,
)
def test_settings_that_a_class_does_not_read_change_nothing(
    family: str, stray: dict[str, Any]
) -> None:
    text = {**TEXT, "num_hidden_layers": 3, "pad_token_id": 0, "tie_word_embeddings": False}
    text |= sections(WHOLES[family].text) if family in WHOLES else {}
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    if family not in WHOLES and (SIZED.get(family) or FAMILIES[family]).experts:
        text |= experts | {"num_experts_per_tok": 2}

    def config(**more: Any) -> dict[str, Any]:
        if family in WHOLES:
            outer = {"model_type": family, "tie_word_embeddings": False}
            return outer | {"text_config": {**text, **more}}
        return {"model_type": family, **text, **more}

    shape = ModelShape.from_config(config(**stray))
    assert shape == ModelShape.from_config(config())
    resolved: Any = CONFIG_MAPPING[family].from_dict(config(**stray))
    with torch.device("meta"):
        model = text_model.class_to_load(resolved)(resolved)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "intermediate_size"])
@pytest.mark.parametrize("family", sorted({**FAMILIES, **SIZED, **TEXTS, **WITH_STATES}))
def test_null_is_a_number_where_the_class_makes_one_of_it(family: str, key: str) -> None:
    row = {**FAMILIES, **SIZED, **TEXTS, **WITH_STATES}[family]
    read = key != "intermediate_size" or not row.experts
    if not read or key in row.needs or key not in CONFIG_MAPPING[family].__dataclass_fields__:
        return
    config: dict[str, Any] = {"model_type": family, key: None}
    wholes = [name for name, parts in PARTS.items() if family in TEXTS and parts.text == family]
    whole = {"model_type": wholes[0], "text_config": config} if wholes else config
    try:
        ModelShape.from_config(whole)
        refused = ""
    except ShapeError as error:
        refused = error.field
    if refused not in ("", key):
        return
    try:
        CONFIG_MAPPING[family].from_dict(config)
    except Exception:  # noqa: BLE001 - of its class, whatever it is
        assert refused == key
    else:
        # Of one family the class takes null, and its layers do not.
        of_layers = (family, key) == ("ernie4_5_moe", "num_key_value_heads")
        assert refused == (key if of_layers else "")


@pytest.mark.parametrize(
    ("family", "change", "field"),
    [
        ("gemma3_text", {"sliding_window": None}, "sliding_window"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window"),
        ("cohere2", {"sliding_window": None, "layer_types": _KINDS}, "sliding_window"),
        ("qwen2", {"layer_types": _KINDS}, "use_sliding_window"),
        ("qwen2_moe", {"layer_types": _KINDS}, "use_sliding_window"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": None}, "sliding_window"),
        ("ministral", {}, "head_dim"),
        ("llama", {"num_attention_heads": 10}, "num_attention_heads"),
        ("gpt2", {"num_attention_heads": 10}, "num_attention_heads"),
    ],
    ids=str,
)
def test_what_transformers_cannot_run_is_refused_by_its_field(
    family: str, change: dict[str, Any], field: str
) -> None:
    config = {"model_type": family, **SMALL, "num_hidden_layers": 3, **MOE, **change}
    with pytest.raises(ShapeError, match=rf"config.json: {field}: "):
        ModelShape.from_config(config)


def test_layers_without_a_window_need_none() -> None:
    full: dict[str, Any] = {"layer_types": ["full_attention"] * 7}
    for family in ("gemma3_text", "gpt_oss", "exaone4", "qwen2"):
        for window in (None, -1, 0, 1):
            config = {"model_type": family, **SMALL, **MOE, **full, "sliding_window": window}
            assert ModelShape.from_config(config).windows == (None,) * 7


@pytest.mark.parametrize(
    "family", [name for name, row in {**FAMILIES, **SIZED}.items() if "sliding_window" in row.needs]
)
@pytest.mark.parametrize("window", [0, -1])
def test_a_class_that_takes_no_null_for_a_window_takes_other_numbers(
    family: str, window: int
) -> None:
    layers = {**FAMILIES, **SIZED}[family].defaults["num_hidden_layers"]
    config = {"model_type": family, "layer_types": ["full_attention"] * layers}
    shape = ModelShape.from_config({**config, "sliding_window": window})
    assert shape.windows == (None,) * layers


def test_a_switch_of_windows_may_be_null_where_its_class_takes_it_for_off() -> None:
    for kind in ("qwen2_vl_text", "qwen2_5_vl_text"):
        text: dict[str, Any] = {"use_sliding_window": None}
        kinds = CONFIG_MAPPING[kind].from_dict(text).layer_types
        whole = {"model_type": kind.removesuffix("_text"), "text_config": text}
        assert {*ModelShape.from_config(whole).windows} == {None}
        assert {*kinds} == {"full_attention"}


@pytest.mark.parametrize(
    "family",
    [
        name
        for name in sorted({**FAMILIES, **SIZED})
        if "sliding_window" in getattr(CONFIG_MAPPING[name], "__dataclass_fields__", ())
    ],
)
def test_null_is_no_window_where_the_class_takes_none(family: str) -> None:
    config: dict[str, Any] = {"model_type": family, "layer_types": None, "sliding_window": None}
    row = {**FAMILIES, **SIZED}[family]
    if row.window == "types":
        layers = row.defaults["num_hidden_layers"]
        config["layer_types"] = ["full_attention"] * layers
    try:
        CONFIG_MAPPING[family].from_dict(config)
    except Exception:  # noqa: BLE001 - of its class, whatever it is
        with pytest.raises(ShapeError, match=r"config\.json: sliding_window: "):
            ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("config", "field", "least"),
    [
        ({"model_type": "mistral", "sliding_window": 1}, "sliding_window", 2),
        ({"model_type": "gemma3_text", "sliding_window": 1}, "sliding_window", 2),
        ({"model_type": "lfm3", "sliding_window": 1}, "sliding_window", 2),
        ({"model_type": "modernbert-decoder", "local_attention": 3}, "local_attention", 4),
    ],
    ids=str,
)
def test_a_window_of_one_token_is_refused(config: dict[str, Any], field: str, least: int) -> None:
    with pytest.raises(ModelError, match=f"{field}: must be .* {least}"):
        architecture.check(config)
    assert architecture.check({**config, field: least}).layers


def test_layers_that_slide_while_windows_are_off_have_none_that_transformers_runs() -> None:
    """Why they are refused: the class makes their window 0."""
    kinds = ["sliding_attention", "full_attention"]
    model: Any = tiny.build("qwen2_moe", layer_types=kinds, num_hidden_layers=2)
    ids = torch.tensor([[5, 9, 3, 7]])
    with pytest.raises(RuntimeError, match="must match the size"):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    short, longer = (model(part, use_cache=False).logits for part in (ids[:, :2], ids))
    assert not torch.allclose(short, longer[:, :2], atol=1e-2)  # tokens see later ones


@pytest.mark.parametrize("window", [1, 2])
def test_of_a_window_of_one_token_transformers_text_depends_on_its_cache(window: int) -> None:
    """Why it is refused."""
    model: Any = tiny.build("gemma3_text", sliding_window=window)
    ids = torch.tensor([[5, 9, 3, 7, 2, 8, 11, 4]])
    texts = [
        model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=[], use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*texts) is (window > 1)


def test_a_text_whose_class_wants_its_type_is_refused_without_it() -> None:
    with pytest.raises(ShapeError, match=r"text_config.model_type: must be 'exaone4' or"):
        ModelShape.from_config({"model_type": "exaone4_5", "text_config": TEXT})


def test_what_few_wholes_call_or_keep_otherwise_is_read_as_transformers_does() -> None:
    text = {**TEXT, "tie_word_embeddings": False}
    exaone = {"model_type": "exaone4_5", "text_config": text | {"model_type": "exaone4_5_text"}}
    compare_text(exaone, ModelShape.from_config(exaone))
    fuyu = {"model_type": "fuyu", **text}
    shape = ModelShape.from_config(fuyu)
    resolved = CONFIG_MAPPING["fuyu"].from_dict(fuyu)
    with torch.device("meta"):
        model = text_model.class_to_load(resolved)(resolved)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    ovis: dict[str, Any] = {"model_type": "ovis2", "text_config": text}
    for key in ("hidden_size", "vocab_size"):
        with pytest.raises(ShapeError, match=f"{key}: must be that of text_config"):
            ModelShape.from_config({**ovis, **text, key: 1024})


@pytest.mark.parametrize(
    ("family", "kind"), [("internvl", "gpt2"), ("idefics2", "gemma2"), ("llava", "glm4v_text")]
)
def test_a_text_that_lacks_what_the_code_of_a_whole_reads_is_refused(
    family: str, kind: str
) -> None:
    with pytest.raises(ShapeError, match=f"{kind}.*reads what such a text has not"):
        ModelShape.from_config({"model_type": family, "text_config": {"model_type": kind}})


def test_the_head_of_a_whole_has_no_bias_of_its_text() -> None:
    text = {"model_type": "phi", **TEXT, "tie_word_embeddings": False}
    alone = ModelShape.from_config(text)
    whole = {"model_type": "internvl", "text_config": text, "tie_word_embeddings": False}
    assert alone.parameters - ModelShape.from_config(whole).parameters == TEXT["vocab_size"]


@pytest.mark.parametrize("family", ["mistral3", "llava"])
@pytest.mark.parametrize("kind", sorted(OWN_INPUTS))
def test_a_text_with_inputs_of_layers_is_served_of_its_own_whole_alone(
    family: str, kind: str
) -> None:
    with pytest.raises(ShapeError, match=rf"{kind}.*made of ids"):
        ModelShape.from_config({"model_type": family, "text_config": {"model_type": kind}})


def compare_text(config: dict[str, Any], shape: ModelShape) -> int:
    """The parameters of the whole."""
    resolved, model = build_whole(config, tied=shape.tied)
    total = sum(p.numel() for p in model.parameters())
    text_model.drop_other_parts(model)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    matrices = [p for n, p in model.named_parameters() if is_layer_matrix(n, p)]
    assert shape.layer_matrices == sum(p.numel() for p in matrices)
    text = resolved.get_text_config()
    text.allow_global_per_layer_attribute_access = True
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert (shape.layers, shape.heads) == (text.num_hidden_layers, text.num_attention_heads)
    if not shape.mixed:
        assert (shape.kv_heads, shape.head_dim) == (text.num_key_value_heads, head_dim)
    assert (shape.vocab, shape.max_len) == (text.vocab_size, text.max_position_embeddings)
    assert shape.windows == families.check(resolved)
    return total


# As REAL; the second number is that of the whole checkpoint, with its images' part.
QWEN3_VL = {"dtype": "bfloat16", "max_position_embeddings": 262144, "head_dim": 128}
REAL_PARTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "gemma-3-4b-it": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "image_size": 896,
                "intermediate_size": 4304,
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
            "torch_dtype": "bfloat16",
        },
        3_880_263_168,
        4_300_079_472,
    ),
    "Qwen2.5-VL-7B-Instruct": (
        {
            "model_type": "qwen2_5_vl",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "num_hidden_layers": 28,
            "max_window_layers": 28,
            "max_position_embeddings": 128000,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "sliding_window": 32768,
            "vision_config": {"model_type": "qwen2_5_vl", "hidden_size": 1280},
            "torch_dtype": "bfloat16",
        },
        7_615_616_512,
        8_292_166_656,
    ),
    "Qwen3-VL-8B-Instruct": (
        {
            "model_type": "qwen3_vl",
            "text_config": {
                **QWEN3_VL,
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_key_value_heads": 8,
                "num_hidden_layers": 36,
            },
            "tie_word_embeddings": False,
            "vision_config": {"hidden_size": 1152, "out_hidden_size": 4096},
        },
        8_190_735_360,
        8_767_123_696,
    ),
    "Qwen3-VL-30B-A3B-Instruct": (
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {
                **QWEN3_VL,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "num_hidden_layers": 48,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
            },
            "tie_word_embeddings": False,
            "vision_config": {"hidden_size": 1152, "out_hidden_size": 2048},
        },
        30_532_122_624,
        31_070_754_032,
    ),
    "Mistral-Small-3.1-24B-Instruct": (
        {
            "model_type": "mistral3",
            "text_config": {
                "model_type": "mistral",
                "head_dim": 128,
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "sliding_window": None,
                "vocab_size": 131072,
            },
            "torch_dtype": "bfloat16",
        },
        23_572_403_200,
        24_011_361_280,
    ),
}


@pytest.mark.parametrize("name", REAL_PARTS)
def test_the_text_of_public_checkpoints_has_its_published_size(name: str) -> None:
    config, parameters, whole = REAL_PARTS[name]
    shape = ModelShape.from_config(config)
    assert (shape.parameters, shape.dtype) == (parameters, "bfloat16")
    assert compare_text(config, shape) == whole


@pytest.mark.parametrize(
    ("outer", "text", "tied"),
    [
        ({"model_type": "gemma3"}, {}, True),
        ({"model_type": "gemma3", "tie_word_embeddings": False}, {}, False),
        ({"model_type": "mistral3"}, {}, False),  # its files have a head
        ({"model_type": "mistral3", "tie_word_embeddings": True}, {}, True),
        # The files may have both: what is held is never more than what is counted.
        (
            {"model_type": "internvl", "tie_word_embeddings": True},
            {"tie_word_embeddings": False},
            False,
        ),
        ({"model_type": "smolvlm"}, {"tie_word_embeddings": True}, False),
        ({"model_type": "qwen2_5_vl"}, {"tie_word_embeddings": True}, True),
        ({"model_type": "qwen3_vl"}, {}, False),
        ({"model_type": "glm4v"}, {"tie_word_embeddings": True}, True),
    ],
    ids=str,
)
def test_the_head_is_the_embedding_where_the_whole_or_its_text_says_so(
    outer: dict[str, Any], text: dict[str, Any], *, tied: bool
) -> None:
    text |= sections(WHOLES[outer["model_type"]].text, 64)
    assert ModelShape.from_config({**outer, "text_config": text}).tied is tied


@pytest.mark.parametrize(
    ("outer", "text", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float32"}, "bfloat16"),
        ({"dtype": "float16"}, {"torch_dtype": "bfloat16"}, "float16"),
        ({"torch_dtype": "float16"}, {"dtype": "bfloat16"}, "float16"),
        ({}, {"dtype": "bfloat16"}, "bfloat16"),
        ({}, {}, None),
    ],
    ids=str,
)
def test_the_type_of_the_whole_comes_before_its_texts(
    outer: dict[str, Any], text: dict[str, Any], dtype: str | None
) -> None:
    config = {"model_type": "internvl", **outer, "text_config": text}
    assert ModelShape.from_config(config).dtype == dtype


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"text_config": None}, "text_config"),
        ({"text_config": []}, "text_config"),
        ({"text_config": {"hidden_size": "x"}}, "hidden_size"),
        ({"text_config": {"model_type": "qwen3_5_text"}}, "text_config.model_type"),
        ({"text_config": {"model_type": 5}}, "text_config.model_type"),
        ({"text_config": {}, "vision_config": {"depth": 10**9}}, "depth"),
        ({"text_config": {}, "vision_config": {"a": {"num_heads": 10**5}}}, "num_heads"),
        ({"text_config": {}, "vision_config": {"depths": [2, 10**7]}}, "depths"),
        ({"text_config": {}, "vision_config": {"depths": [4096] * 2}}, "depths"),
        ({"text_config": {}, "vision_config": {"depths": [[1], [[5000]]]}}, "depths"),
        ({"text_config": {}, "vision_config": {"parts": [{"num_layers": 5000}]}}, "num_layers"),
        ({"text_config": {"num_labels": 10**9}}, "num_labels"),
        (
            {"text_config": {}, "vision_config": {"num_hidden_layers": 10**400}},
            "num_hidden_layers",
        ),
        (
            {"text_config": {}, "quantization_config": {"quant_method": "aqlm"}},
            "quantization_config",
        ),
        ({"text_config": {"quantization_config": {"bits": 4}}}, "quantization_config"),
    ],
    ids=str,
)
def test_a_model_of_several_parts_is_refused_by_the_field(
    change: dict[str, Any], field: str
) -> None:
    with pytest.raises(ShapeError, match=field) as caught:
        ModelShape.from_config({"model_type": "internvl"} | change)
    assert caught.value.field == field


@pytest.mark.parametrize("family", ["llama", "olmo", "gpt2"])
def test_counts_without_bound_are_refused_in_every_family(family: str) -> None:
    for field, value in [("num_labels", 10**9), ("encoder_layers", 10**6), ("depths", [1, 10**7])]:
        with pytest.raises(ShapeError, match=f"{field}: .* is more than") as caught:
            ModelShape.from_config({"model_type": family, field: value})
        assert caught.value.field == field


def test_lists_of_numbers_of_layers_and_widths_are_no_counts() -> None:
    layers = {"mlp_only_layers": list(range(200)), "hidden_size_per_layer_input": 10**6}
    plain = {"model_type": "llama"}
    assert ModelShape.from_config(plain | layers) == ModelShape.from_config(plain)


def test_bidirectional_attention_of_images_alone_leaves_a_text_causal() -> None:
    config = {"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}
    assert ModelShape.from_config(config).layers == 30
    for whole in ("all", True):
        with pytest.raises(ShapeError, match="use_bidirectional_attention"):
            ModelShape.from_config(config | {"use_bidirectional_attention": whole})


def test_a_refused_family_is_an_error_that_lists_the_supported_ones() -> None:
    with pytest.raises(ShapeError, match=r"'rwkv' is not supported: it keeps .*gemma2.*qwen3_moe"):
        ModelShape.from_config({"model_type": "rwkv"})
    with pytest.raises(ShapeError, match="model_type"):
        ModelShape.from_config({})


def test_an_unlisted_family_has_an_error_of_its_own_that_says_what_is_missing() -> None:
    with pytest.raises(
        UnknownFamilyError, match=r"'next_moe' is not in the table .*weights' size.*self-test"
    ):
        ModelShape.from_config({"model_type": "next_moe"})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": "8"}, "num_attention_heads"),
        ({"vocab_size": None}, "vocab_size"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"torch_dtype": "float64"}, "dtype"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "gemma2", "layer_types": ["linear_attention"] * 26}, "layer_types"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_values_no_model_can_have_are_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ShapeError, match=field) as caught:
        ModelShape.from_config({"model_type": "llama"} | change)
    assert caught.value.field == field


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    st.lists,
    max_leaves=4,
)
KEYS = st.sampled_from(
    [*SMALL, *MOE, "head_dim", "layer_types", "sliding_window", "dtype", "mlp_only_layers"]
)


@given(st.sampled_from(sorted({**FAMILIES, **WHOLES})), st.dictionaries(KEYS, JSON, max_size=4))
def test_a_hostile_config_is_sized_or_refused(family: str, change: dict[str, Any]) -> None:
    try:
        config = {"model_type": family, "num_hidden_layers": 2} | change
        shape = ModelShape.from_config(
            {"model_type": family, "text_config": config | {"model_type": WHOLES[family].text}}
            if family in WHOLES
            else config
        )
    except ShapeError:
        return
    assert 0 < shape.layer_matrices <= shape.parameters
    assert len(shape.windows) == shape.layers


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "float16"),
        ({"dtype": "torch.float32"}, "float32"),
        ({}, None),
    ],
    ids=str,
)
def test_the_checkpoint_type_is_read_from_either_key(
    config: dict[str, Any], dtype: str | None
) -> None:
    assert ModelShape.from_config({"model_type": "llama"} | config).dtype == dtype


def test_keys_that_a_family_ignores_change_nothing() -> None:
    stray = {"num_key_value_heads": 2, "head_dim": 7, "intermediate_size": 99}
    named: dict[str, dict[str, Any]] = {
        "gpt2": {"n_inner": None},
        "gpt_neox": {"intermediate_size": 24576},
    }
    for family, own in named.items():
        config = {"model_type": family}
        assert ModelShape.from_config(config | stray | own) == ModelShape.from_config(config)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 8.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
OF_QWEN_CARD = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("change", "longest"),
    [
        ({}, 256),
        ({"rope_scaling": OF_QWEN_CARD}, 1024),
        ({"rope_parameters": YARN}, 1024),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 64}}, 256),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 128}}, 512),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 4096}}, 256),
        ({"rope_parameters": {**YARN, "factor": 1.5}}, 384),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 512),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 3}}, 768),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 256),
        ({"rope_scaling": LLAMA3}, 256),
        ({"rope_scaling": LONGROPE}, 256),
        ({"rope_scaling": {"rope_type": "default"}}, 256),
        ({"rope_scaling": None}, 256),
        *(({"rope_scaling": {"type": "yarn", "factor": factor}}, 256) for factor in (0.5, 0.01)),
        ({"rope_scaling": {"type": "yarn", "factor": 1e6}}, 1 << 24),
    ],
)
def test_scaled_rotary_embeddings_reach_as_far_as_their_factor_says(
    change: dict[str, Any], longest: int
) -> None:
    assert ModelShape.from_config({"model_type": "qwen2", **SMALL, **change}).max_len == longest


def test_learned_positions_reach_no_further_whatever_the_factor() -> None:
    config = {"model_type": "gpt2", **SMALL, "n_positions": 256, "rope_scaling": OF_QWEN_CARD}
    assert ModelShape.from_config(config).max_len == 256
