"""Modules that compute in float32 for a while."""

import itertools

import torch
from torch import Tensor, nn


class Widened:
    """A module whose weights and buffers of other types are float32 from now on, with the same
    values: transformers' code computes in float32.
    """

    def __init__(self, module: nn.Module) -> None:
        # Weights that are mapped from a file take no memory beside the widened ones.
        self._own: list[tuple[Tensor, Tensor]] = []
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            if tensor.is_floating_point() and tensor.dtype is not torch.float32:
                self._own.append((tensor, tensor.data))
                tensor.data = tensor.data.float()

    def narrow(self) -> None:
        """Give them back what they had."""
        for tensor, own in self._own:
            tensor.data = own
        self._own.clear()
