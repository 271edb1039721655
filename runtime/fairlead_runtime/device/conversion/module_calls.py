"""Calls of modules, recorded while a model runs, and played back.

Owns the hooks of every recording: of decoder layers, of what lies around them, of products.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fairlead_runtime.device.conversion.float32_view import has_weights


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """A module, what it got and what it returned, both [..., width]."""

    module: nn.Module
    input: Tensor
    output: Tensor
    identity: int = 0  # of the tensor that it got: calls of one pass with others got other objects


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A module, what it got, with the ``identities`` of these objects, and what it returned."""

    module: nn.Module
    inputs: tuple[Any, ...]
    arguments: dict[str, Any]
    output: Any
    identities: tuple[int, ...] = ()

    @property
    def is_unary(self) -> bool:
        """Whether one tensor goes in by its place, and one out."""
        match self.inputs, self.output:
            case (Tensor(),), Tensor():
                return True
        return False

    @property
    def unary(self) -> ModuleCall:
        """The call with one tensor in and one out; with empty ones [0, 1] if it has others."""
        match self.inputs, self.output:
            case (Tensor() as x,), Tensor() as out:
                return ModuleCall(self.module, x, out, *self.identities)
        return ModuleCall(self.module, torch.empty(0, 1), torch.empty(0, 1))


@contextmanager
def record_calls(modules: Iterable[nn.Module]) -> Iterator[list[Call]]:
    """Inside the ``with`` block all calls of these modules, in the order in which they end. Tensors
    in and out are copies, but for keyword arguments and what is inside a tuple.
    """
    calls: list[Call] = []
    entered: list[tuple[Any, ...]] = []

    def enter(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        entered.append(tuple(x.clone() if isinstance(x, Tensor) else x for x in inputs))

    def leave(module: nn.Module, inputs: Any, arguments: dict[str, Any], output: Any) -> None:
        copied = output.clone() if isinstance(output, Tensor) else output
        identities = tuple(id(x) for x in inputs)
        calls.append(Call(module, entered.pop(), arguments, copied, identities))

    with ExitStack() as hooks:
        for module in modules:
            # Results as the hooks that are there leave them: those are a part of the model.
            hooks.enter_context(module.register_forward_pre_hook(enter))
            hooks.enter_context(module.register_forward_hook(leave, with_kwargs=True))
        yield calls


def play_back(
    run: Callable[[], object], calls: Sequence[Call], factor: float, count: int | None = None
) -> list[Call]:
    """The calls that ``run`` makes of the modules of these ``calls``, in that order. Each that has
    weights, and no others with weights inside it, computes nothing: it gives ``factor`` times what
    it gave, in the first ``count`` of the calls, if not in all, and in the others just that.
    """
    results: dict[nn.Module, list[Any]] = {}

    def scale(x: Tensor) -> Tensor:
        # Not of ids, as those of the experts that a router chose.
        return factor * x if x.is_floating_point() else x

    for index, call in enumerate(calls):
        if [part for part in call.module.modules() if has_weights(part)] == [call.module]:
            scaled = count is None or index < count
            output = tree_map_only(Tensor, scale, call.output) if scaled else call.output
            results.setdefault(call.module, []).append(output)

    def play(outputs: Iterator[Any]) -> Callable[..., Any]:
        return lambda *_, **__: next(outputs)

    with ExitStack() as stack:
        for module, outputs in results.items():
            before = {name: value for name, value in vars(module).items() if name == "forward"}
            stack.callback(vars(module).update, before)
            stack.callback(vars(module).pop, "forward")
            vars(module)["forward"] = play(iter(outputs))
        again = stack.enter_context(record_calls({call.module: None for call in calls}))
        run()
    return again
