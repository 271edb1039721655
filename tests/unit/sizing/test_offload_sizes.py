"""What offloading takes of host memory and of a GPU's is what the plan says."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairlead_kernels.interface.attention import Heads
from fairlead_runtime.build.resolve import resolve
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.arithmetic import ceil_div
from fairlead_runtime.sizing.offload_space import PIECE_BYTES, PIECES, Staging
from fairlead_runtime.sizing.report import memory_report
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.solve import solve
from fairlead_runtime.sizing.terms import GIB, DeviceFacts
from fairlead_runtime.sizing.verdict import plan_memory
from support.stream_standin import DelayedCache

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 96,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
SHAPE = ModelShape.from_config(MODEL)
GPU = DeviceFacts("cuda", 80 * GIB)
OFFLOADING = EngineConfig(cpu_offload_space=4.0)


@given(st.integers(0, 10**6), st.integers(1, 1 << 30))
def test_staging_is_bounded_and_no_larger_than_what_can_leave(host_units: int, unit: int) -> None:
    staging = Staging.of(host_units, unit)
    assert staging.nbytes(unit) <= max(PIECES * PIECE_BYTES, PIECES * unit)
    assert staging.pieces <= min(PIECES, host_units)
    assert (staging.units > 0) is (host_units > 0)
    assert not host_units or staging.pieces * staging.units < host_units + PIECES


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("windows", [{}, {"model_type": "mistral", "sliding_window": 64}])
@pytest.mark.parametrize("space", [0.0, 0.001, 0.7])
def test_what_is_allocated_is_what_is_planned(
    ranks: int, dtype: Any, windows: dict[str, Any], space: float
) -> None:
    shape = ModelShape.from_config(MODEL | windows)
    config = EngineConfig(cpu_offload_space=space, tensor_parallel=ranks, cache_dtype=dtype)
    plan = solve(shape, config, GPU, {})
    heads = Heads(8 // ranks, ceil_div(2, ranks), 96, 96, torch.bfloat16, fp8_cache=dtype == "fp8")
    cache = DelayedCache(
        shape.groups,
        heads,
        units=2,
        block_size=config.block_size,
        device=torch.device("meta"),
        host_units=plan.offload_units,
        choose=lambda _count: 0,
        piece_bytes=PIECE_BYTES,
    )
    assert cache.staging_nbytes == plan.terms.get("staging", 0)
    assert cache.host_nbytes * ranks == plan.host["offload"]
    assert int(space * GIB) - ranks * plan.unit_bytes < plan.host["offload"] <= int(space * GIB)
    assert (cache.staging_nbytes > 0) is (space > 0)


def test_staging_takes_its_room_from_the_cache() -> None:
    plain, offloading = (solve(SHAPE, c, GPU, {}) for c in (EngineConfig(), OFFLOADING))
    staging = offloading.terms["staging"]
    assert 0.99 * PIECES * PIECE_BYTES < staging <= PIECES * PIECE_BYTES
    less = plain.terms["kv"] - offloading.terms["kv"]
    assert staging - plain.block_bytes < less < staging + plain.block_bytes
    assert "staging" not in plain.terms


def test_an_engine_that_only_the_staging_buffer_keeps_from_fitting_is_told_so() -> None:
    """By the plan of the operator, and by the runtime."""
    config = replace(OFFLOADING, max_memory_percent=1.0, num_blocks=512)
    without = solve(SHAPE, replace(config, cpu_offload_space=0.0), GPU, {})
    full = DeviceFacts("cuda", without.used)
    assert "set cpuOffloadSpace 0 or " in plan_memory(SHAPE, config, full).message
    with pytest.raises(ConfigError) as error:
        resolve(config, SHAPE, full, dtype="bfloat16")
    assert error.value.hint.startswith("set --cpu-offload-space 0 or ")
    one_block = DeviceFacts("cuda", without.used - without.terms["kv"] + without.block_bytes)
    with pytest.raises(ConfigError) as error:
        resolve(replace(config, num_blocks=None), SHAPE, one_block, dtype="bfloat16")
    assert error.value.field == "cpu_offload_space"
    # That would leave room for one block: advised is what holds a whole sequence.
    assert "cpu-offload-space" not in error.value.hint


def test_the_report_has_the_pinned_memory_of_all_ranks_beside_the_plan() -> None:
    plan = plan_memory(SHAPE, OFFLOADING, GPU)
    pinned = plan.host["offload"]
    body = memory_report(plan, {}, {"grammars": "reserved"}, (pinned, "not pinned: no")).as_dict()
    terms = {term["name"]: term for term in body["hostTerms"]}
    assert list(terms) == list(plan.host)
    assert terms["offload"] == {
        "name": "offload",
        "plannedBytes": pinned,
        "measuredBytes": pinned,
        "driftPercent": 0.0,
        "note": "not pinned: no",
    }
    assert terms["grammars"]["note"] == "reserved"
    assert memory_report(plan, {}).as_dict()["hostTerms"] == [], "on a CPU they are terms"
