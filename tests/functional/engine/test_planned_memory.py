"""Memory planned from a config.json against what a profiling run of the real model measures."""

import itertools
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fairlead_kernels.choice.backend import pick
from fairlead_kernels.plain.torch_operations import TorchOperations
from fairlead_runtime.device.conversion.fusion import fuse, quantize_weights
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.warmup import profiling
from fairlead_runtime.models import architecture, families, loading, rope, text_model
from fairlead_runtime.models.headers import Header, TensorEntry
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.arithmetic import PANEL
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.terms import GIB, DeviceFacts
from fairlead_runtime.sizing.verdict import plan_memory
from fairlead_runtime.sizing.weight_bytes import held_weights
from support import tiny, tiny_any, tiny_parts, tiny_states
from support.kernel_sets import PRODUCT_SETS, rows_to_a_panel

LENGTH = 512
SIZES: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 64},
    "gemma2": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64},
    "gemma3n_text": {"head_dim": 64, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"vocab_size_per_layer_input": 4000, "hidden_size_per_layer_input": 32},
    "phi3": {},
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
    "gpt_neox": {},
    "qwen3_moe": {"num_local_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 384},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 64},
    "gemma4_text": {"head_dim": 64, "global_head_dim": 128, "sliding_window": 64}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    | {"num_kv_shared_layers": 1, "use_double_wide_mlp": True}
    | {"vocab_size_per_layer_input": 8000, "hidden_size_per_layer_input": 32},
    "mimo_v2_flash": {"n_routed_experts": 8, "head_dim": 96, "v_head_dim": 64}
    | {"num_experts_per_tok": 4, "moe_intermediate_size": 384, "sliding_window": 64},
}
# Heads by which attention keeps more of a token than an MLP does: few key-value heads, layers that
# differ, values of another width than keys.
_GEMMA4: dict[str, Any] = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 64,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
_MIMO: dict[str, Any] = {
    "head_dim": 32,
    "v_head_dim": 96,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "sliding_window": 64,
}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "one key-value head": ("llama", {"head_dim": 64, "num_key_value_heads": 1}),
    "two": ("mistral", {"head_dim": 64, "num_key_value_heads": 2}),
    "of two sizes": ("gemma4_text", _GEMMA4),
    "few in full layers": (
        "gemma4_text",
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
    ),
    "one in full layers": (
        "gemma4_unified_text",
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "few, beside experts": (
        "gemma4_text",
        _GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "enable_moe_block": True}
        | {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    ),
    "wide values": ("mimo_v2_flash", _MIMO | {"num_key_value_heads": 4}),
    "wide values of one head": (
        "mimo_v2_flash",
        _MIMO | {"num_key_value_heads": 1, "v_head_dim": 128},
    ),
}
# Models of several parts whose text is no model of its own, one that the self-test judges, and
# those whose own code keeps more than their text's.
OF_PARTS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "llava"),
    *("gemma4", "gemma4_unified"),
)
NOT_IN_GPT2 = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers; tied ones count once."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return sum({x.data_ptr(): x.nbytes for x in tensors}.values())


@pytest.mark.parametrize(
    ("family", "dtype", "cache_dtype"),
    [
        *((name, "float32", "auto") for name in FAMILIES),
        ("llama", "bfloat16", "auto"),
        ("llama", "float32", "fp8"),
        ("gemma2", "bfloat16", "fp8"),
    ],
)
def test_planned_terms_are_within_a_fifth_of_measured_ones(
    family: str, dtype: str, cache_dtype: Any
) -> None:
    sizes = {k: v for k, v in SIZES.items() if family != "gpt2" or k not in NOT_IN_GPT2}
    config = AutoConfig.for_model(family, **sizes | FAMILIES[family], dtype=dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    paged = PagedModel(model, families.check(config), fp8_cache=cache_dtype == "fp8")
    rope.pin(model, LENGTH)
    measured = profiling.profile(
        paged,
        pick(paged.heads, paged.kinds, paged.device, "torch").attention,
        max_batch_tokens=256,
        max_requests=64,
        max_model_len=LENGTH,
    ).measured
    limits = EngineConfig(
        max_batch_tokens=256, max_requests=64, kernels="torch", cache_dtype=cache_dtype
    )
    shape = ModelShape.from_config(json.loads(config.to_json_string()) | {"dtype": dtype})
    plan = plan_memory(shape, limits, DeviceFacts("cpu", 8 * GIB))
    groups, planned = paged.groups, plan.terms
    assert plan.unit_bytes == CacheStorage.unit_bytes(groups, paged.cache_heads, plan.block_size)
    assert planned["weights"] == held_bytes(model)
    for term in ("activations", "logits"):
        assert 1.0 <= planned[term] / measured[term] <= 1.2, term
    for term in ("attention", "sampling", "batch"):
        assert planned[term] >= measured[term], term


# Settings of models whose matrices have rows that make no whole panels.
NARROW: dict[str, tuple[str, dict[str, Any]]] = {
    "of fused layers": (
        "llama",
        {"intermediate_size": 97, "num_key_value_heads": 1, "head_dim": 18},
    ),
    "of layers that do not fuse": ("olmo2", {"intermediate_size": 97}),
    "of few rows": (
        "qwen3_5_text",
        {"layer_types": ["linear_attention"], "num_hidden_layers": 1}
        | {"linear_num_value_heads": 4, "linear_value_head_dim": 16}
        | {"linear_num_key_heads": 2, "linear_key_head_dim": 16},
    ),
    "of routers": ("afmoe", {"num_experts": 40, "num_hidden_layers": 2}),
    "of two routers": ("jetmoe", {"num_local_experts": 40, "num_hidden_layers": 1}),
}


@pytest.mark.parametrize(
    ("name", "quantization", "deterministic"),
    [
        *((name, "none", name == "of few rows") for name in NARROW),
        ("of fused layers", "int8", False),
    ],
)
def test_rows_that_make_whole_panels_are_planned_as_they_are_held(
    name: str, quantization: Literal["none", "int8"], deterministic: bool
) -> None:
    if not PRODUCT_SETS:
        pytest.skip("the C++ kernels are not built")
    family, settings = NARROW[name]
    model = tiny_any.build(family, vocab_size=288, **settings)
    paged = PagedModel(model, families.check(model.config))
    rope.pin(model, LENGTH)
    if quantization == "int8":
        quantize_weights(paged, "int8", head=True)
    operations = pick(paged.heads, paged.kinds, paged.device, "cpu").operations
    fuse(paged, operations, every_product=deterministic)
    limits = EngineConfig(quantization=quantization, deterministic=deterministic)
    shape = ModelShape.from_config(json.loads(model.config.to_json_string()))
    planned = held_weights(shape, limits, 1, "cpu")
    assert planned >= paged.weight_bytes
    # The widest panels, as planned; with VNNI what int8 multiplies has columns to whole fours.
    fours = quantization == "none" or getattr(operations, "int8_rounding", 0.0) > 0
    if rows_to_a_panel(1) == PANEL - 1 and fours:
        assert planned <= paged.weight_bytes


@pytest.mark.parametrize("name", HEADS)
def test_no_term_of_wide_attention_is_planned_too_low(name: str) -> None:
    family, more = HEADS[name]
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    sizes = SIZES | {"vocab_size": 2000, "intermediate_size": 512} | heads | more
    config = AutoConfig.for_model(family, **sizes, dtype="float32")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    paged = PagedModel(model, families.check(config))
    rope.pin(model, LENGTH)
    measured = profiling.profile(
        paged,
        pick(paged.heads, paged.kinds, paged.device, "torch").attention,
        max_batch_tokens=256,
        max_requests=64,
        max_model_len=LENGTH,
    ).measured
    limits = EngineConfig(max_batch_tokens=256, max_requests=64, kernels="torch")
    shape = ModelShape.from_config(json.loads(config.to_json_string()) | {"dtype": "float32"})
    planned = plan_memory(shape, limits, DeviceFacts("cpu", 8 * GIB)).terms
    for term in ("activations", "logits"):
        assert 1.0 <= planned[term] / measured[term] <= 1.3, term
    assert planned["attention"] >= measured["attention"]


@pytest.mark.parametrize("tokens", [256, 8192])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox"])
def test_no_term_of_fused_layers_is_planned_too_low(family: str, dtype: str, tokens: int) -> None:
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family], dtype=dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    paged = PagedModel(model, families.check(config))
    rope.pin(model, LENGTH)
    choice = pick(paged.heads, paged.kinds, paged.device)
    if choice.operations is None:
        pytest.skip(choice.reason)
    assert fuse(paged, choice.operations).fused == 2
    measured = profiling.profile(
        paged, choice.attention, max_batch_tokens=tokens, max_requests=64, max_model_len=LENGTH
    ).measured
    limits = EngineConfig(max_batch_tokens=tokens, max_requests=64)
    shape = ModelShape.from_config(json.loads(config.to_json_string()) | {"dtype": dtype})
    planned = plan_memory(shape, limits, DeviceFacts("cpu", 8 * GIB)).terms
    # In bfloat16 the last norm is the model's own, of all tokens, and may have copies in float32.
    most = 1.3 if dtype == "float32" else 3.0
    for term in ("activations", "logits"):
        assert 1.0 <= planned[term] / measured[term] <= most, term


@pytest.mark.parametrize("tokens", [256, 2048])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_term_of_layers_fused_beside_states_is_planned_too_low(dtype: str, tokens: int) -> None:
    """In bfloat16, too, fused layers compute in float32."""
    kinds = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    config = AutoConfig.for_model("lfm2", **SIZES | kinds, dtype=dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    paged = PagedModel(model, families.check(config))
    rope.pin(model, LENGTH)
    choice = pick(paged.heads, paged.kinds, paged.device)
    if choice.operations is None:
        pytest.skip(choice.reason)
    assert fuse(paged, choice.operations).fused == 1
    measured = profiling.profile(
        paged, choice.attention, max_batch_tokens=tokens, max_requests=64, max_model_len=LENGTH
    ).measured
    limits = EngineConfig(max_batch_tokens=tokens, max_requests=64)
    shape = ModelShape.from_config(json.loads(config.to_json_string()) | {"dtype": dtype})
    planned = plan_memory(shape, limits, DeviceFacts("cpu", 8 * GIB)).terms
    for term in ("activations", "logits"):
        assert planned[term] >= measured[term], term


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_no_term_of_layers_fused_around_experts_is_planned_too_low(family: str, dtype: str) -> None:
    """As on a GPU, by its operations in torch."""
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family], dtype=dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    paged = PagedModel(model, families.check(config))
    rope.pin(model, LENGTH)
    assert fuse(paged, TorchOperations()).around_mlp == 2
    attention = pick(paged.heads, paged.kinds, paged.device, "torch").attention
    measured = profiling.profile(
        paged, attention, max_batch_tokens=2048, max_requests=64, max_model_len=LENGTH
    ).measured
    limits = EngineConfig(max_batch_tokens=2048, max_requests=64)
    shape = ModelShape.from_config(json.loads(config.to_json_string()) | {"dtype": dtype})
    planned = plan_memory(shape, limits, DeviceFacts("cuda", 8 * GIB)).terms
    for term in ("activations", "logits"):
        assert 1.0 <= round(planned[term] / measured[term], 2) <= 1.2, term


@pytest.mark.parametrize("longest", [2, 40, tiny.CONTEXT])
@pytest.mark.parametrize("tokens", [1, 64, 600])
def test_attention_is_measured_under_any_limits(tokens: int, longest: int) -> None:
    """A row shorter than a strip, a step shorter than a row, one token: each needs at least its
    gathered keys.
    """
    model = tiny.build("mistral")
    paged = PagedModel(model, families.check(model.config))
    measured = profiling.profile(
        paged,
        pick(paged.heads, paged.kinds, paged.device, "torch").attention,
        max_batch_tokens=tokens,
        max_requests=4,
        max_model_len=longest,
    ).measured
    limits = EngineConfig(
        max_batch_tokens=tokens, max_requests=min(4, tokens), max_model_len=longest
    )
    shape = ModelShape.from_config(json.loads(model.config.to_json_string()))
    planned = plan_memory(shape, limits, DeviceFacts("cpu", 8 * GIB)).terms
    assert 0 < measured["attention"] <= planned["attention"]
    assert 0 < measured["batch"] <= planned["batch"]


TINY = (
    *itertools.product(tiny.FAMILIES, (64, 128)),
    *((family, 64) for family in (*tiny.SIZED, *tiny.UNLISTED, *OF_PARTS)),
)
# What they have in float32 in a model of 16 bits: shares of experts, norms of the hidden state and
# of queries, rotary embeddings by tables in float32 and of wider queries.
WIDE = (
    *(("mixtral", 128), ("gemma2", 128), ("gemma3n_text", 128)),
    *(("cohere", 64), ("ernie4_5", 64), ("qwen2_moe", 64)),
)


@pytest.mark.parametrize(
    ("family", "hidden", "dtype"),
    [
        *((*case, "float32") for case in TINY),
        *((*case, "bfloat16") for case in WIDE),
        *(
            pytest.param(*case, "bfloat16", marks=pytest.mark.full)
            for case in TINY
            if case not in WIDE
        ),
    ],
)
def test_no_term_of_a_tiny_model_is_planned_too_low(family: str, hidden: int, dtype: str) -> None:
    """Small widths show terms that a model of common size hides: indices, rotary tables, the
    sampler's counts.
    """
    width = {"n_embd": hidden} if family in {"gpt2", "gpt_bigcode"} else {"hidden_size": hidden}
    more = {"word_embed_proj_dim": hidden} if family == "opt" else {}
    more |= {"head_dim": hidden // 4} if family == "helium" else {}
    if family in OF_PARTS:
        model = tiny_parts.build(family)
        config = json.loads(model.config.to_json_string())
        text_model.drop_other_parts(model)
    else:
        model = tiny.build(family, **width, **more)
        config = json.loads(model.config.to_json_string())
    model.to(getattr(torch, dtype))
    paged = PagedModel(model, families.check(model.config))
    rope.pin(model, tiny.CONTEXT)
    limits = EngineConfig(max_batch_tokens=256, max_requests=64, kernels="torch", dtype=dtype)  # type: ignore[arg-type]
    measured = profiling.profile(
        paged,
        pick(
            paged.heads, paged.kinds, paged.device, "torch", torch_because=paged.torch_because
        ).attention,
        max_batch_tokens=256,
        max_requests=64,
        max_model_len=tiny.CONTEXT,
    ).measured
    header = Header(
        {n: TensorEntry("F32", tuple(p.shape), 0, 0) for n, p in model.state_dict().items()},
        b"",
        0,
        0,
    )
    shape = architecture.check(config, weights={"model.safetensors": header})
    planned = plan_memory(shape, limits, DeviceFacts("cpu", 8 * GIB)).terms
    low = {
        term: round(planned[term] / size, 2)
        for term, size in measured.items()
        if planned[term] < size
    }
    assert not low


# By what transformers' own code of a family keeps that others' does not: logits in float32, gates
# before and after attention, tables of rotary embeddings made again, one product for queries, keys
# and values, hidden states beside an MLP.
ONE_KEY: dict[str, Any] = {"num_key_value_heads": 1}
WIDER: list[tuple[str, dict[str, Any], str]] = [
    ("beam", {"head_dim": 64}, "float32"),
    ("beam", {"head_dim": 128, **ONE_KEY}, "float32"),
    ("beam", {"vocab_size": 2000}, "bfloat16"),
    ("afmoe", {"head_dim": 64}, "float32"),
    ("afmoe", {"head_dim": 64}, "bfloat16"),
    ("ernie4_5", {"head_dim": 128, **ONE_KEY}, "float32"),
    ("persimmon", {"intermediate_size": 16}, "float32"),
    ("stablelm", {"hidden_size": 128, **ONE_KEY}, "float32"),
]


@pytest.mark.parametrize(("family", "more", "dtype"), WIDER, ids=str)
def test_what_the_code_of_a_family_keeps_more_than_others_is_planned(
    family: str, more: dict[str, Any], dtype: Any
) -> None:
    model: Any = tiny_any.build(family, **more).to(getattr(torch, dtype))
    paged = PagedModel(model, families.check(model.config))
    rope.pin(model, 128)
    measured = profiling.profile(
        paged,
        pick(paged.heads, paged.kinds, paged.device, "torch").attention,
        max_batch_tokens=64,
        max_requests=16,
        max_model_len=128,
    ).measured
    limits = EngineConfig(
        max_batch_tokens=64,
        max_requests=16,
        kernels="torch",
        dtype=dtype,
        max_model_len=128,
    )
    own = {"model_type": family, **tiny_any.settings_of(family, **more)}
    planned = plan_memory(ModelShape.from_config(own), limits, DeviceFacts("cpu", 8 * GIB)).terms
    for term in ("activations", "logits"):
        assert 1.0 <= planned[term] / measured[term] <= 1.5, term


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", tiny_states.FAMILIES)
def test_no_term_of_a_tiny_model_with_states_is_planned_too_low(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """Copies of a layer's states do not shrink with a step, so that a step of one token counts."""
    saved = tiny.save(tiny_states.build(family), tmp_path)
    model = loading.load(saved, config=EngineConfig(dtype=dtype, kernels="torch")).model  # type: ignore[arg-type]
    paged = PagedModel(model, families.check(model.config))
    rope.pin(model, tiny.CONTEXT)
    shape = ModelShape.from_config(json.loads(model.config.to_json_string()) | {"dtype": dtype})
    low: dict[tuple[int, str], float] = {}
    for tokens in (1, 24, 200):
        limits = EngineConfig(
            max_batch_tokens=tokens, max_requests=min(64, tokens), kernels="torch"
        )
        plan = plan_memory(shape, limits, DeviceFacts("cpu", 8 * GIB))
        attention = pick(paged.heads, paged.kinds, paged.device, "torch").attention
        measured = profiling.profile(
            paged,
            attention,
            max_batch_tokens=tokens,
            max_requests=min(64, tokens),
            max_model_len=tiny.CONTEXT,
        ).measured
        low |= {
            (tokens, term): round(plan.terms[term] / size, 2)
            for term, size in measured.items()
            if plan.terms[term] < size
        }
    assert not low
    assert plan.terms["weights"] == held_bytes(model)
    layout = paged.state_layout
    assert layout is not None
    cache = CacheStorage(
        paged.groups,
        paged.cache_heads,
        units=5,
        block_size=plan.block_size,
        device=paged.device,
        states=layout,
    )
    assert cache.nbytes == 5 * plan.unit_bytes
    assert plan.state_units == layout.units(plan.unit_bytes)
    assert plan.state_bytes_per_sequence == 2 * plan.state_units * plan.unit_bytes
