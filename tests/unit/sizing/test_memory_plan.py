"""The memory equation: what holds for any model, configuration and device, and its verdicts in
words. ``tests/functional/engine/test_plan_and_start.py`` starts an engine with what they advise.
"""

import dataclasses
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fairlead_runtime.build.resolve import resolve
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig, flag_of
from fairlead_runtime.settings.supported import is_supported
from fairlead_runtime.sizing import fixes, verdict
from fairlead_runtime.sizing.report import memory_report
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.solve import CPU_CACHE, MemoryPlan, sequence_units, solve
from fairlead_runtime.sizing.terms import GIB, PROCESS, Bookkeeping, DeviceFacts
from fairlead_runtime.sizing.verdict import plan_memory
from support.full import LONG_FORM

LLAMA_8B = ModelShape.from_config(
    {
        "model_type": "llama",
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "dtype": "bfloat16",
        "vocab_size": 128256,
    }
)
GEMMA2 = ModelShape.from_config({"model_type": "gemma2", "dtype": "bfloat16"})
examples = settings(max_examples=400 if LONG_FORM else 40)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    family = draw(
        st.sampled_from(
            ["llama", "qwen2", "gemma2", "gemma3_text", "cohere", "mistral", "qwen3_moe"]
        )
    )
    heads = draw(st.sampled_from([2, 4, 8]))
    return ModelShape.from_config(
        {
            "model_type": family,
            "hidden_size": draw(st.sampled_from([64, 256, 1024])),
            "num_hidden_layers": draw(st.integers(1, 12)),
            "num_attention_heads": heads,
            "num_key_value_heads": draw(st.sampled_from([1, 2])),
            "vocab_size": draw(st.integers(100, 50_000)),
            "max_position_embeddings": draw(st.integers(64, 20_000)),
            "sliding_window": draw(st.integers(2, 5_000)),
            "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        }
    )


CONFIGS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([4, 16, 256]),
        "max_batch_tokens": st.integers(1, 4096),
        "max_requests": st.integers(1, 64),
        "max_memory_percent": st.floats(0.1, 1.0),
        "cache_dtype": st.sampled_from(["auto", "fp8"]),
        "quantization": st.sampled_from(["none", "int8", "fp8"]),
        "tensor_parallel": st.sampled_from([1, 2]),
        "cpu_offload_space": st.sampled_from([0.0, 0.5]),
        "max_queue": st.sampled_from([1024, 1_000_000]),
    }
)
DEVICES = st.builds(DeviceFacts, st.sampled_from(["cpu", "cuda"]), st.integers(0, 64 * GIB))


@examples
@given(shapes(), CONFIGS, DEVICES)
def test_the_solved_cache_fills_the_budget_and_never_exceeds_it(
    shape: ModelShape, settings: dict[str, Any], device: DeviceFacts
) -> None:
    config = EngineConfig(**settings)
    plan = plan_memory(shape, config, device)
    if plan.num_blocks:
        assert plan.used <= plan.budget <= device.total_bytes
    most = CPU_CACHE // config.tensor_parallel
    capped = device.kind == "cpu" and plan.terms["kv"] + plan.block_bytes > most
    queue = plan.traffic.waiting_bytes
    kept = Bookkeeping.of(shape, config, len(shape.groups), queue)
    more = kept.size(plan.num_blocks + 1) - kept.size(plan.num_blocks)
    one_more = plan.block_bytes + (more if device.kind == "cpu" else 0)
    assert capped or plan.used + one_more > plan.budget
    assert plan.host["bookkeeping"] == kept.size(plan.num_blocks)
    assert (
        plan.terms["kv"] == plan.num_blocks * plan.block_bytes == plan.num_units * plan.unit_bytes
    )


@examples
@given(shapes(), CONFIGS, DEVICES, st.integers(0, 8 * GIB))
def test_more_memory_never_holds_less(
    shape: ModelShape, settings: dict[str, Any], device: DeviceFacts, more: int
) -> None:
    config = EngineConfig(**settings)
    small = plan_memory(shape, config, device)
    large = plan_memory(
        shape, config, dataclasses.replace(device, total_bytes=device.total_bytes + more)
    )
    assert large.num_blocks >= small.num_blocks
    assert large.full_length_sequences >= small.full_length_sequences
    assert large.fits or not small.fits


@examples
@given(shapes(), CONFIGS, DEVICES)
def test_fits_means_that_one_full_length_sequence_has_room(
    shape: ModelShape, settings: dict[str, Any], device: DeviceFacts
) -> None:
    plan = plan_memory(shape, EngineConfig(**settings), device)
    needed = max(plan.used, plan.loading)
    assert plan.fits == (needed <= plan.budget and plan.concurrent_tokens >= plan.max_model_len)
    assert not plan.fits or plan.full_length_sequences >= 1


SUPPORTED = st.builds(
    lambda settings, deterministic: (
        settings | {"quantization": "none", "tensor_parallel": 1, "deterministic": deterministic}
    ),
    CONFIGS,
    st.booleans(),
)
FIXES = {
    "tensorParallel": "tensor_parallel",
    "maxModelLen": "max_model_len",
    "numBlocks": "num_blocks",
    "cpuOffloadSpace": "cpu_offload_space",
    "maxMemoryPercent": "max_memory_percent",
    "maxQueue": "max_queue",
    "maxBatchTokens": "max_batch_tokens",
}
FIELD = rf"({'|'.join(FIXES)}) ((?:≤ )?[\d.]+)(?= or| and|$)"
SHARES = ("cpuOffloadSpace", "maxMemoryPercent")


@given(shapes(), SUPPORTED, DEVICES, st.none() | st.integers(1, 50_000))
def test_every_fix_that_a_message_names_satisfies_the_equation_and_is_supported(
    shape: ModelShape, settings: dict[str, Any], device: DeviceFacts, pinned: int | None
) -> None:
    config = EngineConfig(**settings, num_blocks=pinned)
    plan = plan_memory(shape, config, device)
    assume(not plan.fits)
    _, _, advice = plan.message.partition(": set ")
    for way in advice.split(" or ") if advice else []:
        facts, changed = device, config
        for fix in way.split(" and "):
            name, value = fix.replace("≤ ", "").split(" ")
            if name == "memory":
                facts = dataclasses.replace(device, total_bytes=int(value.removesuffix("Gi")) * GIB)
            else:
                change: Any = float(value) if name in SHARES else int(value)
                changed = dataclasses.replace(changed, **{FIXES[name]: change})
        assert is_supported(changed), way
        assert plan_memory(shape, changed, facts).fits, way


@examples
@given(shapes(), st.integers(1, 20_000), st.sampled_from([4, 16, 256]))
def test_full_length_sequences_hold_what_windows_leave(
    shape: ModelShape, length: int, block: int
) -> None:
    groups = shape.groups
    held = 0
    for position in range(max(0, length - 2 * block), length):
        last = position // block
        held = max(held, sum(last - group.first_block(position, block) + 1 for group in groups))
    assert held <= sequence_units(groups, length, block) <= held + len(groups)


def test_the_memory_plan_of_a_dense_model_computed_by_hand() -> None:
    plan = plan_memory(LLAMA_8B, EngineConfig(), DeviceFacts("cuda", 80 * GIB))
    assert plan.weights_bytes == plan.terms["weights"] == 8_030_261_248 * 2 + 4 * 128
    assert plan.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert plan.block_bytes == 16 * plan.kv_bytes_per_token
    assert plan.budget == int(80 * GIB * 0.9)
    assert plan.concurrent_tokens == plan.num_blocks * 16
    assert plan.full_length_sequences == plan.concurrent_tokens // 131072
    assert plan.fits


@pytest.mark.parametrize(
    "settings",
    [
        {"deterministic": True},
        {"cuda_graphs": "off"},
        {"max_cached_graphs": 0},
        {"kernels": "torch"},
        {"tensor_parallel": 2},
    ],
)
def test_where_no_graph_is_captured_none_is_planned(settings: dict[str, Any]) -> None:
    config = EngineConfig(**settings)
    assert plan_memory(LLAMA_8B, config, DeviceFacts("cuda", 80 * GIB)).terms["graphs"] == 0


def test_graphs_of_many_rows_whose_heads_share_nothing_take_a_workspace_of_their_own() -> None:
    """As far as it is larger than the 128 MiB that every step has: not for 256 rows of 128."""

    def graphs(heads: int, rows: int) -> int:
        kind = replace(LLAMA_8B.head_kinds[0], kv=heads)
        shape = replace(LLAMA_8B, kv_heads=heads, head_kinds=(kind,))
        config = EngineConfig(max_requests=rows)
        return plan_memory(shape, config, DeviceFacts("cuda", 80 * GIB)).terms["graphs"]

    assert graphs(32, 256) == graphs(8, 256)
    parts = (512 // 16 + 511) * 16 * 32 * 129 * 4
    assert graphs(32, 512) - graphs(8, 512) == parts


def test_every_term_of_a_gpu_computed_by_hand() -> None:
    # 8192 tokens a step in 256 rows of 131072 tokens in blocks of 16; the torch backend's scratch,
    # and one pair of batch buffers.
    terms = plan_memory(LLAMA_8B, EngineConfig(), DeviceFacts("cuda", 80 * GIB)).terms
    # Residual and norm, rotary tables, and gate, up and their product of the MLP.
    assert terms["activations"] == 8192 * (2 * (4 * 4096 + 2 * 128 + 3 * 14336) + 32)
    # Keys and values of one sequence with slots and positions; kept masks; one strip of 256.
    assert terms["attention"] == (
        131072 * (2 * 1024 * 2 + 16) + (1 << 24) * 2 + 256 * 131072 * (2 + 2)
    )
    assert terms["logits"] == 256 * 2 * (2 * 4096 + 128256)
    assert terms["sampling"] == 256 * (128256 * 16 + 33 * 1024 + 128256 * 8)
    # Logits, draws and lists of 256 rows; logits that the host samples; 32 graphs; plans of 10
    # sizes, the largest with blocks.
    draws, plans = (48 << 23) + 256 * 4096 * 12, 10 * (8 << 20) + 256 * 8192 * 4
    logits = terms["logits"] + 256 * 128256 * 2
    assert terms["graphs"] == logits + draws + 32 * (4 << 20) + plans
    # What the GPU keeps: 257 rows with blocks and lists, of each of a step's rows indices and 21
    # log-probabilities, one unit of padding, a hash for each id.
    kept = 257 * (80 + 8192 * 4 + 4096 * 12) + 256 * (24 + 21 * 12)
    kept += 16 * 2 * 1024 * 2 * 32 + 128256 * 4
    assert terms["batch"] == 2 * (8192 * 24 + 256 * 64 + 256 * 8192 * 4) + kept
    assert "process" not in terms


def test_windows_hold_more_full_length_sequences_but_count_no_less_per_token() -> None:
    plan = plan_memory(GEMMA2, EngineConfig(num_blocks=5120), DeviceFacts("cuda", 80 * GIB))
    # 13 layers of window 4096 and 13 full ones: 512 blocks in the full group, 257 in the other, of
    # 2 * 5120.
    assert plan.full_length_sequences == 2 * 5120 // (512 + 257)
    assert plan.kv_bytes_per_token == 2 * 26 * 4 * 256 * 2


def test_quantized_weights_take_a_byte_and_a_scale_per_row() -> None:
    plain, small = (
        plan_memory(
            LLAMA_8B, EngineConfig(quantization=q), DeviceFacts("cuda", 80 * GIB)
        ).weights_bytes
        for q in ("none", "fp8")
    )
    # 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096 output rows in each of 32 layers.
    assert plain - small == LLAMA_8B.layer_matrices - 4 * 32 * (4096 + 2048 + 4096 + 28672 + 4096)


def test_an_fp8_cache_takes_a_byte_an_element() -> None:
    device = DeviceFacts("cuda", 80 * GIB)
    plain, small = (
        plan_memory(LLAMA_8B, EngineConfig(cache_dtype=c), device) for c in ("auto", "fp8")
    )
    assert plain.kv_bytes_per_token == 2 * small.kv_bytes_per_token
    assert plain.block_bytes == 2 * small.block_bytes
    # Plain torch's attention widens the keys and values of one sequence.
    wide = 131072 * 2 * 1024
    assert small.terms["attention"] == plain.terms["attention"] + wide
    lost = 2 * plain.num_blocks - small.num_blocks
    assert 0 <= lost * small.block_bytes <= wide + small.block_bytes


def test_accelerators_share_the_matrices_and_the_cache_but_not_the_embeddings() -> None:
    device = DeviceFacts("cuda", 80 * GIB)
    one, four = (plan_memory(LLAMA_8B, EngineConfig(tensor_parallel=n), device) for n in (1, 4))
    matrices = LLAMA_8B.layer_matrices + 128256 * 4096  # with the output matrix
    outside = (LLAMA_8B.parameters - matrices) * 2 + LLAMA_8B.buffers * 4
    assert four.terms["weights"] - outside == (one.terms["weights"] - outside) // 4
    assert four.block_bytes * 4 == one.block_bytes
    offload = EngineConfig(tensor_parallel=4, cpu_offload_space=2.0)
    units = plan_memory(LLAMA_8B, offload, device).offload_units
    assert units == 2 * GIB // (4 * four.unit_bytes), "the space is the pod's"
    assert four.weights_bytes == one.weights_bytes, "the whole model's"
    assert four.kv_bytes_per_token == one.kv_bytes_per_token, "the whole model's"


def test_a_cpu_counts_its_processes_offload_and_shared_memory_and_caps_the_cache() -> None:
    config = EngineConfig(
        cpu_offload_space=2.0, shared_memory=1.0, max_batch_tokens=256, max_model_len=4096
    )
    plan = plan_memory(LLAMA_8B, config, DeviceFacts("cpu", 64 * GIB))
    assert [plan.terms[n] for n in ("process", "offload", "shared_memory")] == [
        PROCESS,
        2 * GIB,
        GIB,
    ]
    assert plan.terms["kv"] <= CPU_CACHE < plan.terms["kv"] + plan.block_bytes
    assert plan.offload_units == 2 * GIB // plan.unit_bytes
    pinned = plan_memory(
        LLAMA_8B, dataclasses.replace(config, num_blocks=4000), DeviceFacts("cpu", 64 * GIB)
    )
    assert pinned.terms["kv"] > CPU_CACHE
    assert pinned.fits


def test_blocks_that_are_asked_for_fit_only_beside_their_own_bookkeeping() -> None:
    config, device = EngineConfig(max_model_len=1024), DeviceFacts("cpu", 32 * GIB)

    def asked(blocks: int) -> MemoryPlan:
        return plan_memory(LLAMA_8B, replace(config, num_blocks=blocks), device)

    choices = range(1024 // config.block_size, 10**5)
    most = choices[bisect_left(choices, True, key=lambda blocks: not asked(blocks).fits) - 1]
    assert asked(most).used <= asked(most).budget < asked(most + 1).used


def test_measured_terms_take_the_place_of_planned_ones() -> None:
    device = DeviceFacts("cuda", 80 * GIB)
    planned = plan_memory(LLAMA_8B, EngineConfig(), device)
    measured = {
        "weights": planned.terms["weights"] + 16 * planned.block_bytes,
        "activations": planned.terms["activations"],
    }
    again = plan_memory(LLAMA_8B, EngineConfig(), device, measured=measured)
    assert again.num_blocks == planned.num_blocks - 16


@pytest.mark.parametrize("measured", [0, PROCESS // 2, PROCESS, PROCESS + GIB])
def test_a_cpu_reserves_a_fixed_size_for_its_processes_unless_more_is_measured(
    measured: int,
) -> None:
    config = EngineConfig(max_batch_tokens=256, max_model_len=4096)
    device = DeviceFacts("cpu", 20 * GIB)  # less than the largest cache remains
    planned = plan_memory(LLAMA_8B, config, device)
    again = plan_memory(LLAMA_8B, config, device, measured={"process": measured})
    assert again.terms["process"] == max(PROCESS, measured)
    assert (again.num_blocks < planned.num_blocks) == (measured > PROCESS)


@pytest.mark.parametrize(
    ("settings", "device", "message"),
    [
        (
            {},
            DeviceFacts("cuda", 24 * GIB),
            r"needs 16\.0 GiB of KV cache, has 3\.5: set maxModelLen ≤ 31744 or tensorParallel 2",
        ),
        (
            {},
            DeviceFacts("cuda", 16 * GIB),
            r"needs 18\.1 GiB before any KV cache, has 14\.4: set tensorParallel 4",
        ),
        (
            {"deterministic": True},  # not beside more than one accelerator
            DeviceFacts("cuda", 16 * GIB),
            r"needs \S+ GiB before any KV cache, has 14\.4: choose an accelerator of 38 GiB or a",
        ),
        (
            {"num_blocks": 10},
            DeviceFacts("cuda", 80 * GIB),
            r"numBlocks 10 hold 160 of 131072 tokens: set numBlocks 8192 or maxModelLen ≤ 160",
        ),
        (
            {"num_blocks": 10**6},
            DeviceFacts("cuda", 80 * GIB),
            r"numBlocks 1000000 need 1953\.1 GiB of KV cache, has 53\.9: set numBlocks 27599",
        ),
        (
            {},
            DeviceFacts("cpu", 4 * GIB),
            r"needs .* GiB before any KV cache, has 3\.6: set memory \d+Gi and numBlocks 8192",
        ),
        (
            {},
            DeviceFacts("cpu", 256 * GIB),
            r"has 4\.0; a CPU's cache takes at most 4 GiB unless numBlocks asks for more: set .*",
        ),
        ({}, DeviceFacts("cuda", GIB), r": choose an accelerator of 38 GiB or a smaller model"),
    ],
    ids=lambda v: None if isinstance(v, str) else str(v),
)
def test_a_verdict_says_what_is_missing_and_what_to_set(
    settings: dict[str, Any], device: DeviceFacts, message: str
) -> None:
    plan = plan_memory(LLAMA_8B, EngineConfig(**settings), device)
    assert not plan.fits
    assert re.fullmatch(rf".*{message}.*", plan.message), plan.message


@pytest.mark.parametrize(
    ("settings", "gib", "kind", "bound"),
    [
        ({}, 64, "cpu", "a CPU's cache takes at most 4 GiB unless numBlocks asks for more"),
        ({"max_memory_percent": 0.45}, 64, "cpu", "a CPU's cache takes at most 4 GiB"),
        ({"num_blocks": 3000}, 64, "cpu", ""),
        ({}, 23, "cpu", ""),  # memory binds first
        ({"block_size": 16, "cache_dtype": "fp8"}, 10**6, "cuda", "fewer than 2147483648 slots"),
        ({}, 80, "cuda", ""),
        (
            {"q_padding_interval": 1},
            80,
            "cuda",
            "qPaddingInterval 1 acts as 16: more sizes",
        ),
        ({"q_padding_interval": 1, "max_cached_graphs": 256}, 80, "cuda", ""),
        ({"q_padding_interval": 1, "deterministic": True}, 80, "cuda", ""),  # no graph is captured
        ({"q_padding_interval": 1, "num_blocks": 3000}, 64, "cpu", ""),
    ],
)
def test_a_plan_names_what_binds_in_place_of_memory_or_of_a_setting(
    settings: dict[str, Any], gib: int, kind: Literal["cpu", "cuda"], bound: str
) -> None:
    config = EngineConfig(max_batch_tokens=256, max_model_len=4096, **settings)
    plan = plan_memory(LLAMA_8B, config, DeviceFacts(kind, gib * GIB))
    assert plan.fits, plan.message
    _, _, named = plan.message.partition("; ")
    assert bool(named) == bool(bound), plan.message
    assert bound in named


def test_a_too_large_offload_space_is_reported_with_the_largest_that_fits() -> None:
    config = EngineConfig(max_batch_tokens=512, max_model_len=4096, cpu_offload_space=40.0)
    plan = plan_memory(LLAMA_8B, config, DeviceFacts("cpu", 32 * GIB))
    fix = re.search(r"set cpuOffloadSpace ≤ (\S+)", plan.message)
    assert fix is not None, plan.message
    fitting = replace(config, cpu_offload_space=float(fix[1]))
    assert plan_memory(LLAMA_8B, fitting, DeviceFacts("cpu", 32 * GIB)).fits
    larger = replace(fitting, cpu_offload_space=float(fix[1]) + 0.25)
    assert not plan_memory(LLAMA_8B, larger, DeviceFacts("cpu", 32 * GIB)).fits


def test_a_too_long_queue_is_reported_with_the_longest_that_fits() -> None:
    config = EngineConfig(max_batch_tokens=512, max_model_len=4096, max_queue=3_000_000)
    device = DeviceFacts("cpu", 32 * GIB)
    fix = re.search(r"set maxQueue ≤ (\d+)", plan_memory(LLAMA_8B, config, device).message)
    assert fix is not None
    assert plan_memory(LLAMA_8B, replace(config, max_queue=int(fix[1])), device).fits
    assert not plan_memory(LLAMA_8B, replace(config, max_queue=int(fix[1]) + 1024), device).fits


@examples
@given(shapes(), SUPPORTED, DEVICES, st.none() | st.integers(1, 50_000))
def test_operator_and_pod_advise_the_same_changes(
    shape: ModelShape, settings: dict[str, Any], device: DeviceFacts, pinned: int | None
) -> None:
    """Where the pod starts all the same, with a cache of less than one sequence, it advises
    nothing.
    """
    config = EngineConfig(**settings, num_blocks=pinned)
    message = plan_memory(shape, config, device).message
    try:
        resolve(config, shape, device, dtype="float32")
    except ConfigError as error:
        assume("fit" in str(error) or "load" in str(error))
        flags = re.findall(r"--(\S+) (\S+)", error.hint)
    else:
        return
    named = [(name, value.removeprefix("≤ ")) for name, value in re.findall(FIELD, message)]
    assert [(flag_of(FIXES[name]), value) for name, value in named] == [
        (f"--{flag}", value) for flag, value in flags
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"cpu_offload_space": 65536.0},
        {"num_blocks": 2**31 - 1},
        {"max_memory_percent": 0.01},
        {"max_queue": 10**9},
    ],
)
def test_advice_takes_few_solutions_however_large_the_value(
    settings: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator gives it in its loop: one of 262,144 offload spaces kept it busy for minutes."""
    solved: list[EngineConfig] = []

    def counted(*given: Any) -> MemoryPlan:
        solved.append(given[1])
        return solve(*given)

    for module in (verdict, fixes):
        monkeypatch.setattr(module, "solve", counted)
    config = EngineConfig(max_batch_tokens=512, max_model_len=4096, **settings)
    assert not plan_memory(LLAMA_8B, config, DeviceFacts("cpu", 32 * GIB)).fits
    assert len(solved) <= 200


def test_a_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--max-model-len: 131073 is more than the model's own 131072"
    ):
        plan_memory(LLAMA_8B, EngineConfig(max_model_len=131073), DeviceFacts("cuda", 80 * GIB))


def test_the_report_puts_measured_beside_planned() -> None:
    plan: MemoryPlan = plan_memory(LLAMA_8B, EngineConfig(), DeviceFacts("cuda", 80 * GIB))
    facts = {
        "weights": plan.terms["weights"],
        "activations": plan.terms["activations"] * 2,
        "cuda_context": 5,
    }
    body = memory_report(plan, facts).as_dict()
    terms = {t["name"]: t for t in body["terms"]}
    assert set(terms) == {*plan.terms, "cuda_context"}
    assert terms["weights"]["driftPercent"] == 0.0
    assert terms["activations"]["driftPercent"] == 100.0
    assert terms["kv"]["measuredBytes"] is None
    assert terms["cuda_context"] == {
        "name": "cuda_context",
        "plannedBytes": 0,
        "measuredBytes": 5,
        "driftPercent": None,
        "note": "",
    }
    assert body["numBlocks"] == plan.num_blocks
    assert body["formula"].startswith("0.9 * 80.0 GiB = 72.0 ≥ weights 15.0 + ")


def test_the_offload_space_holds_units_of_its_groups() -> None:
    config = EngineConfig(cpu_offload_space=1.0, block_size=16)
    plan = plan_memory(GEMMA2, config, DeviceFacts("cuda", 80 * GIB))
    assert plan.block_bytes == 2 * plan.unit_bytes
    assert plan.offload_units == GIB // plan.unit_bytes


MIMO = ModelShape.from_config(
    {
        "model_type": "mimo_v2_flash",
        "hidden_size": 512,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "dtype": "bfloat16",
    }
)


def test_a_unit_of_layers_of_several_sizes_has_the_bytes_of_the_widest_group() -> None:
    """9 full layers of 320 elements a token and 39 with a window, of 640."""
    plan = plan_memory(MIMO, EngineConfig(block_size=16), DeviceFacts("cuda", 80 * GIB))
    assert [len(group.layers) for group in MIMO.groups] == [9, 8, 8, 8, 8, 7]
    assert plan.unit_bytes == 8 * 640 * 16 * 2
    assert plan.block_bytes == 6 * plan.unit_bytes
    assert plan.kv_bytes_per_token == (9 * 320 + 39 * 640) * 2
    assert plan.terms["kv"] == plan.num_blocks * plan.block_bytes
    wasted = 1 - plan.kv_bytes_per_token * 16 / plan.block_bytes
    assert 0 < wasted < 1 / 9


def test_layers_of_several_sizes_have_the_packed_head_of_cpus() -> None:
    shape = replace(MIMO, vocab=MIMO.vocab + 1)
    on_cpu, on_torch = (
        plan_memory(shape, EngineConfig(kernels=kernels), DeviceFacts("cpu", 4000 * GIB)).terms
        for kernels in ("auto", "torch")
    )
    assert on_cpu["weights"] > on_torch["weights"]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"kernels": "flashinfer"}, "kernels"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
    ],
)
@pytest.mark.parametrize("shardable", [True, False])
def test_what_layers_of_several_sizes_are_not_served_with_is_refused_by_its_name(
    asked: dict[str, Any], field: str, shardable: bool
) -> None:
    shape = replace(MIMO, shardable=shardable)
    with pytest.raises(ConfigError, match="differ in their heads") as refused:
        plan_memory(shape, EngineConfig(**asked), DeviceFacts("cpu", 80 * GIB))
    assert refused.value.field == field
