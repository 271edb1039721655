"""The tensors that hold keys and values, on the device and, for preempted sequences, in host
memory.

Owns storage and the order of its copies. A *unit* is ``block_size`` tokens in the layers of one
group; layer i, the s-th of group g, keeps its share of a unit in storage slot s, found through
group g's tables; a layer without keys of its own reads another one's. Callers name units by id; the
scheduler knows which one is free, shared or cached.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from fairlead_kernels.interface.attention import Heads
from fairlead_kernels.plain.copy_blocks import copy_blocks
from fairlead_runtime.device.memory.host_memory import CudaPinning
from fairlead_runtime.device.memory.offloading import Offload, OffloadAtOnce
from fairlead_runtime.device.memory.page_mapping import page_mapper
from fairlead_runtime.device.memory.streams import Streams, cuda_streams
from fairlead_runtime.scheduling.plan import Row, Work
from fairlead_runtime.sizing.groups import LayerGroup, layers_per_unit


class CacheStorage:
    """Keys and values: ``keys`` [slots, units, block_size, kv heads, dim], ``values`` likewise with
    value_dim, both in the type that ``heads`` names.

    ``host_units`` > 0 adds as many units of host memory for offloading. On CUDA it is pinned, and
    copies cross beside the steps, on ``streams``: CUDA's, or those that are given on another
    device. On CPUs copies are made at once; memory is zeroed, and mapped when first written, or
    shortly before (``page_mapping.py``). Raises RuntimeError (torch) when it does not fit, OSError
    when host memory does not.
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
        streams: Streams | None = None,
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
        on_cuda = device.type == "cuda"
        self._streams = cuda_streams(device) if on_cuda and host_units else streams
        self._offload: Offload | OffloadAtOnce | None = None
        keys_values = self.keys, self.values
        if host_units and self._streams is not None:
            pinning = CudaPinning(device) if on_cuda else None
            self._offload = Offload(keys_values, host_units, self._streams, pinning)
        elif host_units:
            self._offload = OffloadAtOnce(keys_values, host_units)
        self._pages = page_mapper(keys_values)
        if self._pages is not None:
            weakref.finalize(self, self._pages.close)
        self._places = {
            layer: (group.index, slot)
            for group in groups
            for layer, slot in (*((x, i) for i, x in enumerate(group.layers)), *group.readers)
        }
        self._readers = frozenset(layer for group in groups for layer, _ in group.readers)

    def keeps(self, layer: int) -> bool:
        """Whether the layer writes keys of its own; else it reads another one's."""
        return layer not in self._readers

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The keys and values [units, block_size, kv heads, dim] that one layer reads, and their
        group's index.
        """
        group, slot = self._places[index]
        return self.keys[slot], self.values[slot], group

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory for offloaded units."""
        return 0 if self._offload is None else self._offload.host_nbytes

    @property
    def staging_nbytes(self) -> int:
        """Device bytes through which offloaded units pass."""
        return 0 if self._offload is None else self._offload.staging_nbytes

    @property
    def not_pinned(self) -> str:
        """Why host memory is not pinned; empty where it is, or where there is none."""
        return "" if self._offload is None else self._offload.not_pinned

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
            if self._offload is None:
                raise RuntimeError(
                    "offload: this cache has no host memory (cpu_offload_space is 0)"
                )
            self._offload.offload(work.offload)
            self._offload.restore(work.restore)
        if work.copies:
            copies = partial(self._copy_on_write, work.copies)
            if self._streams is None:
                copies()
            else:
                self._streams.steps.run(copies)

    def _copy_on_write(self, pairs: Sequence[tuple[int, int]]) -> None:
        copy_blocks(self.keys, self.keys, pairs, dim=1)
        copy_blocks(self.values, self.values, pairs, dim=1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that a CPU maps page by page when first written; torch.zeros writes every page at
    once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
