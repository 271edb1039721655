"""The tensors that hold keys and values, on the device and, for preempted sequences, in host
memory.

Owns storage and its copies. A *unit* is ``block_size`` tokens in the layers of one group; layer i,
the s-th of group g, keeps its part of a unit in storage slot s, found through group g's tables.
Callers name units by id; the scheduler knows which one is free, shared or cached.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from fairlead_kernels.attention import Heads
from fairlead_kernels.copy_blocks import copy_blocks
from fairlead_runtime.device.page_ahead import page_ahead
from fairlead_runtime.scheduling.plan import Row, Work
from fairlead_runtime.sizing.groups import LayerGroup, layers_per_unit


class CacheStorage:
    """Keys and values: ``keys`` [slots, units, block_size, kv heads, dim], ``values`` likewise with
    value_dim, both in the type that ``heads`` names.

    ``host_units`` > 0 adds as many units of host memory for offloading, pinned when the device is
    CUDA. Memory is zeroed, and on CPUs mapped when first written, or shortly before
    (``page_ahead.py``). Raises RuntimeError (torch) when it does not fit.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        heads: Heads,
        *,
        units: int,
        block_size: int,
        device: torch.device,
        host_units: int = 0,
    ) -> None:
        self.groups = tuple(groups)
        self.heads = heads
        self.units = units
        self.block_size = block_size
        self.device = device
        slots = layers_per_unit(groups)
        shape = (slots, units, block_size, heads.kv)
        self.keys = _zeros((*shape, heads.dim), heads.cache_dtype, device)
        self.values = _zeros((*shape, heads.value_dim), heads.cache_dtype, device)
        self._host = self._host_memory(slots, host_units) if host_units else None
        self._pages = page_ahead((self.keys, self.values))
        if self._pages is not None:
            weakref.finalize(self, self._pages.close)
        self._places = {
            layer: (group.index, slot)
            for group in groups
            for slot, layer in enumerate(group.layers)
        }

    def _host_memory(self, slots: int, units: int) -> tuple[torch.Tensor, torch.Tensor]:
        pin, h = self.device.type == "cuda", self.heads
        shape = (slots, units, self.block_size, h.kv)
        return (
            torch.zeros(*shape, h.dim, dtype=h.cache_dtype, pin_memory=pin),
            torch.zeros(*shape, h.value_dim, dtype=h.cache_dtype, pin_memory=pin),
        )

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """One layer's keys and values [units, block_size, kv heads, dim] and its group's index."""
        group, slot = self._places[index]
        return self.keys[slot], self.values[slot], group

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory for offloaded units."""
        return sum(part.nbytes for part in self._host or ())

    @staticmethod
    def unit_bytes(groups: Sequence[LayerGroup], heads: Heads, block_size: int) -> int:
        """Bytes of one unit, keys and values together."""
        width = heads.kv * (heads.dim + heads.value_dim) * heads.cache_dtype.itemsize
        return layers_per_unit(groups) * block_size * width

    @contextmanager
    def step(self, rows: Sequence[Row]) -> Iterator[None]:
        """Around a step that writes the keys and values of ``rows``."""
        if self._pages is None:
            yield
            return
        tables = (table for row in rows for table in row.sequence.tables if table)
        self._pages.begin(max((table[-1] for table in tables), default=0))
        try:
            yield
        finally:
            self._pages.end()

    def copy(self, work: Work) -> None:
        """A step's copies, in this order: offload, restore, copy-on-write.

        The order matters: a unit may be offloaded and, in the same step, be the target of a restore
        or a copy.
        """
        if work.offload or work.restore:
            if self._host is None:
                raise RuntimeError(
                    "offload: this cache has no host memory (cpu_offload_space is 0)"
                )
            for device, host in zip((self.keys, self.values), self._host, strict=True):
                copy_blocks(device, host, work.offload, dim=1)
                copy_blocks(host, device, work.restore, dim=1)
        if work.copies:
            copy_blocks(self.keys, self.keys, work.copies, dim=1)
            copy_blocks(self.values, self.values, work.copies, dim=1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that a CPU maps page by page when first written; torch.zeros writes every page at
    once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
