"""What a machine is, before anything else is asked of it: a line of JSON for each fact.

    python -m benchmarks.gpu.facts [--device cuda]

What is known without torch comes first. Each large package is imported by a process of its own,
after which the next processes find it in memory.
"""

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from benchmarks.result_lines import append

GPU = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,pstate"
PROGRAMS = {
    "nvidia-smi": ("nvidia-smi", f"--query-gpu={GPU}", "--format=csv,noheader"),
    "gcc": ("gcc", "--version"),
    "nvcc": ("nvcc", "--version"),
    "make": ("make", "--version"),
}
PACKAGES = ("torch", "transformers", "flashinfer")
SECONDS = 60  # for one program


def main() -> None:
    parser = argparse.ArgumentParser(description="what this machine is")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    append("machine", ok=True, value=f"{platform.platform()}, {os.cpu_count()} processors")
    packages = importlib.metadata.distributions()
    versions = {each.metadata["Name"]: each.version for each in packages}
    append("Python", ok=True, value=platform.python_version())
    append("packages", ok=True, value=dict(sorted(versions.items())))
    for name, command in PROGRAMS.items():
        _note(name, partial(_output, *command), essential=False)
    for name in PACKAGES:
        essential = name != "flashinfer"
        _note(
            name, partial(_seconds, name), essential=essential, unit="seconds of the first import"
        )
    _note("GPU", partial(_gpu, device), essential=True)
    _rates(device)


def _note(name: str, find: Callable[[], object], *, essential: bool, unit: str = "") -> None:
    """Write a fact; where it cannot be found that is a failure only where it is essential."""
    began = time.monotonic()
    try:
        value = find()
    except Exception as error:  # noqa: BLE001 - whatever is wrong, the next fact is still wanted
        text = f"{type(error).__name__}: {error}"
        append(name, False if essential else None, error=text, seconds=time.monotonic() - began)
        return
    append(name, ok=True, value=value, seconds=time.monotonic() - began, unit=unit)


def _output(*command: str) -> str:
    """The last line of what a program prints, but for its own name's. Raises an error with what it
    wrote where it fails.
    """
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if ran.returncode:
        raise RuntimeError(f"{command[0]} ends with {ran.returncode}: {ran.stderr[-500:]}")
    lines = ran.stdout.strip().splitlines()
    return lines[-1] if command[0] in ("nvidia-smi", "nvcc", sys.executable) else lines[0]


def _seconds(module: str) -> float:
    """Of an import by a process of its own."""
    program = f"import time; began = time.time(); import {module}; print(time.time() - began)"
    return float(_output(sys.executable, "-c", program))


def _gpu(device: str) -> str:
    import torch

    if device == "cpu":
        return f"none: a rehearsal on {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} for CUDA {torch.version.cuda} sees no GPU")
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, {free / (1 << 30):.1f} of "
        f"{total / (1 << 30):.1f} GiB free, CUDA {torch.version.cuda}"
    )


def _rates(device: str) -> None:
    """What it reads and multiplies: the ceilings of every later figure."""
    import torch
    from benchmarks.gpu import bounds

    where = torch.device(device)
    found = bounds.measure(where, torch.bfloat16, large=device == "cuda")
    append("reads", ok=True, value=found.read / 1e9, unit=f"GB/s by {found.by}")
    append("multiplies", ok=True, value=found.product / 1e12, unit="TFLOP/s in bfloat16")


if __name__ == "__main__":
    main()
