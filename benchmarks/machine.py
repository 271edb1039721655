"""What this machine can do: the bounds that a benchmark's figures are held against."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from fairlead_kernels.cpu import cpu_operations
from fairlead_kernels.interface.not_available import NotAvailableError


class Limits(NamedTuple):
    """``read``: bytes a second that all threads read together, the fastest of several ways;
    ``by``: which one that was. ``product``: operations a second of a large float32 product, the
    faster of torch's and ours.
    """

    read: float
    by: str
    product: float


def limits() -> Limits:
    reads = _reads()
    by = max(reads, key=lambda way: reads[way])
    return Limits(reads[by], by, _product())


def _reads() -> dict[str, float]:
    matrix = torch.ones(2**16, 2**12)  # 1 GiB: no cache holds it
    vector, other = torch.ones(2**12), torch.empty_like(matrix)
    found = {
        "a sum": matrix.nbytes / _least(matrix.sum),
        "a copy": 2 * matrix.nbytes / _least(lambda: other.copy_(matrix)),
        "torch's product with a vector": matrix.nbytes / _least(lambda: matrix @ vector),
    }
    try:
        operations = cpu_operations.load()
    except NotAvailableError:
        return found
    packed, row = operations.pack([matrix]), vector[None]
    found["our product with a vector"] = matrix.nbytes / _least(
        lambda: operations.linear(row, packed)
    )
    return found


def _product() -> float:
    """The faster of torch's product and ours."""
    square = torch.rand(2048, 2048)
    seconds = _least(lambda: square @ square)
    try:
        operations = cpu_operations.load()
    except NotAvailableError:
        return 2 * 2048**3 / seconds
    packed = operations.pack([square])
    ours = _least(lambda: operations.linear(square, packed))
    return 2 * 2048**3 / min(seconds, ours)


def wait_until_idle(share: float = 0.1, most: float = 30.0) -> None:
    """Return when the cores were used for less than ``share`` of a fifth of a second: some engines
    poll for seconds after their turn, and would slow the next one. After ``most`` seconds it prints
    that they are busy, and returns.
    """
    ends = time.monotonic() + most
    busy, total = _used()
    while time.monotonic() < ends:
        time.sleep(0.2)
        before = busy, total
        busy, total = _used()
        if busy - before[0] < share * (total - before[1]):
            return
    print(f"the cores are still busy after {most:.0f} s", flush=True)


def _used() -> tuple[int, int]:
    """Ticks that all cores were busy, and all ticks, since the machine started."""
    line = Path("/proc/stat").read_text().splitlines()[0]
    ticks = [int(field) for field in line.split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _least(work: Callable[[], object], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def processor() -> str:
    """The name, and the instructions that matter here."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in pairs}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    has = [flag for flag in wanted if flag in fields.get("flags", "").split()]
    return f"{fields.get('model name', 'a processor')} ({', '.join(has)})"
