"""MXFP4's codes: what each stands for, against transformers' own code, and what stands for no
number.
"""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fairlead_kernels.formats.mxfp4 import widen


def every_code() -> tuple[torch.Tensor, torch.Tensor]:
    """A row of 16 blocks for each scale but NaN: every byte, each at all scales."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(255, 1, 1)
    return blocks, torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 16)


def by_transformers(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    matrices: torch.Tensor = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)
    return matrices[0].T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_at_every_scale_is_transformers_number(dtype: torch.dtype) -> None:
    blocks, scales = every_code()
    expected = by_transformers(blocks, scales, dtype)
    finite = expected.isfinite().all(dim=1)
    assert finite.sum() == 253  # 6 times two to the 126th is beyond both types
    found = widen(blocks[finite], scales[finite], dtype)
    assert torch.equal(found, expected[finite])
    assert torch.equal(found.signbit(), expected[finite].signbit())


def test_half_precision_takes_what_it_holds_and_rounds_below() -> None:
    blocks, scales = every_code()
    exact = by_transformers(blocks, scales, torch.float32)
    fits = exact.abs().amax(dim=1) <= torch.finfo(torch.float16).max
    assert torch.equal(widen(blocks[fits], scales[fits], torch.float16), exact[fits].half())


def test_the_first_of_two_numbers_is_in_the_lower_bits_and_a_block_has_its_own_scale() -> None:
    blocks = torch.full((1, 2, 16), 0x3A, dtype=torch.uint8)  # -1.0, then 1.5
    row = widen(blocks, torch.tensor([[127, 129]], dtype=torch.uint8), torch.float32)
    assert row.tolist() == [[-1.0, 1.5] * 16 + [-4.0, 6.0] * 16]


def test_a_scale_that_is_no_number_and_a_number_beyond_the_type_are_refused() -> None:
    blocks = torch.full((1, 1, 16), 0x77, dtype=torch.uint8)
    for code, dtype, message in (
        (255, torch.float32, "a scale of 255, which is no number"),
        (253, torch.bfloat16, "a number beyond bfloat16"),
        (141, torch.float16, "a number beyond float16"),
    ):
        scales = torch.tensor([[code]], dtype=torch.uint8)
        with pytest.raises(ValueError, match=message):
            widen(blocks, scales, dtype)
