"""A model of which every part is known: embeddings, fused layers, last norm and head, one after the
other, without the model's own code.

Owns the recognition of what lies around the decoder layers, by what it computes as in
``recognize_layer``, and the pass of such a model. Of transformers' code only those rotary
embeddings are still called that are not cosines of positions times known frequencies. A model that
does anything else in between keeps its own code around its fused layers.

All is recognized in float32. A model in another type has its weights widened meanwhile
(``fusion``): what is kept of them is either the parameter, whose values are narrow again
afterwards, or a vector in float32.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fairlead_kernels.cpu.cpu_operations import CpuOperations
from fairlead_kernels.formats.quantize import Quantized
from fairlead_kernels.formats.row_chunks import row_chunks
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.layer import Norm
from fairlead_runtime.device.conversion.closeness import close, factor_of
from fairlead_runtime.device.conversion.float32_view import has_weights
from fairlead_runtime.device.conversion.module_calls import Call, record_calls
from fairlead_runtime.device.conversion.recognize_layer import (
    DoesNotFitError,
    Matrix,
    matrix_of,
    norm_of,
)
from fairlead_runtime.device.conversion.rounding import SAMPLES, Changes, Noise
from fairlead_runtime.device.model.fused_layers import Rope, RopeArgument
from fairlead_runtime.device.model.paged_attention import CachedPass, ForwardPass
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.models.quantized import QuantizedEmbedding

TOKENS = 8  # of a recorded pass, of a layer's too: both run in one scratch cache
EXACT = 1e-6  # difference of a cosine
OFFSETS = (0, 1, 2)  # of a table of positions: some families keep its first rows for padding


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows that are added by position: those of a module's weights [M, width] from ``offset``
    on.
    """

    weights: nn.Parameter
    offset: int

    @property
    def rows(self) -> Tensor:
        return self.weights.data[self.offset :]

    def of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows float32 [N, width], and where among them those of positions int64 [T] are."""
        if self.weights.dtype is torch.float32:
            return self.rows, positions
        return self.rows[positions].float(), torch.arange(len(positions))


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """What lies around a model's decoder layers.

    ``embedding``: its module, whose rows times ``factor`` are the hidden states, plus those of
    ``positions`` where there are some. ``ropes``: by layer the call that made its rotary embedding,
    None without one. ``head`` multiplies what ``norm`` returns, scaled to the logits, of which
    ``cap * tanh(logits / cap)`` is taken if it is not 0; ``tied``: its matrix is the embeddings'.
    ``last_norm`` is the module of ``norm``, ``product`` what the head's own module multiplies by.
    """

    embedding: nn.Module
    factor: float
    positions: Table | None
    ropes: Sequence[Call | None]
    norm: Norm
    head: Matrix
    tied: bool
    cap: float
    last_norm: nn.Module
    product: Matrix

    @property
    def head_weights(self) -> list[nn.Parameter]:
        """The parameters of the head, and of embeddings that share its matrix."""
        modules = [self.head.module, *([self.embedding] if self.tied else [])]
        return [x for module in modules for x in module.parameters(recurse=False)]


class Layers(Protocol):
    """All decoder layers of a model."""

    @property
    def arguments(self) -> Sequence[RopeArgument]:
        """How each layer reads its rotary embedding."""

    def compute(
        self, x: Tensor, ropes: Sequence[Rope], current: CachedPass, *, all_tokens: bool = True
    ) -> Tensor:
        """Hidden states float32 [T, hidden] and each layer's cosines and sines float32 [T, R] →
        hidden states, of all tokens or of ``current.keep``, which must ascend. May change x.
        """


class FusedModel:
    """``FullPass`` in the C++ kernels, with a head stored as ``dtype`` unless it is quantized. It
    takes the head's weights and keeps none: they must be released, or restored for the model's own
    code to compute with.
    """

    def __init__(
        self,
        ends: Ends,
        layers: Layers,
        operations: CpuOperations,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._layers = layers
        self._operations = operations
        self._norm = ends.norm
        self._cap = ends.cap
        self._table = ends.positions
        head = ends.head
        # A head is the largest matrix of most models: it is never held twice.
        self._head = operations.pack([head.weight], dtype=dtype, factor=head.factor, releases=True)
        self._bias = head.bias
        self._plain = None if ends.tied else _only_rows(ends.embedding)
        # The head's factor is not the embeddings'.
        self._factor = ends.factor / head.factor if ends.tied else ends.factor
        bias = () if head.bias is None else (head.bias,)
        self.packed: tuple[Tensor, ...] = (*self._head.tensors, *bias, *ends.norm.tensors)
        numbers = self._head.data.dtype
        self.stored = "int8" if numbers is torch.int8 else str(numbers).removeprefix("torch.")
        # A cap may make logits equal that are not.
        self.chooses = not ends.cap
        # The different ways in which layers get their rotary embedding; by layer its place there,
        # the last for a layer without one.
        sources = [
            (call, argument) if call is not None and argument.name else None
            for call, argument in zip(ends.ropes, layers.arguments, strict=True)
        ]
        different = list(dict.fromkeys(source for source in sources if source is not None))
        self._reads = [(*source, _frequencies(*source)) for source in different]
        self._places = [
            len(different) if source is None else different.index(source) for source in sources
        ]

    def restore(self, ends: Ends) -> None:
        """Give the head, and embeddings that share it, their weights back."""
        stored = ends.head.stored
        numbers = stored.numbers if isinstance(stored, Quantized) else stored
        for chunk in row_chunks(*numbers.shape):
            loaded = numbers[chunk]
            packed = self._operations.unpack(self._head, chunk.start, len(loaded)).to(loaded.dtype)
            # Those that are mapped from a file are what they were, and need no copy.
            if not torch.equal(loaded, packed):
                loaded.copy_(packed)

    def logits(self, ids: Tensor, positions: Tensor, current: CachedPass) -> Tensor:
        return self._logits(self._last_hidden(ids, positions, current))

    def likeliest(
        self, ids: Tensor, positions: Tensor, current: CachedPass
    ) -> tuple[Tensor, Tensor]:
        return self._likeliest(self._last_hidden(ids, positions, current))

    def both(
        self, ids: Tensor, positions: Tensor, current: CachedPass
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """``logits`` and ``likeliest`` by one pass through the layers."""
        hidden = self._last_hidden(ids, positions, current)
        return self._logits(hidden), self._likeliest(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        normed, _ = self._operations.norm(hidden, self._norm)
        logits, cap = self._operations.linear(normed, self._head, self._bias), self._cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """May change ``hidden``."""
        return self._operations.likeliest(hidden, self._head, self._bias, self._norm)

    def _last_hidden(self, ids: Tensor, positions: Tensor, current: CachedPass) -> Tensor:
        """What the last norm reads: [S, hidden] of the tokens ``current.keep``."""
        x = self._embed(ids, positions)
        return self._layers.compute(x, self._rotary(x, positions), current, all_tokens=False)

    def _rotary(self, hidden: Tensor, positions: Tensor) -> list[Rope]:
        """Each layer's cosines and sines, made once where several layers have the same."""
        ropes = [
            argument.read(_called(call, hidden[None], positions[None]))
            if known is None
            else self._operations.angles(positions, *known)
            for call, argument, known in self._reads
        ]
        ropes.append((hidden[:, :0], hidden[:, :0]))
        return [ropes[place] for place in self._places]

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        table = None if self._table is None else self._table.of(positions)
        if self._plain is None:
            return self._operations.embed(ids, self._head, self._factor, table)
        x = self._plain.data[ids].float()
        if self._factor != 1:
            x *= self._factor
        return x if table is None else x.add_(table[0][table[1]])


def _frequencies(call: Call, argument: RopeArgument) -> tuple[Tensor, float] | None:
    """The frequencies [R / 2] and the scale of a rotary embedding that is what
    ``CpuOperations.angles`` computes of them; None for another, or one that is not known.
    """
    cos, sin = argument.read(call.output)
    tensors = [x for x in (*call.inputs, *call.arguments.values()) if isinstance(x, Tensor)]
    integers = [x for x in tensors if not x.is_floating_point()]
    if len(integers) != 1 or integers[0].numel() != len(cos):
        return None
    positions = integers[0].flatten()
    for buffer in call.module.buffers(recurse=False):
        frequencies = buffer.data
        if frequencies.shape != (cos.shape[1] // 2,) or frequencies.dtype is not torch.float32:
            continue
        plain = reference.angles(positions, frequencies)
        scale = factor_of(cos, torch.zeros_like(cos), plain[0])
        if scale is None:
            continue
        angles = reference.angles(positions, frequencies, scale)
        if all(bool((x - y).abs().max() <= EXACT) for x, y in zip(angles, (cos, sin), strict=True)):
            return frequencies, scale
    return None


def _called(call: Call, hidden: Tensor, positions: Tensor) -> Rope:
    """Cosines and sines [1, T, R] by a module called as it was, but with these positions int64 [1,
    T] and hidden states [1, T, width].
    """

    def changed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return hidden if value.is_floating_point() else positions

    inputs = [changed(value) for value in call.inputs]
    cos, sin = call.module(*inputs, **{name: changed(x) for name, x in call.arguments.items()})
    return cos, sin


@torch.inference_mode()
def recognize(model: PagedModel, layers: Sequence[nn.Module], step: ForwardPass) -> Ends:
    """What lies around the decoder layers, found in one pass of ``TOKENS`` tokens by ``step``,
    which keeps the logits of all. Raises DoesNotFitError with the reason.
    """
    ids, positions = random_tokens(model, seed=0)
    calls, passes, logits = _record(model, layers, step)
    factor, table = _embedding(model, calls, ids, positions, _rows(passes[0].inputs[0]))
    after = [call.unary for call in calls if has_weights(call.module)]
    norms = [call for call in after if close(_rows(call.input), _rows(passes[-1].output))]
    if not norms:
        raise DoesNotFitError("no norm follows its last layer")
    norm, normed = norm_of(norms[0]), _rows(norms[0].output)
    output = model.model.get_output_embeddings()
    heads = [call for call in after if call.module is output]
    head = matrix_of(heads[0], normed) if heads else None
    if head is None:
        raise DoesNotFitError("its head does not multiply what its last norm returns")
    product = _rows(heads[0].output)
    scaled, cap = _changed(model, logits, product)
    embedding = model.model.get_input_embeddings()
    return Ends(
        embedding=embedding,
        factor=factor,
        positions=table,
        ropes=[_rotary(call.arguments, calls) for call in passes],
        norm=norm,
        head=head.scaled(scaled),
        tied=_place(stored_rows(embedding)) == _place(head.stored),
        cap=cap,
        last_norm=norms[0].module,
        product=head,
    )


@torch.inference_mode()
def agrees(
    model: PagedModel, fused_model: FusedModel, step: CachedPass, expected: Tensor, noise: Noise
) -> bool:
    """Whether the pass gives these ``other_logits`` [T, vocabulary] of the same tokens, and their
    largest, but for ``noise``.
    """
    ids, positions = random_tokens(model, seed=1)
    logits, (largest, chosen) = fused_model.both(ids, positions, step)
    best = expected.gather(1, chosen[:, None])[:, 0]
    greedy = not fused_model.chooses or (
        noise.explains_at(chosen, best, expected.amax(1))
        and noise.explains_at(chosen, largest, best)
    )
    return greedy and noise.explains(logits, expected)


@torch.inference_mode()
def noise(
    model: PagedModel,
    layers: Sequence[nn.Module],
    step: ForwardPass,
    expected: Tensor,
    rounding: float = 0.0,
) -> Noise:
    """How far rounding moves ``other_logits`` in the model's own code around its ``layers``, which
    may be fused; none of its weights may be missing.
    """
    outside = _outside(model, layers)

    def again(changes: Changes) -> Iterator[Tensor]:
        with changes.inside(outside):
            for _ in range(SAMPLES):
                yield other_logits(model, step)

    return Noise.of(expected, again, rounding)


@torch.inference_mode()
def logits_and_noise(
    model: PagedModel,
    layers: Sequence[nn.Module],
    step: ForwardPass,
    rounding: float = 0.0,
    samples: int = SAMPLES,
) -> tuple[Tensor, Noise]:
    """``other_logits`` and their ``noise`` by one pass, so that the layers' weights are read once.
    ``step`` takes 1 + ``samples`` sequences, one after the other; of the first nothing is changed.
    """
    count = 1 + samples
    changes = Changes(model.device, rounding, leaves=(TOKENS, count * TOKENS))
    with changes.inside(_outside(model, layers)):
        expected, *changed = other_logits(model, step, count).chunk(count)
    return expected, Noise.from_samples(expected, changed)


def other_logits(model: PagedModel, step: ForwardPass, times: int = 1) -> Tensor:
    """The logits [T, vocabulary] by the model's own code of tokens that ``recognize`` has not
    seen, as sequences so many ``times``: [times · T, vocabulary].
    """
    ids, positions = random_tokens(model, seed=1)
    return model.run(ids.repeat(times), positions.repeat(times), step)


def random_tokens(model: PagedModel, *, seed: int) -> tuple[Tensor, Tensor]:
    """``TOKENS`` random ids, and positions spread over the model's context, both int64 on its
    device; other ones for other seeds.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.vocabulary, (TOKENS,), generator=generator)
    longest = (
        getattr(model.model.config.get_text_config(), "max_position_embeddings", None) or TOKENS + 1
    )
    positions = torch.linspace(seed, longest - 1, TOKENS).long()
    return ids.to(model.device), positions.to(model.device)


def _record(
    model: PagedModel, layers: Sequence[nn.Module], step: ForwardPass
) -> tuple[list[Call], list[Call], Tensor]:
    """The calls of the modules outside the layers and those of the layers, and the logits [T,
    vocabulary].
    """
    with record_calls([*_outside(model, layers), *layers]) as calls:
        logits = model.run(*random_tokens(model, seed=0), step)
    passes = [call for call in calls if call.module in layers]
    if not (
        [call.module for call in passes] == list(layers)
        and passes[0].inputs
        and isinstance(passes[-1].output, Tensor)
    ):
        raise DoesNotFitError("its layers do not pass hidden states on, one after the other")
    return [call for call in calls if call.module not in layers], passes, logits


def _outside(model: PagedModel, layers: Sequence[nn.Module]) -> list[nn.Module]:
    inside = {id(module) for layer in layers for module in layer.modules()}
    return [module for module in model.model.modules() if id(module) not in inside]


def _place(weight: Tensor | Quantized) -> int:
    return (weight.bits if isinstance(weight, Quantized) else weight).data_ptr()


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def stored_rows(module: nn.Module) -> Tensor | Quantized:
    """The only weights of an embedding [N, hidden]."""
    if isinstance(module, QuantizedEmbedding):
        return module.weight
    return _only_rows(module).data


def _only_rows(module: nn.Module) -> nn.Parameter:
    weights = list(module.parameters(recurse=False))
    if len(weights) != 1 or weights[0].dim() != 2:
        raise DoesNotFitError(f"its embedding {type(module).__name__} has other weights than rows")
    return weights[0]


def _embedding(
    model: PagedModel, calls: Sequence[Call], ids: Tensor, positions: Tensor, hidden: Tensor
) -> tuple[float, Table | None]:
    """How hidden states [T, width] come from the embeddings: their factor, and the table of
    positions that is added.
    """
    stored = stored_rows(model.model.get_input_embeddings())
    rows = stored.rows(ids).dequantize() if isinstance(stored, Quantized) else stored[ids]
    tables: list[Table | None] = [None]
    for call in calls:
        parameters = list(call.module.parameters(recurse=False))
        if len(parameters) != 1 or parameters[0].dim() != 2 or not isinstance(call.output, Tensor):
            continue
        tables += [
            Table(parameters[0], offset)
            for offset in OFFSETS
            if parameters[0].shape[1] == hidden.shape[1]
            and int(positions.max()) + offset < len(parameters[0])
            and torch.equal(parameters[0].data[offset:][positions], _rows(call.output))
        ]
    for table in tables:
        rest = hidden if table is None else hidden - table.rows[positions]
        factor = factor_of(rest, torch.zeros_like(rest), rows)
        if factor:
            return exact(factor, rest, rows), table
    raise DoesNotFitError("its layers do not begin with its embeddings")


def _changed(model: PagedModel, logits: Tensor, product: Tensor) -> tuple[float, float]:
    """What the model does to what its head returns: the factor, and the cap, 0 without one, which
    is a number of its configuration.
    """
    zero = torch.zeros_like(product)
    if scaled := factor_of(logits, zero, product):
        return scaled, 0.0
    numbers = vars(model.model.config.get_text_config()).values()
    for cap in {x for x in numbers if isinstance(x, float) and x > 0}:
        if close(logits, cap * (product / cap).tanh()):
            return 1.0, cap
    raise DoesNotFitError("its logits are no multiple of what its head returns, nor capped")


def exact(factor: float, product: Tensor, rows: Tensor) -> float:
    """The factor, known to six digits, to the last one where that gives this product."""
    at = rows.abs().argmax()
    ratio = product.flatten()[at] / rows.flatten()[at]
    near = (ratio, ratio.nextafter(ratio * 2), ratio.nextafter(ratio * 0))
    return next((float(x) for x in near if torch.equal(rows * x, product)), factor)


def _rotary(arguments: Mapping[str, Any], calls: Sequence[Call]) -> Call | None:
    """The module that made a layer's cosines and sines; None if the layer has none."""
    for value in arguments.values():
        if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor)):
            continue
        for call in calls:
            if isinstance(call.output, tuple) and call.output and call.output[0] is value[0]:
                return call
        raise DoesNotFitError("its rotary embedding is no module's")
    return None
