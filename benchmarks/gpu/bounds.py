"""What the device can do, measured in the same run, and what a step must read or multiply."""

import gc
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from benchmarks import models
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


class Device(NamedTuple):
    """``read``: bytes a second, the most of several ways, ``by`` its name; ``product``: operations
    a second of a large product in the model's type.
    """

    read: float
    by: str
    product: float


class Work(NamedTuple):
    """What one model makes a step do. ``cached``: bytes of keys and values of a token."""

    size: models.Size
    element: int
    cached: int
    heads: int
    head_size: int
    layers: int

    @classmethod
    def of(cls, size: models.Size, config: Any, dtype: torch.dtype) -> "Work":
        head = config.hidden_size // config.num_attention_heads
        cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head * dtype.itemsize
        layers = config.num_hidden_layers
        return cls(size, dtype.itemsize, cached, config.num_attention_heads, head, layers)

    def decode_bytes(self, rows: int, context: int) -> int:
        """All weights but the embeddings once, and the keys and values of all rows."""
        weights = (self.size.layers + self.size.head) * self.element
        return weights + rows * context * self.cached

    def prefill_operations(self, rows: int, length: int) -> int:
        """Products with the layers' weights for each token and with the head for the last of a
        row; scores and sums over the keys up to each query.
        """
        attention = 4 * self.layers * self.heads * self.head_size * length * (length + 1) // 2
        return rows * (2 * self.size.layers * length + 2 * self.size.head + attention)


def measure(device: torch.device, dtype: torch.dtype, *, large: bool) -> Device:
    """``large``: with as much memory and work as a GPU needs to show what it can do."""
    count = 2**31 if large else 2**22
    source = torch.ones(count, dtype=dtype, device=device)
    target = torch.empty_like(source)
    ways = {
        "a copy": 2 * source.nbytes / least(lambda: target.copy_(source), device),
        "a sum": source.nbytes / least(source.sum, device),
        "a maximum": source.nbytes / least(source.max, device),
    }
    by = max(ways, key=lambda way: ways[way])
    side = 8192 if large else 256
    # Random: a GPU draws less power, and is faster, on zeros and ones.
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    seconds = least(lambda: left @ right, device)
    return Device(ways[by], by, 2 * side**3 / seconds)


def least(work: Callable[[], object], device: torch.device, times: int = 10) -> float:
    """Seconds of the fastest of some runs after a first one."""
    taken = []
    for _ in range(times + 1):
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what nobody holds any more, before somebody else needs much."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def idle(device: torch.device, work: Callable[[], object]) -> float:
    """The share of the time in which the device computes nothing while ``work`` runs, whichever
    thread makes it compute: from its first kernel to its last, under the profiler. Raises
    RuntimeError where it computes nothing.
    """
    busy, whole = covered(
        (event.time_range.start, event.time_range.end) for event in computed(device, work)
    )
    return 1 - busy / whole


class Kernel(NamedTuple):
    """What a device ran under one name: milliseconds of all its launches."""

    name: str
    milliseconds: float
    launches: int


def longest(device: torch.device, work: Callable[[], object], count: int) -> list[Kernel]:
    """The ``count`` kernels that took most of the device's time while ``work`` ran, the longest
    first. Raises RuntimeError where it computes nothing.
    """
    launches: dict[str, list[float]] = {}
    for event in computed(device, work):
        launches.setdefault(event.name, []).append(event.time_range.elapsed_us())
    kernels = (Kernel(name, sum(each) / 1e3, len(each)) for name, each in launches.items())
    return sorted(kernels, key=lambda kernel: -kernel.milliseconds)[:count]


def computed(device: torch.device, work: Callable[[], object]) -> list[Any]:
    """The profiler's events of what the device computed while ``work`` ran; on a CPU those that are
    in no other. Raises RuntimeError where there are none.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    everywhere = _ExperimentalConfig(profile_all_threads=not on_gpu)
    wait(device)
    with profile(activities=[activity], experimental_config=everywhere) as profiler:
        work()
        wait(device)
    everything: Any = profiler.events()
    events = [
        event
        for event in everything
        if event.device_type.name == activity.name and event.cpu_parent is None
    ]
    if not any(event.time_range.end > event.time_range.start for event in events):
        raise RuntimeError("the profiler saw no work of the device")
    return events


def covered(intervals: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The length that intervals cover together, and from the first's begin to the last's end."""
    busy, begin, end = 0.0, None, 0.0
    for start, stop in sorted(intervals):
        if begin is None:
            begin = end = start
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy, 0.0 if begin is None else end - begin
