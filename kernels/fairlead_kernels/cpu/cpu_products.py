"""Products on packed weights whose arguments are made once: several of one input, and an MLP.

Owns what a model's own code calls in every step in the place of a few of its modules. The functions
are in ``csrc``; ``reference`` has them in torch. Both keep their weights alive.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairlead_kernels.cpu.cpu_arguments import (
    ACTIVATIONS,
    TYPES,
    dense_rows,
    digits_bytes,
    weight_struct,
)
from fairlead_kernels.cpu.library import Library, Pointer, WeightStruct
from fairlead_kernels.interface.layer import Activation, Packed


@dataclass(frozen=True, slots=True, eq=False)
class BiasedWeight:
    """A packed matrix and the bias float32 [rows] that is added to its products."""

    weight: Packed
    bias: Tensor | None = None


class CpuProducts:
    """``linear`` of several weights with one input: the same bits as of each by itself. Raises
    ValueError unless they have equally many columns and are stored alike.
    """

    def __init__(self, library: Library, parts: Sequence[BiasedWeight]) -> None:
        self.parts = tuple(parts)
        self.library = library
        first = self.parts[0].weight
        if any(not alike(first, part.weight) for part in self.parts):
            raise ValueError("parts: matrices of several widths or types")
        structs = [_struct(part) for part in self.parts]
        self._structs = (WeightStruct * len(structs))(*structs)
        self.rows = [part.weight.rows for part in self.parts]
        self._columns = first.columns
        self._digits = {dtype: digits_bytes(library, first, dtype) for dtype in TYPES}

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Give [..., rows] of each for x [..., columns], of its type: float32 or bfloat16."""
        x = dense_rows(x, "x", self._columns)
        count = x.numel() // self._columns
        outs = [x.new_empty(*x.shape[:-1], rows) for rows in self.rows]
        digits = digits_of(count, self._digits[x.dtype])
        self.library.linears(
            x.data_ptr(),
            count,
            x.dtype is torch.bfloat16,
            None if digits is None else digits.data_ptr(),
            self._structs,
            (Pointer * len(outs))(*(out.data_ptr() for out in outs)),
            len(outs),
            torch.get_num_threads(),
        )
        return outs


class CpuMlp:
    """An MLP of ``down(activation(gate(x)) * up(x))``, or of ``down(activation(up(x)))`` without a
    gate. Raises ValueError unless the sizes fit, and gate and up are stored alike.
    """

    def __init__(
        self,
        library: Library,
        gate: BiasedWeight | None,
        up: BiasedWeight,
        activation: Activation,
        down: BiasedWeight,
    ) -> None:
        if gate is not None and not (
            alike(gate.weight, up.weight) and gate.weight.rows == up.weight.rows
        ):
            raise ValueError("gate: another size or type than up")
        if down.weight.columns != up.weight.rows:
            raise ValueError(f"down: {down.weight.columns} columns for {up.weight.rows} numbers")
        self.gate, self.up, self.down = gate, up, down
        self._library = library
        self._activation = ACTIVATIONS[activation]
        self._gate = None if gate is None else _struct(gate)
        self._up, self._down = _struct(up), _struct(down)
        self._digits = {dtype: digits_bytes(library, up.weight, dtype) for dtype in TYPES}
        self._gated_digits = digits_bytes(library, down.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Give [..., rows of down] for x [..., columns], of its type: float32 or bfloat16. What the
        last matrix multiplies is float32 before it is rounded to the type that this takes.
        """
        columns = self.up.weight.columns
        x = dense_rows(x, "x", columns)
        count = x.numel() // columns
        gated = torch.empty(count, self.up.weight.rows)
        out = x.new_empty(*x.shape[:-1], self.down.weight.rows)
        digits = digits_of(count, self._digits[x.dtype])
        gated_digits = digits_of(count, self._gated_digits)
        self._library.mlp(
            x.data_ptr(),
            count,
            x.dtype is torch.bfloat16,
            None if digits is None else digits.data_ptr(),
            None if self._gate is None else ctypes.byref(self._gate),
            ctypes.byref(self._up),
            self._activation,
            ctypes.byref(self._down),
            gated.data_ptr(),
            None if gated_digits is None else gated_digits.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _struct(part: BiasedWeight) -> WeightStruct:
    return weight_struct(part.weight, part.bias, "bias")


def alike(first: Packed, second: Packed) -> bool:
    """Whether products of one input may be made together: equally many columns, stored alike."""
    return (first.columns, first.data.dtype, first.data.dim()) == (
        second.columns,
        second.data.dtype,
        second.data.dim(),
    )


def digits_of(count: int, size: int) -> Tensor | None:
    """Memory for the digits of so many rows, if there are some."""
    return torch.empty(count, size, dtype=torch.int8) if size else None
