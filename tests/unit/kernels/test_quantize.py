"""Weights rounded to 8-bit numbers with a scale per row."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairlead_kernels.formats import row_chunks
from fairlead_kernels.formats.quantize import (
    LARGEST,
    Format,
    as_quantized,
    largest_of_rows,
    quantize,
)
from support.allocated import Allocated

FORMATS: tuple[Format, ...] = ("int8", "fp8")
# A number of float8_e4m3fn has 3 bits after the first: it moves by a 16th of itself, or by half of
# the smallest one.
STEP = {"int8": (0.0, 0.50001), "fp8": (1 / 16, 2.0**-10)}


@settings(max_examples=100, deadline=None)
@given(
    to=st.sampled_from(FORMATS),
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    size=st.floats(1e-12, 1e12),
    factor=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**31),
)
@example(to="int8", rows=1, columns=1, size=1.0, factor=0.3, seed=0)
@example(to="fp8", rows=1, columns=1, size=1.0, factor=0.3, seed=0)
def test_a_weight_moves_by_half_a_step_and_rounding_it_again_moves_nothing(
    to: Format, rows: int, columns: int, size: float, factor: float, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns) * size
    quantized = quantize(weight, to)
    rounded, scales = quantized.dequantize(), quantized.scales
    assert (quantized.bits.dtype, quantized.shape, scales.shape) == (
        torch.int8,
        weight.shape,
        (rows,),
    )
    largest = quantized.numbers.float().abs().amax(1)
    assert torch.equal(largest, torch.full((rows,), LARGEST[to]))
    share, rest = STEP[to]
    assert bool(((rounded - weight).abs() <= share * weight.abs() + rest * scales[:, None]).all())
    # A layer may multiply the rows.
    for again in (rounded, rounded * factor):
        assert torch.equal(quantize(again, to).bits, quantized.bits)


@pytest.mark.parametrize("to", FORMATS)
def test_rows_of_zeros_and_of_tiny_weights_stay_what_they_are(to: Format) -> None:
    weight = torch.tensor([[0.0, 0.0], [1e-40, -1e-42], [3.0, -6.0]])
    quantized = quantize(weight, to)
    rounded = quantized.dequantize()
    half = 64.0 if to == "int8" else 224.0
    assert quantized.numbers[2].tolist() == [half, -LARGEST[to]]
    assert rounded[0].tolist() == [0.0, 0.0]
    assert rounded[1].abs().max() < 1e-39
    assert torch.equal(quantize(rounded, to).bits, quantized.bits)


@pytest.mark.parametrize("to", FORMATS)
def test_a_weight_that_is_no_number_is_not_hidden(to: Format) -> None:
    for value in (torch.nan, torch.inf):
        weight = torch.tensor([[value, 1.0]])
        assert not quantize(weight, to).dequantize().isfinite().all()


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_some_columns_of_a_matrix_are_rounded_as_in_the_whole(
    to: Format, dtype: torch.dtype
) -> None:
    weight = (torch.randn(7, 12) * torch.rand(7, 1)).to(dtype)
    whole, largest = quantize(weight, to), largest_of_rows(weight)
    for first, last in ((0, 5), (5, 12)):
        part = quantize(weight[:, first:last], to, largest)
        assert torch.equal(part.bits, whole.bits[:, first:last])
        assert torch.equal(part.scales, whole.scales)


@pytest.mark.parametrize("to", FORMATS)
def test_a_large_weight_is_rounded_in_parts(to: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 8) * torch.rand(37, 1)
    whole = quantize(weight, to)
    monkeypatch.setattr(row_chunks, "ELEMENTS", 40)
    for given_weight in (weight, weight.T.contiguous().T):
        again = quantize(given_weight, to)
        assert torch.equal(again.bits, whole.bits)
        assert torch.equal(again.scales, whole.scales)


def test_rounding_in_parts_takes_memory_for_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """malloc may keep what is freed, so each part's own would add up."""
    monkeypatch.setattr(row_chunks, "ELEMENTS", 16 * 256)
    weight = torch.randn(20 * 16, 256)
    with Allocated() as allocated:
        quantized = quantize(weight)
    vectors = 8 * quantized.scales.nbytes  # of the largest weights and scales, whole and in parts
    assert allocated.nbytes <= quantized.bits.nbytes + weight.nbytes // 20 + vectors


def test_parts_have_all_rows_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(row_chunks.row_chunks(5, 1 << 30)) == [slice(i, i + 1) for i in range(5)]
    monkeypatch.setattr(row_chunks, "ELEMENTS", 100)
    assert list(row_chunks.row_chunks(70, 3, 16)) == [slice(0, 32), slice(32, 64), slice(64, 70)]
    assert list(row_chunks.row_chunks(0, 3)) == []


def test_rows_in_another_order_keep_their_scales() -> None:
    quantized = quantize(torch.randn(5, 3))
    order = torch.tensor([3, 0, 4, 1, 2])
    assert torch.equal(quantized.rows(order).dequantize(), quantized.dequantize()[order])


def test_weights_of_several_formats_are_not_one_matrix() -> None:
    weight = torch.randn(2, 4)
    for other in (weight, quantize(weight, "fp8")):
        with pytest.raises(ValueError, match=r"^weights: they are of several formats"):
            as_quantized([quantize(weight), other])
