"""What the decoder layers of a loaded model do, seen in one pass of random tokens.

Owns that pass. A layer of another type is recorded in float32, with its weights
widened: what is compared with it later can then tell a wrong function from rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fairlead_kernels.formats.row_chunks import row_chunks
from fairlead_runtime.device.conversion import recognize_ends
from fairlead_runtime.device.conversion.float32_view import has_weights, widened_to_float32
from fairlead_runtime.device.conversion.large_numbers import LARGE, Replay
from fairlead_runtime.device.conversion.module_calls import (
    Call,
    ModuleCall,
    play_back,
    record_calls,
)
from fairlead_runtime.device.conversion.recognize_layer import DoesNotFitError, Recording
from fairlead_runtime.device.conversion.rounding import SAMPLES, Changes
from fairlead_runtime.device.model.paged_attention import CURRENT_PASS, AttentionCall
from fairlead_runtime.device.model.paged_model import PagedModel, ProbePass

OTHER_ARGUMENTS = "its forward pass takes other arguments than hidden states"


@dataclass(slots=True)
class Recorded:
    """The recorded pass of a layer: the calls of its modules and its own; ``attended_at``: how many
    of them ended before its attention.
    """

    layer: nn.Module
    calls: list[Call]
    attended_at: int = -1
    attention: tuple[Tensor, Tensor, Tensor, Tensor, AttentionCall] | None = None

    @property
    def call(self) -> Call:
        """The layer's own call. Raises DoesNotFitError where it does not take hidden states."""
        for call in reversed(self.calls):
            if call.module is self.layer and isinstance(next(iter(call.inputs), None), Tensor):
                return call
        raise DoesNotFitError(OTHER_ARGUMENTS)


class _RecordingPass(ProbePass):
    """Records what each layer passes to its attention."""

    def __init__(self, model: PagedModel, layers: list[Recorded]) -> None:
        super().__init__(torch.tensor([0], device=model.device))
        self.states |= model.states
        self._layers = layers

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        out = super().attend(layer, query, key, value, call)
        recorded = self._layers[layer]
        recorded.attended_at = len(recorded.calls)
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
                {getattr(module, "layer_idx", None) for module in layer.modules()} - {None}
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
    with ExitStack() as hooks:
        recorded = [
            Recorded(layer, hooks.enter_context(record_calls(layer.modules()))) for layer in layers
        ]
        if model.heads.dtype is not torch.float32:
            for layer in layers:
                _widen_while_it_runs(hooks, layer, model.device, model.heads.dtype)
        step = _RecordingPass(model, recorded)
        model.run(ids, positions, step)
    return recorded


def recording_of(recorded: Recorded) -> tuple[Recording, str]:
    """The recording in the terms of the packed tokens, and the name of the rotary embedding's
    argument, "" without one. Raises DoesNotFitError with what the layer takes or returns else.
    """
    layer_call, at = recorded.call, recorded.attended_at
    if recorded.attention is None:
        raise DoesNotFitError(OTHER_ARGUMENTS)
    if not isinstance(layer_call.output, Tensor):
        raise DoesNotFitError("it returns more than hidden states")
    hidden: Tensor = layer_call.inputs[0]
    name, rope = "", (hidden[0, :, :0],) * 2
    for key, value in layer_call.arguments.items():
        if (
            isinstance(value, tuple)
            and len(value) == 2
            and all(isinstance(x, Tensor) and x.dim() == 3 for x in value)
        ):
            name, rope = key, (value[0][0], value[1][0])
    query, key_, value_, attended, call = recorded.attention
    inside = [x for x in recorded.calls if x.module is not recorded.layer]
    before, after = ([x.unary for x in calls] for calls in (inside[:at], inside[at:]))
    return Recording(
        input=hidden[0],
        output=layer_call.output[0],
        rope=rope,
        before=[x for x in before if has_weights(x.module)],
        after=[x for x in after if has_weights(x.module)],
        blocks=[
            x
            for x in after
            if x.input.dim() == x.output.dim() == 3 and any(True for _ in x.module.parameters())
        ],
        query=query,
        key=key_,
        value=value_,
        attended=attended,
        call=call,
        play_back=partial(_played_back, recorded),
        attend_again=partial(_attended_again, recorded),
    ), name


def _played_back(recorded: Recorded, factor: float) -> list[ModuleCall]:
    """The calls of a layer's modules as ``play_back`` has them."""
    step = ProbePass(torch.tensor([0], device=recorded.call.inputs[0].device))
    return [x.unary for x in play_back(_repeat_in(recorded, step), recorded.calls, factor)]


def _attended_again(recorded: Recorded) -> Replay:
    step = _ReplayPass(torch.tensor([0], device=recorded.call.inputs[0].device))
    run = _repeat_in(recorded, step)
    calls = play_back(run, recorded.calls, LARGE, count=recorded.attended_at)
    return Replay([x.unary for x in calls], step.attention)


def _repeat_in(recorded: Recorded, step: ProbePass) -> Callable[[], Tensor]:
    """What runs the layer with what it got, in this pass."""
    call = recorded.call
    return partial(_run, call.module, call.inputs[0], call.arguments, step)


def _run(layer: nn.Module, hidden: Tensor, arguments: dict[str, Any], step: ProbePass) -> Tensor:
    """What a layer gives of these hidden states [B, T, hidden] in a pass of its own."""
    token = CURRENT_PASS.set(step)
    try:
        out: Tensor = layer(hidden, **arguments)
        return out
    finally:
        CURRENT_PASS.reset(token)


class _ReplayPass(ProbePass):
    """Keeps what the attention of one layer gets and returns."""

    attention: tuple[Tensor, ...] = ()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        out = super().attend(layer, query, key, value, call)
        self.attention = (query, key, value, out)
        return out


class _ChangingPass(ProbePass):
    """So many passes in one batch, of which attention reads changed queries, keys and values."""

    def __init__(self, keep: Tensor, changes: Changes, samples: int) -> None:
        super().__init__(keep)
        self.sequences = samples
        self._changes = changes

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        # A score sums over a head, an output over the tokens.
        read = self._changes.of(query, query.shape[-1]), key, self._changes.of(value, len(value))
        return super().attend(layer, *read, call)


def repeat(call: Call, changes: Changes, samples: int = SAMPLES) -> Tensor:
    """What a layer gives [samples, T, hidden] of what it got when it was recorded, each time with
    other changes of all that its modules and its attention read. Its weights must be of the
    recording's type.
    """
    hidden, layer = call.inputs[0], call.module
    sampled = partial(_sampled, samples=samples)
    batch, arguments = tree_map_only(Tensor, sampled, (hidden, call.arguments))
    keep = torch.tensor([0], device=hidden.device)
    with changes.inside(layer.modules()):
        return _run(layer, batch, arguments, _ChangingPass(keep, changes, samples))


def _sampled(x: Tensor, samples: int) -> Tensor:
    """A batch of so many copies of what is a batch of one."""
    return x.repeat(samples, *[1] * (x.dim() - 1)) if x.dim() and len(x) == 1 else x


@contextmanager
def modules_in_float32(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block each module that has weights reads and computes in float32, with
    its own weights widened only while it runs, and those of a linear one by rows.
    """
    with ExitStack() as hooks:
        for module in filter(has_weights, model.modules()):
            target: Any = module  # torch types each attribute as tensor or module
            if isinstance(module, nn.Embedding):  # whose table is large, and its rows exact
                hook = module.register_forward_hook(lambda _m, _i, rows: rows.float())
                hooks.enter_context(hook)
            elif type(module) is nn.Linear and "forward" not in vars(module):
                target.forward = partial(_product_in_float32, module)
                hooks.callback(vars(module).pop, "forward")
            else:
                _widen_while_it_runs(hooks, module)
        yield


def _product_in_float32(module: nn.Linear, x: Tensor) -> Tensor:
    x, weight, bias = x.float(), module.weight, module.bias
    products = [x @ weight[chunk].float().T for chunk in row_chunks(*weight.shape)]
    product = torch.cat(products, dim=-1)
    return product if bias is None else product + bias.float()


def _widen_while_it_runs(
    hooks: ExitStack,
    module: nn.Module,
    device: torch.device | None = None,
    returned: torch.dtype | None = None,
) -> None:
    """Until ``hooks`` are closed a module reads float32 and computes in it, with ``device`` there.
    With a type ``returned`` it gives that: around the hooks that are there, which see float32. Else
    these hooks are inside those, which may put the weights where they are needed.
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

    inside = returned is None
    before = module.register_forward_pre_hook(widen, with_kwargs=True, prepend=not inside)
    hooks.enter_context(before)
    hooks.enter_context(module.register_forward_hook(narrow, prepend=inside))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """The values with every tensor of floats in this type."""
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)
