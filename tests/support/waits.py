"""A pretended device on a CPU that tells when the host waits for it.

Tensors that were on it, and all that is made of them, are the device's; so is what ``to`` sends
there, which is a copy. Raises RuntimeError where CUDA would let the host wait: a number of a tensor
on the device is asked for, a result's shape depends on its data, or a copy between host and device
is not queued (``non_blocking``). Host memory that such a copy is queued to is the device's as well:
nobody may look at it before an event. What runs inside the stand-ins' kernels and graphs is not
looked at; capturing a graph does wait, once.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from support import flashinfer_standin, triton_standin
from support.graph_standin import (
    Tape,
    TapeRecorder,
    name_of,
    storage,
    tensors,
    waits,
    written,
)

MAKERS = ("arange", "empty", "full", "ones", "zeros")
LOOKS = ("tolist", "numpy", "cpu", "item", "__array__", "__bool__", "__int__", "__float__")


class Device(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """``given``: tensors that are on the device before anything runs."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # see above
        # The storages are kept, so no other tensor gets their addresses.
        self._there: dict[int, Any] = {}
        self.watches = True
        self.operations = 0  # on tensors of the device
        self.take(given)

    def take(self, made: Iterable[Tensor]) -> None:
        # All that are empty have one address, 0.
        self._there |= {storage(x): x.untyped_storage() for x in made if storage(x)}

    def has(self, x: Any) -> bool:
        return isinstance(x, Tensor) and storage(x) in self._there

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        there = any(map(self.has, tensors(args, kwargs)))
        self.operations += there
        if there and waits(func, args):
            raise RuntimeError(f"{name} waits for the device")
        if name == "copy_":
            self._check_copy(*args, **kwargs)
        out = func(*args, **kwargs)
        if there:
            self.take(tensors(out, written(func, args, kwargs)))
        return out

    def _check_copy(self, into: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        if self.has(into) != self.has(source) and source.dim() and not non_blocking:
            way = "to" if self.has(into) else "from"
            raise RuntimeError(f"a copy {way} the device is waited for")


@contextmanager
def watched(device: Device) -> Iterator[None]:
    """Raise where what runs inside waits for ``device``."""
    with pytest.MonkeyPatch.context() as patch:
        for name in LOOKS:
            patch.setattr(Tensor, name, _look(device, name, getattr(Tensor, name)))
        patch.setattr(Tensor, "to", _to(device, Tensor.to))
        for name in MAKERS:
            patch.setattr(torch, name, _made(device, getattr(torch, name)))
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, _given(device, getattr(torch, name)))
        wrapper = flashinfer_standin._Wrapper
        for name in ("_compute", "_end_plan"):
            patch.setattr(wrapper, name, _inside(device, getattr(wrapper, name)))
        patch.setattr(Tape, "replay", _inside(device, Tape.replay))
        patch.setattr(TapeRecorder, "record", _inside(device, TapeRecorder.record))
        for name in ("attend", "merge", "multiply_experts"):
            kernel = getattr(triton_standin.Torch, name)
            patch.setattr(kernel, "_run", _inside(device, kernel._run))
        with device:
            yield


def _look(device: Device, name: str, looked: Callable[..., Any]) -> Callable[..., Any]:
    def look(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if device.watches and device.has(x):
            raise RuntimeError(f"{name} waits for the device")
        return looked(x, *args, **kwargs)

    return look


def _made(device: Device, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What is asked for by its device is there; host memory is asked for without one."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        out = make(*args, **kwargs)
        if kwargs.get("device") is not None:
            device.take([out])
        return out

    return made


def _given(device: Device, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def given(*args: Any, **kwargs: Any) -> Tensor:
        if device.watches and kwargs.get("device") is not None:
            raise RuntimeError("numbers that go to the device are waited for")
        return make(*args, **kwargs)

    return given


def _to(device: Device, moved: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def to(x: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        place = kwargs.get("device", args[0] if args else None)
        if not device.watches or not isinstance(place, torch.device) or device.has(x):
            return moved(x, *args, **kwargs)
        if not non_blocking:
            raise RuntimeError("a tensor that goes to the device is waited for")
        kwargs["copy"] = True
        sent = moved(x, *args, **kwargs)
        device.take([sent])
        return sent

    return to


def _inside(device: Device, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Work of the device alone, or of a package whose own care is not ours to test."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, device.watches = device.watches, False
        try:
            with _disable_current_modes():
                out = kernel(*args, **kwargs)
        finally:
            device.watches = before
        device.take(x for x in tensors(out, kwargs.get("out")))
        return out

    return run
