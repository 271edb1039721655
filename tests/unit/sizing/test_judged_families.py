"""Families that the self-test judges: ``config.json`` alone says what transformers' class has,
built on the meta device.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from fairlead_runtime.models import families, text_model
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.checkpoint_formats import check_stored
from fairlead_runtime.sizing.config_json import ShapeError, family_named
from fairlead_runtime.sizing.families.judged import SIZED
from fairlead_runtime.sizing.families.other_names import OTHER_NAMES
from fairlead_runtime.sizing.families.refusals import REFUSED
from fairlead_runtime.sizing.family_table import FAMILIES, JUDGED
from fairlead_runtime.sizing.shape import ModelShape
from support import tiny_any

# Settings that a family has or has not: what its class does not know is left out.
TIED: dict[str, Any] = {"tie_word_embeddings": True, "vocab_size": 131, "num_hidden_layers": 7}
BIASED: dict[str, Any] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias"), True),
    **dict.fromkeys(("qk_layernorm", "use_qk_norm", "lm_head_bias", "attention_out_bias"), True),
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "intermediate_size": 88,
}
# Every other switch the other way, and windows where the class decides which layers slide.
SWITCHED: dict[str, Any] = {
    **dict.fromkeys(("use_sliding_window", "use_parallel_residual"), True),
    **dict.fromkeys(("use_post_norm", "multi_query", "enable_bias", "qkv_bias"), False),
    "layer_norm_elementwise_affine": False,
    "word_embed_proj_dim": 40,
    "sliding_window": 20,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 3),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 2),
    "shared_intermediate_size": 48,
    "max_window_layers": 4,
    "moe_layer_interval": 2,
    "num_hidden_layers": 9,
    "no_rope_layer_interval": 3,
    "sliding_window_pattern": 5,
    "global_attn_every_n_layers": 4,
    "local_attention": 26,
    **dict.fromkeys(("norm_bias", "classifier_bias"), True),
    "decoder_bias": False,
    "gating": "per-element",
    "num_attention_heads_per_layer": [4, 2, 8] * 3,
    "ffn_dim": 88,
}
# Settings that a class reads without a field of its own for them, and types that know the usual
# names as other names of theirs.
UNDECLARED = {"modernbert-decoder": ("global_attn_every_n_layers",)}
RENAMED = ("ctrl", "dbrx")
GPT2 = {"num_hidden_layers": "n_layer", "intermediate_size": "n_inner"}
CASES = [(name, case) for name in SIZED for case in ("tied", "biased", "switched")]
CHANGES = {"tied": TIED, "biased": BIASED, "switched": SWITCHED}


def settings(name: str, change: dict[str, Any]) -> dict[str, Any]:
    """A tiny model's settings with those of ``change`` that its class knows, by its own names."""
    known = CONFIG_MAPPING[name]()
    renamed = GPT2 if name.startswith("gpt") else OTHER_NAMES[name] if name in RENAMED else {}
    own = {renamed.get(k, k): v for k, v in change.items() if k not in SIZED[name].never}
    own = {k: v for k, v in own.items() if hasattr(known, k) or k in UNDECLARED.get(name, ())}
    if name == "dbrx":  # its attention says it
        own.pop("num_key_value_heads", None)
    if name == "opt" and "intermediate_size" in change:
        own["ffn_dim"] = change["intermediate_size"]
    plain = tiny_any.settings_of(name)
    if name.startswith("gpt"):  # other names of the same, or derived
        drop = (*GPT2, "hidden_size", "num_attention_heads", "max_position_embeddings")
        plain = {k: v for k, v in plain.items() if k not in (*drop, "num_key_value_heads")}
        own.pop("num_key_value_heads", None)
    if name in RENAMED:
        plain = {k: v for k, v in plain.items() if k not in OTHER_NAMES[name]}
    return {**plain, **own}


def compare(config: PretrainedConfig, shape: ModelShape) -> None:
    with torch.device("meta"):
        model = text_model.class_to_load(config)._from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.windows == families.check(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query_heads = config.num_attention_heads
    if config.model_type == "jetmoe":  # each chosen expert has so many of each, and all are cached
        query_heads = kv_heads = kv_heads * config.num_experts_per_tok
    if listed := getattr(config, "num_attention_heads_per_layer", None):
        query_heads = listed[0]
        assert [kind.query for kind in shape.head_kinds] == list(dict.fromkeys(listed))
    heads = (shape.layers, shape.heads, shape.kv_heads, shape.head_dim)
    assert heads == (config.num_hidden_layers, query_heads, kv_heads, head_dim)
    widths = (shape.hidden, shape.vocab, shape.max_len)
    assert widths == (config.hidden_size, config.vocab_size, config.max_position_embeddings)
    assert shape.tied == bool(config.tie_word_embeddings)
    assert 0 < shape.largest_layer <= shape.layer_matrices < shape.parameters


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(*case, marks=[pytest.mark.full] * bool(number % 3 and case[0] not in JUDGED))
        for number, case in enumerate(CASES)
    ],
)
def test_a_judged_family_is_sized_as_transformers_builds_it(name: str, case: str) -> None:
    own = settings(name, CHANGES[case])
    config = CONFIG_MAPPING[name](**own)
    shape = ModelShape.from_config({"model_type": name, **own})
    compare(config, shape)
    shortest = json.loads(json.dumps(config.to_diff_dict(), default=str)) | {"model_type": name}
    assert ModelShape.from_config(shortest) == shape
    whole = json.loads(config.to_json_string(use_diff=False)) | {"model_type": name}
    assert ModelShape.from_config(whole) == shape


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * bool(number % 3 and name not in JUDGED))
        for number, name in enumerate(SIZED)
    ],
)
def test_heads_that_a_config_does_not_say_are_those_that_its_class_makes(name: str) -> None:
    own = settings(name, {})
    for key in ("num_key_value_heads", "head_dim"):
        if key not in SIZED[name].needs:
            own.pop(key, None)
    if not name.startswith(("gpt", *RENAMED)):
        heads = SIZED[name].defaults.get("num_key_value_heads") or 4
        width = SIZED[name].defaults.get("head_dim") or 16
        own |= {"num_attention_heads": heads, "hidden_size": width * heads}
    compare(CONFIG_MAPPING[name](**own), ModelShape.from_config({"model_type": name, **own}))


# Their classes' own defaults are of no model: the class cannot be built.
WITHOUT_DEFAULTS = {
    *("cohere_compass_text", "dbrx", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"),
    "nemotron",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * bool(number % 4))
        for number, name in enumerate(sorted(SIZED.keys() - WITHOUT_DEFAULTS))
    ],
)
def test_an_empty_config_of_a_judged_family_takes_the_class_defaults(name: str) -> None:
    compare(CONFIG_MAPPING[name](), ModelShape.from_config({"model_type": name}))


def test_a_family_is_in_one_table_and_those_that_may_be_texts_are_sized() -> None:
    names = [*FAMILIES, *SIZED, *REFUSED]
    assert len(names) == len({*names})
    assert SIZED.keys() >= JUDGED
    assert all(family_named(name) is SIZED[name] for name in SIZED)


# The public checkpoints' own config.json, cut to what decides sizes, and their published counts.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "SmolLM3-3B": (
        {"model_type": "smollm3", "max_position_embeddings": 65536},
        3_075_098_624,
    ),
    "Seed-OSS-36B": (
        {"model_type": "seed_oss", "hidden_size": 5120, "attention_bias": True},
        36_151_104_512,
    ),
    "Phi-3.5-MoE": (
        {"model_type": "phimoe", "attention_bias": True, "lm_head_bias": True},
        41_873_153_344,
    ),
    "Qwen1.5-MoE-A2.7B": ({"model_type": "qwen2_moe"}, 14_315_784_192),
    "OLMo-2-7B": (
        {"model_type": "olmo2", "vocab_size": 100352, "max_position_embeddings": 4096},
        7_298_617_344,
    ),
    "OLMoE-1B-7B": ({"model_type": "olmoe", "intermediate_size": 1024}, 6_919_161_856),
    "GLM-4-9B-0414": (
        {"model_type": "glm4", "attention_bias": True, "max_position_embeddings": 32768},
        9_400_279_040,
    ),
    "phi-2": (
        {"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240}
        | {"num_hidden_layers": 32, "num_key_value_heads": 32},
        2_779_683_840,
    ),
    "opt-125m": ({"model_type": "opt"}, 125_239_296),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_checkpoints_have_their_published_size(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert ModelShape.from_config(config).parameters == parameters


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("internlm3", {"qkv_bias": True, "bias": True}),
        ("mellum", {"num_experts": 6, "num_local_experts": None}),
        ("ernie4_5_moe", {"moe_layer_end_index": 2, "moe_layer_start_index": 0}),
        ("qwen2_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 1}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}),
        ("opt", {"do_layer_norm_before": False}),
        ("persimmon", {"qk_layernorm": False}),
        ("gpt_bigcode", {"n_head": 8}),
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0, 1, 0]},
        ),
        (
            "smollm3",  # layers that a file lists slide whether the switch is on or off
            {"use_sliding_window": False, "sliding_window": 9, "num_hidden_layers": 2}
            | {"layer_types": ["sliding_attention", "full_attention"]},
        ),
        ("hy_v3", {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}),
        ("cohere2_moe", {"prefix_dense_sliding_window_pattern": 2, "first_k_dense_replace": 2}),
    ],
    ids=str,
)
def test_settings_of_few_families_are_read_as_transformers_reads_them(
    name: str, change: dict[str, Any]
) -> None:
    own = {k: v for k, v in (settings(name, {}) | change).items() if v is not None}
    compare(CONFIG_MAPPING[name](**own), ModelShape.from_config({"model_type": name, **own}))


def bad_values() -> Iterator[tuple[str, dict[str, Any], str]]:
    yield "glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace"
    yield "afmoe", {"num_dense_layers": "x"}, "num_dense_layers"
    yield "hy_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"
    yield "hy_v3", {"mlp_layer_types": ["odd"] * 80}, "mlp_layer_types"
    yield "hy_v3", {"num_shared_experts": -1}, "num_shared_experts"
    yield "hy_v3", {"num_shared_experts": 0}, "num_shared_experts"
    yield "glm4_moe", {"num_experts_per_tok": 129}, "num_experts_per_tok: 129 .* more than"
    yield "glm4_moe", {"n_group": 3}, "n_group: 3 groups"
    yield "glm4_moe", {"topk_group": 2}, "topk_group: 2 groups"
    yield "afmoe", {"route_scale": None}, "route_scale"
    yield "afmoe", {"head_dim": None}, "head_dim"
    yield "llama", {"rms_norm_eps": 1}, "rms_norm_eps: must be a number with a decimal point"
    yield "llama", {"hidden_act": "geglu"}, "hidden_act: 'geglu' is none of"
    yield "llama", {"attention_dropout": -1}, "attention_dropout: must be a share"
    yield "llama", {"is_encoder_decoder": True}, "is_encoder_decoder"
    yield "llama", {"layer_types": ["full_attention"]}, "layer_types: must be a list of 32"
    yield "llama", {"id2label": {"x": "y"}}, "id2label"
    yield "llama", {"dtype": ""}, "dtype"
    yield "mistral", {"head_dim": 15}, "head_dim: 15 of 15 elements"
    yield "phi", {"hidden_size": 72, "num_attention_heads": 4}, "head_dim: 9 of 18 elements"
    yield "stablelm", {"head_dim": 40}, "head_dim: must be 80"
    yield "persimmon", {"head_dim": "x"}, "head_dim: must be 64"
    yield "bitnet", {"head_dim": 64}, "head_dim"
    yield "qwen2_5_vl", {"text_config": {"head_dim": 64}}, "head_dim: must be 128"
    yield "llava_next", {"text_config": {}, "rope_scaling": 1}, "rope_scaling: must be an object"
    yield "gemma3n", {"text_config": {"is_encoder_decoder": True}}, "is_encoder_decoder"
    yield "smolvlm", {"text_config": {"tie_word_embeddings": [1]}}, r"text_config\.tie_word_embed"
    yield "stablelm", {"num_attention_heads": 12}, "num_attention_heads"
    yield "gpt_bigcode", {"rope_scaling": -1}, "rope_scaling"
    yield (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": 1},
        "no_rope",
    )
    yield "dots1", {"n_shared_experts": 1}, "n_group"
    yield (
        "dots1",
        {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        "num_local_experts",
    )
    yield "dots1", {"n_routed_experts": 4}, "n_shared_experts"
    yield "stablelm", {"use_parallel_residual": 1}, "use_parallel_residual"
    yield "ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index"
    yield "gpt_bigcode", {"multi_query": None}, "multi_query"
    yield "dbrx", {}, r"attn_config\.rope_theta"
    yield "dbrx", {"attn_config": [1]}, "attn_config: must be an object"
    yield "dbrx", {"attn_config": {"rope_theta": 1e4}, "ffn_config": [1]}, "ffn_config"
    yield "dbrx", {"attn_config": {"rope_theta": 1e4}, "tie_word_embeddings": True}, "tie_word"
    yield "jetmoe", {"num_experts_per_tok": 9}, "num_experts_per_tok: must be at most"
    yield "laguna", {"num_attention_heads_per_layer": [48] * 39}, "num_attention_heads_per_layer"
    yield "laguna", {"num_attention_heads_per_layer": 48}, "num_attention_heads_per_layer"
    yield "laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input"
    yield "minimax_m3_vl_text", {"layer_types": ["minimax_m3_sparse"] * 60}, "layer_types"
    yield (
        "minimax_m3_vl_text",
        {"sparse_attention_config": {"sparse_attention_freq": [0] * 59 + [1]}},
        "layer_types",
    )
    yield "minimax_m3_vl_text", {"layer_types": ["sliding_attention"] * 60}, "layer_types"
    yield "modernbert-decoder", {"local_attention": 1}, "local_attention"
    yield "moshi", {"ffn_dim": 25}, "ffn_dim"
    yield "moshi", {"num_codebooks": 33}, "num_codebooks"
    yield "moshi", {"tie_word_embeddings": True}, "tie_word_embeddings"
    yield "cohere_compass_text", {}, r"rope_parameters\.full_attention"


@pytest.mark.parametrize(("name", "change", "field"), list(bad_values()), ids=str)
def test_values_of_no_model_are_refused_by_name(
    name: str, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(ShapeError, match=field):
        ModelShape.from_config({"model_type": name} | change)


def test_a_family_that_no_kernel_for_cpus_fuses_is_not_refused_for_gpus_in_int8() -> None:
    """Those fuse its layers around their MLP. A CPU's pod refuses what is rounded or brings it."""
    shape = ModelShape.from_config({"model_type": "apertus"})
    assert shape.slab_width == 0
    engine = EngineConfig(quantization="int8")
    for stored in ("", "int8"):
        unfused = shape.plain_on("cuda")
        assert check_stored(engine, stored, "bfloat16", "cuda", unfused=unfused) == engine
        with pytest.raises(ConfigError, match="int8 weights of layers that no CPU's kernel fuses"):
            check_stored(engine, stored, "bfloat16", "cpu", unfused=shape.plain_on("cpu"))
