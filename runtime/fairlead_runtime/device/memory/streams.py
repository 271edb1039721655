"""The two queues of a GPU that copies need: the one that steps run on, and one beside it.

Owns their interface, which tests put a stand-in behind, and CUDA's streams and events for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

# What ``Lane.record`` returns and ``Lane.wait`` takes.
Event = Any


class Lane(Protocol):
    """A queue of the device: what is put there runs in order, and beside the other lanes. No call
    waits for the device.
    """

    def run(self, work: Callable[[], object]) -> None:
        """Queue the kernels and transfers that ``work`` makes; it makes them once."""
        ...

    def record(self) -> Event:
        """An event that comes when all that is queued here so far has run."""
        ...

    def wait(self, event: Event) -> None:
        """What is queued here from now on runs after the event."""
        ...


class Streams(NamedTuple):
    """``steps``: where a step's forward pass is queued. ``side``: where transfers cross."""

    steps: Lane
    side: Lane


class CudaLane:
    """A stream of ``device``: the one that is current at each call, or ``stream``."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream

    def run(self, work: Callable[[], object]) -> None:
        if self._stream is None:
            work()
            return
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
        event.record(self._now())
        return event

    def wait(self, event: Event) -> None:
        self._now().wait_event(event)

    def _now(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream(self._device)


def cuda_streams(device: torch.device) -> Streams:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return Streams(CudaLane(device), CudaLane(device, side))
