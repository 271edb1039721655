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

import torch

AHEAD = 1 << 30
# Mapped at a time: one large page, a few milliseconds where pages are slowest.
PIECE = 2 << 20
# Seconds without a step after which it counts as idle: steps of decodes follow each other sooner.
REST = 0.02
# Smaller caches are mapped by a few steps.
SMALLEST = 64 << 20
PAGE = mmap.PAGESIZE
MADV_POPULATE_WRITE = 23  # Linux 5.14


class PageMapper:
    """Maps ``tensors`` [slots, units, ...], dense on the CPU, until ``close``. Keeps them alive
    until then.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, ahead: int = AHEAD) -> None:
        self._tensors = tuple(tensors)
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
        """The thread ends after the piece that it maps."""
        self._closed = True
        self._more.set()

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
        self._tensors = ()

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Last unit, address and bytes of each piece, those of low units first."""
        widest = max(t.stride(1) * t.itemsize for t in self._tensors)
        many = max(1, PIECE // widest)
        for first in range(0, self._units, many):
            count = min(many, self._units - first)
            for tensor in self._tensors:
                unit = tensor.stride(1) * tensor.itemsize
                for slot in range(tensor.shape[0]):
                    begin = tensor.data_ptr() + slot * tensor.stride(0) * tensor.itemsize
                    yield first + count, begin + first * unit, count * unit


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
