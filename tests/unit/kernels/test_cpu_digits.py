"""Products of int8 weights in integers, by VNNI and AMX: what is exact, and what rounding costs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.cpu import cpu_operations, library
from fairlead_kernels.formats.quantize import Quantized
from fairlead_kernels.interface import reference
from support.full import LONG_FORM
from support.kernel_sets import PRODUCT_SETS

SETS = [name for name in PRODUCT_SETS if "+" in name]
LARGEST = 127 * 256 + 127  # of two signed digits of base 256

_SKIPPED = pytest.mark.skip(reason="needs a processor with VNNI and the C++ kernels")
every_digit_set = pytest.mark.parametrize(
    "instruction_set", SETS or [pytest.param("none", marks=_SKIPPED)]
)


def in_digits(tokens: int, columns: int) -> Tensor:
    """Integers of two digits with the largest, or minus it, in each row: nothing is rounded."""
    x = torch.randint(-LARGEST, LARGEST + 1, (tokens, columns)).float()
    x[torch.arange(tokens), torch.randint(columns, (tokens,))] = (
        torch.randint(2, (tokens,)).float().mul_(2).sub_(1).mul_(LARGEST)
    )
    return x


def published(rows: int, columns: int) -> Quantized:
    """Weights with -128, which rounding does not give."""
    bits = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
    return Quantized("int8", bits, torch.ones(rows))


@every_digit_set
@settings(max_examples=400 if LONG_FORM else 60, deadline=None)
@given(
    tokens=st.one_of(st.integers(1, 40), st.integers(250, 270)),
    rows=st.integers(1, 70),
    columns=st.one_of(st.integers(1, 70), st.integers(120, 135), st.integers(500, 520)),
    seed=st.integers(0, 2**31),
)
def test_a_product_of_digits_is_exact_but_for_the_rounding_of_its_two_sums(
    instruction_set: str, tokens: int, rows: int, columns: int, seed: int
) -> None:
    torch.manual_seed(seed)
    ours = cpu_operations.load(instruction_set)
    x, weight = in_digits(tokens, columns), published(rows, columns)
    got = ours.linear(x, ours.pack([weight])).double()
    want = x.double() @ weight.numbers.double().t()
    low = (x.double() + 128).remainder(256) - 128
    sums = (low @ weight.numbers.double().t()).abs()
    assert ((got - want).abs() <= 2.0**-22 * (want.abs() + sums)).all()


@every_digit_set
@pytest.mark.parametrize("columns", [131_071, 131_072, 140_000])
def test_the_largest_sums_of_digits_do_not_overflow(instruction_set: str, columns: int) -> None:
    """With more columns they would, so there weights are widened to floats."""
    ours = cpu_operations.load(instruction_set)
    # The digits 126 and -128, but for one element.
    x = torch.full((3, columns), 126.0 * 256 - 128)
    x[:2] = torch.tensor([[LARGEST], [-LARGEST]])
    x[2, 0] = LARGEST
    bits = torch.full((2, columns), -128, dtype=torch.int8)
    bits[1] = 127
    packed = ours.pack([Quantized("int8", bits, torch.ones(2))])
    assert (packed.rounding > 0) == (columns == 131_071)
    want = x.double() @ bits.double().t()
    # So many floats are summed less exactly than integers.
    rtol = 1e-6 if packed.rounding else 1e-2
    torch.testing.assert_close(ours.linear(x, packed).double(), want, rtol=rtol, atol=0)


@every_digit_set
def test_a_row_of_x_is_rounded_by_its_own_largest_element_whatever_the_others_are(
    instruction_set: str,
) -> None:
    ours = cpu_operations.load(instruction_set)
    torch.manual_seed(0)
    sizes = 10.0 ** torch.linspace(-8, 8, 40)
    x, weight = torch.randn(40, 200) * sizes[:, None], published(50, 200)
    packed = ours.pack([weight])
    together = ours.linear(x, packed)
    for row, alone in enumerate(x):
        assert torch.equal(ours.linear(alone[None], packed)[0], together[row])
    want = x.double() @ weight.numbers.double().t()
    apart = ((together - want).abs() / sizes[:, None]).max()
    assert 0.0 < apart < 1.0


@every_digit_set
def test_a_row_of_zeros_stays_one_and_what_is_no_number_is_not_hidden(instruction_set: str) -> None:
    ours = cpu_operations.load(instruction_set)
    x, weight = torch.randn(5, 600), published(40, 600)
    x[0], x[1], x[2, 7], x[3, 599] = 0.0, 1e-40, torch.nan, -torch.inf
    got = ours.linear(x, ours.pack([weight]))
    assert got[0].tolist() == [0.0] * 40
    assert got[1].abs().max() < 1e-30
    assert not got[2:4].isfinite().any()
    want = reference.linear(x[4:], reference.pack([weight]))
    torch.testing.assert_close(got[4:], want, atol=2.0, rtol=0)


@every_digit_set
def test_embeddings_are_the_rows_of_a_weight_packed_for_digits(instruction_set: str) -> None:
    ours = cpu_operations.load(instruction_set)
    weight, ids = published(75, 30), torch.tensor([0, 74, 31, 32, 74])
    got = ours.embed(ids, ours.pack([weight], factor=0.5), 2.0)
    assert torch.equal(got, weight.numbers[ids].float())


@every_digit_set
@pytest.mark.parametrize("columns", [64, 150, 577])
def test_tiles_give_the_same_bits_as_vectors(instruction_set: str, columns: int) -> None:
    ours, vectors = cpu_operations.load(instruction_set), cpu_operations.load("avx512+vnni")
    x, weight = torch.randn(75, columns), published(70, columns)
    got, want = (made.linear(x, made.pack([weight])) for made in (ours, vectors))
    assert torch.equal(got, want)


@pytest.mark.skipif(not SETS, reason="needs a processor with VNNI and the C++ kernels")
def test_a_processor_with_amx_multiplies_in_tiles() -> None:
    """Tiles that gave other results would not be used, and nothing else would notice."""
    has_it = bool(library.load("baseline").supports(b"avx512+amx"))
    assert ("avx512+amx" in library.supported()) == has_it
