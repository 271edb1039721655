"""Weights rounded to 8-bit integers with a scale per row."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairlead_kernels.quantize import dequantize, quantize


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    size=st.floats(1e-12, 1e12),
    factor=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**31),
)
@example(rows=1, columns=1, size=1.0, factor=0.3, seed=0)
def test_a_weight_moves_by_half_a_step_and_rounding_it_again_moves_nothing(
    rows: int, columns: int, size: float, factor: float, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns) * size
    integers, scales = quantize(weight)
    rounded = dequantize(integers, scales)
    assert (integers.dtype, integers.shape, scales.shape) == (torch.int8, weight.shape, (rows,))
    assert torch.equal(integers.abs().amax(1), torch.full((rows,), 127, dtype=torch.int8))
    assert bool(((rounded - weight).abs() <= 0.50001 * scales[:, None]).all())
    # Packing rounds weights that were rounded before, also after a layer multiplied them.
    for again in (rounded, rounded * factor):
        assert torch.equal(quantize(again)[0], integers)


def test_rows_of_zeros_and_of_tiny_weights_stay_what_they_are() -> None:
    weight = torch.tensor([[0.0, 0.0], [1e-40, -1e-42], [3.0, -6.0]])
    integers, scales = quantize(weight)
    rounded = dequantize(integers, scales)
    assert integers.tolist() == [[0, 0], [0, 0], [64, -127]]
    assert rounded[0].tolist() == [0.0, 0.0]
    assert torch.equal(quantize(rounded)[0], integers)


def test_a_weight_that_is_no_number_is_not_hidden() -> None:
    for value in (torch.nan, torch.inf):
        weight = torch.tensor([[value, 1.0]])
        assert not dequantize(*quantize(weight)).isfinite().all()
