"""The memory that this process has freed."""

import ctypes
import gc


def release_memory() -> None:
    """Give freed memory back to the system: glibc keeps it in pieces of up to 32 MiB, which after
    building a tokenizer, or rounding weights, is more than what they take themselves. Does nothing
    with another C library.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
