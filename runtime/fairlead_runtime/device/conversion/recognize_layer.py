"""Recognizes a decoder layer by what it computes, and finds its structure.

Owns the verdict whether a layer is a ``fairlead_kernels.interface.layer.Layer``, with the reason if
it is not, and whether it is one around an MLP that stays a module: experts, for one. Every part is
proven on a recorded pass: a matrix is one because its output is that product, a norm because the
formula gives its output, the rotary embedding because the reference's gives the queries and keys
that attention got. Names of families, classes and attributes play no role, so a family that differs
in a detail does not fit and runs as transformers wrote it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn

from fairlead_kernels.formats.quantize import Quantized
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.layer import (
    Activation,
    Layer,
    LayerOperations,
    LayerWithoutMlp,
    Norm,
    Packed,
)
from fairlead_runtime.device.conversion.closeness import close, factor_of, same_rows
from fairlead_runtime.device.conversion.large_numbers import (
    LARGE,
    PlayBack,
    Replay,
    attention_is_same,
    mlp_is_same,
)
from fairlead_runtime.device.conversion.module_calls import ModuleCall
from fairlead_runtime.device.model.fused_layers import UnfusedMlp, halves_of
from fairlead_runtime.device.model.paged_attention import AttentionCall
from fairlead_runtime.device.model.row_parallel import RowParallel
from fairlead_runtime.models.published import StoredLinear
from fairlead_runtime.models.quantized import QuantizedLinear

OTHER_BEGIN = "its MLP does not begin with a norm of the residual or of the residual plus attention"
OTHER_MLP = "its MLP is not two or three matrices with SiLU, GELU, ReLU or its square"
FACTOR = "it multiplies what a norm after attention or MLP returns"
LIMITED_MLP = "its MLP computes something else with large numbers"
LIMITED_ATTENTION = "its attention gets something else of large numbers"
Mix = Callable[[Tensor, Activation], Tensor]


class DoesNotFitError(Exception):
    """A layer is no ``Layer``; the message says why, as the end of "layer 3: ..."."""


@dataclass(slots=True, eq=False)
class Recording:
    """One pass of T tokens through a decoder layer.

    ``input`` and ``output`` [T, hidden]; ``rope`` the cosines and sines [T, R] that it was passed;
    ``before`` and ``after``: the calls of its modules before and after its attention, in order;
    ``blocks``: the calls after it of all modules with weights anywhere inside, inner ones first,
    which took and gave [1, T, width]; query, key and value [T, heads, dim] what attention got,
    ``attended`` what it returned. ``play_back`` with a factor: the calls of all modules where those
    with weights give so many times what they gave; ``attend_again``: where those before attention
    give LARGE times as much.
    """

    input: Tensor
    output: Tensor
    rope: tuple[Tensor, Tensor]
    before: list[ModuleCall]
    after: list[ModuleCall]
    blocks: list[ModuleCall]
    query: Tensor
    key: Tensor
    value: Tensor
    attended: Tensor
    call: AttentionCall
    play_back: PlayBack
    attend_again: Callable[[], Replay]


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """The weights [N, K] and bias [N] of a module that multiplies by them. ``stored`` is a view of
    the module's own weights [N, K], or their quantized form, of which ``weight`` may have the rows
    in another order. What a layer multiplies the result by (Granite) is the ``factor`` of the
    weights, and already part of ``bias``.
    """

    module: nn.Module
    stored: Tensor | Quantized
    weight: Tensor | Quantized
    bias: Tensor | None
    factor: float = 1.0

    def scaled(self, by: float) -> Self:
        if by == 1:
            return self
        bias = None if self.bias is None else self.bias * by
        return replace(self, bias=bias, factor=self.factor * by)

    def ordered(self, rows: Tensor) -> Self:
        """The matrix with its rows, and so its results, in this order."""
        bias = None if self.bias is None else self.bias[rows]
        weight = self.weight
        weight = weight.rows(rows) if isinstance(weight, Quantized) else weight[rows]
        return replace(self, weight=weight, bias=bias)


@dataclass(frozen=True, slots=True, eq=False)
class MlpStructure:
    """The matrices of gate and up in this order, or of up alone, and the last one."""

    gate_up: Sequence[Matrix]
    activation: Activation
    down: Matrix


@dataclass(slots=True, eq=False)
class LayerStructure:
    """The modules of a layer that fits, in the terms of ``Layer``, or of ``LayerWithoutMlp`` where
    its MLP is the model's own. ``rotates`` False: the layer ignores the rotary embedding;
    ``rope_in_pairs``: its elements 2i and 2i + 1 belong to a pair, not i and i + R/2; ``parallel``:
    see ``LayerWithoutMlp``.
    """

    input_norm: Norm
    qkv: Sequence[Matrix]
    q_norm: Norm | None
    k_norm: Norm | None
    out: Matrix
    after_attention: Norm | None
    mlp_norm: Norm
    mlp: MlpStructure | UnfusedMlp
    after_mlp: Norm | None
    parallel: bool
    rotates: bool
    rope_in_pairs: bool
    call: AttentionCall

    @property
    def matrices(self) -> list[Matrix]:
        mlp = [] if isinstance(self.mlp, UnfusedMlp) else [*self.mlp.gate_up, self.mlp.down]
        return [*self.qkv, self.out, *mlp]

    @property
    def sharded(self) -> bool:
        """Whether the inputs of both of its last matrices are split over ranks, an own MLP's
        apart.
        """
        last = [self.out] if isinstance(self.mlp, UnfusedMlp) else [self.out, self.mlp.down]
        return all(isinstance(x.module, RowParallel) for x in last)

    def pack(
        self, operations: LayerOperations, dtype: torch.dtype = torch.float32
    ) -> LayerWithoutMlp:
        """The layer with its matrices packed for these operations, stored as ``dtype`` unless they
        are quantized; copies them.
        """

        def pack(*matrices: Matrix) -> Packed:
            (factor,) = {matrix.factor for matrix in matrices}
            return operations.pack([x.weight for x in matrices], dtype=dtype, factor=factor)

        around: dict[str, Any] = {
            "input_norm": self.input_norm,
            "qkv": pack(*self.qkv),
            "qkv_bias": _bias(self.qkv),
            "q_norm": self.q_norm,
            "k_norm": self.k_norm,
            "out": pack(self.out),
            "out_bias": self.out.bias,
            "after_attention": self.after_attention,
            "mlp_norm": self.mlp_norm,
            "after_mlp": self.after_mlp,
            "parallel": self.parallel,
        }
        if isinstance(self.mlp, UnfusedMlp):
            return LayerWithoutMlp(**around)
        return Layer(
            **around,
            gate_up=pack(*self.mlp.gate_up),
            gate_up_bias=_bias(self.mlp.gate_up),
            activation=self.mlp.activation,
            down=pack(self.mlp.down),
            down_bias=self.mlp.down.bias,
        )


def _bias(matrices: Sequence[Matrix]) -> Tensor | None:
    """The biases below each other, zeros for a matrix without one."""
    if all(matrix.bias is None for matrix in matrices):
        return None
    known = next(matrix.bias for matrix in matrices if matrix.bias is not None)
    biases = [
        known.new_zeros(matrix.weight.shape[0]) if matrix.bias is None else matrix.bias
        for matrix in matrices
    ]
    return torch.cat(biases)


@dataclass(slots=True, eq=False)
class _Calls:
    """The recorded calls of one half of a layer; ``take`` hands each out once."""

    rest: list[ModuleCall] = field(default_factory=list)

    def matrices(self, x: Tensor) -> list[tuple[Matrix, Tensor]]:
        """Take every product of ``x`` [T, K], with its result [T, N]."""
        products = []
        for call in self.rest[:]:
            matrix = matrix_of(call, x)
            if matrix is not None:
                self.rest.remove(call)
                products.append((matrix, call.output.reshape(x.shape[0], -1)))
        return products

    def multiply(self, x: Tensor) -> bool:
        """Whether there is a product of ``x``."""
        return any(matrix_of(call, x) is not None for call in self.rest)

    def norm(self, x: Tensor) -> tuple[Norm, Tensor] | None:
        """Take the norm of ``x`` [T, width], with its result."""
        for call in filter(_may_be_norm, self.rest):
            if close(call.input.reshape(-1, call.input.shape[-1]), x):
                norm = norm_of(call)
                self.rest.remove(call)
                return norm, call.output.reshape(x.shape)
        return None

    def norm_of_sum(self, residual: Tensor, branch: Tensor) -> tuple[Norm, Tensor, float] | None:
        """Take the norm of the residual plus a multiple of ``branch``, with its result and that
        factor, which is not 0.
        """
        for call in filter(_may_be_norm, self.rest):
            total = call.input.reshape(-1, call.input.shape[-1])
            factor = factor_of(total, residual, branch)
            if factor:
                norm = norm_of(call)
                self.rest.remove(call)
                return norm, call.output.reshape(total.shape), factor
        return None

    def without(self, module: nn.Module | None = None) -> Self:
        """The calls to take anew, but for those inside this module."""
        inside = set() if module is None else set(module.modules())
        return type(self)([call for call in self.rest if call.module not in inside])

    def check_empty(self) -> None:
        if self.rest:
            kinds = ", ".join(sorted({type(call.module).__name__ for call in self.rest}))
            raise DoesNotFitError(f"it computes with {kinds}")


def recognize(recording: Recording) -> LayerStructure:
    """The structure of the layer. Raises DoesNotFitError with the reason when it is not even a
    ``LayerWithoutMlp``.
    """
    r = recording
    calls = _Calls(list(r.before))
    first_norm = calls.norm(r.input)
    if first_norm is None:
        raise DoesNotFitError("it does not normalize the input of its attention")
    input_norm, normed = first_norm
    projections = calls.matrices(normed)
    q_norm, k_norm = _head_norms(calls, r.query.shape[-1])
    heads = _projected(r, [result for _, result in projections], q_norm, k_norm)

    calls = _Calls(list(r.after))
    outs = calls.matrices(r.attended.flatten(1))
    if len(outs) != 1:
        raise DoesNotFitError("no single matrix multiplies what its attention returns")
    ((out, branch),) = outs
    if not attention_is_same(r.attend_again(), (r.query, r.key, r.value), out.module):
        raise DoesNotFitError(LIMITED_ATTENTION)
    after_attention = calls.norm(branch)
    branch = branch if after_attention is None else after_attention[1]
    begin = calls.norm_of_sum(r.input, branch)
    parallel = begin is None
    if begin is None:
        # Its norm is one of its own, or the one before attention.
        begin = *(calls.norm(r.input) or (input_norm, normed)), 1.0
        read = calls.multiply(begin[1]) or any(close(x.input[0], begin[1]) for x in r.blocks)
        if after_attention is not None or not read:
            raise DoesNotFitError(OTHER_BEGIN)
    mlp_norm, normed, out_factor = begin
    hidden = r.input + out_factor * branch
    if after_attention is not None and out_factor != 1:
        raise DoesNotFitError(FACTOR)
    mlp, after_mlp = _second_half(calls, r, normed, hidden)
    return LayerStructure(
        input_norm=input_norm,
        qkv=heads.rows_of([matrix for matrix, _ in projections]),
        q_norm=heads.norm(q_norm),
        k_norm=heads.norm(k_norm),
        out=out.scaled(out_factor),
        after_attention=None if after_attention is None else after_attention[0],
        mlp_norm=mlp_norm,
        mlp=mlp,
        after_mlp=after_mlp,
        parallel=parallel,
        rotates=heads.rotates,
        rope_in_pairs=heads.rope_in_pairs,
        call=replace(r.call, scale=r.call.scale * heads.factor),
    )


def matrix_of(call: ModuleCall, x: Tensor) -> Matrix | None:
    """The matrix of a module that multiplies ``x`` by it; transposed where it is stored [K, N],
    as in GPT-2.
    """
    if not close(call.input.reshape(-1, call.input.shape[-1]), x):
        return None
    weights, bias = _weights_of(call.module)
    if isinstance(call.module, RowParallel):  # it returns the sum of all ranks' products
        return Matrix(call.module, call.module.stored, call.module.stored, bias)
    result = call.output.reshape(x.shape[0], -1)
    for weight in weights:
        if weight.shape == (result.shape[1], x.shape[1]):
            # What a plain linear layer gives is that product: computing it again would read its
            # weights, the most of what recognition takes. The fused layer is compared all the same.
            if _is_linear(call.module) or close(result, _product(weight, bias, x)):
                return Matrix(call.module, weight, weight, bias)
    return None


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is torch's linear layer, or ours, and nothing changes what it gives."""
    after = module._forward_hooks  # noqa: SLF001 - torch has no public name for it
    before = module._forward_pre_hooks  # noqa: SLF001 - nor for this
    plain = type(module) in (nn.Linear, QuantizedLinear) and "forward" not in vars(module)
    return plain and not (before or after)


def _product(weight: Tensor | Quantized, bias: Tensor | None, x: Tensor) -> Tensor:
    if isinstance(weight, Quantized):
        quantized: Tensor = QuantizedLinear(weight, bias)(x)  # which dequantizes it in chunks
        return quantized
    product = x @ weight.T
    return product if bias is None else product + bias


def _weights_of(module: nn.Module) -> tuple[Sequence[Tensor | Quantized], Tensor | None]:
    """The matrices [N, K] that a module may multiply by, none or those that it may store, and the
    bias.
    """
    if isinstance(module, RowParallel):
        return [module.stored], None if module.bias is None else module.bias.data
    if isinstance(module, StoredLinear):
        module = module.quantized()
    if isinstance(module, QuantizedLinear):
        return [module.weight], None if module.bias is None else module.bias.data
    parameters = dict(module.named_parameters(recurse=False))
    weights = [p.data for p in parameters.values() if p.dim() == 2]
    biases = [p.data for p in parameters.values() if p.dim() == 1]
    if len(weights) != 1 or len(weights) + len(biases) != len(parameters) or len(biases) > 1:
        return [], None
    return [weights[0], weights[0].T], biases[0] if biases else None


def _may_be_norm(call: ModuleCall) -> bool:
    return all(parameter.dim() == 1 for parameter in call.module.parameters(recurse=False))


def norm_of(call: ModuleCall) -> Norm:
    """The norm that a module computes, found by its results. Its epsilon is one of its numbers; it
    decides the result for small inputs, so those are tried too.
    """
    vectors = [parameter.data for parameter in call.module.parameters(recurse=False)]
    x = call.input
    orders: list[tuple[Tensor, Tensor | None]] = []
    if {parameter.shape for parameter in vectors} == {x.shape[-1:]}:
        both: list[tuple[Tensor, Tensor | None]] = [
            (vectors[0], vectors[-1]),
            (vectors[-1], vectors[0]),
        ]
        orders = [(vectors[0], None)] if len(vectors) == 1 else both if len(vectors) == 2 else []
    for eps in {value for value in vars(call.module).values() if isinstance(value, float)}:
        small = x / x.square().mean().sqrt() * eps**0.5
        for (weight, bias), offset, centered in itertools.product(
            orders, (0.0, 1.0), (False, True)
        ):
            norm = Norm(weight, eps, offset, bias, centered)
            if all(close(call.module(y), reference.norm(y, norm)[0]) for y in (x, small)):
                return norm
    kind = type(call.module).__name__
    raise DoesNotFitError(f"its norm {kind} is no root-mean-square or layer norm")


def _head_norms(calls: _Calls, dim: int) -> tuple[Norm | None, Norm | None]:
    """The norms of each query and each key head: none, or both in this order."""
    if not calls.rest:
        return None, None
    if len(calls.rest) != 2 or any(call.input.shape[-1] != dim for call in calls.rest):
        calls.check_empty()
    first, second = map(norm_of, calls.rest)
    return first, second


def _as_they_are(order: Tensor) -> bool:
    return torch.equal(order, torch.arange(len(order), device=order.device))


@dataclass(frozen=True, slots=True, eq=False)
class _Heads:
    """How attention gets the projections: their rows in this ``order``, the elements of a query's
    and a key's head in the order ``elements`` [dim], the query multiplied by ``factor``.
    """

    order: Tensor
    elements: Tensor
    factor: float
    rotates: bool
    rope_in_pairs: bool

    def norm(self, norm: Norm | None) -> Norm | None:
        """The norm of a head in that order of elements."""
        if norm is None or _as_they_are(self.elements):
            return norm
        bias = None if norm.bias is None else norm.bias[self.elements]
        return replace(norm, weight=norm.weight[self.elements], bias=bias)

    def rows_of(self, matrices: Sequence[Matrix]) -> list[Matrix]:
        """The matrices with their rows in order, which stay in their matrix."""
        if _as_they_are(self.order):
            return list(matrices)
        ordered, first = [], 0
        for matrix in matrices:
            count = matrix.weight.shape[0]
            ordered.append(matrix.ordered(self.order[first : first + count] - first))
            first += count
        return ordered


def _projected(
    r: Recording, results: Sequence[Tensor], q_norm: Norm | None, k_norm: Norm | None
) -> _Heads:
    """Find how attention gets the projections. Raises DoesNotFitError unless they are rotated as
    the reference does it, or not at all, each head's elements in order or in pairs.
    """
    rows = torch.cat([r.input[:, :0], *results], dim=1)
    tokens, kv, dim = r.key.shape
    slots = torch.arange(tokens, device=rows.device)
    for heads in _candidates(r, rows.shape[1], single=len(results) == 1):
        cos, sin = r.rope if heads.rotates else (rows[:, :0], rows[:, :0])
        if heads.rope_in_pairs:
            cos, sin = halves_of(cos), halves_of(sin)
        norms = heads.norm(q_norm), heads.norm(k_norm)
        keys, values = (rows.new_zeros(1, tokens, kv, dim) for _ in range(2))
        query = reference.rope_write(rows[:, heads.order], cos, sin, slots, keys, values, *norms)
        want = r.query[..., heads.elements]
        factor = factor_of(want, torch.zeros_like(want), query)
        same = close(keys[0], r.key[..., heads.elements]) and close(values[0], r.value)
        if factor is not None and same:
            return replace(heads, factor=factor)
    raise DoesNotFitError("its queries and keys are not projected and rotated as Llama's or GLM's")


def _candidates(r: Recording, width: int, *, single: bool) -> Iterator[_Heads]:
    """The known ways to project heads, for matrices of ``width`` rows, ``single``: for one."""
    kv, dim, rotated = *r.key.shape[1:], r.rope[0].shape[1]
    per_kv = r.query.shape[1] // kv
    if r.value.shape != r.key.shape or width != (per_kv + 2) * kv * dim:
        return
    rows = torch.arange(width, device=r.key.device)
    query, key = per_kv * kv * dim, (per_kv + 1) * kv * dim
    layouts = [(rows[:query], rows[query:key], rows[key:])]
    if single:  # for each key head its queries, the key and the value, as in GPT-NeoX
        by_head = rows.view(kv, per_kv + 2, dim)
        layouts.append((by_head[:, :per_kv], by_head[:, per_kv], by_head[:, per_kv + 1]))
    elements = torch.arange(dim, device=r.key.device)
    orders: list[tuple[Tensor, bool, bool]] = [(elements, False, False)]
    if 0 < rotated <= dim and rotated % 2 == 0:
        pairs = torch.cat([halves_of(elements[:rotated]), elements[rotated:]])
        orders = [(elements, True, False), (pairs, True, False), (pairs, True, True), *orders]
    for (*turned, value), (order, rotates, in_pairs) in itertools.product(layouts, orders):
        heads = [indices.reshape(-1, dim)[:, order].flatten() for indices in turned]
        yield _Heads(torch.cat([*heads, value.flatten()]), order, 1.0, rotates, in_pairs)


def _second_half(
    calls: _Calls, r: Recording, normed: Tensor, hidden: Tensor
) -> tuple[MlpStructure | UnfusedMlp, Norm | None]:
    """The MLP of ``normed`` [T, hidden] and the norm of its result: its matrices, else the
    outermost module that explains the layer's result as well. ``hidden`` [T, hidden] is what the
    layer adds it to.
    """
    try:
        rest = calls.without()
        structure, branch = _mlp(rest, normed, r.blocks, r.play_back)
        norm, factor = _added(rest, branch, hidden, r.output)
        return replace(structure, down=structure.down.scaled(factor)), norm
    except DoesNotFitError as error:
        for block in reversed(r.blocks):
            if close(block.input[0], normed):
                rest = calls.without(block.module)
                with suppress(DoesNotFitError):
                    norm, factor = _added(rest, block.output[0], hidden, r.output)
                    return UnfusedMlp(block.module, factor, str(error)), norm
        raise


def _added(
    calls: _Calls, branch: Tensor, hidden: Tensor, output: Tensor
) -> tuple[Norm | None, float]:
    """The norm of what an MLP gives, and the factor with which a layer adds it at its end."""
    norm = calls.norm(branch)
    calls.check_empty()
    factor = factor_of(output, hidden, branch if norm is None else norm[1])
    if factor is None:
        raise DoesNotFitError("it does not return the residual plus its MLP")
    if norm is not None and factor != 1:
        raise DoesNotFitError(FACTOR)
    return None if norm is None else norm[0], factor


def mlp_of(block: ModuleCall, inside: Sequence[ModuleCall], play_back: PlayBack) -> MlpStructure:
    """The MLP that a module computes with these modules inside it; ``play_back`` as a recording has
    it, of what the module got so many times. Raises DoesNotFitError where it is none or does more.
    """
    calls = _Calls(list(inside))
    x = block.input.reshape(-1, block.input.shape[-1])
    structure, branch = _mlp(calls, x, [block], play_back)
    calls.check_empty()
    if not close(branch, block.output.reshape(branch.shape)):
        raise DoesNotFitError("it does more than its MLP")
    return structure


def _mlp(
    calls: _Calls, normed: Tensor, blocks: Sequence[ModuleCall], play_back: PlayBack
) -> tuple[MlpStructure, Tensor]:
    """The MLP, and what it gives [T, hidden]; one of these ``blocks`` may compute it. Raises
    DoesNotFitError also where it computes something else with large numbers.
    """
    products = calls.matrices(normed)
    results = [result for _, result in products]
    orders: list[tuple[int, ...]] = [(0,)] if len(products) == 1 else [(0, 1), (1, 0)]
    if len(products) not in (1, 2):
        raise DoesNotFitError(OTHER_MLP)
    for order, activation in itertools.product(orders, get_args(Activation)):
        gate_up = torch.cat([results[i] for i in order], dim=1)
        mixes: list[Mix] = [] if gate_up.shape[1] % 2 else [reference.gated]
        if len(order) == 1:
            mixes.append(reference.activate)
        for mix in mixes:
            mixed = mix(gate_up, activation)
            width = mixed.shape[1]
            if any(
                call.input.shape[-1] == width and close(call.input.reshape(-1, width), mixed)
                for call in calls.rest
            ):
                downs = calls.matrices(mixed)
                if len(downs) != 1:
                    raise DoesNotFitError(OTHER_MLP)
                ((down, branch),) = downs
                matrices = [products[i][0] for i in order]
                inputs = {matrix.module: LARGE * normed for matrix in matrices}
                inputs[down.module] = mix(LARGE * gate_up, activation)
                outputs = {x.module: LARGE * branch for x in blocks if same_rows(x.output, branch)}
                if not mlp_is_same(play_back(LARGE), inputs, outputs):
                    raise DoesNotFitError(LIMITED_MLP)
                return MlpStructure(matrices, activation, down), branch
    raise DoesNotFitError(OTHER_MLP)
