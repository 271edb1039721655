"""Replaces the decoder layers of a loaded model by fused ones, where their structure allows it.

Owns the recorded pass, the order (recognize → pack → compare with the original → replace, one layer
after the other) and the fused layer's chain of operations. A replaced layer drops its own matrices
at once, so that no more than one layer is held twice; transformers' code can then no longer compute
it.

A model in bfloat16 is recorded and compared in float32, one layer at a time with its weights
widened: the comparison can then tell a wrong function from rounding. Its packed weights are the
same bfloat16 values; its fused layers compute in float32, or in bfloat16 with a residual in float32
(``LayerOperations.in_float32``), and between two runs of them hidden states are bfloat16 as
elsewhere in the model. What lies around them is recorded in float32, too, and a model without its
own code (``whole_model``) is float32 from its embeddings to its logits. What is said of bfloat16
holds for float16.

Quantized weights are first rounded where they are, or come rounded from the checkpoint:
transformers' code multiplies by what they stand for (``models/quantized.py``), fused layers by
their own copy of the same numbers, so every comparison judges the kernels alone.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from fairlead_kernels.attention import Heads, LayerSpec
from fairlead_kernels.cpu import CpuOperations
from fairlead_kernels.cpu_attention import CpuAttention
from fairlead_kernels.cpu_layers import LayerChain
from fairlead_kernels.layer import Layer, LayerOperations, Packed
from fairlead_kernels.quantize import FP8, Format, Quantized, quantize
from fairlead_kernels.slabs import SLAB
from fairlead_kernels.triton_fixed import FixedOperations
from fairlead_runtime.device import whole_model
from fairlead_runtime.device.attention import (
    CURRENT_PASS,
    AttentionCall,
    CachedLayer,
    CachedPass,
    PagedPass,
    spec_of,
)
from fairlead_runtime.device.group import Group
from fairlead_runtime.device.kv_cache import CacheStorage
from fairlead_runtime.device.layer_parts import (
    CLOSE,
    CLOSE_ROUNDED,
    DoesNotFitError,
    ModuleCall,
    Recording,
    Rope,
    RopeArgument,
    close,
    recognize,
)
from fairlead_runtime.device.own_ends import replace_ends
from fairlead_runtime.device.packed_products import PackedProducts, pack_products
from fairlead_runtime.device.paged_model import PagedModel, ProbePass, causal_attention
from fairlead_runtime.device.whole_model import TOKENS
from fairlead_runtime.device.widened import Widened
from fairlead_runtime.heap import release_memory
from fairlead_runtime.models.quantized import QuantizedEmbedding, QuantizedLinear

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fusion:
    """How many of a model's layers are fused; ``reason`` says why the others are not.

    ``head``: the type of a packed head, "" for none; ``head_reason``: why the model's own code
    calls it where all layers are fused. ``others``: what else of that code is packed.
    """

    fused: int
    layers: int
    reason: str = ""
    stored: torch.dtype = torch.float32  # their weights
    head: str = ""
    head_reason: str = ""
    rounds: bool = False  # whether their products round what they multiply by these
    others: PackedProducts = field(default_factory=PackedProducts)

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        names = {FP8: "fp8", torch.uint8: "int4"}
        name = names.get(self.stored, str(self.stored).removeprefix("torch."))
        weights = f", {name} weights" if self.fused and self.stored is not torch.float32 else ""
        head = f", {self.head} head" if self.head else ""
        if self.head_reason:
            head = f"{head} in" if head else ", head by"
            head += f" the model's code ({self.head_reason})"
        return f"fused {self.fused}/{self.layers} layers{why}{weights}{self.others}{head}"


class FusedLayer:
    """One decoder layer as a chain of operations. With ``group`` its matrices are one rank's part:
    what those give whose inputs are split is summed over the ranks, then biases are added.
    """

    def __init__(
        self,
        index: int,
        layer: Layer,
        spec: LayerSpec,
        call: AttentionCall,
        rope: RopeArgument,
        operations: LayerOperations,
        group: Group | None = None,
    ) -> None:
        self.index = index
        self.layer = layer
        self.spec = spec
        self.rope = rope
        self._call = call
        self._operations = operations
        self._group = group

    def run(self, x: Tensor, added: list[Tensor], rope: Rope, current: CachedPass) -> Tensor:
        """Hidden states x [T, hidden] and the rotary embedding → hidden states. May change x.

        To x belongs what is in ``added``, one tensor or none. It is taken out, so that nobody holds
        it any longer, and the layer leaves in its place what the next one's norm adds.
        """
        ops, layer = self._operations, self.layer
        if added:
            normed, residual = ops.norm(added.pop(), layer.input_norm, x)
        else:
            normed, residual = ops.norm(x, layer.input_norm)
        branch = self._attention(normed, rope, current)
        if layer.parallel:
            if layer.mlp_norm is not layer.input_norm:
                normed, _ = ops.norm(residual, layer.mlp_norm)
            added.append(self._side_by_side(residual, branch, normed))
            return residual
        branch = self._sum(branch, layer.out_bias)
        if layer.after_attention is not None:
            branch, _ = ops.norm(branch, layer.after_attention)
        normed, residual = ops.norm(branch, layer.mlp_norm, residual)
        added.append(self._after_mlp(self._mlp(normed)))
        return residual

    def _side_by_side(self, residual: Tensor, attended: Tensor, normed: Tensor) -> Tensor:
        """What the next layer adds to the residual, to which the rest is added here. Ranks need one
        sum of both branches, unless a norm comes between.
        """
        layer = self.layer
        if self._group is None or layer.after_mlp is not None:
            residual.add_(self._sum(attended, layer.out_bias))
            return self._after_mlp(self._mlp(normed))
        both = attended.add_(self._mlp(normed))
        return self._sum(both, layer.out_bias, layer.down_bias)

    def _attention(self, normed: Tensor, rope: Rope, current: CachedPass) -> Tensor:
        """What attention adds to the residual, before ``_sum``."""
        ops, layer = self._operations, self.layer
        qkv = ops.linear(normed, layer.qkv, layer.qkv_bias)
        cached = current.cached(self.index)
        query = ops.rope_write(
            qkv, *rope, cached.slots, cached.keys, cached.values, layer.q_norm, layer.k_norm
        )
        attended = current.attend_cached(self.index, query, self._call)
        return self._product(attended.flatten(1), layer.out, layer.out_bias)

    def _mlp(self, normed: Tensor) -> Tensor:
        """What the MLP adds to the residual, before ``_sum``."""
        ops, layer = self._operations, self.layer
        mix = ops.gated if layer.gated else ops.activate
        gated = mix(ops.linear(normed, layer.gate_up, layer.gate_up_bias), layer.activation)
        return self._product(gated, layer.down, layer.down_bias)

    def _after_mlp(self, branch: Tensor) -> Tensor:
        branch = self._sum(branch, self.layer.down_bias)
        if self.layer.after_mlp is not None:
            branch, _ = self._operations.norm(branch, self.layer.after_mlp)
        return branch

    def _product(self, x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
        """With the bias, unless the ranks' products are still to be summed."""
        return self._operations.linear(x, weight, None if self._group else bias)

    def _sum(self, part: Tensor, *biases: Tensor | None) -> Tensor:
        """All ranks' products and the biases; ``part`` itself where it is whole. May change it."""
        if self._group is None:
            return part
        total = self._group.sum(part)
        for bias in biases:
            if bias is not None:
                total.add_(bias)
        return total

    @property
    def rounds(self) -> bool:
        """Whether its products round their inputs."""
        layer = self.layer
        return any(x.rounding for x in (layer.qkv, layer.out, layer.gate_up, layer.down))

    @property
    def sizes(self) -> tuple[int, ...]:
        layer = self.layer
        return layer.qkv.rows, layer.qkv.columns, layer.gate_up.rows, layer.down.columns


class FusedRun:
    """Consecutive fused layers of equal sizes, computed together when the last one is called; the
    others only note their rotary embedding. In C++ they are one call, but for ``split`` ones, whose
    sums lie in between; elsewhere one operation after another.
    """

    def __init__(
        self,
        layers: Sequence[FusedLayer],
        heads: Heads,
        operations: LayerOperations,
        *,
        split: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self.arguments = tuple(layer.rope for layer in layers)
        self._chain: LayerChain | None = None
        self._cache: CacheStorage | None = None  # whose layers the chain has
        if isinstance(operations, CpuOperations) and not split:
            parts, specs = [x.layer for x in layers], [x.spec for x in layers]
            self._chain = operations.chain(heads, parts, specs)
        self._ropes: list[Rope] = []
        # By the id of the model's own tensor.
        self._known: dict[tuple[int, RopeArgument], Rope] = {}

    def forward_of(self, place: int) -> Callable[..., Tensor]:
        """What takes the place of the ``forward`` of layer ``place`` of this run: hidden states
        [1, T, hidden] in and out.
        """

        def forward(hidden_states: Tensor, *_: Any, **arguments: Any) -> Tensor:
            if place == 0:
                self._forget()  # what a failed pass has left
            rope = self.layers[place].rope
            self._note_rope(rope, arguments.get(rope.name), hidden_states)
            if place + 1 < len(self.layers):
                return hidden_states
            current = CURRENT_PASS.get()
            if not isinstance(current, CachedPass):
                message = "fused layers run only inside PagedModel.forward"
                raise RuntimeError(message)  # noqa: TRY004 - no argument is wrong, the call is
            result = self.compute(hidden_states[0].float(), self._ropes, current)
            self._forget()
            return result[None].to(hidden_states.dtype)

        return forward

    def _forget(self) -> None:
        self._ropes.clear()
        self._known.clear()

    def _note_rope(self, argument: RopeArgument, given: Rope | None, x: Tensor) -> None:
        """The same tensors for layers that are given the same."""
        key = 0 if given is None else id(given[0]), argument
        if key not in self._known:
            self._known[key] = argument.read(given or (x[..., :0], x[..., :0]))
        self._ropes.append(self._known[key])

    def compute(
        self, x: Tensor, ropes: Sequence[Rope], current: CachedPass, *, all_tokens: bool = True
    ) -> Tensor:
        """Hidden states float32 [T, hidden], with each layer's rotary embedding → those after the
        layers: of all tokens, or of ``current.keep``, which must ascend. May change x.
        """
        keep = None if all_tokens or len(current.keep) == len(x) else current.keep
        if (
            self._chain is not None
            and isinstance(current, PagedPass)
            and isinstance(current.backend, CpuAttention)
        ):
            if self._cache is not current.cache:
                found = [current.cache.layer(layer.index) for layer in self.layers]
                caches = [(keys, values) for keys, values, _ in found]
                self._chain.bind(caches, groups=[group for _, _, group in found])
                self._cache = current.cache
            return self._chain.run(
                x,
                plans=[plan for plan, _ in current.groups],
                slots=[slots for _, slots in current.groups],
                ropes=ropes,
                # In proportion, so that this step's tensors are those of the larger one.
                slab=-(-SLAB * len(x) // max(len(x), current.stands_for)),
                keep=keep,
            )
        added: list[Tensor] = []
        for layer, rope in zip(self.layers, ropes, strict=True):
            x = layer.run(x, added, rope, current)
        x.add_(added.pop())
        return x if keep is None else x[keep]


@torch.inference_mode()
def quantize_weights(model: PagedModel, to: Format, *, head: bool = False) -> None:
    """Quantize the matrices of every layer that fits, one layer after the other: each is held by a
    ``QuantizedLinear`` instead, for transformers' code to compute with and for ``fuse`` to pack.
    With ``head`` the output matrix, too, and embeddings that share it.
    """
    shared = _shared_parameters(model.model)
    layers = _decoder_layers(model) or []
    # What is recorded of a layer holds its modules: it goes with them.
    recorded = deque(_record(model, layers))
    for layer in layers:
        _quantize_layer(layer, recorded.popleft(), shared, to)
    release_memory()  # of the plain weights, which no layer after these takes up
    if head and layers:
        _quantize_head(model, layers, to)


def _quantize_layer(layer: nn.Module, recorded: "_Recorded", shared: set[int], to: Format) -> None:
    widened = Widened(layer)
    try:
        parts = recognize(_recording(recorded)[0])
        found = {} if _shares(layer, shared) else {x.module: x.stored for x in parts.matrices}
    except DoesNotFitError:
        found = {}  # `fuse` gives the reason
    widened.narrow()
    for parent in list(layer.modules()):
        for name, module in list(parent.named_children()):
            weight = found.get(module)
            if isinstance(weight, Tensor):
                vectors = [x for x in module.parameters(recurse=False) if x.dim() == 1]
                bias = vectors[0] if vectors else None
                setattr(parent, name, QuantizedLinear(quantize(weight, to), bias))


def _quantize_head(model: PagedModel, layers: list[nn.Module], to: Format) -> None:
    step = ProbePass(torch.arange(TOKENS, device=model.device))
    try:
        ends = whole_model.recognize(model, layers, step)
    except DoesNotFitError:
        return  # `fuse` gives the reason
    matrix, tied = ends.head, ends.tied
    if isinstance(matrix.stored, Quantized):
        return
    rounded = quantize(matrix.stored, to)
    unscaled = None if matrix.bias is None else matrix.bias / matrix.factor
    embedding = QuantizedEmbedding(rounded, ends.factor) if tied else None
    model.replace_ends(QuantizedLinear(rounded, unscaled), embedding)


@contextmanager
def computed_in_float32(model: PagedModel) -> Iterator[None]:
    """Inside the ``with`` block every layer that fits computes in float32, as its fused one will,
    by transformers' code; nothing changes for a model in float32.
    """
    dtype = model.heads.dtype
    fitting = [] if dtype is torch.float32 else _fitting(model)
    hooks = [hook for layer in fitting for hook in _in_float32(layer, dtype, model.device)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def _fitting(model: PagedModel) -> list[nn.Module]:
    layers, found = _decoder_layers(model) or [], list[nn.Module]()
    for layer, recorded in zip(layers, _record(model, layers), strict=True):
        widened = Widened(layer, model.device)
        try:
            recognize(_recording(recorded)[0])
            found.append(layer)
        except DoesNotFitError:
            pass  # `fuse` gives the reason
        finally:
            widened.narrow()
    return found


@torch.inference_mode()
def fuse(
    model: PagedModel, operations: LayerOperations | None, group: Group | None = None
) -> Fusion:
    """Replace every layer that fits by a fused one on these operations; without any, none. Weights
    are packed in the model's type, quantized ones as they are.

    The result of each fused layer, packed weights and all, is compared with the original's first;
    a layer that differs keeps its own code and weights. On CPUs what lies around the layers is
    replaced, too, or the matrices that the model's own code multiplies by are packed; where sums
    have one order, the last norm and the head are.

    With ``group`` the model is one rank's part of a split one (``shards.split``), and every rank
    must call this with the same kind of operations: a layer is fused on all of them or on none, and
    what lies around the layers stays as it is.
    """
    if operations is None:
        return Fusion(0, len(model.windows))
    fusion, runs = _fuse_layers(model, operations, group)
    step = _ScratchPass(model.heads, model.device)
    if isinstance(operations, FixedOperations) and fusion.fused == fusion.layers:
        layers = _decoder_layers(model) or []
        try:
            return replace(fusion, head=replace_ends(model, layers, operations, step))
        except DoesNotFitError as error:
            return replace(fusion, head_reason=str(error))
    if group is not None or not isinstance(operations, CpuOperations):
        return fusion
    if fusion.fused == fusion.layers:
        try:
            whole = _fuse_ends(model, runs, operations, step)
            return replace(fusion, head=whole.stored)
        except DoesNotFitError as error:
            fusion = replace(fusion, head_reason=str(error))
    others = pack_products(model, operations, step)
    return replace(fusion, head=others.head, others=others)


def _fuse_layers(
    model: PagedModel, operations: LayerOperations, group: Group | None
) -> tuple[Fusion, list[FusedRun]]:
    layers, total = _decoder_layers(model), len(model.windows)
    if layers is None:
        return Fusion(0, total, "its decoder layers are not one list"), []
    fused: list[FusedLayer] = []
    reasons: dict[str, int] = {}
    shared = _shared_parameters(model.model)
    for index, recorded in enumerate(_record(model, layers)):
        layer: FusedLayer | None = None
        widened = Widened(layers[index])
        try:
            layer = _fused(layers[index], index, recorded, shared, model, operations, group)
        except DoesNotFitError as error:
            reasons.setdefault(str(error), index)
        widened.narrow()
        if layer is not None:
            _release(layers[index], operations)
            model.packed += layer.layer.tensors
            fused.append(layer)
    split = group is not None
    runs = [FusedRun(run, model.heads, operations, split=split) for run in _runs(fused)]
    for run in runs:
        for place, part in enumerate(run.layers):
            original: Any = layers[part.index]  # torch types each attribute as tensor or module
            original.forward = run.forward_of(place)
    reason = "; ".join(f"layer {index}: {text}" for text, index in reasons.items())
    stored = {layer.layer.qkv.data.dtype for layer in fused} or {model.heads.dtype}
    smallest = min(stored, key=lambda dtype: dtype.itemsize)
    rounds = any(layer.rounds for layer in fused)
    return Fusion(len(fused), total, reason, smallest, rounds=rounds), runs


def _fuse_ends(
    model: PagedModel, runs: list[FusedRun], operations: CpuOperations, step: CachedPass
) -> whole_model.WholeModel:
    """Let what lies around the layers be computed by these operations, too, once it is proven to
    give the same logits. Raises DoesNotFitError.
    """
    if len(runs) != 1:
        raise DoesNotFitError("its layers differ in their sizes")
    layers = _decoder_layers(model) or []
    widened = Widened(model.model)
    try:
        ends = whole_model.recognize(model, layers, step)
        expected = whole_model.other_logits(model, step)
        whole = whole_model.WholeModel(ends, runs[0], operations, model.heads.dtype)
        same = whole_model.agrees(model, whole, step, expected)
        if not same:
            whole.restore(ends)
    finally:
        widened.narrow()
    if not same:
        raise DoesNotFitError("its packed ends give other logits")
    ends.release()
    model.whole = whole
    model.packed += whole.packed
    return whole


def _release(layer: nn.Module, operations: LayerOperations) -> None:
    """Take the weights out of a layer of which the matrices are packed."""
    for parameter in layer.parameters():
        # Those that are mapped from a file would stay resident as long as another one's are.
        if isinstance(operations, CpuOperations) and parameter.dim() > 1:
            operations.give_back(parameter.data)
        parameter.data = parameter.new_empty(0)


def _runs(fused: Sequence[FusedLayer]) -> list[list[FusedLayer]]:
    """Consecutive layers of equal sizes."""
    runs: list[list[FusedLayer]] = []
    for layer in fused:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.index + 1, last.sizes) == (layer.index, layer.sizes):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


@dataclass(slots=True)
class _Recorded:
    """What the hooks saw of one layer. ``attended_at``: calls before its attention."""

    calls: list[ModuleCall]
    attended_at: int = -1
    attention: tuple[Tensor, Tensor, Tensor, Tensor, AttentionCall] | None = None
    arguments: dict[str, Any] | None = None
    input: Any = None
    output: Any = None


class _RecordingPass(ProbePass):
    """Records what each layer passes to its attention."""

    def __init__(self, keep: Tensor, layers: list[_Recorded]) -> None:
        super().__init__(keep)
        self._layers = layers

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        out = super().attend(layer, query, key, value, call)
        recorded = self._layers[layer]
        recorded.attended_at = len(recorded.calls)
        recorded.attention = (query.clone(), key.clone(), value.clone(), out.clone(), call)
        return out


class _ScratchPass(CachedPass):
    """One short sequence in a float32 cache of its own."""

    def __init__(self, heads: Heads, device: torch.device) -> None:
        size = (1, TOKENS, heads.kv)
        keys = torch.zeros(*size, heads.dim, device=device)
        values = torch.zeros(*size, heads.value_dim, device=device)
        self.keep = torch.arange(TOKENS, device=device)
        self._cached = CachedLayer(keys, values, self.keep)

    def cached(self, _layer: int) -> CachedLayer:
        return self._cached

    def attend_cached(self, _layer: int, query: Tensor, call: AttentionCall) -> Tensor:
        keys, values = (x[0].to(query.dtype) for x in (self._cached.keys, self._cached.values))
        return causal_attention(query, keys, values, call.scale)


def _decoder_layers(model: PagedModel) -> list[nn.Module] | None:
    """The list of modules of which the i-th holds the attention of layer i."""
    count = len(model.windows)
    for module in model.model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            held = [
                {getattr(part, "layer_idx", None) for part in layer.modules()} - {None}
                for layer in module
            ]
            if held == [{index} for index in range(count)]:
                return list(module)
    return None


def _record(model: PagedModel, layers: list[nn.Module]) -> list[_Recorded]:
    """One pass of random tokens at positions spread over the model's context, each layer in
    float32.
    """
    ids, positions = whole_model.random_tokens(model, seed=0)
    recorded = [_Recorded([]) for _ in layers]
    hooks = []
    for layer, place in zip(layers, recorded, strict=True):
        hooks.append(layer.register_forward_hook(_layer_hook(place), with_kwargs=True))
        hooks += [
            module.register_forward_hook(_module_hook(place))
            for module in layer.modules()
            if module is not layer and any(True for _ in module.parameters(recurse=False))
        ]
        if model.heads.dtype is not torch.float32:
            hooks += _in_float32(layer, model.heads.dtype, model.device)
    try:
        step = _RecordingPass(torch.tensor([0], device=model.device), recorded)
        model.run(ids, positions, step)
    finally:
        for hook in hooks:
            hook.remove()
    return recorded


def _module_hook(place: _Recorded) -> Any:
    def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if len(inputs) == 1 and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            place.calls.append(ModuleCall(module, inputs[0].clone(), output.clone()))
        else:
            place.calls.append(ModuleCall(module, torch.empty(0, 1), torch.empty(0, 1)))

    return record


def _in_float32(
    layer: nn.Module, dtype: torch.dtype, device: torch.device
) -> list[RemovableHandle]:
    """Hooks, after the recording ones, with which a layer of another type computes in float32 on
    ``device``: inputs and weights are widened before, weights and hidden states narrowed after.
    """
    widened: list[Widened] = []

    def widen(_module: nn.Module, inputs: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        widened.append(Widened(layer, device))
        return _cast((inputs, arguments), dtype, torch.float32)

    def narrow(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        widened.pop().narrow()
        return _cast(output, torch.float32, dtype)

    return [
        layer.register_forward_pre_hook(widen, with_kwargs=True),
        layer.register_forward_hook(narrow),
    ]


def _cast(values: Any, given: torch.dtype, wanted: torch.dtype) -> Any:
    """The same with every tensor of the one type in the other."""
    return tree_map_only(Tensor, lambda x: x.to(wanted) if x.dtype is given else x, values)


def _layer_hook(place: _Recorded) -> Any:
    def record(
        _module: nn.Module, inputs: tuple[Any, ...], arguments: dict[str, Any], output: Any
    ) -> None:
        place.input = inputs[0].clone() if inputs else None
        place.arguments = arguments
        place.output = output

    return record


def _fused(
    original: nn.Module,
    index: int,
    recorded: _Recorded,
    shared: set[int],
    model: PagedModel,
    operations: LayerOperations,
    group: Group | None,
) -> FusedLayer:
    """The fused layer, proven equal to the original. Raises DoesNotFitError, on every rank or on
    none.
    """

    def packed() -> tuple[FusedLayer, Recording, Rope]:
        recording, rope = _recording(recorded)
        parts = recognize(recording)
        if _shares(original, shared):
            raise DoesNotFitError("it shares weights with another module")
        if group is not None and not parts.split:
            raise DoesNotFitError("not all of its matrices are split")
        spec = spec_of(parts.call, model.windows[index])
        argument = RopeArgument(rope if parts.rotates else "", parts.rope_in_pairs)
        layer = parts.pack(operations, model.heads.dtype)
        x = recording.input
        cos, sin = recording.rope if parts.rotates else (x[:, :0], x[:, :0])
        angles = argument.read((cos[None], sin[None]))
        fused = FusedLayer(index, layer, spec, parts.call, argument, operations, group)
        return fused, recording, angles

    def proven() -> None:
        added: list[Tensor] = []
        step = _ScratchPass(model.heads, model.device)
        out = fused.run(recording.input.clone(), added, angles, step)
        allowed = CLOSE_ROUNDED if fused.rounds else CLOSE
        if not close(out + added.pop(), recording.output, allowed=allowed):
            raise DoesNotFitError("its fused layer gives other results")

    fused, recording, angles = _on_every_rank(group, packed)
    _on_every_rank(group, proven)
    if not operations.in_float32:
        fused.layer = fused.layer.cast(model.heads.dtype)
    return fused


def _on_every_rank(group: Group | None, do: Callable[[], T]) -> T:
    """What ``do`` returns, once it has succeeded on every rank. Raises DoesNotFitError on each of
    them where it does on one: they would wait for each other's sums for ever.
    """
    if group is None:
        return do()
    try:
        done = do()
    except DoesNotFitError:
        group.agrees(False)
        raise
    if not group.agrees(True):
        raise DoesNotFitError("it does not fit on another rank")
    return done


def _recording(recorded: _Recorded) -> tuple[Recording, str]:
    """The recording in the terms of the packed tokens, and the name of the rotary embedding's
    argument, "" without one.
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
        query=query,
        key=key_,
        value=value_,
        attended=attended,
        call=call,
    ), name


def _shares(layer: nn.Module, shared: set[int]) -> bool:
    """Whether a module of the layer is one of ``shared``, by its id."""
    return not shared.isdisjoint(map(id, layer.modules()))


def _shared_parameters(model: nn.Module) -> set[int]:
    """The ids of the modules of which a parameter also belongs to another module."""
    owners: dict[int, list[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(id(module))
    return {module for modules in owners.values() if len(modules) > 1 for module in modules}
