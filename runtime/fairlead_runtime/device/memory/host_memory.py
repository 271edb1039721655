"""Host memory of exactly the size that was planned, pinned for a GPU where the system lets it be.

Pinned memory is what a GPU reads and writes by itself, while the host goes on. torch's own is
rounded up to a power of two, which may be nearly twice as much; this is mapped here and registered
with CUDA. Owns the mapping, its registration and the end of both.
"""

import logging
import mmap
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol

import torch

log = logging.getLogger("fairlead.offload")

# Registered at a time: the driver keeps a table of each call's pages, of less than 2 GiB, which is
# that of 512 GiB in pages of 4 KiB.
SEGMENT = 32 << 30


class Pinning(Protocol):
    """What registers memory with a device."""

    def register(self, address: int, size: int) -> str:
        """Pin these bytes. Returns why they cannot be, else nothing."""
        ...

    def unregister(self, address: int) -> None:
        """Undo ``register``. Raises RuntimeError where the device is gone."""
        ...

    def finish(self) -> None:
        """Wait for every transfer that may still use the memory. Raises as ``unregister``."""
        ...


class CudaPinning:
    """Pinning by the CUDA runtime that torch uses, for ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size: int) -> str:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # not annotated
        with torch.cuda.device(self._device):
            code = runtime.cudaHostRegister(address, size, 0)
            if code == runtime.cudaError.success:
                return ""
            # CUDA remembers the error of a call that failed, and torch would raise it at the next
            # kernel, whatever that is: here it is one that nobody needs.
            with suppress(RuntimeError):
                torch.ones(1, device=self._device).add_(1)
        return str(runtime.cudaGetErrorString(code))

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # see above

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


class HostMemory:
    """``data`` uint8 [nbytes]: zeros at the start of a page, for as long as this lives. ``refused``
    says why they are not pinned, and is empty where they are. Raises OSError when there is no room.

    Memory that is not pinned serves, too: then the host waits for each transfer.
    """

    def __init__(self, nbytes: int, pinning: Pinning | None) -> None:
        # Private: shared memory would count as the pod's files in memory.
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data = torch.frombuffer(pages, dtype=torch.uint8)
        self.refused = "" if pinning else "no device needs it"
        if pinning is None:
            return
        registered: list[int] = []
        weakref.finalize(self, _release, pinning, registered, self.data)
        self.refused = _register(pinning, self.data, registered)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def within_segments(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The bytes ``begin``:``end`` of a HostMemory, cut where a segment ends: CUDA wants the memory
    of a transfer registered as a whole.
    """
    while begin < end:
        until = min(end, (begin // SEGMENT + 1) * SEGMENT)
        yield begin, until
        begin = until


def _register(pinning: Pinning, data: torch.Tensor, registered: list[int]) -> str:
    """Pin all of ``data`` or nothing, and add the addresses of its segments. Says which it was."""
    began, size = time.monotonic(), data.nbytes
    for at in range(0, size, SEGMENT):
        address = data.data_ptr() + at
        if refused := pinning.register(address, min(SEGMENT, size - at)):
            _unregister(pinning, registered)
            log.warning(
                "offload: %.2f GiB of host memory cannot be pinned (%s): it is used as it is, and "
                "the host waits for each copy of a preempted sequence; see that the container and "
                "its ulimits (memlock) allow it, or set cpu_offload_space to 0",
                *(size / (1 << 30), refused),
            )
            return refused
        registered.append(address)
    seconds = time.monotonic() - began
    log.info("offload: %.2f GiB of host memory pinned in %.1f s", size / (1 << 30), seconds)
    return ""


def _release(pinning: Pinning, registered: list[int], _data: torch.Tensor) -> None:
    """``_data`` keeps the memory mapped until then."""
    if not registered:
        return
    with suppress(RuntimeError):  # of a device that failed, whose process ends
        pinning.finish()
        _unregister(pinning, registered)


def _unregister(pinning: Pinning, registered: list[int]) -> None:
    while registered:
        pinning.unregister(registered.pop())
