"""Norms of a model's own code in one call of the C++ kernels each, alone or with a gate.

Owns their recognition, their proof and their replacement, in a model of float32 or bfloat16: they
read the vectors that the model holds. A norm is found in float32, where another function is told
from rounding, and must give what its module gives there. In bfloat16 that is rounded once, where
transformers' code may round after each step.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fairlead_kernels.cpu.cpu_norms import CpuGatedNorm, CpuNorm
from fairlead_kernels.cpu.cpu_operations import CpuOperations
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.layer import GatedNorm, Norm
from fairlead_runtime.device.conversion.closeness import CLOSE, close
from fairlead_runtime.device.conversion.float32_view import widened_to_float32
from fairlead_runtime.device.conversion.module_calls import Call, ModuleCall
from fairlead_runtime.device.conversion.recognize_layer import DoesNotFitError, norm_of
from fairlead_runtime.device.conversion.replacement import Replacement

HALF_ROUNDING = 2.0**-8  # of a number in bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class GatedCall:
    """A module, what it got, x and a gate [..., width], x in the gate's type."""

    module: nn.Module
    x: Tensor
    gate: Tensor


def gated_call(call: Call) -> GatedCall | None:
    """The call, if two tensors of one shape go in by their places and one like the first out."""
    match call.inputs, call.output:
        case (Tensor() as x, Tensor() as gate), Tensor() as out:
            fractions = x.is_floating_point() and gate.is_floating_point()
            alike = x.shape == gate.shape == out.shape and x.dtype is out.dtype
            if fractions and alike and x.numel() and not call.arguments:
                return GatedCall(call.module, x.to(gate.dtype), gate)
    return None


def norm_replacements(
    calls: Mapping[nn.Module, ModuleCall],
    gated_calls: Mapping[nn.Module, GatedCall],
    operations: CpuOperations,
) -> Iterator[Replacement]:
    """What takes the place of each norm that is proven."""
    for module, call in calls.items():
        x = call.input
        if _may_be_norm(module, x) and call.output.dtype is x.dtype:
            with suppress(DoesNotFitError):
                norm, want = _norm_in_float32(call)
                compute = CpuNorm(operations.library, norm)
                if _same(compute(x), want):
                    yield Replacement({module: _forward(module, compute, {x.dtype})})
    for module, gated in gated_calls.items():
        gate = gated.gate
        if _may_be_norm(module, gate):
            with suppress(DoesNotFitError):
                gated_norm, want = _gated_norm_in_float32(gated)
                with_gate = CpuGatedNorm(operations.library, gated_norm)
                # What an operation on states gives may be float32 in a model of another type.
                types = set[torch.dtype]()
                for x in (gated.x, gated.x.float()):
                    if module(x, gate).dtype is x.dtype and _same(with_gate(x, gate), want):
                        types.add(x.dtype)
                if types:
                    yield Replacement({module: _forward(module, with_gate, types, gate.dtype)})


def _may_be_norm(module: nn.Module, x: Tensor) -> bool:
    """Whether it has nothing but vectors, of the type of x, which the kernels read."""
    parameters = list(module.parameters())
    direct = list(module.parameters(recurse=False))
    return (
        "forward" not in vars(module)
        and x.dtype in (torch.float32, torch.bfloat16)
        and len(direct) == len(parameters)
        and all(p.dim() == 1 and p.dtype is x.dtype for p in direct)
    )


def _norm_in_float32(call: ModuleCall) -> tuple[Norm, Tensor]:
    """The norm that a module computes, of the vectors that it holds, and what it gives in float32.
    Raises DoesNotFitError.
    """
    with _widened(call.module) as vector_of:
        x = call.input.float()
        want = call.module(x)
        norm = norm_of(ModuleCall(call.module, x, want))
        bias = None if norm.bias is None else vector_of(norm.bias)
        return replace(norm, weight=vector_of(norm.weight), bias=bias), want


def _gated_norm_in_float32(call: GatedCall) -> tuple[GatedNorm, Tensor]:
    """The same of a norm with a gate."""
    with _widened(call.module) as vector_of:
        x, gate, width = call.x.float(), call.gate.float(), call.x.shape[-1]
        want = call.module(x, gate)
        vectors = [parameter.data for parameter in call.module.parameters()]
        if [len(vector) for vector in vectors] != [width]:
            raise DoesNotFitError("its norm with a gate has not one vector of its width")
        settings = vars(call.module).values()
        sizes = {x for x in settings if type(x) is int and 0 < x <= width and width % x == 0}
        groups = {width} | sizes | {width // size for size in sizes}
        for eps in {value for value in settings if isinstance(value, float)}:
            # It decides the result for small numbers.
            small = x / x.square().mean().sqrt() * eps**0.5
            for group, offset, last in itertools.product(groups, (0.0, 1.0), (False, True)):
                gated = GatedNorm(Norm(vectors[0], eps, offset), group, last)
                if close(reference.gated_norm(x, gate, gated), want) and close(
                    reference.gated_norm(small, gate, gated), call.module(small, gate)
                ):
                    return replace(gated, norm=Norm(vector_of(vectors[0]), eps, offset)), want
    kind = type(call.module).__name__
    raise DoesNotFitError(f"its norm with a gate {kind} is no root-mean-square norm with SiLU")


@contextmanager
def _widened(module: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside the ``with`` block a module computes in float32. Gives what finds for a vector of it
    there the one that it holds.
    """
    before = [parameter.data for parameter in module.parameters()]
    with widened_to_float32(module):
        wide = [parameter.data_ptr() for parameter in module.parameters()]
        yield lambda vector: before[wide.index(vector.data_ptr())]


def _same(got: Tensor, want: Tensor) -> bool:
    """Whether it is what is wanted, in float32, or that rounded once."""
    if got.dtype is torch.float32:
        return close(got, want)
    allowed = HALF_ROUNDING * want.abs() + CLOSE * want.square().mean().sqrt()
    return bool(((got.float() - want).abs() <= allowed).all())


def _forward(
    module: nn.Module,
    compute: Callable[..., Tensor],
    types: set[torch.dtype],
    gate: torch.dtype | None = None,
) -> Callable[..., Tensor]:
    """What takes the place of a module's ``forward``: for tensors of other types than those that
    were recorded its own stays, with the vectors that it has.
    """
    forward_of_class: Any = type(module).forward

    def forward(x: Tensor, *gates: Tensor) -> Tensor:
        if x.dtype in types and all(y.dtype is gate for y in gates):
            return compute(x, *gates)
        out: Tensor = forward_of_class(module, x, *gates)
        return out

    return forward
