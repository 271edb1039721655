"""The tensors that hold keys and values, on the device and, for preempted sequences, in host
memory.

Owns storage and the order of its copies. A *unit* is ``block_size`` tokens in the layers of one
group; layer i, the s-th of group g, keeps its share of a unit in storage slot s, found through
group g's tables; a layer without keys of its own reads another one's. Callers name units by id; the
scheduler knows which one is free, shared or cached.

Layers with heads of several sizes have no slots in common. There a unit is ``block_size`` places of
a token, each as wide as the widest group needs, and a group lays its layers out in a place:

    place of a full group      [ keys 0 | values 0 | keys 6 | values 6 | unused ]
    place of a window group    [ keys 1     | values 1     | keys 2 | values 2  ]

So a layer's tokens lie one stride apart in all units, as they do in a tensor of its own. A cache
that also has states (``state_units.py``) is laid out so, too: they lie over whole units. Where no
layer keeps keys a unit is a state.
"""

import math
import mmap
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from fairlead_kernels.interface.attention import Heads
from fairlead_kernels.plain.copy_blocks import copy_blocks
from fairlead_runtime.device.memory.host_memory import CudaPinning
from fairlead_runtime.device.memory.offloading import Offload, OffloadAtOnce
from fairlead_runtime.device.memory.page_mapping import page_mapper
from fairlead_runtime.device.memory.state_units import StateUnits
from fairlead_runtime.device.memory.streams import Streams, cuda_streams
from fairlead_runtime.scheduling.plan import Row, Work
from fairlead_runtime.sizing.groups import LayerGroup
from fairlead_runtime.sizing.states import StateLayout, aligned_width


class CacheStorage:
    """The units of one cache. ``heads``: of every layer, or one for each layer of the model.

    With heads of one size, ``tensors`` are keys [slots, units, block_size, kv heads, dim] and
    values, likewise with value_dim; else one [1, units, block_size, width]. All are in the type
    that ``heads`` names.

    ``states``: where a sequence's states lie over its units, in a model that keeps some.

    ``host_units`` > 0 adds as many units of host memory for offloading. On CUDA it is pinned, and
    copies cross beside the steps, on ``streams``: CUDA's, or those that are given on another
    device. On CPUs copies are made at once; memory is zeroed, and mapped when first written, or
    shortly before (``page_mapping.py``). Raises RuntimeError (torch) when it does not fit, OSError
    when host memory does not.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        heads: Heads | Sequence[Heads],
        *,
        units: int,
        block_size: int,
        device: torch.device,
        host_units: int = 0,
        streams: Streams | None = None,
        states: StateLayout | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.units = units
        self.block_size = block_size
        self.device = device
        of_layers = _of_layers(groups, heads)
        # By layer: keys, values and the group's index.
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self.tensors: tuple[torch.Tensor, ...]
        self.states: StateUnits | None = None
        if not of_layers:
            nbytes = self.unit_bytes(groups, heads, block_size, states)
            self.tensors = (_zeros((1, units, nbytes), torch.uint8, device),)
        elif len({*of_layers.values()}) == 1 and states is None:
            one = of_layers[groups[0].layers[0]]
            shape = (max(len(group.layers) for group in groups), units, block_size, one.kv)
            keys = _zeros((*shape, one.dim), one.cache_dtype, device)
            values = _zeros((*shape, one.value_dim), one.cache_dtype, device)
            self.tensors = keys, values
            for group in groups:
                for slot, layer in enumerate(group.layers):
                    self._layers[layer] = keys[slot], values[slot], group.index
        else:
            cache_dtype = next(iter(of_layers.values())).cache_dtype
            nbytes = self.unit_bytes(groups, heads, block_size, states)
            width = nbytes // (block_size * cache_dtype.itemsize)
            places = _zeros((1, units, block_size, width), cache_dtype, device)
            self.tensors = (places,)
            for group in groups:
                self._layers |= _laid_out(places[0], group, of_layers)
        if states is not None:
            places = self.tensors[0]
            self.states = StateUnits(places.view(units, -1).view(torch.uint8), states)
        self.unit_nbytes = sum(x[:, :1].nbytes for x in self.tensors)
        on_cuda = device.type == "cuda"
        self._streams = cuda_streams(device) if on_cuda and host_units else streams
        self._offload: Offload | OffloadAtOnce | None = None
        if host_units and self._streams is not None:
            pinning = CudaPinning(device) if on_cuda else None
            self._offload = Offload(self.tensors, host_units, self._streams, pinning)
        elif host_units:
            self._offload = OffloadAtOnce(self.tensors, host_units)
        self._pages = page_mapper(self.tensors)
        if self._pages is not None:
            weakref.finalize(self, self._pages.close)
        for group in groups:
            for reader, slot in group.readers:
                self._layers[reader] = self._layers[group.layers[slot]]
        self._readers = frozenset(layer for group in groups for layer, _ in group.readers)

    def keeps(self, layer: int) -> bool:
        """Whether the layer writes keys of its own; else it reads another one's."""
        return layer not in self._readers

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The keys and values [units, block_size, kv heads, dim] that one layer reads, and their
        group's index.
        """
        return self._layers[index]

    def fill(self, value: float) -> None:
        """Put one number everywhere."""
        for tensor in self.tensors:
            if tensor.dtype is torch.uint8:  # a byte of NaN
                tensor.fill_(0xFF if math.isnan(value) else int(value))
            else:
                tensor.fill_(value)

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

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
    def unit_bytes(
        groups: Sequence[LayerGroup],
        heads: Heads | Sequence[Heads],
        block_size: int,
        states: StateLayout | None = None,
    ) -> int:
        """Bytes of one unit, keys and values together: as many as the widest group needs, with
        states a multiple of their ALIGNMENT, and without keys those of a state.
        """
        of_layers = _of_layers(groups, heads)
        if not of_layers:
            return 0 if states is None else states.nbytes
        width = max(sum(_width(of_layers[i]) for i in group.layers) for group in groups)
        itemsize = next(iter(of_layers.values())).cache_dtype.itemsize
        if states is not None:
            width = aligned_width(width, block_size * itemsize)
        return block_size * width * itemsize

    @contextmanager
    def step(self, rows: Sequence[Row]) -> Iterator[None]:
        """Around a step that writes the keys and values of ``rows``."""
        if self._pages is None:
            yield
            return
        tops = [table[-1] for row in rows for table in row.sequence.tables if table]
        # A state that takes the place of another may lie in any order.
        tops += [max(units) for row in rows for units in row.sequence.states if units]
        self._pages.begin(max(tops, default=0))
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
        for tensor in self.tensors:
            copy_blocks(tensor, tensor, pairs, dim=1)


def _of_layers(groups: Sequence[LayerGroup], heads: Heads | Sequence[Heads]) -> dict[int, Heads]:
    """The heads of every layer that is in a group."""
    layers = [layer for group in groups for layer in group.layers]
    return {i: heads if isinstance(heads, Heads) else heads[i] for i in layers}


def _width(heads: Heads) -> int:
    """Elements of one token's key and value."""
    return heads.kv * (heads.dim + heads.value_dim)


def _laid_out(
    places: torch.Tensor, group: LayerGroup, heads: Mapping[int, Heads]
) -> dict[int, tuple[torch.Tensor, torch.Tensor, int]]:
    """A group's layers in the places [units, block_size, width] of tokens, one beside the other."""
    layers, at = {}, 0
    for layer in group.layers:
        h, parts = heads[layer], []
        for dim in (h.dim, h.value_dim):
            part = places[..., at : at + h.kv * dim]
            parts.append(part.view(*part.shape[:-1], h.kv, dim))
            at += h.kv * dim
        layers[layer] = parts[0], parts[1], group.index
    return layers


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that a CPU maps page by page when first written; torch.zeros writes every page at
    once. They begin with a page: numpy's own begin 16 bytes behind it, so that each vector of a
    kernel would be in two cache lines.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    pages = np.zeros(nbytes + mmap.PAGESIZE, dtype=np.uint8)
    first = -pages.ctypes.data % mmap.PAGESIZE
    return torch.from_numpy(pages[first : first + nbytes]).view(dtype).view(shape)
