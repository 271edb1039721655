"""Reads the weights of a quantized checkpoint as they are stored, without a plain copy of them.

Owns the modules that receive the stored tensors while transformers loads the rest, and what they
become: ``QuantizedLinear``, at once or, of a split model, part by part. Which formats there are is
``sizing/checkpoint_formats.py``'s. The tensors are untrusted: their sizes come from checked headers
and must be those of the layer.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fairlead_kernels.formats.quantize import FP8, STORED, Format, Quantized
from fairlead_runtime.models.headers import Header, TensorEntry
from fairlead_runtime.models.int4 import matrix_of
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.models.quantized import QuantizedLinear
from fairlead_runtime.sizing.stored import SCALE, ZERO, Published

_METHOD = "fairlead"
_TYPES = {
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": FP8,
    **dict.fromkeys(("F32", "F16", "BF16"), torch.float32),  # scales, which float32 holds exactly
}


@register_quantization_config(_METHOD)
class StoredWeights(QuantizationConfigMixin):  # type: ignore[misc] # transformers' is untyped
    """A checkpoint as transformers' loader is told of it: the format and the headers' tensors."""

    def __init__(self, stored: Published, weights: Mapping[str, Header]) -> None:
        self.quant_method = _METHOD
        self.stored = stored
        self.tensors = {k: v for header in weights.values() for k, v in header.tensors.items()}


@register_quantizer(_METHOD)
class _Loader(HfQuantizer):  # type: ignore[misc] # the same
    """Puts a module for the stored tensors in the place of each linear layer that has some."""

    quantization_config: StoredWeights

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        settings = self.quantization_config
        scale = f".{settings.stored.scale}"
        layers = {name.removesuffix(scale) for name in settings.tensors if name.endswith(scale)}
        for name, module in list(model.named_modules()):
            prefixes = (name, name.removeprefix(f"{model.base_model_prefix}."))
            layer = next((prefix for prefix in prefixes if prefix in layers), None)
            if layer is not None and isinstance(module, nn.Linear):
                layers.discard(layer)
                model.set_submodule(name, StoredLinear(settings, layer, module))
        if layers:
            raise ValueError(f"{min(layers)[:100]!r} is no linear layer of the model")

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class StoredLinear(nn.Module):
    """Holds the tensors of one matrix as the checkpoint has them, on the meta device until they are
    loaded. Computes with what they stand for, which it finds out each time. ``name``: the layer's
    in the checkpoint, which may lack the base model's prefix.
    """

    def __init__(self, settings: StoredWeights, name: str, linear: nn.Linear) -> None:
        super().__init__()
        self._stored = settings.stored
        self.name = name
        self._shape = (linear.out_features, linear.in_features)
        self._floats = False  # whether the numbers are floats, held as integers
        for leaf in (self._stored.weight, *self._stored.side_tensors):
            entry = settings.tensors.get(f"{name}.{leaf}")
            if entry is None and leaf not in self._stored.needed:
                continue
            if entry is None or entry.dtype not in _TYPES:
                raise ValueError(f"{name[:100]}.{leaf} is missing, or of another type")
            self.register_parameter(leaf, _empty(entry))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.quantized()(x)
        return out

    def keep_bits(self) -> None:
        """Hold 8-bit floats as integers of the same bits: no cast of floats may change them."""
        numbers = getattr(self, self._stored.weight)
        if numbers.dtype is FP8:
            self._floats = True
            bits = nn.Parameter(numbers.data.view(torch.int8), requires_grad=False)
            self.register_parameter(self._stored.weight, bits)

    def quantized(self) -> QuantizedLinear:
        """The layer with its weights as they are served. Raises ModelError for tensors that do not
        fit the layer.
        """
        try:
            return self._quantized()
        except ValueError as error:
            fix = "serve the plain checkpoint, or fetch this one again if its files are damaged"
            raise ModelError("BadWeights", str(error), fix) from error

    def _quantized(self) -> QuantizedLinear:
        if self._stored.format == "int4":
            tensors = {leaf: x.data for leaf, x in self.named_parameters() if leaf != "bias"}
            try:
                return QuantizedLinear(matrix_of(self._stored, tensors, *self._shape), self.bias)
            except ValueError as error:
                raise ValueError(f"{self.name[:100]}: {error}") from None
        numbers, scales = getattr(self, self._stored.weight).data, getattr(self, SCALE).data
        if self._stored.packed > 1:
            numbers = _unpacked(numbers)
        rows = self._shape[0]
        if numbers.shape != self._shape or scales.numel() not in (1, rows):
            raise ValueError(
                f"{self.name[:100]}: {tuple(numbers.shape)} numbers and {scales.numel()} scales "
                f"for a matrix of {self._shape}"
            )
        if ZERO in self._parameters and getattr(self, ZERO).any():
            raise ValueError(f"{self.name[:100]}: a zero point, in weights without any")
        scales = scales.reshape(-1).expand(rows).contiguous()
        served: Format = "fp8" if self._stored.format == "fp8" else "int8"
        expected = STORED[served]
        if (dtype := FP8 if self._floats else numbers.dtype) is not expected:
            raise ValueError(f"{self.name[:100]}: {dtype} where {expected} is expected")
        weight = Quantized(served, numbers.view(torch.int8).contiguous(), scales)
        return QuantizedLinear(weight, self.bias)


def _empty(entry: TensorEntry) -> nn.Parameter:
    empty = torch.empty(entry.shape, dtype=_TYPES[entry.dtype], device="meta")
    return nn.Parameter(empty, requires_grad=False)


def _unpacked(words: Tensor) -> Tensor:
    """Four 8-bit integers of each int32 [N, K / 4], the lowest bits first, each stored as the
    integer plus 128 → int8 [N, K]. So packs compressed-tensors' ``pack_to_int32``.
    """
    return words.contiguous().view(torch.uint8).bitwise_xor(128).view(torch.int8)


def loader_arguments(
    settings: Any, stored: Published | None, weights: Mapping[str, Header]
) -> dict[str, Any]:
    """Arguments with which ``from_pretrained`` loads a checkpoint. Takes the quantization out of
    ``settings``, its configuration: transformers' own readers of quantized weights must not know of
    it.
    """
    if stored is None:
        return {}
    del settings.quantization_config
    return {"quantization_config": StoredWeights(stored, weights)}


def check_biases(
    model: PreTrainedModel, unexpected: Iterable[str], folder: Path, weights: Mapping[str, Header]
) -> None:
    """Raise ModelError where a layer that is stored quantized has a bias that the architecture does
    not add. GPTQ writes one for each layer, of zeros where the model had none; any other is a part
    of what was calibrated. ``unexpected``: names of tensors that were not loaded; ``weights``: the
    headers of the files in ``folder``.
    """
    biases = {f"{x.name}.bias" for x in model.modules() if isinstance(x, StoredLinear)}
    biases.intersection_update(unexpected)
    for file, header in weights.items():
        if not (names := sorted(biases.intersection(header.tensors))):
            continue
        with safe_open(folder / file, framework="pt") as stored:
            for name in names:
                if stored.get_tensor(name).any():
                    raise ModelError(
                        "BadWeights",
                        f"{name[:100]}: a bias that the architecture does not have, and not zeros",
                        "serve the plain checkpoint",
                    )


def finish(model: PreTrainedModel, *, sharded: bool) -> None:
    """Make the loaded tensors the layers' weights; of a model that will be ``sharded`` they stay as
    they are, pages of a file that all ranks share, until each has its part. Raises ModelError for
    tensors that do not fit their layer.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, _Loader):
        return
    quantizer.remove_quantization_config(model)
    for name, module in list(model.named_modules()):
        if not isinstance(module, StoredLinear):
            continue
        if sharded:
            module.keep_bits()
        else:
            model.set_submodule(name, module.quantized())
