"""Resolving a configuration: auto and unset get values, unsupported settings are refused."""

import re
from dataclasses import replace
from typing import Any

import pytest

from fairlead_runtime.build.resolve import (
    CPU_PREFILL_BESIDE_DECODES,
    ResolvedConfig,
    resolve,
    summary,
)
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.settings.supported import check_supported
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.terms import GIB, UNIT_BYTES, DeviceFacts
from fairlead_runtime.sizing.verdict import plan_memory

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
CPU = DeviceFacts("cpu", 16 * GIB)


def resolved(dtype: str = "float32", device: DeviceFacts = CPU, **settings: Any) -> ResolvedConfig:
    return resolve(EngineConfig(**settings), ModelShape.from_config(CONFIG), device, dtype=dtype)


@pytest.mark.parametrize(
    "setting",
    [
        {"quantization": "fp8"},
        {"tensor_parallel": 3},
        {"async_batching": "on"},
        {"cuda_graphs": "on"},
        {"kernels": "flashinfer"},
    ],
)
def test_a_setting_that_is_not_supported_is_refused_by_its_name(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not supported") as error:
        resolved(**setting)
    assert error.value.field == next(iter(setting))
    assert error.value.hint.startswith("use ")


def test_a_cache_without_a_single_block_is_refused_and_one_block_is_enough() -> None:
    plan = resolved(device=DeviceFacts("cuda", 16 * GIB), max_memory_percent=1.0).plan
    rest = plan.used - plan.terms["kv"]
    with pytest.raises(ConfigError, match="no room for a single cache block"):
        resolved(device=DeviceFacts("cuda", rest + plan.block_bytes - 1), max_memory_percent=1.0)
    one = resolved(device=DeviceFacts("cuda", rest + plan.block_bytes), max_memory_percent=1.0)
    assert (one.num_blocks, one.capacity) == (1, plan.block_size)


def test_a_cache_for_exactly_one_whole_sequence_needs_no_warning() -> None:
    assert resolved(num_blocks=128, block_size=16).warnings == ()
    (warning,) = resolved(num_blocks=127, block_size=16).warnings
    assert warning.startswith("the cache holds 2032 tokens (127 blocks of 16)")


def test_the_line_at_start_says_what_binds_and_which_flag_lifts_it() -> None:
    bound = "; a CPU's cache takes at most 4 GiB unless --num-blocks asks for more"
    assert bound in summary(resolved())
    assert "at most" not in summary(resolved(num_blocks=500))
    line = summary(resolved(device=DeviceFacts("cuda", 80 * GIB), q_padding_interval=4))
    assert "; --q-padding-interval 4 acts as 16: " in line


def test_more_than_the_reserved_process_memory_is_used_and_warned_about() -> None:
    small = DeviceFacts("cpu", 3 * GIB)
    planned = resolved(device=small)
    less, more = (
        resolve(
            EngineConfig(),
            ModelShape.from_config(CONFIG),
            small,
            dtype="float32",
            measured={"process": size},
        )
        for size in (GIB // 2, GIB * 5 // 4)
    )
    assert (less.num_blocks, less.warnings) == (planned.num_blocks, ())
    each = planned.plan.block_bytes + UNIT_BYTES
    assert planned.num_blocks - more.num_blocks in (GIB // 4 // each, GIB // 4 // each + 1)
    assert "the pod takes 1.25 GiB before any weight, more than the 1.0" in more.warnings[0]


def test_a_setting_without_effect_is_accepted_with_a_warning() -> None:
    assert "--trust-remote-code has no effect yet" in resolved(trust_remote_code=True).warnings[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_deterministic_is_supported_in_every_type_but_not_beside_fp8_weights(dtype: str) -> None:
    assert resolved(dtype, deterministic=True, quantization="none").dtype == dtype
    if dtype != "float32":
        gpu = DeviceFacts("cuda", 80 * GIB)
        with pytest.raises(ConfigError, match="--deterministic: true is not supported yet: the or"):
            resolved(dtype, gpu, deterministic=True, quantization="fp8")


def test_deterministic_is_refused_where_ranks_sum() -> None:
    with pytest.raises(ConfigError, match="use false, or tensorParallel 1 and quantization none"):
        check_supported(EngineConfig(deterministic=True, tensor_parallel=2))


@pytest.mark.parametrize(
    ("dtype", "device"),
    [("bfloat16", CPU), ("float16", CPU), ("float32", DeviceFacts("cuda", 80 * GIB))],
)
def test_fp8_weights_are_supported_on_gpus_below_float32_only(
    dtype: str, device: DeviceFacts
) -> None:
    with pytest.raises(ConfigError, match=f"fp8 is not supported in {dtype} on {device.kind}"):
        resolved(dtype, device, quantization="fp8")
    gpu = DeviceFacts("cuda", 80 * GIB)
    for ranks in (1, 2):
        assert resolved("bfloat16", gpu, quantization="fp8", tensor_parallel=ranks).num_blocks > 0


def test_int8_weights_are_supported_everywhere_but_in_float16_on_cpus() -> None:
    gpu = DeviceFacts("cuda", 80 * GIB)
    for dtype, device in (("bfloat16", CPU), ("float32", CPU), ("float16", gpu), ("float32", gpu)):
        assert resolved(dtype, device, quantization="int8").num_blocks > 0
        split = resolved(dtype, device, quantization="int8", tensor_parallel=2)
        assert split.num_blocks > 0
    with pytest.raises(ConfigError, match="int8 is not supported in float16 on cpu"):
        resolved("float16", CPU, quantization="int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", [CPU, DeviceFacts("cuda", 80 * GIB)])
def test_an_fp8_cache_is_supported_everywhere_but_with_int8_weights_on_cpus(
    dtype: str, device: DeviceFacts
) -> None:
    result = resolved(dtype, device, cache_dtype="fp8")
    assert result.cache_dtype == "float8_e4m3fn"
    assert f"{device.kind} {dtype} with a cache in float8_e4m3fn, " in summary(result)
    assert "with a cache" not in summary(resolved(dtype, device))
    both = {"cache_dtype": "fp8", "quantization": "int8"}
    if device.kind == "cuda":
        assert resolved(dtype, device, **both).num_blocks > 0
    elif dtype != "float16":
        with pytest.raises(ConfigError, match="fp8 is not supported with int8 weights") as error:
            resolved(dtype, device, **both)
        assert (error.value.field, error.value.hint) == ("cache_dtype", "use auto")


def test_prompts_beside_decodes_are_bounded_on_cpus_unless_the_policy_puts_them_first() -> None:
    result = resolved()
    assert result.prefill_beside_decodes == CPU_PREFILL_BESIDE_DECODES
    bound = (
        f"8192 tokens a step, {CPU_PREFILL_BESIDE_DECODES} of them of prompts while answers run;"
    )
    assert bound in summary(result)
    for other in (
        resolved(scheduler_type="prefill_first"),
        resolved(max_batch_tokens=CPU_PREFILL_BESIDE_DECODES),
        resolved(device=DeviceFacts("cuda", 80 * GIB)),
    ):
        assert other.prefill_beside_decodes == 0
        assert "while answers run" not in summary(other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_flashinfer_is_supported_on_gpus_below_float32_only(dtype: str) -> None:
    gpu = DeviceFacts("cuda", 80 * GIB)
    with pytest.raises(ConfigError, match=f"flashinfer is not supported in {dtype} on cpu"):
        resolved(dtype, CPU, kernels="flashinfer")
    with pytest.raises(ConfigError, match="flashinfer is not supported in float32 on cuda"):
        resolved("float32", gpu, kernels="flashinfer")
    assert resolved(dtype, gpu, kernels="flashinfer").num_blocks > 0


@pytest.mark.parametrize("setting", ["async_batching", "cuda_graphs"])
def test_graphs_and_steps_ahead_may_be_asked_for_on_gpus_only(setting: str) -> None:
    gpu = DeviceFacts("cuda", 80 * GIB)
    for dtype in ("float32", "bfloat16", "float16"):
        assert resolved(dtype, gpu, **{setting: "on"}).num_blocks > 0
        with pytest.raises(ConfigError, match="on is not supported on cpu") as error:
            resolved(dtype, CPU, **{setting: "on"})
        assert error.value.hint.startswith("use auto or off; on a GPU with ")
        with pytest.raises(ConfigError, match="while results are deterministic") as error:
            resolved(dtype, gpu, **{setting: "on", "deterministic": True})
        assert error.value.field == setting


def test_steps_of_ranks_may_be_launched_ahead_but_not_captured() -> None:
    gpu = DeviceFacts("cuda", 80 * GIB)
    split = {"tensor_parallel": 2}
    assert resolved("bfloat16", gpu, async_batching="on", **split).num_blocks > 0
    with pytest.raises(ConfigError, match="on one GPU alone") as error:
        resolved("bfloat16", gpu, cuda_graphs="on", **split)
    assert error.value.field == "cuda_graphs"


def test_auto_and_off_are_accepted_on_every_device() -> None:
    for device in (CPU, DeviceFacts("cuda", 80 * GIB)):
        for switch in ("auto", "off"):
            assert resolved(device=device, async_batching=switch, cuda_graphs=switch).num_blocks > 0


def test_a_max_model_len_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        resolved(max_model_len=2049)
    assert error.value.field == "max_model_len"


def test_unset_values_come_from_the_model_and_the_memory() -> None:
    result = resolved()
    assert result.max_model_len == result.capacity == 2048
    assert result.num_blocks * result.plan.block_bytes <= 4 * GIB
    assert (result.device, result.cache_dtype, result.warnings) == ("cpu", "float32", ())


def test_a_cache_smaller_than_one_full_length_sequence_warns_and_lowers_the_limit() -> None:
    result = resolved(num_blocks=10)
    assert result.capacity == 160
    assert result.max_model_len == 2048
    assert "requests are limited to 160" in result.warnings[0]


def test_max_requests_is_clamped_to_the_tokens_of_a_step() -> None:
    assert resolved(max_requests=100, max_batch_tokens=8).config.max_requests == 8


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_blocks": 10_000_000}, "num_blocks"),
        ({"max_memory_percent": 0.05}, "max_memory_percent"),
        ({"cpu_offload_space": 15.5}, "cpu_offload_space"),
        ({"max_queue": 3_000_000}, "max_queue"),
        ({"cpu_offload_space": 15.5, "max_memory_percent": 0.5}, "cpu_offload_space"),
        ({"max_batch_tokens": 100_000_000, "max_requests": 4}, "max_memory_percent"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_formula_and_values_that_fit(
    settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=r"does not fit: .* GiB = .* weights .*") as error:
        resolved(**settings)
    assert error.value.field == field
    advice = re.findall(r"--([a-z-]+) (\S+)", error.value.hint)
    assert 1 <= len(advice) <= 2
    for flag, value in advice:
        number = float(value) if "." in value else int(value)
        assert resolved(**settings | {flag.replace("-", "_"): number}).num_blocks >= 1


@pytest.mark.parametrize("windows", [(None, None), (None, 8)])
def test_a_cache_has_fewer_slots_than_int32_counts_however_much_memory_there_is(
    windows: tuple[int | None, ...],
) -> None:
    shape = replace(ModelShape.from_config(CONFIG), windows=windows)

    def plan(**settings: Any) -> ResolvedConfig:
        config, device = EngineConfig(block_size=32, **settings), DeviceFacts("cuda", 1 << 50)
        return resolve(config, shape, device, dtype="float32")

    largest = plan()
    slots = largest.plan.num_units * 32
    assert 2**31 - 32 * len(set(windows)) <= slots < 2**31
    assert plan(num_blocks=largest.num_blocks).num_blocks == largest.num_blocks
    with pytest.raises(ConfigError, match="fewer than 2147483648") as error:
        plan(num_blocks=largest.num_blocks + 1)
    assert error.value.field == "num_blocks"
    assert error.value.hint == f"set --num-blocks {largest.num_blocks}"
    refused = plan_memory(
        shape,
        EngineConfig(block_size=32, num_blocks=largest.num_blocks + 1),
        DeviceFacts("cuda", 1 << 50),
    )
    assert not refused.fits
    assert refused.message.endswith(f"set numBlocks {largest.num_blocks}")


def test_when_no_setting_helps_the_hint_names_the_memory_needed() -> None:
    with pytest.raises(ConfigError) as error:
        resolved(shared_memory=40.0)
    needed = re.fullmatch(r"needs (\d+) GiB of memory", error.value.hint)
    assert needed is not None
    assert (
        resolved(shared_memory=40.0, device=DeviceFacts("cpu", int(needed[1]) * GIB)).num_blocks
        >= 1
    )
