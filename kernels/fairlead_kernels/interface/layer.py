"""The interface of a decoder layer's operations, on the packed tokens of one step.

Owns the types that a fused layer and every implementation of its operations share. Knows no model,
request or kernel. ``attention`` is the interface of what lies between ``rope_write`` and the output
projection.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, Self

import torch

from fairlead_kernels.formats.quantize import Quantized

# ``gelu_tanh`` is the approximation with tanh, ``relu2`` the square of ``relu``.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


@dataclass(frozen=True, slots=True, eq=False)
class Int4Groups:
    """The zero points and the orders of columns of 4-bit integers. ``zeros`` uint8 [G, rows] stand
    for 0 in each group of columns; ``orders``: of so many rows after each other the order of the
    columns that they multiply, int32 [columns], None for as they are.
    """

    zeros: torch.Tensor
    orders: tuple[tuple[int, torch.Tensor | None], ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.zeros, *(order for _, order in self.orders if order is not None))


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight matrix of ``rows`` outputs and ``columns`` inputs, in the layout of the operations
    that packed it: only their ``linear`` can read ``data``.

    ``data`` is float32, bfloat16, float16, int8 or float8_e4m3fn. With ``scales`` float32 [rows],
    each row of the matrix is its row of data times its scale; ``factor`` multiplies all of them.
    With ``int4_groups`` data is uint8, two integers of 4 bits each (``Int4Matrix``), scales are
    [G, rows].
    ``rounding``: the most by which products move an element of x, in units of its row's largest,
    beside what float32 explains.
    """

    data: torch.Tensor
    rows: int
    columns: int
    scales: torch.Tensor | None = None
    factor: float = 1.0
    rounding: float = 0.0
    int4_groups: Int4Groups | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        scales = () if self.scales is None else (self.scales,)
        return (self.data, *scales, *(() if self.int4_groups is None else self.int4_groups.tensors))

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """``LayerOperations.linear`` of a layout with its own product; None: ``data`` is read."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A root-mean-square norm, ``x / sqrt(mean(x²) + eps) * (weight + offset) + bias``; with
    ``centered`` a layer norm, the same of ``x`` minus its mean.

    ``weight`` and ``bias`` [width]; ``offset`` is 1 for families that store weights around zero
    (Gemma).
    """

    weight: torch.Tensor
    eps: float
    offset: float = 0.0
    bias: torch.Tensor | None = None
    centered: bool = False

    def to(self, dtype: torch.dtype) -> Self:
        """The norm with its weight and bias in this type."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, weight=self.weight.to(dtype), bias=bias)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """``norm`` of each ``group`` of columns of x times SiLU of a gate, by its part of the norm's
    vectors; ``gate_last``: ``norm`` of those of x, times SiLU of the gate.
    """

    norm: Norm
    group: int
    gate_last: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWithoutMlp:
    """A decoder layer without the MLP between two of its parts, which normalizes before its
    attention and before its MLP:

    ``h = x + after_attention(out(attend(qkv(input_norm(x)))))``, then
    ``h + after_mlp(MLP(mlp_norm(h)))``; a ``parallel`` one, which has nothing after attention,
    normalizes ``x`` for its MLP.

    ``qkv`` has the rows of all queries, then keys, then values. ``q_norm`` and ``k_norm`` act on
    each head. What is None is left out.
    """

    input_norm: Norm
    qkv: Packed
    qkv_bias: torch.Tensor | None
    q_norm: Norm | None
    k_norm: Norm | None
    out: Packed
    out_bias: torch.Tensor | None
    after_attention: Norm | None
    mlp_norm: Norm
    after_mlp: Norm | None
    parallel: bool = False

    @property
    def matrices(self) -> list[Packed]:
        return [value for value in self._values().values() if isinstance(value, Packed)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all fields; the vectors of a norm in two of them are there twice."""
        tensors: list[torch.Tensor] = []
        for value in self._values().values():
            if isinstance(value, Packed | Norm):
                tensors += value.tensors
            elif isinstance(value, torch.Tensor):
                tensors.append(value)
        return tensors

    def cast(self, dtype: torch.dtype) -> Self:
        """A copy with norms and biases in this type; a norm that it has twice is one still."""
        casts: dict[int, Any] = {}
        changed: dict[str, Any] = {}
        for name, value in self._values().items():
            if isinstance(value, Norm | torch.Tensor):
                if id(value) not in casts:
                    casts[id(value)] = value.to(dtype)
                changed[name] = casts[id(value)]
        return replace(self, **changed)

    def repacked(self, repack: Callable[[Packed], Packed]) -> Self:
        """A copy with each matrix replaced by what ``repack`` gives for it, one after the other."""
        changed: dict[str, Any] = {}
        for name, value in self._values().items():
            if isinstance(value, Packed):
                changed[name] = repack(value)
        return replace(self, **changed)

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layer(LayerWithoutMlp):
    """A decoder layer whose MLP is ``down(gated(gate_up(x)))``.

    ``gate_up`` has the rows of the gate, then the others; without a gate it has the others only,
    which are activated.
    """

    gate_up: Packed
    gate_up_bias: torch.Tensor | None
    activation: Activation
    down: Packed
    down_bias: torch.Tensor | None

    @property
    def gated(self) -> bool:
        """Whether its MLP has a gate."""
        return self.gate_up.rows == 2 * self.down.columns


class LayerOperations(Protocol):
    """The operations of a decoder layer. T: packed tokens. Results have the type of their input,
    norms that of their weight; sums within an operation are at least float32.

    ``in_float32``: they compute in float32, and a layer's vectors stay so. Else hidden states
    between two operations have the model's own type, as the layer's vectors have: but for the
    residual, which is float32. ``rounds``: products with fp8 weights round their ``x`` to fp8,
    too, with a scale per token; while no layer runs it may be switched off, and on again.
    ``int8_rounding``: the most by which products with int8 weights round their ``x``, as in
    ``Packed``. ``fixed_order``: sums have one order, whatever the number of tokens.
    """

    name: str
    in_float32: bool
    rounds: bool
    int8_rounding: float
    fixed_order: bool

    @property
    def model_operations(self) -> Any:
        """The operations of a whole model, in the terms of their own library: embeddings, rotary
        angles, a head, layers in one call. None where there are only a layer's.
        """

    def pack(
        self,
        weights: Sequence[torch.Tensor | Quantized],
        *,
        dtype: torch.dtype = torch.float32,
        factor: float = 1.0,
    ) -> Packed:
        """Weights float32 [N_i, K] below each other as one matrix of the sum of N_i rows, times
        ``factor``. They are stored as ``dtype``: float32, bfloat16 or float16, to which they are
        rounded before they are multiplied. Quantized weights, all of one format, are stored as they
        are. Raises ValueError for a format or type that the operations do not multiply.

        Copies them; a caller that drops each weight after it is packed holds little twice.
        """

    def linear(
        self, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply: x [T, columns] and bias [rows] → [T, rows]."""

    def norm(
        self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add and normalize: x and residual [T, width] → the norm of their sum, and the sum in the
        residual's type; without a residual the norm of x, and x.

        May write the results into ``residual`` and, if there is one, ``x``: with a residual neither
        is used afterwards.
        """

    def rope_write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> torch.Tensor:
        """Rotate queries and keys, and write keys and values into their slots.

        qkv [T, (query heads + 2 · kv heads) · dim]: each token's queries, keys and values. cos and
        sin [T, R], R even and at most dim: element i < R/2 of a head is rotated with element
        i + R/2, as Llama does; elements from R on stay. ``q_norm`` and ``k_norm`` [dim] normalize
        each head before. slots int64 [T] are distinct places in the caches [blocks, block_size, kv
        heads, dim], which may have another type. Returns queries [T, query heads, dim].
        """

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Activate and multiply: gate_up [T, 2 I] → activation(first half) * second half [T, I]."""

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """The activation of each element of x [T, I], for an MLP without a gate."""
