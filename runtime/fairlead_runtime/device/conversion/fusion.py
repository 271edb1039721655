"""Replaces the decoder layers of a loaded model by fused ones, where their structure allows it.

Owns the order: recognize → pack → compare with the original → replace, one layer after the other.
A replaced layer drops its own matrices at once, so that no more than one layer is held twice;
transformers' code can then no longer compute it. What a layer does is seen by ``recording_pass``;
what takes its place is in ``fused_layers``.

A model in bfloat16 is recorded and compared in float32, one layer at a time with its weights
widened: the comparison can then tell a wrong function from rounding. Its packed weights are the
same bfloat16 values; its fused layers compute in float32, or in bfloat16 with a residual in float32
(``LayerOperations.in_float32``), and between two runs of them hidden states are bfloat16 as
elsewhere in the model. What lies around them is recorded in float32, too, and a model without its
own code (``whole_model``) is float32 from its embeddings to its logits. What is said of bfloat16
holds for float16.

A layer of which only the MLP does not fit, experts for one, is replaced around it on GPUs: the
module stays as it is, with its weights, and computes in the model's type.

Quantized weights are first rounded where they are, or come rounded from the checkpoint:
transformers' code multiplies by what they stand for (``models/quantized.py``), fused layers by
their own copy of the same numbers, so every comparison judges the kernels alone.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from fairlead_kernels.cpu.cpu_operations import CpuOperations
from fairlead_kernels.formats.quantize import FP8, Format, Quantized, quantize
from fairlead_kernels.interface.attention import Heads
from fairlead_kernels.interface.layer import LayerOperations, Packed
from fairlead_runtime.child.heap import release_memory
from fairlead_runtime.device.conversion import recognize_ends
from fairlead_runtime.device.conversion.fixed_order_ends import use_fixed_order_ends
from fairlead_runtime.device.conversion.float32_view import widened_to_float32
from fairlead_runtime.device.conversion.pack_states import PackedStates
from fairlead_runtime.device.conversion.packed_linears import (
    PackedProducts,
    owners_of,
    pack_products,
)
from fairlead_runtime.device.conversion.recognize_ends import TOKENS
from fairlead_runtime.device.conversion.recognize_layer import (
    DoesNotFitError,
    Recording,
    recognize,
)
from fairlead_runtime.device.conversion.recording_pass import (
    Recorded,
    decoder_layers,
    record,
    recording_of,
    repeat,
)
from fairlead_runtime.device.conversion.replacement import Replacement
from fairlead_runtime.device.conversion.rounding import SAMPLES, Noise
from fairlead_runtime.device.model.fused_layers import (
    FusedLayer,
    FusedRun,
    Rope,
    RopeArgument,
    UnfusedMlp,
)
from fairlead_runtime.device.model.paged_attention import (
    AttentionCall,
    CachedLayer,
    CachedPass,
    spec_of,
)
from fairlead_runtime.device.model.paged_model import PagedModel, ProbePass, causal_attention
from fairlead_runtime.device.model.rank_group import RankGroup
from fairlead_runtime.device.model.state_cache import FirstStates
from fairlead_runtime.device.model.state_layers import StateMixer
from fairlead_runtime.models.quantized import QuantizedEmbedding, QuantizedLinear
from fairlead_runtime.settings.startup_parts import Report, unreported
from fairlead_runtime.sizing.groups import NO_KEYS

T = TypeVar("T")
OTHER_RANK = "it does not fit on another rank"


@dataclass(frozen=True, slots=True)
class Fusion:
    """How many of a model's layers are fused, and ``around_mlp`` how many others are but for an MLP
    that stays the model's own; ``reason`` says why not all are.

    ``head``: the type of a packed head, "" for none; ``head_reason``: why the model's own code
    calls it where all layers are fused. ``products``: what else of that code is packed; ``states``:
    the mixers that run once a step.
    """

    fused: int
    layers: int
    reason: str = ""
    around_mlp: int = 0
    stored: torch.dtype = torch.float32  # their weights
    head: str = ""
    head_reason: str = ""
    products: PackedProducts = field(default_factory=PackedProducts)
    states: PackedStates = field(default_factory=PackedStates)

    def __str__(self) -> str:
        around = f" and all but the MLP of {self.around_mlp}" if self.around_mlp else ""
        cause = f"{around} ({self.reason})" if self.reason else ""
        names = {FP8: "fp8", torch.uint8: "int4"}
        name = names.get(self.stored, str(self.stored).removeprefix("torch."))
        fused = self.fused + self.around_mlp > 0
        weights = f", {name} weights" if fused and self.stored is not torch.float32 else ""
        head = f", {self.head} head" if self.head else ""
        if self.head_reason:
            head = f"{head} in" if head else ", head by"
            head += f" the model's code ({self.head_reason})"
        layers = f"fused {self.fused}/{self.layers} layers{cause}"
        return f"{layers}{weights}{self.products}{self.states}{head}"


@torch.inference_mode()
def quantize_weights(model: PagedModel, to: Format, *, head: bool = False) -> None:
    """Quantize the matrices of every layer that fits, one layer after the other: each is held by a
    ``QuantizedLinear`` instead, for transformers' code to compute with and for ``fuse`` to pack.
    With ``head`` the output matrix, too, and embeddings that share it.
    """
    if model.states:
        _quantize_linears(model, to)
        return
    owners = owners_of(model.model)
    layers = decoder_layers(model)
    # What is recorded of a layer holds its modules: it goes with them.
    recorded = deque(record(model, layers))
    for layer in layers:
        _quantize_layer(layer, recorded.popleft(), owners, to)
    release_memory()  # of the plain weights, which no layer after these takes up
    if head and layers:
        _quantize_head(model, layers, to)


def _quantize_linears(model: PagedModel, to: Format) -> None:
    """Quantize what the model's code multiplies by but its head: each linear layer by itself, which
    goes on being called.
    """
    head = model.model.get_output_embeddings()
    for parent in list(model.model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is nn.Linear and module is not head:
                bias = None if module.bias is None else module.bias.data
                setattr(parent, name, QuantizedLinear(quantize(module.weight.data, to), bias))
    release_memory()


def quantized_elements(model: PagedModel) -> int:
    """Elements of all matrices that are held quantized."""
    linears = (m for m in model.model.modules() if isinstance(m, QuantizedLinear))
    return sum(math.prod(linear.weight.shape) for linear in linears)


def _quantize_layer(layer: nn.Module, recorded: Recorded, owners: Counter[int], to: Format) -> None:
    try:
        with widened_to_float32(layer):
            structure = recognize(recording_of(recorded)[0])
            fits = not isinstance(structure.mlp, UnfusedMlp) and not _shares(layer, owners)
            weights = {x.module: x.stored for x in structure.matrices} if fits else {}
    except DoesNotFitError:
        weights = {}  # `fuse` gives the reason
    for parent in list(layer.modules()):
        for name, module in list(parent.named_children()):
            weight = weights.get(module)
            if isinstance(weight, Tensor):
                vectors = [x for x in module.parameters(recurse=False) if x.dim() == 1]
                bias = vectors[0] if vectors else None
                setattr(parent, name, QuantizedLinear(quantize(weight, to), bias))


def _quantize_head(model: PagedModel, layers: list[nn.Module], to: Format) -> None:
    step = ProbePass(torch.arange(TOKENS, device=model.device))
    try:
        ends = recognize_ends.recognize(model, layers, step)
    except DoesNotFitError:
        return  # `fuse` gives the reason
    matrix, tied = ends.head, ends.tied
    if isinstance(matrix.stored, Quantized):
        return
    rounded = quantize(matrix.stored, to)
    unscaled = None if matrix.bias is None else matrix.bias / matrix.factor
    embedding = QuantizedEmbedding(rounded, ends.factor) if tied else None
    model.swap_embeddings(QuantizedLinear(rounded, unscaled), embedding)


@torch.inference_mode()
def fuse(
    model: PagedModel,
    operations: LayerOperations | None,
    ranks: RankGroup | None = None,
    repack: Callable[[Packed], Packed] | None = None,
    report: Report = unreported,
    *,
    every_product: bool = False,
) -> Fusion:
    """Replace every layer that fits by a fused one on these operations; without any, none. Weights
    are packed in the model's type, quantized ones as they are.

    The result of each fused layer, packed weights and all, is compared with the original's first;
    a layer that differs keeps its own code and weights. Operations that are not ``in_float32`` also
    replace layers of which only the MLP does not fit: that stays a module, which they call. On CPUs
    what lies around the layers is replaced, too, or the matrices that the model's own code
    multiplies by are packed; where sums have one order, the last norm and the head are.

    ``repack`` gives each matrix the layout in which it is served, once its layer is proven;
    ``report`` hears of each layer. ``every_product``: also those of the model's own code are packed
    that gain nothing by it, since their sums then have one order.

    With ``ranks`` the model is one rank's shard (``shards.shard``), and every rank must call this
    with the same kind of operations: a layer is fused on all of them or on none, and what lies
    around the layers stays as it is.
    """
    if operations is None:
        return Fusion(0, len(model.windows))
    fusion, runs = _fuse_layers(model, operations, ranks, repack, report)
    step = _ScratchPass(model)
    model_operations: CpuOperations | None = operations.model_operations
    if fusion.fused == fusion.layers:
        try:
            if model_operations is None and operations.fixed_order:
                layers = decoder_layers(model)
                return replace(fusion, head=use_fixed_order_ends(model, layers, operations, step))
            if model_operations is not None and ranks is None:
                return replace(fusion, head=_fuse_ends(model, runs, model_operations, step))
        except DoesNotFitError as error:
            fusion = replace(fusion, head_reason=str(error))
    if model_operations is None or ranks is not None:
        return fusion
    products = pack_products(model, model_operations, step, every=every_product)
    return replace(fusion, head=products.head, products=products)


def _fuse_layers(
    model: PagedModel,
    operations: LayerOperations,
    ranks: RankGroup | None,
    repack: Callable[[Packed], Packed] | None,
    report: Report,
) -> tuple[Fusion, list[FusedRun]]:
    layers, total = decoder_layers(model), len(model.windows)
    if not layers:
        return Fusion(0, total, "its decoder layers are not one list"), []
    fused: list[FusedLayer] = []
    reasons: dict[str, int] = {}
    owners = owners_of(model.model)
    for index, recorded in enumerate(record(model, layers)):
        report("kernels", index, total)
        try:
            with widened_to_float32(recorded.layer):
                layer, replacement = _fused(index, recorded, owners, model, operations, ranks)
        except DoesNotFitError as error:
            reasons.setdefault(str(error), index)
            continue
        if repack is not None:
            layer.layer = layer.layer.repacked(repack)
        if layer.unfused_mlp is not None:
            reasons.setdefault(layer.unfused_mlp.reason, index)
        replacement.apply()
        model.packed += layer.layer.tensors
        model.calls[index] = layer.call  # a factor of its queries is one of the scores here
        fused.append(layer)
    sharded = ranks is not None
    heads = model.layer_heads
    runs = [
        FusedRun(run, heads[run[0].index], operations, sharded=sharded)
        for run in _runs(fused, heads)
    ]
    for run in runs:
        places = enumerate(run.layers)
        Replacement({layers[x.index]: run.forward_of(place) for place, x in places}).apply()
    reason = "; ".join(f"layer {index}: {text}" for text, index in reasons.items())
    stored = {layer.layer.qkv.data.dtype for layer in fused} or {model.matrix_dtype}
    smallest = min(stored, key=lambda dtype: dtype.itemsize)
    around = sum(layer.unfused_mlp is not None for layer in fused)
    return Fusion(len(fused) - around, total, reason, around, smallest), runs


def _fuse_ends(
    model: PagedModel, runs: list[FusedRun], operations: CpuOperations, step: CachedPass
) -> str:
    """Let what lies around the layers be computed by these operations, too, once it is proven to
    give the same logits. Returns the type of the head. Raises DoesNotFitError.
    """
    if len(runs) != 1:
        raise DoesNotFitError("its layers differ in their sizes")
    with widened_to_float32(model.model):
        ends = recognize_ends.recognize(model, decoder_layers(model), step)
        rounding = max(layer.rounding for layer in runs[0].layers)  # as the layers do
        # One sample is no wider than all of them, and explains what nearly all right ends give.
        prove = partial(_proven_ends, model, ends, runs[0], operations, rounding)
        try:
            proven = prove(1)
        except DoesNotFitError:
            proven = None
        # Outside the handler, whose error holds the packed head.
        fused_model, replacement = prove(SAMPLES) if proven is None else proven
    replacement.apply()
    model.full_pass = fused_model
    model.packed += fused_model.packed
    return fused_model.stored


def _proven_ends(
    model: PagedModel,
    ends: recognize_ends.Ends,
    run: FusedRun,
    operations: CpuOperations,
    rounding: float,
    samples: int,
) -> tuple[recognize_ends.FusedModel, Replacement]:
    """What computes the ends in the place of the model's own code, which may be as far from that as
    so many ``samples`` of its noise explain. Raises DoesNotFitError, with all weights where they
    were.
    """
    # Before the head's weights are packed, which takes them.
    several = _ScratchPass(model, 1 + samples)
    expected, noise = recognize_ends.logits_and_noise(
        model, decoder_layers(model), several, rounding, samples
    )
    fused_model = recognize_ends.FusedModel(ends, run, operations, model.matrix_dtype)
    restore = partial(fused_model.restore, ends)
    replacement = Replacement(weights=ends.head_weights, restore=restore)
    step = _ScratchPass(model)
    replacement.prove(
        lambda: recognize_ends.agrees(model, fused_model, step, expected, noise),
        "its packed ends give other logits",
    )
    return fused_model, replacement


def _replacement_of(
    layer: nn.Module, operations: LayerOperations, mlp: UnfusedMlp | None
) -> Replacement:
    """What takes a layer's weights, but for those of an MLP that stays the model's own."""
    mlp_parameters = set[nn.Parameter]() if mlp is None else set(mlp.module.parameters())
    weights = [x for x in layer.parameters() if x not in mlp_parameters]
    # Those that are mapped from a file would stay resident as long as another one's are.
    owner: CpuOperations | None = operations.model_operations
    return Replacement(weights=weights, give_back=None if owner is None else owner.give_back)


def _runs(fused: Sequence[FusedLayer], heads: Sequence[Heads]) -> list[list[FusedLayer]]:
    """Consecutive layers of equal sizes, those of their ``heads``, by layer, too."""
    runs: list[list[FusedLayer]] = []
    sizes: object = None
    for layer in fused:
        before, sizes = sizes, (layer.sizes, heads[layer.index])
        if runs and (runs[-1][-1].index + 1, before) == (layer.index, sizes):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


class _ScratchPass(CachedPass):
    """Short sequences, one after the other, in a float32 cache of their own. Layers with heads of
    one size have it in common: each writes its keys before it reads them.
    """

    def __init__(self, model: PagedModel, sequences: int = 1) -> None:
        tokens = sequences * TOKENS
        self.keep = torch.arange(tokens, device=model.device)
        self._heads = model.layer_heads
        self._cached: dict[Heads, CachedLayer] = {}
        for h in {*self._heads}:
            keys, values = (
                torch.zeros(1, tokens, h.kv, dim, device=model.device)
                for dim in (h.dim, h.value_dim)
            )
            self._cached[h] = CachedLayer(keys, values, self.keep)

    def cached(self, layer: int) -> CachedLayer:
        return self._cached[self._heads[layer]]

    def mix(self, _layer: int, mixer: StateMixer, hidden: Tensor) -> Tensor:
        sequences = hidden.view(-1, TOKENS, hidden.shape[-1])
        return mixer.call(sequences, FirstStates()).reshape(hidden.shape)

    def attend_cached(self, layer: int, query: Tensor, call: AttentionCall) -> Tensor:
        cached = self.cached(layer)
        keys, values = (x[0].to(query.dtype) for x in (cached.keys, cached.values))
        count = len(query) // TOKENS
        each = zip(query.chunk(count), keys.chunk(count), values.chunk(count), strict=True)
        return torch.cat([causal_attention(q, k, v, call.scale) for q, k, v in each])


def _fused(
    index: int,
    recorded: Recorded,
    owners: Counter[int],
    model: PagedModel,
    operations: LayerOperations,
    ranks: RankGroup | None,
) -> tuple[FusedLayer, Replacement]:
    """The fused layer, proven equal to the original, and the weights in whose place it is. Raises
    DoesNotFitError, on every rank or on none.
    """

    def packed() -> tuple[FusedLayer, Recording, Rope]:
        if index in model.states:
            raise DoesNotFitError("it keeps a state")
        if model.sources[index] == NO_KEYS:
            raise DoesNotFitError("it has no attention")
        if model.sources[index] != index or model.sources.count(index) > 1:
            raise DoesNotFitError(
                "it reads the keys of another layer, or another one reads its keys"
            )
        recording, rope = recording_of(recorded)
        structure = recognize(recording)
        if _shares(recorded.layer, owners):
            raise DoesNotFitError("it shares weights with another module")
        unfused_mlp = structure.mlp if isinstance(structure.mlp, UnfusedMlp) else None
        # Those in float32 are C++, which computes runs of whole layers, and would give the model's
        # own code another type than it has.
        if unfused_mlp is not None and operations.in_float32:
            raise DoesNotFitError(unfused_mlp.reason)
        if ranks is not None and not structure.sharded:
            raise DoesNotFitError("not all of its matrices are split")
        call = structure.call
        spec = spec_of(call, model.windows[index])
        argument = RopeArgument(rope if structure.rotates else "", structure.rope_in_pairs)
        layer = structure.pack(operations, model.matrix_dtype)
        x = recording.input
        cos, sin = recording.rope if structure.rotates else (x[:, :0], x[:, :0])
        angles = argument.read((cos[None], sin[None]))
        fused = FusedLayer(index, layer, spec, call, argument, operations, ranks, unfused_mlp)
        return fused, recording, angles

    def proven() -> None:
        added: list[Tensor] = []
        step = _ScratchPass(model)
        out = fused.run(recording.input.clone(), added, angles, step)
        out += added.pop()

        def explained(samples: int) -> bool:
            again = partial(repeat, recorded.call, samples=samples)
            noise = Noise.of(recording.output, again, fused.rounding)
            return noise.explains(out, recording.output)

        # One sample is no wider than all of them, and explains what nearly all right layers give.
        # Ranks meet in each pass, so they make the same ones.
        samples = (SAMPLES,) if ranks is not None else (1, SAMPLES)
        replacement.prove(
            lambda: any(map(explained, samples)), "its fused layer gives other results"
        )

    fused, recording, angles = _on_every_rank(ranks, packed)
    if ranks is not None and not ranks.same_everywhere(fused.unfused_mlp is None):
        raise DoesNotFitError(OTHER_RANK)
    replacement = _replacement_of(recorded.layer, operations, fused.unfused_mlp)
    _on_every_rank(ranks, proven)
    if not operations.in_float32:
        fused.layer = fused.layer.cast(model.heads.dtype)
    return fused, replacement


def _on_every_rank(ranks: RankGroup | None, do: Callable[[], T]) -> T:
    """What ``do`` returns, once it has succeeded on every rank. Raises DoesNotFitError on each of
    them where it does on one: they would wait for each other's sums for ever.
    """
    if ranks is None:
        return do()
    try:
        done = do()
    except DoesNotFitError:
        ranks.all_true(False)
        raise
    if not ranks.all_true(True):
        raise DoesNotFitError(OTHER_RANK)
    return done


def _shares(layer: nn.Module, owners: Counter[int]) -> bool:
    """Whether another module has one of the layer's parameters, too."""
    return any(owners[id(x)] > 1 for x in layer.parameters())
