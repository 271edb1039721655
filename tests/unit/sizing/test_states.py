"""Families whose layers keep states: their sizes against transformers' own classes on the meta
device, and the plan of states beside keys.
"""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from fairlead_runtime.device.model.state_layers import state_mixers
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.arithmetic import PANEL
from fairlead_runtime.sizing.config_json import ShapeError
from fairlead_runtime.sizing.families.with_states import WITH_STATES
from fairlead_runtime.sizing.groups import NO_KEYS
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.states import ALIGNMENT, DECODES, StateLayout, StatePart
from fairlead_runtime.sizing.stored import QuantizedError
from fairlead_runtime.sizing.terms import (
    ENTRY_BYTES,
    GIB,
    DeviceFacts,
    decode_state,
    state_layout,
)
from fairlead_runtime.sizing.verdict import plan_memory
from support.published import awq, compressed_int4, compressed_tensors, gptq

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 40}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "head_dim": 12,
}
MAMBA2 = {
    "mamba_n_heads": 12,
    "mamba_n_groups": 3,
    "mamba_d_state": 10,
    "mamba_d_conv": 5,
    "mamba_chunk_size": 16,
}
NEMOTRON = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 9,
    "n_routed_experts": 4,
    "moe_intermediate_size": 20,
    "num_experts_per_tok": 2,
    "moe_shared_expert_intermediate_size": 28,
    "head_dim": 8,
}
LFM = ["conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv"]
LINEAR = ["linear_attention", "full_attention"] * 3 + ["linear_attention"]
# By family its settings beside SMALL's: one for each way to say something.
CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen3_next": (
        DELTA | SHARED,
        DELTA | SHARED | {"mlp_only_layers": [1, 2], "attention_bias": True},
        DELTA | SHARED | {"decoder_sparse_step": 3, "full_attention_interval": 2},
    ),
    "qwen3_5_text": (
        DELTA,
        DELTA | {"attention_bias": True, "layer_types": LINEAR, "tie_word_embeddings": True},
        DELTA | {"full_attention_interval": 3, "linear_num_value_heads": 18},
    ),
    "qwen3_5_moe_text": (DELTA | SHARED, DELTA | SHARED | {"layer_types": LINEAR}),
    "olmo_hybrid": (
        {"num_key_value_heads": None},
        DELTA | {"layer_types": LINEAR, "linear_num_value_heads": 2, "attention_bias": True},
        {"num_hidden_layers": 2},
    ),
    "mamba2": (
        {"num_heads": 12, "head_dim": 8, "n_groups": 4, "state_size": 9, "conv_kernel": 3},
        {"num_heads": 9, "head_dim": 16, "n_groups": 3, "expand": 3, "use_bias": True}
        | {"use_conv_bias": False, "tie_word_embeddings": True},
    ),
    "falcon_mamba": (
        {"state_size": 5, "conv_kernel": 3},
        {"time_step_rank": 7, "expand": 3, "use_bias": True, "use_conv_bias": False},
        {"expand": 16, "intermediate_size": 40},
    ),
    "nemotron_h": (
        NEMOTRON,
        NEMOTRON | {"hybrid_override_pattern": "M*-E-MM", "mamba_d_conv": 3, "mlp_bias": True},
        NEMOTRON | {"layers_block_type": ["mamba", "attention", "mlp"], "attention_bias": True},
        NEMOTRON | {"moe_latent_size": 16, "use_bias": True, "use_conv_bias": False},
    ),
    "falcon_h1": (
        MAMBA2 | {"mamba_d_ssm": 60},
        MAMBA2 | {"mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_proj_bias": True},
        MAMBA2
        | {"mamba_d_ssm": 36, "projectors_bias": True, "mlp_bias": True}
        | {"attention_bias": True, "mamba_conv_bias": False},
    ),
    "granitemoehybrid": (
        MAMBA2 | {"num_local_experts": 4, "shared_intermediate_size": 20},
        MAMBA2 | {"num_local_experts": 0, "shared_intermediate_size": 60, "layer_types": LINEAR},
        MAMBA2 | {"mamba_proj_bias": True, "mamba_expand": 3, "layer_types": ["mamba"] * 7},
    ),
    "bamba": (
        MAMBA2 | {"attn_layer_indices": [1, 4]},
        MAMBA2 | {"mamba_d_head": 8, "mlp_bias": True, "attention_bias": True},
    ),
    "jamba": (
        {"num_experts": 4, "mamba_d_state": 5, "attn_layer_period": 3, "attn_layer_offset": 1},
        {"num_experts": 1, "mamba_dt_rank": 6, "mamba_proj_bias": True, "mamba_conv_bias": False},
        {"num_experts": 3, "expert_layer_period": 3, "expert_layer_offset": 2, "mamba_expand": 3},
    ),
    "lfm2": (
        {"layer_types": LFM, "conv_bias": True, "block_multiple_of": 32},
        {"full_attn_idxs": [0, 3], "block_ff_dim": 90, "block_auto_adjust_ff_dim": False},
        {"full_attn_idxs": [2], "block_ffn_dim_multiplier": 1.3, "tie_embedding": False},
    ),
    "lfm2_moe": (
        EXPERTS | {"layer_types": LFM, "num_dense_layers": 3},
        EXPERTS | {"layer_types": LFM, "conv_bias": True, "conv_L_cache": 5},
    ),
    "lfm3": (
        {"head_dim": 10, "sliding_window": 12},
        {"use_sandwich_norm": False, "attention_bias": True, "layer_types": LFM},
        {"use_attention_gate": False, "conv_L_cache": 4, "conv_bias": True},
    ),
    "minimax": (
        {"num_local_experts": 4, "head_dim": 10},
        {"num_local_experts": 3, "layer_types": LINEAR},
    ),
}
NO_HEADS = ("mamba2", "falcon_mamba")
ALWAYS = ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")
EACH = [(family, i) for family in WITH_STATES for i in range(len(CASES[family]))]


def config_of(family: str, case: int) -> dict[str, Any]:
    small = {
        key: value
        for key, value in SMALL.items()
        if family not in NO_HEADS
        or key in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")
    }
    if family == "nemotron_h":
        small.pop("num_hidden_layers")
    return {"model_type": family} | small | CASES[family][case]


def build(config: dict[str, Any]) -> tuple[Any, torch.nn.Module]:
    plain = {key: value for key, value in config.items() if key != "model_type"}
    resolved = AutoConfig.for_model(config["model_type"], **plain)
    with torch.device("meta"):
        return resolved, AutoModelForCausalLM.from_config(resolved)


def test_every_row_has_cases() -> None:
    assert CASES.keys() == WITH_STATES.keys()


@pytest.mark.parametrize(("family", "case"), EACH)
def test_sizes_equal_those_of_transformers(family: str, case: int) -> None:
    config = config_of(family, case)
    shape, (resolved, model) = ModelShape.from_config(config), build(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layers == resolved.num_hidden_layers
    assert shape.tied == resolved.tie_word_embeddings
    kinds = resolved.layer_types
    keys = [i for i, kind in enumerate(kinds) if "_attention" in kind and "linear" not in kind]
    keys = [*range(len(kinds))] if "hybrid" in kinds else keys
    states = [i for i, kind in enumerate(kinds) if kind in ("linear_attention", "conv", "hybrid")]
    assert [i for i, source in enumerate(shape.sources) if source != NO_KEYS] == keys
    assert [*shape.states] == states
    windows = [resolved.sliding_window if k == "sliding_attention" else None for k in kinds]
    assert [*shape.windows] == windows
    rows = {name: parameter.shape[0] for name, parameter in model.named_parameters()}
    for layer, width in enumerate(shape.kv_widths):
        ends = tuple(f".{layer}.{m}.k_proj.weight" for m in ("self_attn", "mixer"))
        made = [size for name, size in rows.items() if name.endswith(ends)]
        assert width == 2 * sum(made)


@pytest.mark.parametrize(("family", "case"), EACH)
def test_a_saved_config_has_the_same_shape(family: str, case: int) -> None:
    config = config_of(family, case)
    saved, _ = build(config)
    shape = ModelShape.from_config(config)
    for text in (saved.to_json_string(), saved.to_json_string(use_diff=False)):
        assert ModelShape.from_config(json.loads(text)) == shape


@pytest.mark.parametrize(("family", "case"), EACH)
def test_rows_that_make_whole_panels_are_those_of_the_linear_layers(family: str, case: int) -> None:
    config = config_of(family, case)
    _, model = build(config)
    # A single row is never packed, and the head counts apart.
    apart = ("shared_expert_gate", "lm_head")
    mixers = {part for mixer in state_mixers(model).values() for part in mixer.modules()}
    padding = Counter[bool]()
    for name, x in model.named_modules():
        if isinstance(x, torch.nn.Linear) and not name.endswith(apart):
            least = PANEL // 2 if x in mixers else PANEL
            padding[x.out_features >= least] += -x.out_features % PANEL * x.in_features
    shape = ModelShape.from_config(config)
    assert (shape.padding, shape.narrow_padding) == (padding[True], padding[False])
    assert shape.padding > 0


def test_matrices_of_few_rows_are_planned_in_panels_where_they_are_quantized() -> None:
    shape, cpu = ModelShape.from_config(config_of("qwen3_5_text", 0)), DeviceFacts("cpu", GIB << 6)
    assert shape.narrow_padding > 0
    for name in ("none", "int8"):
        config = EngineConfig(quantization=name, max_batch_tokens=64)
        planned = [
            plan_memory(each, config, cpu).terms["weights"]
            for each in (shape, replace(shape, narrow_padding=0))
        ]
        assert planned[0] - planned[1] == shape.narrow_padding * (name == "int8")


@pytest.mark.parametrize("family", sorted(WITH_STATES))
def test_an_empty_config_takes_the_class_defaults(family: str) -> None:
    config = {"model_type": family} | (
        {"layer_types": LFM, "num_hidden_layers": 7} if family == "lfm2_moe" else {}
    )
    shape, (_, model) = ModelShape.from_config(config), build(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "lfm2_moe"}, "layer_types"),
        ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention"]}, "layer_types"),
        ({"model_type": "qwen3_5_text", "layer_types": ["conv"] * 32}, "layer_types"),
        ({"model_type": "qwen3_5_text", "linear_num_value_heads": 24}, "linear_num_value_heads"),
        ({"model_type": "qwen3_next", "linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ({"model_type": "mamba2", "num_heads": 100}, "head_dim"),
        ({"model_type": "mamba2", "n_groups": 3}, "num_heads"),
        ({"model_type": "bamba", "attn_layer_indices": 3}, "attn_layer_indices"),
        ({"model_type": "jamba", "attn_layer_period": 0}, "attn_layer_period"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "layers_block_type"),
        ({"model_type": "nemotron_h", "layers_block_type": 4}, "layers_block_type"),
        ({"model_type": "lfm2", "block_ff_dim": "wide"}, "intermediate_size"),
        ({"model_type": "granitemoehybrid", "num_local_experts": -1}, "num_local_experts"),
    ],
)
def test_what_is_no_model_is_refused_by_its_setting(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ShapeError, match=field) as caught:
        ModelShape.from_config(config)
    assert caught.value.field == field


# -- layouts


PARTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
        st.sampled_from(["", "float32", "bfloat16"]),
    ),
    max_size=3,
)


@given(
    st.dictionaries(st.integers(0, 9), PARTS, max_size=5),
    st.sampled_from(["float32", "float16"]),
    st.integers(1, 40),
)
def test_parts_lie_behind_one_another(
    parts: dict[int, list[tuple[tuple[int, ...], str]]], dtype: str, unit: int
) -> None:
    named = {
        layer: [StatePart(f"p{i}", *p) for i, p in enumerate(ps)] for layer, ps in parts.items()
    }
    layout = StateLayout.of(named, dtype)
    assert [*layout.layers] == sorted(parts)
    end = 0
    for layer, components in layout.layers.items():
        for component, part in zip(components, named[layer], strict=True):
            assert (component.name, component.shape) == (part.name, part.shape)
            assert component.dtype == (part.dtype or dtype)
            assert component.offset % ALIGNMENT == 0
            assert end <= component.offset < end + ALIGNMENT
            end = component.offset + component.nbytes
    assert end <= layout.nbytes < end + ALIGNMENT
    unit *= ALIGNMENT
    assert layout.units(unit) * unit >= layout.nbytes > (layout.units(unit) - 1) * unit or not end


def test_qwen_3_5_27b_keeps_147_mib_of_a_sequence() -> None:
    """48 layers of 3 MiB in float32, and convolutions: the figure of the mechanism's page."""
    shape = ModelShape.from_config(QWEN_27B)
    assert len(shape.states) == 48
    layout = state_layout(shape, EngineConfig())
    assert layout.nbytes == 48 * (48 * 128 * 128 * 4 + (16 * 128 * 2 + 48 * 128) * 3 * 2)
    assert layout.nbytes / 2**20 == pytest.approx(146.8, abs=0.1)


QWEN_27B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "max_position_embeddings": 262144,
    },
}
GPU = DeviceFacts("cuda", 141 * GIB)


# -- the plan


@pytest.mark.parametrize(("switch", "versions"), [("auto", 3), ("on", 3), ("off", 2)])
def test_the_plan_counts_states_beside_keys(switch: str, versions: int) -> None:
    """Every sequence has its states twice, and three times where steps are launched ahead; what is
    left beside one sequence's is a request's.
    """
    config = EngineConfig(async_batching=switch)  # type: ignore[arg-type]
    plan = plan_memory(ModelShape.from_config(QWEN_27B), config, GPU)
    assert plan.fits
    token = 16 * 2 * 4 * 256 * 2  # 16 layers' keys and values of 4 heads in bfloat16
    assert (plan.kv_bytes_per_token, plan.unit_bytes) == (token, 16 * token)
    layout = state_layout(ModelShape.from_config(QWEN_27B), EngineConfig())
    assert plan.state_units == -(-layout.nbytes // plan.unit_bytes)
    held = versions * plan.state_units
    assert plan.state_versions == versions
    assert plan.state_bytes_per_sequence == held * plan.unit_bytes
    assert plan.concurrent_tokens == (plan.num_blocks - held) * 16
    assert plan.full_length_sequences == plan.num_blocks // (262144 // 16 + held)


def test_copies_of_states_are_planned_for_the_decodes_of_one_call() -> None:
    """What more of them take is a decode's own: hidden states, and no state."""
    shape = ModelShape.from_config(QWEN_27B)
    logits = [
        plan_memory(shape, EngineConfig(max_requests=rows), GPU).terms["logits"]
        for rows in (DECODES - 1, DECODES, DECODES + 1, DECODES + 2)
    ]
    state = state_layout(shape, EngineConfig()).nbytes // 48
    assert logits[1] - logits[0] > state
    assert logits[2] - logits[1] == logits[3] - logits[2] < state


def test_a_row_is_filled_up_to_a_chunk() -> None:
    shape = ModelShape.from_config(QWEN_27B)
    planned = [
        plan_memory(shape, EngineConfig(max_batch_tokens=tokens), GPU).terms["activations"]
        for tokens in (64, 65, 128)
    ]
    assert planned[1] - planned[0] > 63 * 4 * shape.mixer_width
    assert planned[0] < planned[1] < planned[2]


@pytest.mark.parametrize("family", ["mamba2", "granitemoehybrid"])
def test_without_keys_a_block_is_a_state(family: str) -> None:
    shape = ModelShape.from_config({"model_type": family, "num_local_experts": 0})
    config = EngineConfig(max_model_len=1000)
    plan = plan_memory(shape, config, GPU)
    layout = state_layout(shape, config)
    assert (plan.unit_bytes, plan.block_bytes) == (layout.nbytes, layout.nbytes)
    assert (plan.state_units, plan.kv_bytes_per_token) == (1, 0)
    assert plan.num_units == plan.num_blocks
    assert plan.full_length_sequences == plan.num_blocks // 3
    assert plan.concurrent_tokens == plan.full_length_sequences * 1000
    for blocks, fits in ((2, False), (3, True), (5, True)):
        plan = plan_memory(shape, replace(config, num_blocks=blocks), GPU)
        assert (plan.fits, plan.full_length_sequences) == (fits, blocks // 3)


def test_a_device_that_launches_keeps_rows_of_sequences_with_states() -> None:
    """As of a model without: blocks of every group, lists, and a unit for padding."""
    shape, off = ModelShape.from_config(QWEN_27B), EngineConfig(async_batching="off")
    batch, waited = (plan_memory(shape, c, GPU).terms["batch"] for c in (EngineConfig(), off))
    units = plan_memory(shape, off, GPU).state_units
    assert batch - waited == decode_state(shape, off, shape.groups) + 256 * units * ENTRY_BYTES


@pytest.mark.parametrize("less", [0, 1])
def test_a_cache_fits_that_holds_one_sequence_with_its_states(less: int) -> None:
    shape = ModelShape.from_config(QWEN_27B)
    config = EngineConfig(max_model_len=4096)
    enough = 4096 // 16 + 3 * plan_memory(shape, config, GPU).state_units
    plan = plan_memory(shape, replace(config, num_blocks=enough - less), GPU)
    assert plan.fits == (not less)
    assert plan.concurrent_tokens == 4096 - 16 * less
    if less:
        assert f"hold {4096 - 16} of 4096 tokens beside one sequence's states" in plan.message
        assert plan.fixes[0] == {"num_blocks": enough}


def test_an_fp8_cache_halves_the_keys_and_leaves_the_states() -> None:
    shape, config = ModelShape.from_config(QWEN_27B), EngineConfig(cache_dtype="fp8")
    whole, half = (plan_memory(shape, c, GPU) for c in (EngineConfig(), config))
    assert 2 * half.unit_bytes == whole.unit_bytes
    assert 2 * half.kv_bytes_per_token == whole.kv_bytes_per_token
    assert half.state_units == -(-state_layout(shape, config).nbytes // half.unit_bytes)
    assert state_layout(shape, config) == state_layout(shape, EngineConfig())


def test_quantized_weights_of_mixers_are_a_byte_each_and_a_scale_a_row() -> None:
    shape = ModelShape.from_config(QWEN_27B)
    for name in ("int8", "fp8"):
        config = EngineConfig(quantization=name)
        whole, rounded = (plan_memory(shape, c, GPU).terms for c in (EngineConfig(), config))
        less = whole["weights"] - rounded["weights"]
        assert less == shape.layer_matrices - 4 * shape.layer_channels
        # One row of a large matrix after the other is widened.
        assert 6 << 20 < rounded["logits"] - whole["logits"] < 64 << 20


def test_no_more_is_widened_at_a_time_than_a_layer_has() -> None:
    shape = ModelShape.from_config(config_of("nemotron_h", 2))
    config = EngineConfig(dtype="bfloat16", max_batch_tokens=640)
    whole, rounded = (
        plan_memory(shape, replace(config, quantization=name), GPU).terms["activations"]
        for name in ("none", "fp8")
    )
    assert rounded - whole == 6 * shape.largest_layer + 2 * 640 * shape.most_channels


def test_what_a_layer_gives_is_planned_by_the_widest_of_them() -> None:
    """A single MLP among many layers of attention, by which the mean is less than its rows."""
    kinds = ["mlp", *["full_attention"] * 9, "linear_attention"]
    shape = ModelShape.from_config({"model_type": "nemotron_h", "layers_block_type": kinds})
    inner, hidden = 21504, 4096
    assert shape.most_channels == inner + hidden > shape.layer_channels / len(kinds)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-M-"},
        {"model_type": "qwen3_next", "mlp_only_layers": [*range(48)]},
        {"model_type": "lfm2_moe", "layer_types": LFM, "num_hidden_layers": 7}
        | {"num_dense_layers": 7},
    ],
)
def test_a_family_that_may_have_experts_is_dense_where_no_layer_has_them(
    config: dict[str, Any],
) -> None:
    shape = ModelShape.from_config(config)
    assert (shape.experts, shape.experts_per_token) == (0, 0)
    cpu = DeviceFacts("cpu", 4096 * GIB)
    for wanted in (EngineConfig(quantization="int8"), EngineConfig(deterministic=True)):
        assert plan_memory(shape, wanted, cpu).fits


@pytest.mark.parametrize(("kind", "name"), [("int", "int8"), ("float", "fp8")])
def test_a_quantized_checkpoint_is_planned_as_weights_that_are_rounded(
    kind: str, name: str
) -> None:
    settings, _ = compressed_tensors(kind=kind)
    shape = ModelShape.from_config(QWEN_27B | {"quantization_config": settings})
    assert shape.quantized == name
    config = EngineConfig(quantization=name)  # type: ignore[arg-type]
    rounded = plan_memory(ModelShape.from_config(QWEN_27B), config, GPU)
    assert plan_memory(shape, EngineConfig(), GPU).terms == rounded.terms


@pytest.mark.parametrize(
    ("family", "form", "words"),
    [
        ("qwen3_5_text", gptq(), "4-bit layers with states are not supported: 8-bit ones are"),
        ("mamba2", awq(), "4-bit layers with states"),
        ("olmo_hybrid", compressed_int4(), "4-bit layers with states"),
        ("qwen3_5_moe_text", compressed_tensors(), "quantized experts beside layers with states"),
        ("minimax", compressed_tensors(), "quantized experts beside layers with states"),
        ("falcon_mamba", compressed_tensors(), "layers with states whose code reads their weights"),
    ],
)
def test_a_quantized_checkpoint_that_no_linear_layers_hold_is_refused(
    family: str, form: Any, words: str
) -> None:
    settings, _ = form
    with pytest.raises(QuantizedError, match=words):
        ModelShape.from_config({"model_type": family, "quantization_config": settings})


def test_experts_beside_states_stay_whole_and_are_named() -> None:
    shape = ModelShape.from_config({"model_type": "qwen3_5_moe_text"})
    with pytest.raises(ConfigError, match="experts beside these stay whole") as caught:
        plan_memory(shape, EngineConfig(quantization="fp8"), GPU)
    assert caught.value.field == "quantization"


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rounded_weights_that_code_reads_itself_are_refused(name: str) -> None:
    shape = ModelShape.from_config({"model_type": "falcon_mamba"})
    with pytest.raises(ConfigError, match="'falcon_mamba' reads weights itself") as caught:
        plan_memory(shape, EngineConfig(quantization=name), GPU)  # type: ignore[arg-type]
    assert caught.value.field == "quantization"


def test_an_fp8_cache_is_refused_where_no_layer_has_keys() -> None:
    with pytest.raises(ConfigError, match="states and no keys") as caught:
        plan_memory(
            ModelShape.from_config({"model_type": "mamba2"}), EngineConfig(cache_dtype="fp8"), GPU
        )
    assert caught.value.field == "cache_dtype"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("deterministic", True),  # on a GPU
        ("tensor_parallel", 2),
        ("kernels", "flashinfer"),
    ],
)
def test_what_does_not_work_with_states_yet_is_refused_by_name(setting: str, value: Any) -> None:
    config = replace(EngineConfig(), **{setting: value})
    with pytest.raises(ConfigError, match="states") as caught:
        plan_memory(ModelShape.from_config(QWEN_27B), config, GPU)
    assert caught.value.field == setting


@pytest.mark.parametrize(
    ("family", "works"),
    [("qwen3_5_text", True), ("mamba2", True), ("qwen3_5_moe_text", False), ("minimax", False)],
)
def test_results_are_deterministic_on_cpus_but_of_experts_beside_states(
    family: str, works: bool
) -> None:
    shape = ModelShape.from_config({"model_type": family})
    config, cpu = EngineConfig(deterministic=True), DeviceFacts("cpu", 4096 * GIB)
    if works:
        assert plan_memory(shape, config, cpu).fits
        return
    with pytest.raises(ConfigError, match="experts beside these, whose products") as caught:
        plan_memory(shape, config, cpu)
    assert caught.value.field == "deterministic"
