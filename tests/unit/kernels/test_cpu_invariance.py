"""In C++ a token's results are the same bits whatever else is in its step, on each instruction set:
of attention with ``fixed``, of everything else always.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_kernels.cpu import cpu_operations, library
from fairlead_kernels.cpu.cpu_attention import CpuAttention
from fairlead_kernels.formats.quantize import quantize
from fairlead_kernels.interface.attention import NULL, Heads, LayerSpec
from fairlead_kernels.interface.layer import Norm
from support.attention_cases import Cut, attend_cut, make_case
from support.full import LONG_FORM
from support.kernel_sets import every_product_set, every_set

cuts = st.lists(st.integers(1, 90), min_size=1, max_size=4)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@every_set
@settings(max_examples=200 if LONG_FORM else 25, deadline=None)
@given(
    before=st.integers(0, 150),
    chunks=cuts,
    others=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 70)), max_size=3),
    block_size=st.sampled_from([1, 4, 16, 20]),
    window=st.one_of(st.none(), st.integers(1, 150)),
    group=st.integers(1, 9),
    kv=st.integers(1, 2),
    dim=st.sampled_from([8, 16, 33, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    softcap=st.sampled_from([None, None, 2.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_query_attends_alike_in_any_step_and_chunk(
    instruction_set: str,
    before: int,
    chunks: list[int],
    others: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    group: int,
    kv: int,
    dim: int,
    dtype: torch.dtype,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    heads = Heads(group * kv, kv, dim, dim, dtype)
    count = sum(chunks)
    case = make_case([(before, count), *others], block_size=block_size, heads=heads, seed=seed)
    case.query = case.query.float()  # so that results are not rounded
    spec = LayerSpec(0.3, window, softcap, torch.randn(heads.query) if sinks else None)
    ours = CpuAttention(heads, library.load(instruction_set), fixed=True)
    alone = attend_cut(ours, case, spec, [Cut(0, 0, count)])
    begin = 0
    for number, size in enumerate(chunks):
        # The others' last queries, as decodes or chunks, before and behind this row.
        cut = [Cut(0, begin, size)]
        for row, (_, all_of_it) in enumerate(others, 1):
            rest = 1 if number % 2 else all_of_it
            cut.insert(row % 2 * len(cut), Cut(row, all_of_it - rest, rest))
        with threads(1 + number % 2):
            together = attend_cut(ours, case, spec, cut)
        at = sum(c.count for c in cut[: cut.index(Cut(0, begin, size))])
        assert same(together[at : at + size].float(), alone[begin : begin + size].float())
        begin += size


@every_set
def test_a_decode_over_many_keys_is_not_cut_by_what_is_beside_it(instruction_set: str) -> None:
    heads = Heads(6, 2, 24, 24, torch.bfloat16)
    case = make_case([(2099, 1), (900, 1), (5, 1)], block_size=16, heads=heads)
    case.query = case.query.float()
    rows = [Cut(0, 0, 1), Cut(1, 0, 1), Cut(2, 0, 1)]
    spec = LayerSpec(0.3)
    plain, ours = (
        CpuAttention(heads, library.load(instruction_set), fixed=fixed) for fixed in (False, True)
    )
    with threads(2):
        differ = attend_cut(plain, case, spec, rows)[0], attend_cut(plain, case, spec, rows[:1])[0]
        alike = attend_cut(ours, case, spec, rows)[0], attend_cut(ours, case, spec, rows[:1])[0]
    assert not torch.equal(*differ), "the case does not show the difference"
    assert torch.equal(*alike)


@every_set
@pytest.mark.parametrize("count", [1, 30])
def test_a_tile_that_begins_before_the_window_reads_no_freed_block(
    instruction_set: str, count: int
) -> None:
    heads = Heads(2, 1, 16, 16, torch.float32)
    case = make_case([(200, count)], block_size=16, window=50, heads=heads)
    ours, spec = CpuAttention(heads, library.load(instruction_set), fixed=True), LayerSpec(0.3, 50)
    want = ours.run(ours.plan(case.ragged), case.query, case.key_cache, case.value_cache, spec)
    # In place of no block, one that another row fills with NaN.
    used, tables = case.ragged.tables, case.ragged.tables.clone()
    foreign = next(block for block in range(len(case.key_cache)) if block not in used)
    tables[tables == NULL] = foreign
    ragged = replace(case.ragged, tables=tables)
    got = ours.run(ours.plan(ragged), case.query, case.key_cache, case.value_cache, spec)
    assert same(got, want)
    assert bool(got.isfinite().all())


@every_product_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("columns", [40, 1100])
def test_a_product_of_a_token_is_the_same_beside_any_others(
    instruction_set: str, dtype: torch.dtype, columns: int
) -> None:
    ours = cpu_operations.load(instruction_set)
    torch.manual_seed(columns)
    plain = torch.randn(70, columns)
    weight = [quantize(plain) if dtype is torch.int8 else plain]
    packed = ours.pack(weight, dtype=torch.float32 if dtype is torch.int8 else dtype)
    x, bias = torch.randn(300, columns), torch.randn(70)
    for count in (1, 2, 7, 29, 64, 300):
        with threads(1 + count % 2):
            some = ours.linear(x[-count:], packed, bias)
            values, chosen = ours.likeliest(x[-count:], packed, bias)
        alone = ours.linear(x[-1:], packed, bias)
        assert same(some[-1:], alone), count
        assert same(values[-1:], alone.max(1).values)
        assert chosen[-1] == alone.argmax(), count


@every_set
def test_what_lies_between_products_is_the_same_beside_any_others(instruction_set: str) -> None:
    ours = cpu_operations.load(instruction_set)
    torch.manual_seed(0)
    x, residual, width = torch.randn(301, 72), torch.randn(301, 72), 72
    norm = Norm(torch.randn(width), 1e-6, 1.0, torch.randn(width), centered=True)

    def results(part: slice) -> list[torch.Tensor]:
        qkv = x[part].clone()
        keys, values = (torch.zeros(301, 1, 1, 24) for _ in range(2))
        angles, count = torch.linspace(0, 9, 301 * 8).view(301, 8)[part], len(qkv)
        slots = torch.arange(count)
        query = ours.rope_write(qkv, angles.cos(), angles.sin(), slots, keys, values)
        normed = ours.norm(x[part], norm, residual[part].clone())
        made = [query, *normed, ours.gated(x[part], "silu"), ours.activate(x[part], "gelu_tanh")]
        return [*(y.contiguous() for y in made), keys[:count], values[:count]]

    whole = results(slice(0, 301))
    for part in (slice(300, 301), slice(7, 9), slice(0, 65)):
        for one, all_of_it in zip(results(part), whole, strict=True):
            assert same(one, all_of_it[part])
