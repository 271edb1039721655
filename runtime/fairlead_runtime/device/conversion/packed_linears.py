"""A model's own products on packed weights: of layers that do not fuse, and of a head around which
the model's own code runs.

Owns their proof and their replacement. A module that multiplies by a matrix is recorded, its packed
matrix must give what it gave, then its ``forward`` becomes the product in C++; transformers' code
goes on calling it. No matrix is held twice, but for those that are stored [K, N], one at a time.
Quantized ones are packed as they are, which nobody widens any longer.

A module whose weights other code reads itself would leave that code nothing. No structure tells, so
the whole model computes other tokens before and after; if it fails then, or gives other logits,
every module gets its weights back, which a packed matrix still has.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fairlead_kernels.cpu.cpu_operations import CpuOperations
from fairlead_kernels.cpu.cpu_products import BiasedWeight
from fairlead_kernels.formats.quantize import Quantized
from fairlead_kernels.interface.layer import Packed
from fairlead_runtime.device.conversion import recognize_ends
from fairlead_runtime.device.conversion.closeness import factor_of
from fairlead_runtime.device.conversion.float32_view import widened_to_float32
from fairlead_runtime.device.conversion.module_calls import ModuleCall, record_calls
from fairlead_runtime.device.conversion.packed_blocks import find_mlps, in_parts, replacements
from fairlead_runtime.device.conversion.packed_norms import (
    GatedCall,
    gated_call,
    norm_replacements,
)
from fairlead_runtime.device.conversion.recognize_layer import DoesNotFitError, matrix_of
from fairlead_runtime.device.conversion.replacement import Replacement
from fairlead_runtime.device.conversion.rounding import SAMPLES, Noise
from fairlead_runtime.device.model.paged_attention import ForwardPass
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.models.quantized import QuantizedLinear
from fairlead_runtime.sizing.arithmetic import PANEL

SMALLEST = 2048  # weights; the call of a smaller product costs more than it gains


@dataclass(frozen=True, slots=True)
class PackedProducts:
    """How many matrices of a model's own code are packed, its head apart; ``head``: the type of the
    packed head, "" without one; ``reason``: why none is, where some could be; ``blocks``: how many
    calls around them are one of the kernels'.
    """

    matrices: int = 0
    head: str = ""
    reason: str = ""
    blocks: int = 0

    def __str__(self) -> str:
        if self.reason:
            return f", no other matrices packed ({self.reason})"
        around = f" in {self.blocks} blocks" if self.blocks else ""
        return f", {self.matrices} other matrices packed{around}" if self.matrices else ""


@dataclass(slots=True, eq=False)
class _Product:
    """A module's packed matrix, with ``embedding``, its rows times ``factor``, where they are tied.
    ``parameter``: the loaded weights, [N, K] or ``transposed``; ``scales``: those of their rows,
    where they are quantized. ``widens``: what it gives stays float32 in a model of another type.
    """

    module: nn.Module
    parameter: nn.Parameter
    scales: nn.Parameter | None
    transposed: bool
    weight: Packed
    bias: nn.Parameter | None  # in the model's type, as it is held
    operations: CpuOperations
    embedding: nn.Module | None
    factor: float
    widens: bool

    def multiply(self, x: Tensor) -> Tensor:
        """Give [..., N] of x [..., K], in the type of x, or in float32 where it ``widens``."""
        bias = None if self.bias is None else self.bias.data.float()
        if self.widens:
            return self.operations.linear(x.float(), self.weight, bias)
        (out,) = in_parts(
            x, lambda rows: [self.operations.linear(rows, self.weight, bias)], [self.weight.rows]
        )
        return out

    def rounds(self, x: Tensor) -> bool:
        """Whether it gives of x what it gives of it in float32, in the type of x."""
        if x.dtype is torch.float32:
            return True
        out = self.multiply(x)
        return torch.equal(out, self.multiply(x.float()).to(out.dtype))

    def rows(self, ids: Tensor) -> Tensor:
        """Embeddings [..., K] of ids int64 [...], in the model's type."""
        embedded = self.operations.embed(ids.reshape(-1), self.weight, self.factor)
        return embedded.view(*ids.shape, self.weight.columns).to(self.parameter.dtype)

    @property
    def biased(self) -> BiasedWeight | None:
        """The matrix and its bias; None where that is not held in float32."""
        if self.bias is None or self.bias.dtype is torch.float32:
            return BiasedWeight(self.weight, None if self.bias is None else self.bias.data)
        return None

    @property
    def replacement(self) -> Replacement:
        forwards: dict[nn.Module, Callable[..., Tensor]] = {self.module: self.multiply}
        if self.embedding is not None:
            forwards[self.embedding] = self.rows
        weights = [self.parameter, *([] if self.scales is None else [self.scales])]
        return Replacement(forwards, weights, restore=self.unpack)

    def unpack(self) -> None:
        """Give the parameter its weights back: packing has taken their memory."""
        rows = self.operations.unpack(self.weight, 0, self.weight.rows)
        loaded = (rows.T if self.transposed else rows).contiguous()
        self.parameter.data = loaded.to(self.parameter.dtype)
        if self.scales is not None and self.weight.scales is not None:
            self.scales.data = self.weight.scales


@torch.inference_mode()
def pack_products(
    model: PagedModel, operations: CpuOperations, step: ForwardPass, *, every: bool = False
) -> PackedProducts:
    """Pack the matrices that the model's own code multiplies by, each proven in a pass of ``step``,
    which keeps the logits of all tokens. ``every``: also those that gain nothing by it, as where
    the plan counts all in a narrower type than the model's.
    """
    head: Any = model.model.get_output_embeddings()
    embedding: Any = model.model.get_input_embeddings()
    dtypes, owners = (model.heads.dtype, model.matrix_dtype), owners_of(model.model)
    half, every = dtypes[0] is not torch.float32, every or dtypes[0] is not dtypes[1]
    smallest = 1 if every else SMALLEST
    calls, gated_calls = _record(model, step)
    mlps = find_mlps(calls)
    expected = recognize_ends.other_logits(model, step)
    # In half precision rounding may send a token to other experts, so there only the self-test
    # judges the logits.
    quantized = any(isinstance(module, QuantizedLinear) for module in calls)
    rounding = operations.int8_rounding if quantized else 0.0
    noise = None if half else recognize_ends.noise(model, [], step, expected, rounding)
    products: list[_Product] = []
    # Of mixers the plan counts the rows that fill a panel, also of a number for each head.
    mixers = {part for mixer in model.mixers.values() for part in mixer.module.modules()}
    for module, call in calls.items():
        if not call.input.is_floating_point() or not _has_matrix(module, smallest):
            continue
        if isinstance(module, QuantizedLinear):
            if module is head:  # embeddings may share its numbers
                continue
        shares = max(owners[id(parameter)] for parameter in module.parameters(recurse=False))
        try:
            if shares == 1:
                fewest_rows = 1 if every else PANEL // 2 if module in mixers else PANEL
                product = _packed(
                    call, operations, dtypes, widens=module is head, fewest_rows=fewest_rows
                )
            elif shares == 2 and module is head and embedding in calls:
                fewest_rows = 1 if every else PANEL
                product = _packed(
                    call, operations, dtypes, calls[embedding], widens=True, fewest_rows=fewest_rows
                )
            else:
                continue
        except DoesNotFitError:
            continue
        product.replacement.apply()
        products.append(product)
    around: list[Replacement] = []
    layers = (product for product in products if product.module is not head)
    biased = {product.module: biased for product in layers if (biased := product.biased)}
    for replacement in chain(
        replacements(mlps, calls, biased, operations),
        norm_replacements(calls, gated_calls, operations),
    ):
        replacement.apply()
        around.append(replacement)

    def same() -> bool:
        logits = recognize_ends.other_logits(model, step)
        return noise is None or noise.explains(logits, expected)

    def undo() -> None:
        for replacement in (*around, *(product.replacement for product in products)):
            replacement.undo()

    try:
        Replacement(restore=undo).prove(same, "its code gives other logits with them")
    except DoesNotFitError as error:
        return PackedProducts(reason=str(error))
    except (RuntimeError, IndexError, ValueError) as error:
        return PackedProducts(reason=f"its code reads weights itself: {type(error).__name__}")
    model.packed += [tensor for product in products for tensor in product.weight.tensors]
    heads = [product for product in products if product.module is head]
    stored = str(model.matrix_dtype).removeprefix("torch.") if heads else ""
    return PackedProducts(len(products) - len(heads), stored, blocks=len(around))


def owners_of(model: nn.Module) -> Counter[int]:
    """Count the modules that have each parameter, by its id."""
    return Counter(id(x) for module in model.modules() for x in module.parameters(recurse=False))


def _record(
    model: PagedModel, step: ForwardPass
) -> tuple[dict[nn.Module, ModuleCall], dict[nn.Module, GatedCall]]:
    """The first call of each module that has weights somewhere inside, one tensor in and out; and
    of each that takes a gate besides. A module that is called in another way, too, is left out:
    what takes its place has no other way.
    """
    modules = (x for x in model.model.modules() if any(True for _ in x.parameters()))
    with record_calls(modules) as calls:
        model.run(*recognize_ends.random_tokens(model, seed=0), step)
    first: dict[nn.Module, ModuleCall] = {}
    gated: dict[nn.Module, GatedCall] = {}
    called_otherwise: set[nn.Module] = set()
    for call in calls:
        if (with_gate := gated_call(call)) is not None:
            gated.setdefault(call.module, with_gate)
        elif call.arguments or not call.is_unary:
            called_otherwise.add(call.module)
        elif call.unary.input.numel():
            first.setdefault(call.module, call.unary)
    called_otherwise |= first.keys() & gated.keys()
    alone = {module: call for module, call in first.items() if module not in called_otherwise}
    return alone, {module: x for module, x in gated.items() if module not in called_otherwise}


def _has_matrix(module: nn.Module, smallest: int) -> bool:
    """Whether it has a matrix of its own, of ``smallest`` weights or more."""
    parameters = module.parameters(recurse=False)
    return any(p.dim() == 2 and p.numel() >= smallest for p in parameters)


def _packed(
    call: ModuleCall,
    operations: CpuOperations,
    dtypes: tuple[torch.dtype, torch.dtype],
    embedded: ModuleCall | None = None,
    *,
    widens: bool,
    fewest_rows: int = PANEL,
) -> _Product:
    """The module's product, and the embedding's rows where ``embedded`` is the call of one that
    shares its matrix, proven on these calls. ``dtypes``: of the model, and in which its matrix is
    packed. Raises DoesNotFitError, also for fewer rows than ``fewest_rows``.
    """
    module, (dtype, packed_dtype) = call.module, dtypes
    parameters = dict(module.named_parameters(recurse=False))
    parameter = next(p for p in parameters.values() if p.dim() == 2)
    scales = parameters.pop("scales", None) if isinstance(module, QuantizedLinear) else None
    if scales is None and parameter.dtype is not dtype:  # as packed numbers they would be rounded
        raise DoesNotFitError(f"its matrix is in {parameter.dtype}")
    with widened_to_float32(module):
        x = call.input.reshape(-1, call.input.shape[-1]).float()
        want = module(call.input.float()).reshape(len(x), -1)
        matrix = matrix_of(ModuleCall(module, x, want), x)
        if matrix is None:
            raise DoesNotFitError("it does not multiply by its matrix")
        stored, factor, transposed, rounding = matrix.stored, 1.0, False, 0.0
        if isinstance(stored, Quantized):
            rounding = operations.int8_rounding
        elif len(stored) < fewest_rows:
            raise DoesNotFitError("most of its packed rows would be padding")
        else:
            transposed = stored.stride() != parameter.stride()
            factor = 1.0 if embedded is None else _factor(embedded, stored)
        pairs = dtype is packed_dtype  # they round what they multiply
        batch = x.expand(SAMPLES, *x.shape)
        noise = Noise.of(want, lambda c: module(c.of(batch, x.shape[-1])), rounding)
        product = _Product(
            module,
            parameter,
            scales,
            transposed,
            operations.pack([stored], dtype=packed_dtype, releases=True, pairs=pairs),
            next((p for p in parameters.values() if p.dim() == 1), None),
            operations,
            None if embedded is None else embedded.module,
            factor,
            widens,
        )
        product.replacement.prove(
            lambda: noise.explains(product.multiply(x), want) and product.rounds(x.to(dtype)),
            "its packed matrix gives other results",
        )
        return product


def _factor(embedded: ModuleCall, matrix: Tensor) -> float:
    """What an embedding multiplies the rows of this matrix by. Raises DoesNotFitError."""
    ids, (stored, *vectors) = embedded.input, embedded.module.parameters(recurse=False)
    if vectors or not torch.equal(stored, matrix):
        raise DoesNotFitError("its embedding has other rows")
    rows = stored[ids.flatten()]
    got = embedded.module(ids).reshape(rows.shape)
    factor = factor_of(got, torch.zeros_like(rows), rows)
    if not factor:
        raise DoesNotFitError("its embedding is no multiple of its rows")
    return recognize_ends.exact(factor, got, rows)
