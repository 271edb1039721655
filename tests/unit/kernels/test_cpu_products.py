"""Products whose arguments are made once, in C++: the same bits as of each matrix by itself, and an
MLP as its operations make it.
"""

from typing import get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.cpu import cpu_operations
from fairlead_kernels.cpu.cpu_products import BiasedWeight, CpuMlp, CpuProducts
from fairlead_kernels.formats.quantize import quantize
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.layer import Activation
from support.full import LONG_FORM
from support.kernel_sets import every_product_set

examples = settings(max_examples=200 if LONG_FORM else 25, deadline=None)
STORED = (torch.float32, torch.bfloat16, torch.int8)
sizes = st.integers(1, 70)


def packed(
    ours: cpu_operations.CpuOperations,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    *,
    biased: bool,
    pairs: bool = False,
) -> BiasedWeight:
    weight = torch.randn(rows, columns) / columns**0.5
    matrix = quantize(weight) if dtype is torch.int8 else weight
    bias = torch.randn(rows) if biased else None
    return BiasedWeight(ours.pack([matrix], dtype=dtype, pairs=pairs), bias)


@every_product_set
@examples
@example(tokens=300, rows=[40, 100, 7], columns=520, biased=True, dtype=torch.float32, seed=0)
@example(tokens=30, rows=[40, 100], columns=1024, biased=True, dtype=torch.float32, seed=0)
@example(tokens=0, rows=[40, 100], columns=20, biased=True, dtype=torch.float32, seed=0)
@given(
    tokens=sizes,
    rows=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    columns=sizes,
    biased=st.booleans(),
    dtype=st.sampled_from(STORED),
    seed=st.integers(0, 2**31),
)
def test_products_of_one_input_are_the_bits_of_each_alone(
    instruction_set: str,
    tokens: int,
    rows: list[int],
    columns: int,
    biased: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    ours = cpu_operations.load(instruction_set)
    parts = [
        packed(ours, count, columns, dtype, biased=biased and place != 1)
        for place, count in enumerate(rows)
    ]
    x = torch.randn(tokens, columns)
    outs = CpuProducts(ours.library, parts)(x)
    assert len(outs) == len(parts)
    for out, part in zip(outs, parts, strict=True):
        assert torch.equal(out, ours.linear(x, part.weight, part.bias))


@every_product_set
@pytest.mark.parametrize("columns", [256, 1024, 1040, 2048])
def test_a_row_is_the_same_bits_beside_any_others(instruction_set: str, columns: int) -> None:
    # Lines of rows of 1,024 numbers have one place in a first-level cache: fewer rows at a time.
    ours = cpu_operations.load(instruction_set)
    part = packed(ours, 70, columns, torch.float32, biased=True)
    x = torch.randn(45, columns)
    whole = ours.linear(x, part.weight, part.bias)
    want = reference.linear(x.double(), reference.pack([unpacked(ours, part)]), part.bias)
    torch.testing.assert_close(whole.double(), want, rtol=1e-5, atol=1e-5)
    for first, count in ((0, 1), (3, 7), (10, 8), (5, 14), (20, 15), (11, 29)):
        rows = slice(first, first + count)
        assert torch.equal(ours.linear(x[rows], part.weight, part.bias), whole[rows])


@every_product_set
@pytest.mark.parametrize("columns", [70, 1024, 1040])
def test_numbers_in_bfloat16_give_the_bits_of_the_same_in_float32(
    instruction_set: str, columns: int
) -> None:
    """For many rows they are widened once, in parts of as many columns as others are read in."""
    ours = cpu_operations.load(instruction_set)
    weight = (torch.randn(100, columns) / columns**0.5).bfloat16().float()
    half, whole = (ours.pack([weight], dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    for rows in (1, 6, 8, 14, 15, 29, 300):
        x = torch.randn(rows, columns)
        assert torch.equal(ours.linear(x, half), ours.linear(x, whole)), rows


def unpacked(ours: cpu_operations.CpuOperations, part: BiasedWeight) -> Tensor:
    return ours.unpack(part.weight, 0, part.weight.rows)


@every_product_set
@examples
@example(tokens=300, inner=200, gated=True, activation="silu", dtype=torch.float32, seed=0)
@example(tokens=0, inner=64, gated=True, activation="silu", dtype=torch.int8, seed=0)
@given(
    tokens=sizes,
    inner=st.integers(1, 150),
    gated=st.booleans(),
    activation=st.sampled_from(get_args(Activation)),
    dtype=st.sampled_from(STORED),
    seed=st.integers(0, 2**31),
)
def test_an_mlp_in_one_call_is_its_operations_one_after_the_other(
    instruction_set: str,
    tokens: int,
    inner: int,
    gated: bool,
    activation: Activation,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    ours = cpu_operations.load(instruction_set)
    up, gate = (packed(ours, inner, 50, dtype, biased=True) for _ in range(2))
    down = packed(ours, 45, inner, dtype, biased=True)
    x = torch.randn(tokens, 50)
    got = CpuMlp(ours.library, gate if gated else None, up, activation, down)(x)
    mixed = ours.linear(x, up.weight, up.bias)
    if gated:
        mixed = reference.gated(
            torch.cat([ours.linear(x, gate.weight, gate.bias), mixed], dim=1), activation
        )
    else:
        mixed = reference.activate(mixed, activation)
    want = ours.linear(mixed, down.weight, down.bias)
    # Where digits of the gated numbers are rounded one may be the next.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3 if down.weight.rounding else 1e-5)


def test_matrices_that_do_not_fit_are_refused_by_name() -> None:
    ours = cpu_operations.load()
    wide, narrow = (packed(ours, 40, n, torch.float32, biased=False) for n in (50, 30))
    int8 = packed(ours, 40, 50, torch.int8, biased=False)
    down = packed(ours, 20, 40, torch.float32, biased=False)
    for parts in ((wide, narrow), (wide, int8)):
        with pytest.raises(ValueError, match="parts: matrices of several widths or types"):
            CpuProducts(ours.library, parts)
        with pytest.raises(ValueError, match="gate: another size or type than up"):
            CpuMlp(ours.library, parts[1], parts[0], "silu", down)
    with pytest.raises(ValueError, match="down: 50 columns for 40 numbers"):
        CpuMlp(ours.library, None, wide, "silu", wide)
    with pytest.raises(ValueError, match=r"x: .*bfloat16 \[\.\.\., 50\]"):
        CpuProducts(ours.library, (wide,))(torch.randn(3, 30))


@every_product_set
@examples
@example(tokens=300, columns=1024, inner=40, gated=True, dtype=torch.bfloat16, pairs=True, seed=0)
@example(tokens=0, columns=20, inner=40, gated=False, dtype=torch.int8, pairs=False, seed=0)
@given(
    tokens=sizes,
    columns=sizes,
    inner=st.integers(1, 70),
    gated=st.booleans(),
    dtype=st.sampled_from(STORED),
    pairs=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rows_of_bfloat16_give_what_the_same_floats_give_rounded_as_torch_rounds(
    instruction_set: str,
    tokens: int,
    columns: int,
    inner: int,
    gated: bool,
    dtype: torch.dtype,
    pairs: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    ours = cpu_operations.load(instruction_set)
    gate, up, down = (
        packed(ours, rows, count, dtype, biased=True, pairs=pairs)
        for rows, count in ((inner, columns), (inner, columns), (33, inner))
    )
    x = torch.randn(2, tokens, columns).bfloat16()
    calls = (
        CpuProducts(ours.library, [gate, up]),
        lambda x: [CpuMlp(ours.library, gate if gated else None, up, "silu", down)(x)],
        lambda x: [ours.linear(x, up.weight, up.bias)],
    )
    for call in calls:
        for got, want in zip(call(x), call(x.float()), strict=True):
            assert got.shape == (2, tokens, want.shape[-1])
            assert torch.equal(got, want.bfloat16())


@every_product_set
@pytest.mark.parametrize("dtype", STORED)
def test_a_number_that_is_none_in_a_row_of_bfloat16_makes_its_results_none(
    instruction_set: str, dtype: torch.dtype
) -> None:
    ours = cpu_operations.load(instruction_set)
    part = packed(ours, 40, 37, dtype, biased=False, pairs=True)
    x = torch.randn(3, 37).bfloat16()
    x[1, 36] = float("nan")
    assert ours.linear(x, part.weight).isnan().all(dim=1).tolist() == [False, True, False]


def test_rows_of_another_type_or_width_are_refused() -> None:
    ours = cpu_operations.load()
    part = packed(ours, 4, 6, torch.float32, biased=False)
    products = CpuProducts(ours.library, [part])
    for x in (torch.zeros(2, 6, dtype=torch.float16), torch.zeros(2, 5), torch.zeros(())):
        with pytest.raises(ValueError, match=r"x: .* float32 or bfloat16 \[\.\.\., 6\] on the CPU"):
            products(x)
