"""4-bit integers in groups: what they stand for, element by element, and what cannot be joined."""

import pytest
import torch

from fairlead_kernels.formats.int4 import Int4Matrix, as_int4, paired
from fairlead_kernels.formats.quantize import as_quantized, quantize
from fairlead_kernels.plain.torch_operations import TorchOperations
from support.operation_cases import int4_matrix


@pytest.mark.parametrize("ordered", [False, True])
def test_an_element_is_its_integer_less_the_zero_point_times_the_scale(ordered: bool) -> None:
    torch.manual_seed(0)
    integers = torch.randint(0, 16, (3, 64), dtype=torch.uint8)
    scales = torch.randn(3, 2).half().float()
    zeros = torch.randint(0, 17, (3, 2), dtype=torch.uint8)
    order = torch.randperm(64).int() if ordered else None
    matrix = Int4Matrix("int4", paired(integers), scales, zeros, order).dequantize()
    for row in range(3):
        for held in range(64):
            column = held if order is None else int(order[held])
            number = int(integers[row, held]) - int(zeros[row, held // 32])
            assert float(matrix[row, column]) == number * float(scales[row, held // 32])


def test_rows_are_taken_with_their_scales_and_zero_points() -> None:
    weight = int4_matrix(6, 96, 3, torch.randperm(96).int())
    assert weight.shape == (6, 96)
    for rows in (torch.tensor([4, 0, 5]), slice(2, 5)):
        assert torch.equal(weight.rows(rows).dequantize(), weight.dequantize()[rows])
    moved = weight.to(torch.device("cpu"))
    assert torch.equal(moved.dequantize(), weight.dequantize())


@pytest.mark.parametrize("groups", [3, 1])
def test_columns_are_taken_with_their_groups(groups: int) -> None:
    weight = int4_matrix(6, 96, groups, None)
    part = weight.columns(slice(32, 96))
    assert torch.equal(part.dequantize(), weight.dequantize()[:, 32:96])
    own = part.clone()
    assert torch.equal(own.dequantize(), part.dequantize())
    assert all(x.is_contiguous() for x in (own.bits, own.scales, own.zeros))
    assert own.bits.untyped_storage().nbytes() == 6 * 32


def test_parts_of_groups_and_ordered_columns_are_not_taken() -> None:
    for columns in (slice(16, 96), slice(32, 80)):
        with pytest.raises(
            ValueError, match=f"{columns.start} to {columns.stop} are no whole groups"
        ):
            int4_matrix(6, 96, 3, None).columns(columns)
    with pytest.raises(ValueError, match="would cut a byte"):
        int4_matrix(6, 96, 1, None).columns(slice(0, 47))
    with pytest.raises(ValueError, match="an order of their own"):
        int4_matrix(6, 96, 3, torch.randperm(96).int()).columns(slice(0, 32))


def test_weights_of_several_kinds_are_not_joined() -> None:
    four, eight = int4_matrix(4, 64, 2), quantize(torch.randn(4, 64))
    with pytest.raises(ValueError, match="several formats"):
        as_quantized([four, eight])
    with pytest.raises(ValueError, match="groups are of several sizes"):
        as_int4([four, int4_matrix(4, 64, 1)])
    assert as_int4([eight]) == []


def test_rows_with_one_order_of_columns_are_one_product() -> None:
    order, other = torch.randperm(64).int(), torch.randperm(64).int()
    orders = [order, order.clone(), other, None, None]
    packed = TorchOperations().pack([int4_matrix(8, 64, 2, x) for x in orders])
    assert packed.int4_groups is not None
    assert [(rows, x is None) for rows, x in packed.int4_groups.orders] == [
        (16, False),
        (8, False),
        (16, True),
    ]
