"""The last norm and the head of a model by operations of ours, called by the model's own code.

Owns this replacement, which ``deterministic`` needs on GPUs: torch sums in another order for
another number of tokens. What else the model's code does around its layers is recognized, so it is
known to sum nothing: rows of embeddings, factors, a cap, and a rotary embedding's single products.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fairlead_kernels.formats.quantize import Quantized
from fairlead_kernels.interface.layer import LayerOperations, Packed
from fairlead_runtime.device.conversion import recognize_ends
from fairlead_runtime.device.conversion.float32_view import widened_to_float32
from fairlead_runtime.device.conversion.recognize_layer import DoesNotFitError, Matrix
from fairlead_runtime.device.conversion.replacement import Replacement, by_rows
from fairlead_runtime.device.model.paged_attention import CachedPass
from fairlead_runtime.device.model.paged_model import PagedModel


@torch.inference_mode()
def use_fixed_order_ends(
    model: PagedModel, layers: Sequence[nn.Module], operations: LayerOperations, step: CachedPass
) -> str:
    """Let both modules compute by these operations, once that is proven to give the same logits, in
    float32. Returns the type of the head. Raises DoesNotFitError; then both are as they were.
    """
    with widened_to_float32(model.model):
        ends = recognize_ends.recognize(model, layers, step)
        expected = recognize_ends.other_logits(model, step)
        noise = recognize_ends.noise(model, layers, step, expected)
        forwards = {
            ends.last_norm: by_rows(lambda x: operations.norm(x, ends.norm)[0]),
            ends.product.module: by_rows(_product(ends.product, operations)),
        }
        replacement = Replacement(forwards)
        replacement.apply()
        replacement.prove(
            lambda: noise.explains(recognize_ends.other_logits(model, step), expected),
            "its last norm and head give other logits",
        )
    norm = ends.norm.to(model.heads.dtype)
    Replacement({ends.last_norm: by_rows(lambda x: operations.norm(x, norm)[0])}).apply()
    return str(model.heads.dtype).removeprefix("torch.")


def _product(matrix: Matrix, operations: LayerOperations) -> Callable[[Tensor], Tensor]:
    """A product with the module's own parameters, whatever their type is by then."""
    stored, module = matrix.stored, matrix.module
    matrices = [x for x in module.parameters(recurse=False) if x.dim() == 2]
    if isinstance(stored, Quantized) or len(matrices) != 1 or matrices[0].shape != stored.shape:
        raise DoesNotFitError("its head is no plain matrix of rows")
    biases = [x for x in module.parameters(recurse=False) if x.dim() == 1]

    def multiply(x: Tensor) -> Tensor:
        weight = Packed(matrices[0].data, *matrices[0].shape)
        return operations.linear(x, weight, biases[0].data if biases else None)

    return multiply
