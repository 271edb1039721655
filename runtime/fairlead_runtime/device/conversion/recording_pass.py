"""What the decoder layers of a loaded model do, seen in one pass of random tokens.

Owns the hooks of that pass. A layer of another type is recorded in float32, with its weights
widened: what is compared with it later can then tell a wrong function from rounding.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from fairlead_kernels.formats.row_chunks import row_chunks
from fairlead_runtime.device.conversion import recognize_ends
from fairlead_runtime.device.conversion.float32_view import has_weights, widened_to_float32
from fairlead_runtime.device.conversion.recognize_layer import (
    DoesNotFitError,
    ModuleCall,
    Recording,
)
from fairlead_runtime.device.conversion.rounding import Changes
from fairlead_runtime.device.model.paged_attention import CURRENT_PASS, AttentionCall
from fairlead_runtime.device.model.paged_model import PagedModel, ProbePass


@dataclass(slots=True)
class Recorded:
    """What the hooks saw of one layer. ``attended_at``: calls before its attention; ``blocks``: as
    in ``Recording``.
    """

    calls: list[ModuleCall]
    blocks: list[ModuleCall] = field(default_factory=list)
    attended_at: int = -1
    attention: tuple[Tensor, Tensor, Tensor, Tensor, AttentionCall] | None = None
    arguments: dict[str, Any] | None = None
    input: Any = None
    output: Any = None


class _RecordingPass(ProbePass):
    """Records what each layer passes to its attention."""

    def __init__(self, keep: Tensor, layers: list[Recorded]) -> None:
        super().__init__(keep)
        self._layers = layers

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        out = super().attend(layer, query, key, value, call)
        recorded = self._layers[layer]
        recorded.attended_at = len(recorded.calls)
        recorded.blocks.clear()
        recorded.attention = (query.clone(), key.clone(), value.clone(), out.clone(), call)
        return out


def decoder_layers(model: PagedModel) -> list[nn.Module]:
    """The list of modules of which the i-th holds the attention of layer i; empty where there is
    none.
    """
    count = len(model.windows)
    for module in model.model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            indices = [
                {getattr(part, "layer_idx", None) for part in layer.modules()} - {None}
                for layer in module
            ]
            if indices == [{index} for index in range(count)]:
                return list(module)
    return []


def record(model: PagedModel, layers: list[nn.Module]) -> list[Recorded]:
    """One pass of random tokens at positions spread over the model's context, each layer in
    float32.
    """
    ids, positions = recognize_ends.random_tokens(model, seed=0)
    recorded = [Recorded([]) for _ in layers]
    hooks = []
    for layer, place in zip(layers, recorded, strict=True):
        hooks.append(layer.register_forward_hook(_layer_hook(place), with_kwargs=True))
        hooks += [
            module.register_forward_hook(_module_hook(place))
            for module in layer.modules()
            if module is not layer and any(True for _ in module.parameters())
        ]
        if model.heads.dtype is not torch.float32:
            hooks += _widened_while_it_runs(layer, model.device, model.heads.dtype)
    try:
        step = _RecordingPass(torch.tensor([0], device=model.device), recorded)
        model.run(ids, positions, step)
    finally:
        for hook in hooks:
            hook.remove()
    return recorded


def _module_hook(place: Recorded) -> Any:
    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        call = ModuleCall(module, torch.empty(0, 1), torch.empty(0, 1))
        if len(inputs) == 1 and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            call = ModuleCall(module, inputs[0].clone(), output.clone())
        if has_weights(module):
            place.calls.append(call)
        if call.input.dim() == call.output.dim() == 3:
            place.blocks.append(call)

    return note


def _layer_hook(place: Recorded) -> Any:
    def note(
        _module: nn.Module, inputs: tuple[Any, ...], arguments: dict[str, Any], output: Any
    ) -> None:
        place.input = inputs[0].clone() if inputs else None
        place.arguments = arguments
        place.output = output

    return note


def recording_of(recorded: Recorded) -> tuple[Recording, str]:
    """The recording in the terms of the packed tokens, and the name of the rotary embedding's
    argument, "" without one. Raises DoesNotFitError with what the layer takes or returns else.
    """
    if recorded.attention is None or not isinstance(recorded.input, Tensor):
        raise DoesNotFitError("its forward pass takes other arguments than hidden states")
    if not isinstance(recorded.output, Tensor):
        raise DoesNotFitError("it returns more than hidden states")
    name, rope = "", (recorded.input[0, :, :0],) * 2
    for key, value in (recorded.arguments or {}).items():
        if (
            isinstance(value, tuple)
            and len(value) == 2
            and all(isinstance(x, Tensor) and x.dim() == 3 for x in value)
        ):
            name, rope = key, (value[0][0], value[1][0])
    query, key_, value_, attended, call = recorded.attention
    return Recording(
        input=recorded.input[0],
        output=recorded.output[0],
        rope=rope,
        before=recorded.calls[: recorded.attended_at],
        after=recorded.calls[recorded.attended_at :],
        blocks=recorded.blocks,
        query=query,
        key=key_,
        value=value_,
        attended=attended,
        call=call,
    ), name


class _ChangingPass(ProbePass):
    """A pass of which attention reads changed queries, keys and values."""

    def __init__(self, keep: Tensor, changes: Changes) -> None:
        super().__init__(keep)
        self._changes = changes

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        # A score sums over a head, an output over the tokens.
        read = self._changes.of(query, query.shape[-1]), key, self._changes.of(value, len(value))
        return super().attend(layer, *read, call)


def repeat(layer: nn.Module, recorded: Recorded, changes: Changes) -> Tensor:
    """What the layer gives [T, hidden] of what it got when it was recorded, with all that its
    modules and its attention read changed. Its weights must be of the recording's type.
    """
    step = _ChangingPass(torch.tensor([0], device=recorded.input.device), changes)
    token = CURRENT_PASS.set(step)
    try:
        with changes.inside(layer.modules()):
            out: Tensor = layer(recorded.input, **(recorded.arguments or {}))[0]
            return out
    finally:
        CURRENT_PASS.reset(token)


@contextmanager
def modules_in_float32(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block each module that has weights reads and computes in float32, with
    its own weights widened only while it runs, and those of a linear one by rows.
    """
    hooks: list[RemovableHandle] = []
    products: list[Any] = []
    for module in model.modules():
        target: Any = module  # torch types each attribute as tensor or module
        if not has_weights(module):
            continue
        if isinstance(module, nn.Embedding):  # whose table is large, and its rows exact
            hooks.append(module.register_forward_hook(lambda _m, _i, rows: rows.float()))
        elif type(module) is nn.Linear and "forward" not in vars(module):
            target.forward = partial(_product_in_float32, module)
            products.append(target)
        else:
            hooks += _widened_while_it_runs(module)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for product in products:
            del product.forward


def _product_in_float32(module: nn.Linear, x: Tensor) -> Tensor:
    x, weight, bias = x.float(), module.weight, module.bias
    parts = [x @ weight[part].float().T for part in row_chunks(*weight.shape)]
    product = torch.cat(parts, dim=-1)
    return product if bias is None else product + bias.float()


def _widened_while_it_runs(
    module: nn.Module, device: torch.device | None = None, returned: torch.dtype | None = None
) -> list[RemovableHandle]:
    """Hooks with which a module reads float32 and computes in it, with ``device`` there; what it
    gives becomes ``returned``, if that is a type, after the hooks that are there have seen it. Else
    these hooks are around those, so that the weights are where those have put them.
    """
    entered: list[ExitStack] = []

    def widen(_module: nn.Module, inputs: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        stack = ExitStack()
        stack.enter_context(widened_to_float32(module, device))
        entered.append(stack)
        return _cast((inputs, arguments), torch.float32)

    def narrow(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        entered.pop().close()
        return output if returned is None else _cast(output, returned)

    return [
        module.register_forward_pre_hook(widen, with_kwargs=True),
        module.register_forward_hook(narrow, prepend=returned is None),
    ]


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """The same with every tensor of floats in this type."""
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)
