"""Splits a loaded model into the shard of one rank, as transformers' own plan says.

Owns which plans are admitted, what of each weight a rank keeps, and where its partial results meet
those of the others. In each layer the matrices that read hidden states are split by their outputs
(queries, keys and values by heads), those that write them by their inputs, so that one sum over the
ranks after each of the latter makes hidden states equal everywhere. Where there are more ranks than
key-value heads, ranks share a head. The output matrix is split by the vocabulary and its logits
come together on rank 0; embeddings, norms and routers are whole on every rank.

Before it is split, a model's weights are pages of its files that all ranks share, where their type
is that of the files, so that a rank never holds more than its shard in memory of its own.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from transformers import PreTrainedModel

from fairlead_kernels.formats.quantize import Format, largest_of_rows, quantize
from fairlead_kernels.interface.attention import Heads
from fairlead_runtime.device.conversion.float32_view import has_weights
from fairlead_runtime.device.model.rank_group import RankGroup
from fairlead_runtime.device.model.row_parallel import QuantizedRowParallel, RowParallel
from fairlead_runtime.models.published import StoredLinear
from fairlead_runtime.models.quantized import QuantizedLinear
from fairlead_runtime.settings.engine_config import ConfigError
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.tensor_parallel import UNSHARDED, refuse

KEYS = ("k_proj", "v_proj")  # the names by which transformers' plans know keys and values
COLUMNS, ROWS, PACKED, EXPERTS = "colwise", "rowwise", "packed_colwise", "moe_tp_experts"
# Each rank's heads have the whole weights of a norm over one head.
REPLICATED = ("replicated_with_grad_allreduce", "replicate")
ADMITTED = (COLUMNS, ROWS, PACKED, EXPERTS, *REPLICATED)


def shard(
    model: PreTrainedModel,
    shape: ModelShape,
    ranks: RankGroup,
    device: torch.device,
    quantize_to: Format | None = None,
) -> None:
    """Leave this rank's shard of a whole model, on ``device``, its layers' matrices rounded to
    numbers that they would have in the whole model if they are to be quantized; those of a
    quantized checkpoint are as they are. Nothing may be computed until ``ranks`` has met. Raises
    ConfigError for a model that cannot be split: before it changes anything where config.json
    tells, in the midst of it where only the weights do.
    """
    plan = plan_of(model, shape, ranks.size)
    modules, (embeddings, head) = dict(model.named_modules()), _embeddings_and_head(model)
    for name, style in plan.items():
        parent_name, _, leaf = name.rpartition(".")
        parent: Any = modules[parent_name]
        if style == EXPERTS:
            modules[name].register_forward_hook(lambda _module, _args, out: ranks.sum(out))
        elif name not in modules:
            tensor = getattr(parent, leaf)
            tensor.data = _shard_of_experts(tensor.data, style, ranks).to(device)
        elif style == COLUMNS:
            share = _share_of(leaf, shape, ranks)
            # Nobody else holds the whole matrix once its shard has its place.
            setattr(parent, leaf, _shard_columns(modules.pop(name), share, device, quantize_to))
        elif style == ROWS:
            setattr(parent, leaf, _shard_rows(modules.pop(name), ranks, device, quantize_to))
    tied = embeddings.weight is head.weight
    divides = shape.vocab % ranks.size == 0 and head.weight.shape[0] == shape.vocab
    if divides and not tied:
        for parameter in head.parameters(recurse=False):
            parameter.data = _shard_of(parameter.data, 0, ranks.rank, ranks.size).to(device)
    model.to(device)
    if divides and tied:  # the rows of the embeddings, which every rank has
        rows = embeddings.weight.data.tensor_split(ranks.size)[ranks.rank]
        head.weight = nn.Parameter(rows, requires_grad=False)
    if divides:
        head.register_forward_hook(lambda _module, _args, out: ranks.gather(out))


def plan_of(model: PreTrainedModel, shape: ModelShape, count: int) -> Mapping[str, str]:
    """How each module or parameter of the layers is split over ``count`` ranks, by its full name.
    Raises ConfigError.
    """
    refuse(shape, count)
    rules: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    outer = _embeddings_and_head(model)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    plan = {
        name: rules[key]
        for name in (*modules, *parameters)
        if (key := re.sub(r"\.\d+(?=\.|$)", ".*", name)) in rules and modules.get(name) not in outer
    }
    for name, style in plan.items():
        linear = isinstance(modules.get(name), nn.Linear | StoredLinear)
        fits = linear or style not in (COLUMNS, ROWS)
        if style not in ADMITTED or not (fits or name in parameters):
            raise _refused(shape, f"transformers' plan for it has {style} for {name}")
    layers = {n: p for n, p in parameters.items() if p.dim() > 1 and re.search(r"\.\d+\.", n)}
    unsharded = [
        p.numel() for n, p in layers.items() if plan.get(n, plan.get(n.rpartition(".")[0])) is None
    ]
    total = sum(p.numel() for p in layers.values())
    if not plan or sum(unsharded) > UNSHARDED * total:
        share = f"{sum(unsharded) / total:.0%} of its layers' weights"
        raise _refused(shape, f"transformers has no plan for {share if plan else 'it'}")
    return plan


def heads_of(heads: Heads, count: int) -> Heads:
    """The heads that each of ``count`` ranks has of a model's."""
    return replace(heads, query=heads.query // count, kv=-(-heads.kv // count))


def check_heads(heads: Heads, shape: ModelShape, count: int) -> None:
    """Raise ConfigError when a rank's attention has other heads than the memory was sized for."""
    kv = -(-shape.kv_heads // count)
    if (heads.query, heads.kv) != (shape.heads // count, kv):
        raise _refused(shape, f"a rank has {heads.query} query and {heads.kv} key-value heads")


@contextmanager
def quantized(model: PreTrainedModel, plan: Mapping[str, str], to: Format) -> Iterator[None]:
    """Inside the ``with`` block a whole model multiplies by what the quantized weights of its
    shards stand for. They are rounded whenever a matrix is used: none is held twice.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    module_styles = {name: style for name, style in plan.items() if name in modules}
    matrices = [modules[name] for name, style in module_styles.items() if style in (COLUMNS, ROWS)]
    for matrix in matrices:
        matrix.forward = partial(_multiplied, matrix, to)
    try:
        yield
    finally:
        for matrix in matrices:
            del matrix.forward


def _multiplied(matrix: nn.Linear, to: Format, x: Tensor) -> Tensor:
    weight = quantize(matrix.weight.data, to).dequantize().to(x.dtype)
    return F.linear(x, weight, matrix.bias)


@contextmanager
def computed_on(device: torch.device, model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block a model on the CPU computes on ``device``: each module's own
    weights are there only while it runs, so a whole model needs little memory there.
    """
    hooks: list[Any] = []
    if device.type != "cpu":
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        for module in model.modules():
            if has_weights(module):
                hooks += _lent(module, device)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _lent(module: nn.Module, device: torch.device) -> list[Any]:
    host_data: list[list[Tensor]] = []

    def lend(_module: nn.Module, _args: Any) -> None:
        parameters = list(module.parameters(recurse=False))
        host_data.append([parameter.data for parameter in parameters])
        for parameter in parameters:
            parameter.data = parameter.data.to(device)

    def take_back(_module: nn.Module, _args: Any, _output: Any) -> None:
        for parameter, data in zip(module.parameters(recurse=False), host_data.pop(), strict=True):
            parameter.data = data

    return [
        module.register_forward_pre_hook(lend),
        module.register_forward_hook(take_back, always_call=True),
    ]


def _shard_rows(
    module: Any, ranks: RankGroup, device: torch.device, to: Format | None
) -> RowParallel:
    if isinstance(module, StoredLinear):
        stored = module.quantized().weight
        span = _range(stored.shape[1], ranks.rank, ranks.size)
        try:
            stored = stored.columns(span)
        except ValueError as error:  # config.json says nothing of it
            problem = f"a rank cannot have {span.stop - span.start} columns of a matrix: {error}"
            raise ConfigError("tensor_parallel", problem, "use 1") from error
        return QuantizedRowParallel(stored.clone().to(device), module.bias, ranks)
    weight = module.weight.data
    columns = _shard_of(weight, -1, ranks.rank, ranks.size).to(device)
    if to is None:
        return RowParallel(columns, module.bias, ranks)
    # A scale for these columns alone would round it to other numbers than those of the whole row.
    return QuantizedRowParallel(quantize(columns, to, largest_of_rows(weight)), module.bias, ranks)


def _share_of(leaf: str, shape: ModelShape, ranks: RankGroup) -> tuple[int, int]:
    """Which share of a matrix's outputs a rank has, of how many: whole heads of keys and values."""
    if leaf in KEYS and shape.kv_heads < ranks.size:
        return ranks.rank * shape.kv_heads // ranks.size, shape.kv_heads
    return ranks.rank, ranks.size


def _shard_columns(
    module: Any, share: tuple[int, int], device: torch.device, to: Format | None
) -> nn.Module:
    """The module with this share of its outputs."""
    if module.bias is not None:
        module.bias.data = _shard_of(module.bias.data, 0, *share).to(device)
    if isinstance(module, StoredLinear):
        stored = module.quantized().weight
        rows = stored.rows(_range(stored.shape[0], *share))
        return QuantizedLinear(rows.clone().to(device), module.bias)
    module.weight.data = _shard_of(module.weight.data, 0, *share).to(device)
    module.out_features = module.weight.shape[0]
    if to is None:
        return module  # type: ignore[no-any-return]  # it is one
    return QuantizedLinear(quantize(module.weight.data, to), module.bias)


def _shard_of_experts(tensor: Tensor, style: str, ranks: RankGroup) -> Tensor:
    """A shard of the matrices of all experts [experts, outputs, inputs]. Packed outputs are two
    matrices one after the other: gate and up.
    """
    if style == ROWS:
        return _shard_of(tensor, -1, ranks.rank, ranks.size)
    halves = tensor.chunk(2 if style == PACKED else 1, dim=-2)
    return torch.cat([_shard_of(half, -2, ranks.rank, ranks.size) for half in halves], dim=-2)


def _shard_of(tensor: Tensor, dim: int, index: int, count: int) -> Tensor:
    """A copy of one of ``count`` equal shards, which keeps no byte of the others."""
    span = _range(tensor.shape[dim], index, count)
    view = tensor.narrow(dim, span.start, span.stop - span.start)
    return view.clone(memory_format=torch.contiguous_format)


def _range(size: int, index: int, count: int) -> slice:
    """One of ``count`` equal shares of so many rows or columns."""
    if size % count:
        problem = f"a matrix of {size} rows or columns has no {count} equal parts"
        raise ConfigError("tensor_parallel", problem, "use 1")
    return slice(size // count * index, size // count * (index + 1))


def _embeddings_and_head(model: PreTrainedModel) -> tuple[Any, Any]:
    return model.get_input_embeddings(), model.get_output_embeddings()


def _refused(shape: ModelShape, reason: str) -> ConfigError:
    return ConfigError(
        "tensor_parallel", f"{shape.model_type!r} cannot be split: {reason}", "use 1"
    )
