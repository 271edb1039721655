"""Paged attention in C++ against its definition, on each instruction set."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_kernels import library, reference
from fairlead_kernels.attention import AttentionBackend, Heads, LayerSpec
from fairlead_kernels.cpu_attention import CpuAttention
from support.attention_cases import Case, make_case
from support.full import LONG_FORM
from support.kernel_sets import every_set


def attend(
    instruction_set: str, case: Case, spec: LayerSpec, *, fixed: bool = False
) -> torch.Tensor:
    backend = CpuAttention(case.heads, library.load(instruction_set), fixed=fixed)
    checked: AttentionBackend = backend  # mypy checks the interface here
    plan = checked.plan(case.ragged)
    return checked.run(plan, case.query, case.key_cache, case.value_cache, spec)


def check(instruction_set: str, case: Case, spec: LayerSpec, *, fixed: bool = False) -> None:
    got = attend(instruction_set, case, spec, fixed=fixed)
    want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)
    assert got.dtype is case.query.dtype
    half = case.heads.dtype is torch.bfloat16
    atol, rtol = (2e-2, 2e-2) if half else (4e-6, 1e-5)
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


row = st.one_of(
    st.tuples(st.integers(0, 200), st.just(1)), st.tuples(st.integers(0, 90), st.integers(1, 90))
)


@every_set
@settings(max_examples=300 if LONG_FORM else 30, deadline=None)
@given(
    rows=st.lists(row, min_size=1, max_size=5),
    block_size=st.sampled_from([1, 4, 16, 20]),
    window=st.one_of(st.none(), st.integers(1, 150)),
    group=st.integers(1, 10),
    kv=st.integers(1, 3),
    dim=st.one_of(st.sampled_from([8, 16, 48, 64, 80]), st.integers(1, 70)),
    value_dim=st.one_of(st.none(), st.integers(1, 70)),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    softcap=st.sampled_from([None, None, 2.0, 30.0]),
    sinks=st.booleans(),
    fixed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_step_is_attended_as_defined(
    instruction_set: str,
    rows: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    group: int,
    kv: int,
    dim: int,
    value_dim: int | None,
    dtype: torch.dtype,
    softcap: float | None,
    sinks: bool,
    fixed: bool,
    seed: int,
) -> None:
    heads = Heads(group * kv, kv, dim, value_dim or dim, dtype)
    case = make_case(rows, block_size=block_size, window=window, heads=heads, seed=seed)
    learned = 2 * torch.randn(heads.query) if sinks else None
    check(instruction_set, case, LayerSpec(0.3, window, softcap, learned), fixed=fixed)


@every_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_decode_over_many_keys_is_cut_into_parts_and_merged(
    instruction_set: str, dtype: torch.dtype, window: int | None, sinks: bool
) -> None:
    heads = Heads(6, 2, 24, 24, dtype)
    case = make_case([(2100, 1), (5, 1), (700, 1)], block_size=16, window=window, heads=heads)
    plan = CpuAttention(heads, library.load(instruction_set)).plan(case.ragged)
    assert plan.rows.merge_count == 2
    assert plan.rows.task_count > 8
    check(instruction_set, case, LayerSpec(0.3, window, None, torch.ones(6) if sinks else None))


@every_set
def test_a_prefill_is_cut_so_that_its_tasks_cover_each_query_of_each_head_once(
    instruction_set: str,
) -> None:
    heads = Heads(6, 2, 8, 8, torch.float32)
    case = make_case([(3, 130), (0, 1), (7, 43)], heads=heads)
    plan = CpuAttention(heads, library.load(instruction_set)).plan(case.ragged)
    covered = [
        (row, head, query)
        for row, head, first, count, _, _ in plan.tasks.tolist()
        if head >= 0
        for query in range(first, first + count)
    ]
    assert sorted(covered) == [
        (row, head, query)
        for row, count in ((0, 130), (2, 43))
        for head in range(2)
        for query in range(count)
    ]
    check(instruction_set, case, LayerSpec(0.3))


@every_set
def test_tiles_before_a_querys_window_count_nothing_for_it(instruction_set: str) -> None:
    case = make_case([(40, 180)], window=8, heads=Heads(1, 1, 16, 16, torch.float32))
    plan = CpuAttention(case.heads, library.load(instruction_set)).plan(case.ragged)
    assert plan.rows.task_count == 1
    check(instruction_set, case, LayerSpec(0.3, 8))


@every_set
@pytest.mark.parametrize("rows", [[(90, 1)], [(30, 61)]])
def test_scores_beyond_the_exponentials_range_are_attended_as_defined(
    instruction_set: str, rows: list[tuple[int, int]]
) -> None:
    case = make_case(rows, heads=Heads(4, 2, 16, 16, torch.float32))
    case.query.mul_(300)
    spec = LayerSpec(scale=1.0)
    got = attend(instruction_set, case, spec)
    want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)
    # The scores are some thousands, and rounded.
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


@every_set
def test_queries_inside_a_packed_product_are_read_in_place(instruction_set: str) -> None:
    case = make_case([(0, 7), (12, 1), (3, 1)], heads=Heads(4, 2, 8, 8, torch.float32))
    wide = torch.randn(case.query.shape[0], 8, 8)
    wide[:, :4] = case.query
    want = attend(instruction_set, case, LayerSpec(scale=0.3))
    case.query = wide[:, :4]
    assert torch.equal(attend(instruction_set, case, LayerSpec(scale=0.3)), want)


@every_set
def test_a_plan_for_another_window_is_refused(instruction_set: str) -> None:
    case = make_case([(5, 1)], window=3)
    with pytest.raises(ValueError, match=r"^window: the layer has None"):
        attend(instruction_set, case, LayerSpec(scale=0.3))
