"""The 4-bit matrices of a published checkpoint, from the tensors that hold them.

Owns how GPTQ, AWQ and compressed-tensors pack integers, zero points and the order of columns. The
tensors are untrusted: each must have its layer's size.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fairlead_kernels.formats.int4 import Int4Matrix, paired
from fairlead_runtime.sizing.stored import (
    GROUP_INDEX,
    GROUP_SCALES,
    GROUP_ZEROS,
    INDEX,
    SCALE,
    ZERO,
    Published,
)

# Of the eight integers in an int32 of AWQ, where each of eight neighbours is.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_ONES = 0x11111111
_SYMMETRIC = 8  # what stands for 0 where no zero points are stored


def matrix_of(
    stored: Published, tensors: Mapping[str, Tensor], rows: int, columns: int
) -> Int4Matrix:
    """The matrix [rows, columns] of a layer. Raises ValueError for tensors of other sizes or types,
    and for an index that does not give every group as many columns.
    """
    int4_groups = columns // stored.int4_group_size if stored.int4_group_size else 1
    _check(stored, tensors, rows, columns, int4_groups)
    numbers = tensors[stored.weight]
    if stored.layout == "rows":
        bits, scales = numbers.view(torch.uint8), tensors[SCALE]
        zeros = numbers.new_full((rows, int4_groups), _SYMMETRIC, dtype=torch.uint8)
        if (words := tensors.get(ZERO)) is not None:
            zeros = _integers(words.T.contiguous()).T.contiguous()
        index = tensors.get(INDEX)
    else:
        words, index = tensors[GROUP_ZEROS], tensors.get(GROUP_INDEX)
        scales = tensors[GROUP_SCALES].T.contiguous()
        if stored.layout == "awq":
            bits = paired(_in_order(_integers(numbers)).T)
            zeros = _in_order(_integers(words)).T.contiguous()
        else:
            bits = numbers.T.contiguous().view(torch.uint8)
            # Of whole words, as it was taken from them: below 0 it borrows from the next.
            words = words + _ONES if stored.layout == "gptq" else words
            zeros = _integers(words).T.contiguous()
    order = None if index is None else _order(index, int4_groups)
    if order is not None:
        bits = paired(_integers(bits)[:, order])
    return Int4Matrix("int4", bits, scales.float(), zeros, order)


def _check(
    stored: Published, tensors: Mapping[str, Tensor], rows: int, columns: int, int4_groups: int
) -> None:
    integers = torch.int32
    if stored.layout == "rows":
        shapes = {
            stored.weight: ((rows, columns // 8), integers),
            SCALE: ((rows, int4_groups), torch.float32),
            ZERO: ((rows // 8, int4_groups), integers),
            INDEX: ((columns,), integers),
        }
    else:
        across = stored.layout == "awq"
        shapes = {
            stored.weight: (
                (columns, rows // 8) if across else (columns // 8, rows),
                integers,
            ),
            GROUP_SCALES: ((int4_groups, rows), torch.float32),
            GROUP_ZEROS: ((int4_groups, rows // 8), integers),
            GROUP_INDEX: ((columns,), integers),
        }
    if rows % 8 or columns % 8 or columns % int4_groups:
        raise ValueError(f"a matrix of {rows} rows and {columns} columns has no groups of its size")
    for leaf, tensor in tensors.items():
        if leaf in shapes and (tuple(tensor.shape), tensor.dtype) != shapes[leaf]:
            shape, dtype = shapes[leaf]
            actual = f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise ValueError(f"{leaf}: {actual}, where {shape} of {dtype} is expected")


def _integers(words: Tensor) -> Tensor:
    """Eight integers of 4 bits of each int32, or two of each byte, the lowest bits first, side by
    side: [N, W] → uint8 [N, 8 W].
    """
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)


def _in_order(integers: Tensor) -> Tensor:
    """Integers of AWQ's words, reordered as they are in the matrix."""
    return integers.view(len(integers), -1, 8)[..., _PLACES].flatten(1)


def _order(index: Tensor, int4_groups: int) -> Tensor | None:
    """The columns group after group, int32; None where they already are."""
    size = len(index) // int4_groups
    group_index = torch.arange(len(index), dtype=index.dtype, device=index.device) // size
    if torch.equal(index, group_index):
        return None
    order = index.argsort(stable=True)
    if not torch.equal(index[order], group_index):
        raise ValueError(f"its index does not give each of {int4_groups} groups {size} columns")
    return order.int()
