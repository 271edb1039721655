"""Host memory of a step that is reused by the next."""

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]


class HostBuffer:
    """Host memory that grows; ``take`` returns its beginning as a numpy view and as a tensor on the
    same bytes. Where it must grow it becomes ``spare`` times as large as is needed.
    """

    def __init__(self, dtype: torch.dtype, *, pinned: bool = False, spare: int = 2) -> None:
        self._dtype = dtype
        self._pinned = pinned
        self._spare = spare
        self._tensor = torch.empty(0, dtype=dtype)

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def take(self, *shape: int) -> tuple[Array, torch.Tensor]:
        size = int(np.prod(shape))
        if size > self._tensor.numel():
            self._tensor = torch.empty(
                self._spare * size, dtype=self._dtype, pin_memory=self._pinned
            )
        view = self._tensor[:size].view(*shape)
        return view.numpy(), view
