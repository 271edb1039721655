"""Blocks of a model's own code in one call of the C++ kernels each: MLPs, products of one input.

Owns their recognition, before matrices are packed, their proof and their replacement, for layers
that do not fuse as a whole: those that keep a state, for one. As with products alone
(``packed_linears``) transformers' code goes on calling the modules. An MLP must give what its
packed matrices give one after the other; products of one input are the same bits as of each alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairlead_kernels.cpu.cpu_operations import CpuOperations
from fairlead_kernels.cpu.cpu_products import BiasedWeight, CpuMlp, CpuProducts, alike
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.layer import Activation
from fairlead_runtime.device.conversion.closeness import close
from fairlead_runtime.device.conversion.float32_view import has_weights, widened_to_float32
from fairlead_runtime.device.conversion.module_calls import (
    ModuleCall,
    play_back,
    record_calls,
)
from fairlead_runtime.device.conversion.packed_norms import HALF_ROUNDING
from fairlead_runtime.device.conversion.recognize_layer import DoesNotFitError, mlp_of
from fairlead_runtime.device.conversion.replacement import Replacement
from fairlead_runtime.sizing.terms import WIDE_ROWS

Calls = Mapping[nn.Module, ModuleCall]


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """The modules of an MLP: the matrices of its gate, if it has one, and of up, and that of down.
    It keeps none of their weights.
    """

    gate_up: Sequence[nn.Module]
    activation: Activation
    down: nn.Module


def find_mlps(calls: Calls) -> dict[nn.Module, Mlp]:
    """The MLPs among these calls by their module, of modules whose weights are there yet."""
    mlps: dict[nn.Module, Mlp] = {}
    for module, call in calls.items():
        if "forward" in vars(module) or not call.input.is_floating_point():
            continue
        inside = [part for part in module.modules() if has_weights(part)]
        if module not in inside and all(part in calls for part in inside):
            with suppress(DoesNotFitError):
                mlps[module] = _mlp_in_float32(call, inside)
    return mlps


def _mlp_in_float32(call: ModuleCall, inside: Sequence[nn.Module]) -> Mlp:
    """The MLP that a module computes with these inside it. Raises DoesNotFitError."""
    module, x = call.module, call.input.float()
    with widened_to_float32(module):
        with record_calls([*inside, module]) as calls:
            module(x)

        def again(factor: float) -> list[ModuleCall]:
            return [call.unary for call in play_back(lambda: module(factor * x), calls, factor)]

        *parts, block = (part.unary for part in calls)
        structure = mlp_of(block, parts, again)
        if structure.gate_up[0].weight.shape[0] != structure.down.weight.shape[1]:
            raise DoesNotFitError("its gate and up are one matrix")
    gate_up = [matrix.module for matrix in structure.gate_up]
    return Mlp(gate_up, structure.activation, structure.down.module)


def _compute(
    gate_up: Sequence[Callable[[Tensor], Tensor]],
    activation: Activation,
    down: Callable[[Tensor], Tensor],
    x: Tensor,
) -> Tensor:
    """What an MLP of these products, one after the other, gives of x [T, K]."""
    activate = reference.activate if len(gate_up) == 1 else reference.gated
    return down(activate(torch.cat([product(x) for product in gate_up], dim=1), activation))


def replacements(
    mlps: Mapping[nn.Module, Mlp],
    calls: Calls,
    products: Mapping[nn.Module, BiasedWeight],
    operations: CpuOperations,
) -> Iterator[Replacement]:
    """What takes the place of each block that is proven, with these packed ``products`` by module:
    MLPs, products of one input.
    """
    inside: set[nn.Module] = set()
    for module, structure in mlps.items():
        with suppress(KeyError, ValueError):
            mlp = _mlp(structure, products, operations)
            if _gives_the_same(mlp, structure.activation, calls[module].input, operations):
                inside |= _modules_of(structure)
                yield Replacement({module: _forward_of(mlp)})
    rest = {module: part for module, part in products.items() if module not in inside}
    for together in _of_one_input(rest, calls):
        joined = CpuProducts(operations.library, [rest[module] for module in together])
        x = calls[together[0]].input
        if _same_bits(joined, x.reshape(-1, x.shape[-1]), operations):
            shared = _Together(joined)
            forwards = {module: shared.forward_of(i) for i, module in enumerate(together)}
            yield Replacement(forwards)


def in_parts(
    x: Tensor, compute: Callable[[Tensor], Sequence[Tensor]], widths: Sequence[int]
) -> list[Tensor]:
    """What ``compute`` gives of x [..., K], tensors [..., width] of these ``widths`` of its type:
    where that is not float32 of so many rows at a time as memory is planned for what it makes of
    them.
    """
    count = x.numel() // x.shape[-1]
    if x.dtype is torch.float32 or count <= WIDE_ROWS:
        return [*compute(x)]
    outs = [x.new_empty(count, width) for width in widths]
    all_rows = x.reshape(count, -1)
    for first in range(0, count, WIDE_ROWS):
        rows = slice(first, first + WIDE_ROWS)
        for out, part in zip(outs, compute(all_rows[rows]), strict=True):
            out[rows] = part
    return [out.view(*x.shape[:-1], -1) for out in outs]


def _forward_of(mlp: CpuMlp) -> Callable[[Tensor], Tensor]:
    """What gives [..., rows of down] in the type of x [..., K]."""
    width = mlp.down.weight.rows
    return lambda x: in_parts(x, lambda rows: [mlp(rows)], [width])[0]


def _modules_of(mlp: Mlp) -> set[nn.Module]:
    return {*mlp.gate_up, mlp.down}


def _mlp(
    structure: Mlp, products: Mapping[nn.Module, BiasedWeight], operations: CpuOperations
) -> CpuMlp:
    """The MLP on its packed matrices. Raises KeyError where one is not, ValueError where they are
    stored in different ways.
    """
    *gate, up = (products[module] for module in structure.gate_up)
    down = products[structure.down]
    return CpuMlp(operations.library, gate[0] if gate else None, up, structure.activation, down)


def _gives_the_same(
    mlp: CpuMlp, activation: Activation, x: Tensor, operations: CpuOperations
) -> bool:
    """Whether an MLP gives what its matrices do one after the other."""
    rows = x.reshape(-1, x.shape[-1]).float()

    def product(part: BiasedWeight) -> Callable[[Tensor], Tensor]:
        return lambda of: operations.linear(of, part.weight, part.bias)

    gate_up = [product(part) for part in (mlp.gate, mlp.up) if part is not None]
    got, want = mlp(rows), _compute(gate_up, activation, product(mlp.down), rows)
    if x.dtype is torch.float32:
        return close(got, want)
    # A number that lies between two of bfloat16 may be rounded to either.
    near = bool((got - want).abs().max() <= HALF_ROUNDING * want.abs().max())
    return near and torch.equal(mlp(rows.to(x.dtype)), got.to(x.dtype))


def _of_one_input(
    products: Mapping[nn.Module, BiasedWeight], calls: Calls
) -> Iterator[list[nn.Module]]:
    """Modules, in the order in which they were called, that got the same tensor and whose matrices
    are stored alike: two or more. Another tensor may have the same numbers, as a product with 1
    has, and the identity of one that is gone.
    """
    rest = [module for module in calls if module in products]
    while rest:
        first, *modules = rest
        together = [first] + [
            module
            for module in modules
            if alike(products[first].weight, products[module].weight)
            and calls[first].identity == calls[module].identity
            and torch.equal(calls[first].input, calls[module].input)
        ]
        rest = [module for module in modules if module not in together]
        if len(together) > 1:
            yield together


def _same_bits(joined: CpuProducts, x: Tensor, operations: CpuOperations) -> bool:
    return all(
        torch.equal(out, operations.linear(x, part.weight, part.bias))
        for out, part in zip(joined(x), joined.parts, strict=True)
    )


class _Together:
    """Modules that are called with one tensor, one after the other: the first one's call computes
    the products of all. Where another one gets another tensor each computes its own from then on.
    """

    def __init__(self, joined: CpuProducts) -> None:
        self._joined = joined
        self._alone = [CpuProducts(joined.library, [part]) for part in joined.parts]
        self._input: Tensor | None = None
        self._rest: dict[int, Tensor] = {}
        self._gets_one = True

    def forward_of(self, place: int) -> Callable[[Tensor], Tensor]:
        """What takes the place of a module's ``forward``."""

        def forward(x: Tensor) -> Tensor:
            return self._product(place, x)

        return forward

    def _product(self, place: int, x: Tensor) -> Tensor:
        if place == 0 and self._gets_one:
            self._input, outs = x, in_parts(x, self._joined, self._joined.rows)
            self._rest = dict(enumerate(outs))
        if self._input is x and place in self._rest:
            out = self._rest.pop(place)
            if not self._rest:
                self._input = None
            return out
        self._gets_one, self._input, self._rest = False, None, {}
        alone = self._alone[place]
        (out,) = in_parts(x, alone, alone.rows)
        return out
