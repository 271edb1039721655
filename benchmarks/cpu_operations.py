"""The C++ kernels against torch on this machine's CPU: products and attention, on one thread.

Both sides run in turn, once unmeasured and then ROUNDS times, on the same inputs; weights are many
enough not to stay in the cache. Times are the thread's processor time, so that neighbours on a
shared machine count less; what they take of the memory's bandwidth still counts.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from fairlead_kernels import cpu, library
from fairlead_kernels.attention import AttentionBackend, Heads, LayerSpec
from fairlead_kernels.torch_attention import TorchAttention

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.attention_cases import make_case

ROUNDS = 5
# Tokens, outputs, inputs, weights: decode and prefill of small models.
PRODUCTS = (
    (1, 3072, 576, 20),
    (8, 3072, 576, 20),
    (8, 576, 1536, 30),
    (8, 9728, 896, 8),
    (64, 3072, 576, 20),
    (512, 3072, 576, 6),
)
STEPS = {
    "8 decodes after 300": [(300, 1)] * 8,
    "1 decode after 4000": [(4000, 1)],
    "a prefill of 512": [(0, 512)],
    "a prefill of 512 after 1500": [(1500, 512)],
}
HEADS = Heads(9, 3, 64, 64, torch.float32)


def compare(name: str, theirs: Callable[[], object], ours: Callable[[], object]) -> None:
    """Print the medians in milliseconds, the extremes, and the ratio of the medians."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS + 1):
        for side, run in zip(times, (theirs, ours), strict=True):
            began = time.thread_time()
            run()
            if number:
                side.append(1e3 * (time.thread_time() - began))
    text = "  ".join(
        f"{who} {statistics.median(side):7.2f} ms ({min(side):.2f} to {max(side):.2f})"
        for who, side in zip(("torch", "C++"), times, strict=True)
    )
    print(
        f"{name:32} {text}  ratio {statistics.median(times[0]) / statistics.median(times[1]):.2f}"
    )


def compare_product(
    operations: cpu.CpuOperations, tokens: int, outputs: int, inputs: int, count: int
) -> None:
    x = torch.randn(tokens, inputs)
    weights = [torch.randn(outputs, inputs) for _ in range(count)]
    packed = [operations.pack([weight]) for weight in weights]
    compare(
        f"{tokens} x {inputs} by {outputs}, {count} weights",
        lambda: [F.linear(x, weight) for weight in weights],
        lambda: [operations.linear(x, weight) for weight in packed],
    )


def compare_attention(
    operations: cpu.CpuOperations, name: str, rows: list[tuple[int, int]]
) -> None:
    case = make_case(rows, block_size=16, heads=HEADS)
    spec = LayerSpec(HEADS.dim**-0.5)

    def repeat(backend: AttentionBackend) -> Callable[[], object]:
        plan = backend.plan(case.ragged)
        return lambda: [
            backend.run(plan, case.query, case.key_cache, case.value_cache, spec) for _ in range(5)
        ]

    torch_attention = TorchAttention(HEADS, torch.device("cpu"))
    compare(f"{name}, 5 layers", repeat(torch_attention), repeat(operations.attention(HEADS)))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="The C++ kernels against torch, on one thread.")
    parser.add_argument("--set", choices=library.INSTRUCTION_SETS, help="default: the fastest")
    operations = cpu.load(parser.parse_args().set)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, kernels {operations.name}, {ROUNDS} rounds")
    for sizes in PRODUCTS:
        compare_product(operations, *sizes)
    for name, rows in STEPS.items():
        compare_attention(operations, name, rows)


if __name__ == "__main__":
    main()
