"""Reads the weights of a quantized checkpoint as they are stored, without a plain copy of them.

Owns the modules that receive the stored tensors while transformers loads the rest, and what they
become: ``QuantizedLinear``, at once or, of a split model, part by part; experts in MXFP4, which no
product takes, become plain ones, a few rows at a time. Which formats there are is
``sizing/checkpoint_formats.py``'s. The tensors are untrusted: their sizes come from checked headers
and must be those of the layer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings, dot_natural_key
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fairlead_kernels.formats.mxfp4 import widen
from fairlead_kernels.formats.quantize import FP8, STORED, Format, Quantized
from fairlead_kernels.formats.row_chunks import row_chunks
from fairlead_runtime.models.headers import Header, TensorEntry
from fairlead_runtime.models.int4 import matrix_of
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.models.quantized import QuantizedLinear
from fairlead_runtime.models.text_model import text_of
from fairlead_runtime.sizing.stored import (
    BLOCK_SCALES,
    BLOCKS,
    KEY,
    MXFP4_BLOCK,
    SCALE,
    ZERO,
    Published,
)

_METHOD = "fairlead"
_TYPES = {
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": FP8,
    **dict.fromkeys(("F32", "F16", "BF16"), torch.float32),  # scales, which float32 holds exactly
}
# MXFP4's tensors are read bit by bit; scales also have a type of their own.
_BITS: Mapping[str, Mapping[str, torch.dtype]] = {
    BLOCKS: {"U8": torch.uint8},
    BLOCK_SCALES: {"U8": torch.uint8, "F8_E8M0": torch.float8_e8m0fnu},
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
        if settings.stored.layout == "mxfp4":
            _hold_blocks(model, settings)
            return
        scale = f".{settings.stored.scale}"
        layers = _stored_names(model, settings, [scale])
        for name, module in list(model.named_modules()):
            prefixes = (name, name.removeprefix(f"{model.base_model_prefix}."))
            layer = next((prefix for prefix in prefixes if prefix in layers), None)
            if layer is not None and isinstance(module, nn.Linear):
                model.set_submodule(name, StoredLinear(settings, layers.pop(layer), module))
        if layers:
            raise ValueError(f"{min(layers.values())[:100]!r} is no linear layer of the model")

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class StoredLinear(nn.Module):
    """Holds the tensors of one matrix as the checkpoint has them, on the meta device until they are
    loaded. Computes with what they stand for, which it finds out each time. ``name``: the layer's
    in the checkpoint, where the model's may have another.
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


class StoredExperts(nn.Module):
    """Holds the tensors of a module of experts as the checkpoint has them, on the meta device until
    they are loaded: blocks and scales in the place of matrices. ``name``: the module's in the
    checkpoint, ``packed``: the names of its parameters that are stored so.
    """

    def __init__(
        self, settings: StoredWeights, name: str, experts: nn.Module, packed: set[str]
    ) -> None:
        super().__init__()
        self.name = name
        self._experts = (experts,)  # no part of the model while it is loaded
        self._packed = packed
        for leaf, parameter in experts.named_parameters(recurse=False):
            if leaf not in packed:
                self.register_parameter(leaf, parameter)
                continue
            *shape, blocks = self._stored_shape(parameter)
            for end, sizes in ((BLOCKS, (*shape, blocks, 16)), (BLOCK_SCALES, (*shape, blocks))):
                entry, types = settings.tensors.get(f"{name}.{leaf}{end}"), _BITS[end]
                if entry is None or entry.dtype not in types or entry.shape != sizes:
                    found = "missing" if entry is None else f"{entry.shape} of {entry.dtype}"
                    problem = f"{found}, where {sizes} of {' or '.join(types)} is expected"
                    raise ValueError(f"{name[:100]}.{leaf}{end}: {problem}")
                empty = torch.empty(sizes, dtype=types[entry.dtype], device="meta")
                self.register_parameter(f"{leaf}{end}", nn.Parameter(empty, requires_grad=False))

    def _stored_shape(self, parameter: Tensor) -> tuple[int, int, int]:
        """Experts, rows and the blocks of one row: a row is an output's, however it is held."""
        experts, rows, columns = parameter.shape
        if self._transposed:
            rows, columns = columns, rows
        return experts, rows, columns // MXFP4_BLOCK

    @property
    def _transposed(self) -> bool:
        """Whether the module has a column for each output."""
        return bool(getattr(self._experts[0], "is_transposed", False))

    def widened(self) -> nn.Module:
        """The module with plain weights, in their own type and on the device where the stored ones
        are, which go one after the other. Raises ModelError for what stands for no number.
        """
        (experts,) = self._experts
        for leaf, parameter in list(experts.named_parameters(recurse=False)):
            if leaf not in self._packed:
                experts.register_parameter(leaf, getattr(self, leaf))
                continue
            blocks, scales = (
                getattr(self, leaf + end).data.view(torch.uint8) for end in (BLOCKS, BLOCK_SCALES)
            )
            weight = torch.empty(parameter.shape, dtype=parameter.dtype, device=blocks.device)
            rows = weight.mT if self._transposed else weight
            for expert, chunk in self._chunks(rows):
                try:
                    numbers = widen(blocks[expert, chunk], scales[expert, chunk], weight.dtype)
                except ValueError as error:
                    raise ModelError(
                        "BadWeights",
                        f"{self.name[:100]}.{leaf}{BLOCK_SCALES}: expert {expert}: {error}",
                        "serve it in bfloat16, or fetch it again if its files are damaged",
                    ) from error
                rows[expert, chunk] = numbers
            experts.register_parameter(leaf, nn.Parameter(weight, requires_grad=False))
            for end in (BLOCKS, BLOCK_SCALES):
                delattr(self, leaf + end)
            del blocks, scales
        return experts

    def _chunks(self, matrices: Tensor) -> Iterator[tuple[int, slice]]:
        experts, rows, columns = matrices.shape
        return ((e, chunk) for e in range(experts) for chunk in row_chunks(rows, columns))


def _hold_blocks(model: PreTrainedModel, settings: StoredWeights) -> None:
    """Put a module for the stored tensors in the place of each module of experts that has some.
    Raises ValueError for tensors that do not fit the model's.
    """
    names = _stored_names(model, settings, (BLOCKS, BLOCK_SCALES))
    for name, module in list(model.named_modules()):
        leaves = {leaf for leaf, x in module.named_parameters(recurse=False) if x.dim() == 3}
        for prefix in (name, name.removeprefix(f"{model.base_model_prefix}.")):
            if packed := {leaf for leaf in leaves if f"{prefix}.{leaf}" in names}:
                stored = {names.pop(f"{prefix}.{leaf}").rpartition(".")[0] for leaf in packed}
                model.set_submodule(name, StoredExperts(settings, min(stored), module, packed))
                break
    if names:
        raise ValueError(f"{min(names.values())[:100]!r} is no matrix of the model's experts")


def _stored_names(
    model: PreTrainedModel, settings: StoredWeights, ends: Sequence[str]
) -> dict[str, str]:
    """What tensors that end so are of, but for parts that are not loaded: by the name that
    transformers' loader takes it for the name that is stored.
    """
    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    patterns = model._keys_to_ignore_on_load_unexpected or ()  # noqa: SLF001 - no public one
    names: dict[str, str] = {}
    for tensor in sorted(settings.tensors, key=dot_natural_key):  # some act on what came before
        if end := next((end for end in ends if tensor.endswith(end)), ""):
            renamed = apply_renamings(tensor, renamings)
            if not any(re.search(pattern, renamed) for pattern in patterns):
                names[renamed.removesuffix(end)] = tensor.removesuffix(end)
    return names


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
    ``settings``, its configuration, and out of its text's: transformers' own readers of quantized
    weights must not know of it.
    """
    if stored is None:
        return {}
    for part in {id(part): part for part in (settings, text_of(settings))}.values():
        if hasattr(part, KEY):
            delattr(part, KEY)
    return {"quantization_config": StoredWeights(stored, weights)}


def check_biases(model: PreTrainedModel, folder: Path, weights: Mapping[str, Header]) -> None:
    """Raise ModelError where a layer that is stored quantized has a bias that the architecture does
    not add. GPTQ writes one for each layer, of zeros where the model had none; any other is a part
    of what was calibrated. ``weights``: the headers of the files in ``folder``.
    """
    layers = [x for x in model.modules() if isinstance(x, StoredLinear)]
    biases = {f"{layer.name}.bias" for layer in layers if layer.bias is None}
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


def finish(model: PreTrainedModel, device: torch.device, *, sharded: bool) -> None:
    """Make the loaded tensors the layers' weights; of a model that will be ``sharded`` they stay as
    they are, pages of a file that all ranks share, until each has its part. Experts are widened on
    ``device``, so that the host never has them plain. Raises ModelError for tensors that do not fit
    their layer.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, _Loader):
        return
    quantizer.remove_quantization_config(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, StoredExperts):
            model.set_submodule(name, module.to(device).widened())
        if not isinstance(module, StoredLinear):
            continue
        if sharded:
            module.keep_bits()
        else:
            model.set_submodule(name, module.quantized())
