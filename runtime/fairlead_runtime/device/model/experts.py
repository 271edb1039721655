"""A mixture's experts on a product of ours, as transformers' experts function.

Owns the function registered with transformers, and which of a model's modules it is for. It does
what transformers' ``grouped_mm`` does (``integrations/moe.py``), without its reads on the host and
without experts that other ranks have: here ranks split each expert.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fairlead_kernels.choice.experts import (
    ExpertProduct,
    Matrices,
    groups_in_torch,
    looped_product,
)

NAME = "fairlead_experts"
LOOPED = "fairlead_looped_experts"


def register(product: ExpertProduct) -> None:
    """Register the experts function with transformers as NAME, on this product from now on."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, partial(_experts, product))


def groupable(model: nn.Module, device: torch.device) -> bool:
    """Whether torch's grouped product takes all of the model's experts on this device. Where it
    does not, LOOPED is registered, on one product for each expert.
    """
    if all(groups_in_torch(sample, device) for sample in samples_of(model)):
        return True
    ALL_EXPERTS_FUNCTIONS.register(LOOPED, partial(_experts, looped_product))
    return False


def samples_of(model: nn.Module) -> list[Matrices]:
    """One product's matrices of each size and layout that the model's experts have."""
    samples: dict[object, Matrices] = {}
    for module in model.modules():
        if hasattr(module, "is_concatenated"):  # transformers gives it to experts alone
            for name in (_first(module), "down_proj"):
                matrices = _matrices(module, name)
                weights, bias = matrices
                key = weights.shape, weights.stride(), weights.dtype, bias is None
                samples.setdefault(key, matrices)
    return list(samples.values())


def _first(experts: Any) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _matrices(experts: Any, name: str) -> Matrices:
    weights: Tensor = getattr(experts, name).data
    bias = getattr(experts, f"{name}_bias").data if experts.has_bias else None
    return Matrices(weights if experts.is_transposed else weights.transpose(-2, -1), bias)


def _experts(
    product: ExpertProduct, experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor
) -> Tensor:
    """Compute from ``hidden`` [T, width] the ``chosen`` experts of each token int64 [T, k] and
    their ``shares`` [T, k]: [T, width].
    """
    count, per_token = chosen.shape
    ids, order = torch.sort(chosen.reshape(-1))
    numbers = torch.arange(experts.num_experts, device=ids.device, dtype=ids.dtype)
    expert_ends = torch.searchsorted(ids, numbers, right=True, out_int32=True)

    def multiplied(x: Tensor, name: str) -> Tensor:
        weights, bias = _matrices(experts, name)
        return product(x.to(weights.dtype), weights, expert_ends, bias)

    out = multiplied(hidden[order // per_token], _first(experts))
    gate = experts._apply_gate if experts.has_gate else experts.act_fn  # noqa: SLF001 - as theirs
    out = multiplied(gate(out), "down_proj")
    if getattr(experts, "has_post_expert_norm", False):  # the oldest transformers knows none
        out = experts.post_expert_norm(out)
    out = out * shares.reshape(-1)[order, None]
    out = torch.empty_like(out).index_copy_(0, order, out)
    return out.view(count, per_token, -1).sum(dim=1).to(hidden.dtype)
