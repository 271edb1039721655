"""The package flashinfer-python: imported here and nowhere else.

Owns which of its names are used, and says why it cannot be used. Written for 0.7.2.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fairlead_kernels.interface.not_available import importing


class Event(Protocol):
    """A place in the device's queue of work, as torch.cuda.Event."""

    def record(self) -> None:
        """Mark the place behind all work that is queued now."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the marked place; return at once if none is marked."""
        ...


@dataclass(frozen=True, slots=True)
class FlashinferPackage:
    """The classes of the package that we call, under its own names in the comments.

    They are not typed here: the package's signatures are compared with those of the stand-in that
    the tests run, not with annotations of ours.
    """

    version: str
    prefill: Callable[..., Any]  # BatchPrefillWithPagedKVCacheWrapper
    decode: Callable[..., Any]  # BatchDecodeWithPagedKVCacheWrapper
    sinks: Callable[..., Any]  # BatchAttentionWithAttentionSinkWrapper
    event: Callable[[], Event]
    properties: Callable[[torch.device], Any]  # of a GPU, as torch.cuda.get_device_properties


def load() -> FlashinferPackage:
    """Import the package, which takes seconds. Raises NotAvailableError with the reason."""
    with importing("flashinfer-python", "flashinfer"):
        package: Any = importlib.import_module("flashinfer")
    return FlashinferPackage(
        version=str(package.__version__),
        prefill=package.BatchPrefillWithPagedKVCacheWrapper,
        decode=package.BatchDecodeWithPagedKVCacheWrapper,
        sinks=package.BatchAttentionWithAttentionSinkWrapper,
        event=torch.cuda.Event,
        properties=torch.cuda.get_device_properties,
    )
