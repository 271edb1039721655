"""The pages of a cache in a CPU's memory, mapped before steps write there.

The first write to a page maps and zeroes it: within a step, on the threads that compute. In a small
virtual machine, whose host gives memory page by page, that is a tenth of a long prefill. So a
thread maps pages while no step runs, from the lowest unit on, as the pool takes them, and stays
``AHEAD`` bytes ahead of the highest unit that steps have used: what is resident grows with use, and
not to all that was planned.

Owns that thread. Knows no block table.
"""

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch

AHEAD = 1 << 30
# Mapped at a time: one large page, a few milliseconds where pages are slowest.
PIECE = 2 << 20
# Seconds without a step after which it counts as idle: steps of decodes follow each other sooner.
REST = 0.02
# Smaller caches are mapped by a few steps.
SMALLEST = 64 << 20
LONGEST = 10.0  # seconds that a piece may take for ``close`` to wait for its end
PAGE = mmap.PAGESIZE
MADV_POPULATE_WRITE = 23  # Linux 5.14


class _Place(NamedTuple):
    """Where a tensor's slots lie, and the bytes of a unit there."""

    slots: range
    unit: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        slot, unit = (stride * tensor.itemsize for stride in tensor.stride()[:2])
        first = tensor.data_ptr()
        return cls(range(first, first + tensor.shape[0] * slot, slot), unit)


class PageMapper:
    """Maps ``tensors`` [slots, units, ...], dense on the CPU, until ``close``, which their owner
    calls while they are there: the thread knows addresses alone, since a thread that frees the last
    reference while the interpreter ends takes the process down.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, ahead: int = AHEAD) -> None:
        self._places = [_Place.of(tensor) for tensor in tensors]
        self._units = tensors[0].shape[1]
        self._ahead = ahead * self._units // sum(t.nbytes for t in tensors)
        self._goal = min(self._ahead, self._units)
        self._running = False
        self._ended = time.monotonic()
        self._closed = False
        self._more = threading.Event()
        self.thread = threading.Thread(target=self._run, name="page-ahead", daemon=True)
        self.thread.start()

    def begin(self, top: int) -> None:
        """A step begins, whose last units go up to ``top``. The thread rests until ``end``."""
        self._running = True
        goal = min(top + 1 + self._ahead, self._units)
        if goal > self._goal:
            self._goal = goal
            self._more.set()

    def end(self) -> None:
        """The step has ended."""
        self._ended = time.monotonic()
        self._running = False

    def close(self) -> None:
        """The thread ends after the piece that it maps, before this returns."""
        self._closed = True
        self._more.set()
        if self.thread is not threading.current_thread():  # which may collect the owner
            self.thread.join(LONGEST)

    def _run(self) -> None:
        for end, address, size in self._pieces():
            while end > self._goal and not self._closed:
                self._more.clear()
                if end > self._goal and not self._closed:
                    self._more.wait()
            while not self._closed and (self._running or time.monotonic() - self._ended < REST):
                time.sleep(REST)
            if self._closed or not _populate(address, size):
                break

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Last unit, address and bytes of each piece, those of low units first."""
        many = max(1, PIECE // max(place.unit for place in self._places))
        for first in range(0, self._units, many):
            count = min(many, self._units - first)
            for place in self._places:
                for begin in place.slots:
                    yield first + count, begin + first * place.unit, count * place.unit


def page_mapper(tensors: Sequence[torch.Tensor]) -> PageMapper | None:
    """A PageMapper where it can help: for a large cache on a CPU, on Linux."""
    size = sum(tensor.nbytes for tensor in tensors)
    if tensors[0].device.type != "cpu" or size < SMALLEST or sys.platform != "linux":
        return None
    return PageMapper(tensors)


def _populate(address: int, size: int) -> bool:
    """Map the pages that hold these bytes as a write does, and leave what they hold. False where
    the system cannot.
    """
    begin = address // PAGE * PAGE
    length = -(-(address + size - begin) // PAGE) * PAGE
    done: int = ctypes.CDLL(None).madvise(
        ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_POPULATE_WRITE
    )
    return done == 0
