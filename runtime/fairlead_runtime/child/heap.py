"""The memory that this process has freed."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_for_good() -> Iterator[None]:
    """Inside the ``with`` block no garbage is collected, and afterwards the collector looks at
    nothing of what is there: modules live as long as the process, and imports make so many objects
    that it goes over all of them again and again. ``gc.unfreeze`` undoes it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def release_memory() -> None:
    """Give freed memory back to the system: glibc keeps it in pieces of up to 32 MiB, which after
    building a tokenizer, or rounding weights, is more than what they take themselves. Does nothing
    with another C library.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "mapped"),
            *("usmblks", "fsmblks", "in_use", "fordblks", "keepcost"),
        )
    )


def allocated_bytes() -> int:
    """Bytes that malloc has given out and that are not freed, below 4 GiB; no pages that a process
    touches for the first time, as resident memory has. 0 with another C library than glibc.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.in_use + info.mapped)
