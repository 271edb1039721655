"""Builds of the C++ kernels against each other on this CPU: float32 products, all threads.

Each argument is a library: kernels/fairlead_kernels/native/avx512.so of a checkout after
`make setup`, say, and the first is what the others are compared with. They run in turns in one
process, on the same packed weights, which no cache holds. Printed for each matrix: the bytes of
weights that are read a second, by rows of x; and the time of all matrices over the first library's.

    .venv/bin/python benchmarks/cpu_products.py BEFORE.so AFTER.so [--rows 1 3 8]
"""

import argparse
import ctypes
import statistics
import time
from pathlib import Path

import torch

from fairlead_kernels.cpu import cpu_operations, library
from fairlead_kernels.cpu.cpu_arguments import weight_struct

# Outputs, inputs, matrices: those of the layers and heads that `models.py` has.
SHAPES = {
    "0.5 B, q/k/v": (1152, 896, 24),
    "0.5 B, gate/up": (9728, 896, 24),
    "0.5 B, down": (896, 4864, 24),
    "0.5 B, head": (151936, 896, 1),
    "135 M, gate/up": (3072, 576, 30),
    "135 M, down": (576, 1536, 30),
    "GPT-2, up": (3072, 768, 12),
    "GPT-2, down": (768, 3072, 12),
}


def load(path: Path) -> ctypes.CDLL:
    """The library, on torch's threads."""
    loaded = ctypes.CDLL(str(path.resolve()))
    library.share_threads(loaded.fairlead_use_openmp)
    arguments, _ = library._FUNCTIONS["linear"]  # noqa: SLF001 - a tool for these functions
    loaded.fairlead_linear.argtypes = arguments
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("libraries", nargs="+", type=Path)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 3, 8, 14, 20, 28, 64])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    libraries = [load(path) for path in options.libraries]
    operations, threads = cpu_operations.load(), torch.get_num_threads()
    weights = {
        name: [operations.pack([torch.rand(outputs, inputs)]) for _ in range(count)]
        for name, (outputs, inputs, count) in SHAPES.items()
    }
    for rows in options.rows:
        totals = [0.0] * len(libraries)
        for name, (outputs, inputs, count) in SHAPES.items():
            x, y = torch.rand(rows, inputs), torch.empty(rows, outputs)
            structs = [weight_struct(one, None, "bias") for one in weights[name]]
            times: list[list[float]] = [[] for _ in libraries]
            for _ in range(options.rounds):
                for taken, one in zip(times, libraries, strict=True):
                    began = time.perf_counter()
                    for struct in structs:
                        one.fairlead_linear(
                            x.data_ptr(), rows, None, ctypes.byref(struct), y.data_ptr(), threads
                        )
                    taken.append(time.perf_counter() - began)
            medians = [statistics.median(taken) for taken in times]
            totals = [total + median for total, median in zip(totals, medians, strict=True)]
            speeds = (outputs * inputs * count * 4 / median / 1e9 for median in medians)
            print(f"{rows:3} rows  {name:15}", *(f"{speed:6.1f} GB/s" for speed in speeds))
        ratios = (f"{total / totals[0]:6.3f}     " for total in totals)
        print(f"{rows:3} rows  {'time / first':15}", *ratios, flush=True)


if __name__ == "__main__":
    main()
