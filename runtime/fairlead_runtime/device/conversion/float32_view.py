"""Modules that compute in float32 for a while, and what has weights to widen."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def has_weights(module: nn.Module) -> bool:
    """Of its own, not of a module inside it."""
    return next(module.parameters(recurse=False), None) is not None


class Widened:
    """A module whose weights and buffers of other types are float32 from now on, with the same
    values: transformers' code computes in float32. With ``device`` all are there meanwhile.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | None = None,
    ) -> None:
        # Weights that are mapped from a file take no memory beside the widened ones.
        self._own: list[tuple[Tensor, Tensor]] = []
        for tensor in _tensors(module):
            own = tensor.data
            wide = own if device is None else own.to(device)
            if wide.is_floating_point():
                wide = wide.float()
            if wide is not own:
                self._own.append((tensor, own))
                tensor.data = wide

    def narrow(self) -> None:
        """Give them back what they had."""
        for tensor, own in self._own:
            tensor.data = own
        self._own.clear()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())
