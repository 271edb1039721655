"""Host memory for offloading: pinned in exactly its size, given back, and of use without that."""

import mmap
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairlead_runtime.device.memory import host_memory
from fairlead_runtime.device.memory.host_memory import CudaPinning, HostMemory


class FakePinning:
    """Registers the first ``most`` parts; ``log`` says what it did then."""

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.registered: dict[int, int] = {}
        self.log: list[str] = []

    def register(self, address: int, size: int) -> str:
        if len(self.registered) == self.most:
            return "out of memory"
        self.registered[address] = size
        return ""

    def unregister(self, address: int) -> None:
        self.log.append("unregister")
        del self.registered[address]

    def finish(self) -> None:
        self.log.append("finish")


def test_exactly_the_bytes_that_were_planned_are_pinned_from_the_start_of_a_page(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pinning = FakePinning()
    nbytes = 5 * mmap.PAGESIZE + 123
    with caplog.at_level("INFO"):
        memory = HostMemory(nbytes, pinning)
    ((address, size),) = pinning.registered.items()
    assert (address, size) == (memory.data.data_ptr(), nbytes)
    assert memory.nbytes == memory.data.untyped_storage().nbytes() == nbytes
    assert address % mmap.PAGESIZE == 0
    assert not memory.data.any()
    assert memory.refused == ""
    assert "of host memory pinned in" in caplog.text


def test_large_memory_is_registered_in_parts_without_a_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "SEGMENT", 2 * mmap.PAGESIZE)
    pinning = FakePinning()
    memory = HostMemory(5 * mmap.PAGESIZE + 1, pinning)
    end = memory.data.data_ptr()
    for address, size in pinning.registered.items():
        assert address == end
        end += size
    assert end == memory.data.data_ptr() + memory.nbytes
    assert len(pinning.registered) == 3


def test_pinned_memory_is_given_back_after_the_last_transfer() -> None:
    pinning = FakePinning()
    memory = HostMemory(100, pinning)
    data = memory.data
    del memory
    assert pinning.log == ["finish", "unregister"]
    assert not pinning.registered
    data.fill_(1)  # it stays mapped for whoever still has it


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "SEGMENT", mmap.PAGESIZE)
    pinning = FakePinning(most=2)
    memory = HostMemory(4 * mmap.PAGESIZE, pinning)
    assert memory.refused == "out of memory"
    assert not pinning.registered, "no part stays pinned"
    assert "cannot be pinned (out of memory): it is used as it is" in caplog.text
    memory.data.fill_(7)
    del memory
    assert pinning.log == ["unregister", "unregister"]


def test_memory_of_a_device_that_is_gone_ends_quietly() -> None:
    class Gone(FakePinning):
        def finish(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    pinning = Gone()
    memory = HostMemory(100, pinning)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del memory
    assert pinning.registered, "nothing was asked of the device"


class FakeRuntime:
    """What ``torch.cuda.cudart()`` returns; ``code`` is that of every registration."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815 - CUDA's name

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[int, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802 - CUDA's name
        self.calls.append(arguments)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self.calls.append((address,))
        return 0

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802 - CUDA's name
        return f"error {code}"


@pytest.mark.parametrize("code", [0, 2])
def test_an_error_of_cuda_is_not_left_for_the_next_kernel(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises it there, so one runs that nobody needs."""
    runtime, kernels = FakeRuntime(code), []

    def kernel(*_arguments: Any, **_options: Any) -> Any:
        kernels.append(1)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(torch, "ones", kernel)
    pinning = CudaPinning(torch.device("cuda"))
    assert pinning.register(4096, 10) == ("error 2" if code else "")
    assert len(kernels) == (1 if code else 0)
    pinning.unregister(4096)
    assert runtime.calls == [(4096, 10, 0), (4096,)]
