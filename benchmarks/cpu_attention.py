"""Builds of the C++ kernels against each other on this CPU: attention of decodes, all threads.

Each argument is a library: kernels/fairlead_kernels/native/avx512.so of a checkout after
`make setup`, say, and the first is what the others are compared with. They run in turns in one
process, over the same float32 caches of so many layers that no processor's cache holds them. Blocks
have 16 tokens and are in random places, as after hours of serving, or in a row's order. Printed:
microseconds a layer, and each library's time over the first one's.

    .venv/bin/python benchmarks/cpu_attention.py BEFORE.so AFTER.so [--rounds 15]
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fairlead_kernels.cpu import library
from fairlead_kernels.cpu.cpu_attention import CpuAttention
from fairlead_kernels.interface.attention import Heads, LayerSpec, RaggedRows
from fairlead_kernels.interface.not_available import NotAvailableError

BLOCK = 16
CACHE_BYTES = 512 << 20  # of all layers: more than a processor's cache


class Shape(NamedTuple):
    """Heads, decodes, the keys of each, and how many of these all of them share."""

    query: int
    kv: int
    dim: int
    rows: int
    keys: int
    shared: int = 0


SHAPES = {
    "15 M, 64 decodes of 150": Shape(6, 2, 32, 64, 150),
    "135 M, 64 decodes of 150": Shape(9, 3, 64, 64, 150),
    "0.5 B, 64 decodes of 150": Shape(14, 2, 64, 64, 150),
    "135 M, 1 decode of 120": Shape(9, 3, 64, 1, 120),
    "0.5 B, 1 decode of 600": Shape(14, 2, 64, 1, 600),
    "GPT-2, 1 decode of 250": Shape(12, 12, 64, 1, 250),
    "GPT-2, 3 decodes of 120": Shape(12, 12, 64, 3, 120),
    "GPT-2, 3 decodes of 300": Shape(12, 12, 64, 3, 300),
    "8 B, 8 decodes of 1,000": Shape(32, 8, 128, 8, 1000),
    "135 M, 8 decodes share 512": Shape(9, 3, 64, 8, 528, 512),
    "135 M, 32 decodes share 512": Shape(9, 3, 64, 32, 528, 512),
}


def load(path: Path) -> library.Library:
    """The library, which need not be built from the sources beside this file, but must have the
    same functions and structures.
    """
    library.SOURCES, library.FOLDER = Path("none"), path.resolve().parent
    try:
        return library.Library(path.stem)
    except NotAvailableError as error:
        sys.exit(f"{path}: not a library with these kernels' functions ({error})")


def rows_of(shape: Shape, *, shuffled: bool) -> RaggedRows:
    """The step's rows, whose blocks fill a cache."""
    width, same = -(-shape.keys // BLOCK), shape.shared // BLOCK
    total = shape.rows * width
    tables = torch.randperm(total) if shuffled else torch.arange(total)
    tables = tables.to(torch.int32).view(shape.rows, width)
    tables[:, :same] = tables[0, :same].clone()
    starts = torch.arange(shape.rows + 1, dtype=torch.int32)
    lens = torch.full((shape.rows,), shape.keys, dtype=torch.int32)
    return RaggedRows(starts, lens, tables, BLOCK, None)


def measure(
    shape: Shape, rows: RaggedRows, libraries: list[library.Library], rounds: int
) -> list[list[float]]:
    """Seconds a layer of each library in each round."""
    heads = Heads(shape.query, shape.kv, shape.dim, shape.dim, torch.float32)
    spec = LayerSpec(shape.dim**-0.5)
    size = (rows.tables.numel(), BLOCK, shape.kv, shape.dim)
    layers = max(2, CACHE_BYTES // (2 * 4 * torch.Size(size).numel()))
    caches = [(_cache(size), _cache(size)) for _ in range(layers)]
    query = torch.rand(shape.rows, shape.query, shape.dim)
    attentions = [CpuAttention(heads, one) for one in libraries]
    plans = [attention.plan(rows) for attention in attentions]
    times: list[list[float]] = [[] for _ in libraries]
    for _ in range(rounds + 1):
        for taken, attention, plan in zip(times, attentions, plans, strict=True):
            began = time.perf_counter()
            for keys, values in caches:
                attention.run(plan, query, keys, values, spec)
            taken.append((time.perf_counter() - began) / layers)
    return [taken[1:] for taken in times]


def _cache(size: tuple[int, ...]) -> torch.Tensor:
    # NumPy asks for large pages, as for an engine's cache.
    return torch.from_numpy(np.zeros(size, dtype=np.float32)).uniform_()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("libraries", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    libraries = [load(path) for path in options.libraries]
    for name, shape in SHAPES.items():
        for order in ("random", "in order"):
            rows = rows_of(shape, shuffled=order == "random")
            times = measure(shape, rows, libraries, options.rounds)
            ratios = [
                statistics.median(a / b for a, b in zip(taken, times[0], strict=True))
                for taken in times
            ]
            print(
                f"{name:28} {order:9}",
                *(f"{statistics.median(taken) * 1e6:8.1f} us" for taken in times),
                "  time / first",
                *(f"{ratio:6.3f}" for ratio in ratios),
                flush=True,
            )


if __name__ == "__main__":
    main()
