"""Modules that compute in float32 for a while, and what has weights to widen."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def has_weights(module: nn.Module) -> bool:
    """Whether it has weights of its own, not of a module inside it."""
    return next(module.parameters(recurse=False), None) is not None


@contextmanager
def widened_to_float32(module: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Inside the ``with`` block a module's weights and buffers of other types are float32, with the
    same values: transformers' code computes in float32. With ``device`` all are there meanwhile.
    """
    stored = _widen(module, device)
    try:
        yield
    finally:
        for tensor, data in stored:
            tensor.data = data


def _widen(module: nn.Module, device: torch.device | None) -> list[tuple[Tensor, Tensor]]:
    """Widen these tensors; returns those that have changed, each with the data that it had. Keeps
    no reference to the wide data: who packs it releases it.
    """
    # Weights that are mapped from a file take no memory beside the widened ones.
    stored: list[tuple[Tensor, Tensor]] = []
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        data = tensor.data
        wide = data if device is None else data.to(device)
        if wide.is_floating_point():
            wide = wide.float()
        if wide is not data:
            stored.append((tensor, data))
            tensor.data = wide
    return stored
