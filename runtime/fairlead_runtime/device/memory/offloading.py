"""Units on their way between a GPU's cache and host memory, beside the steps.

    steps   gather units into a piece ┐             ┌ scatter it into units, then the step
    side                              send it    fetch a piece

Owns the staging buffer, which has a few pieces, host memory, and the events between the two lanes.
No call waits for the device. docs/design/0013 says which order protects what.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from fairlead_kernels.plain.copy_blocks import copy_blocks, gather_blocks, indices, scatter_blocks
from fairlead_runtime.device.memory.host_memory import HostMemory, Pinning, within_segments
from fairlead_runtime.device.memory.streams import Event, Streams
from fairlead_runtime.sizing.offload_space import Staging

Pairs = Sequence[tuple[int, int]]
Tensors = tuple[torch.Tensor, ...]  # keys and values, or both in one


class _Units(NamedTuple):
    """The place of host units of one tensor: from the byte ``begin`` on, ``size`` each."""

    begin: int
    size: int


@dataclass(slots=True, eq=False)
class _Piece:
    """``tensors`` [units, slots, bytes] each of the staging buffer. ``free``: the event after which
    they may be written again.
    """

    tensors: Tensors
    free: Event = None


class Offload:
    """Copies between ``cache``, tensors [slots, units, ...] dense on one device, and ``host_units``
    > 0 units of host memory.

    What is queued on the lane of the steps behind a call sees the cache as if its copies were done,
    and may write to every unit that they read. Raises OSError or RuntimeError (torch) when memory
    is short.
    """

    def __init__(
        self, cache: Tensors, host_units: int, streams: Streams, pinning: Pinning | None
    ) -> None:
        self._cache = cache
        self._device = cache[0].device
        self._streams = streams
        sizes = [x[:, 0].nbytes for x in cache]  # of a unit
        shapes = [(x.shape[0], n // x.shape[0]) for x, n in zip(cache, sizes, strict=True)]
        staging = Staging.of(host_units, sum(sizes))
        self._units = staging.units  # of a piece
        pieces = [
            torch.empty((*staging, *shape), dtype=torch.uint8, device=self._device)
            for shape in shapes
        ]
        self.staging_nbytes = sum(tensor.nbytes for tensor in pieces)
        self._pieces = [_Piece(tensors) for tensors in zip(*pieces, strict=True)]
        self._turn = 0
        self._memory = HostMemory(host_units * sum(sizes), pinning)
        self.not_pinned = self._memory.refused
        self.host_nbytes = self._memory.nbytes
        begins = accumulate((host_units * size for size in sizes[:-1]), initial=0)
        self._host = [_Units(*place) for place in zip(begins, sizes, strict=True)]

    def offload(self, pairs: Pairs) -> None:
        """Queue the copies of units to host units: (unit, host unit)."""
        if not pairs:
            return
        steps, side = self._streams
        units = indices([unit for unit, _ in pairs], self._device)
        for at, piece in self._turns(len(pairs)):
            span = slice(at, at + self._units)
            if piece.free is not None:
                steps.wait(piece.free)
            steps.run(partial(self._gather, units[span], piece))
            side.wait(steps.record())
            runs = list(_runs((host, place) for place, (_, host) in enumerate(pairs[span])))
            side.run(partial(self._cross, runs, piece, leaves=True))
            piece.free = side.record()

    def restore(self, pairs: Pairs) -> None:
        """Queue the copies of host units to units: (host unit, unit)."""
        if not pairs:
            return
        steps, side = self._streams
        units = indices([unit for _, unit in pairs], self._device)
        for at, piece in self._turns(len(pairs)):
            span = slice(at, at + self._units)
            if piece.free is not None:
                side.wait(piece.free)
            runs = list(_runs((host, place) for place, (host, _) in enumerate(pairs[span])))
            side.run(partial(self._cross, runs, piece, leaves=False))
            steps.wait(side.record())
            steps.run(partial(self._scatter, piece, units[span]))
            piece.free = steps.record()

    def _turns(self, count: int) -> Iterator[tuple[int, _Piece]]:
        """The piece for each span of ``count`` units, with the span's first."""
        for at in range(0, count, self._units):
            yield at, self._pieces[self._turn]
            self._turn = (self._turn + 1) % len(self._pieces)

    def _gather(self, units: torch.Tensor, piece: _Piece) -> None:
        for cache, staged in zip(self._cache, piece.tensors, strict=True):
            gather_blocks(cache, units, staged[: len(units)])

    def _scatter(self, piece: _Piece, units: torch.Tensor) -> None:
        for cache, staged in zip(self._cache, piece.tensors, strict=True):
            scatter_blocks(staged[: len(units)], units, cache)

    def _cross(self, runs: Sequence["_Run"], piece: _Piece, *, leaves: bool) -> None:
        """Queue a transfer of each tensor for each run of host units and their places in the
        piece; more where a run lies in several segments of host memory.
        """
        for units, staged in zip(self._host, piece.tensors, strict=True):
            flat = staged.view(-1)
            for host, place, count in runs:
                begin, at = units.begin + host * units.size, place * units.size
                for first, end in within_segments(begin, begin + count * units.size):
                    host_bytes = self._memory.data[first:end]
                    staged_bytes = flat[at + first - begin : at + end - begin]
                    target, source = (
                        (host_bytes, staged_bytes) if leaves else (staged_bytes, host_bytes)
                    )
                    target.copy_(source, non_blocking=True)


class OffloadAtOnce:
    """Offloading on a CPU, where host memory is one more tensor [slots, units, ...] for each:
    copies are made when they are asked for, and pass nowhere.
    """

    staging_nbytes = 0
    not_pinned = ""

    def __init__(self, cache: Tensors, host_units: int) -> None:
        self._cache = cache
        self._host = tuple(
            torch.zeros((tensor.shape[0], host_units, *tensor.shape[2:]), dtype=tensor.dtype)
            for tensor in cache
        )
        self.host_nbytes = sum(tensor.nbytes for tensor in self._host)

    def offload(self, pairs: Pairs) -> None:
        """Copy units to host units: (unit, host unit)."""
        for cache, host in zip(self._cache, self._host, strict=True):
            copy_blocks(cache, host, pairs, dim=1)

    def restore(self, pairs: Pairs) -> None:
        """Copy host units to units: (host unit, unit)."""
        for cache, host in zip(self._cache, self._host, strict=True):
            copy_blocks(host, cache, pairs, dim=1)


class _Run(NamedTuple):
    """``units`` that lie side by side in both memories."""

    source: int
    target: int
    units: int


def _runs(pairs: Iterable[tuple[int, int]]) -> Iterator[_Run]:
    """The pairs (source, target), neighbours together: a transfer takes longer to begin than a
    small one to cross.
    """
    run: _Run | None = None
    for source, target in pairs:
        if run is not None and (source - run.source, target - run.target) == (run.units, run.units):
            run = run._replace(units=run.units + 1)
            continue
        if run is not None:
            yield run
        run = _Run(source, target, 1)
    if run is not None:
        yield run
