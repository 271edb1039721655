"""The C++ kernels against torch on this machine's CPU: products and attention, on one thread.

Both sides run in turn, once unmeasured and then ROUNDS times, on the same inputs; weights are many
enough not to stay in the cache. Times are the thread's processor time, so that neighbours on a
shared machine count less; what they take of the memory's bandwidth still counts. With --bf16 only
products: bfloat16 weights in C++ against float32 ones and against torch's bfloat16. With --int8
products of int8 weights: in integers, against float32 weights and against int8 weights that are
widened to floats.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from fairlead_kernels.cpu import cpu_operations, library
from fairlead_kernels.formats.quantize import quantize
from fairlead_kernels.interface.attention import AttentionBackend, Heads, LayerSpec
from fairlead_kernels.plain.torch_attention import TorchAttention

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


def compare(name: str, **sides: Callable[[], object]) -> None:
    """Print the medians in milliseconds, the extremes, and each median over the last."""
    times: dict[str, list[float]] = {who: [] for who in sides}
    for number in range(ROUNDS + 1):
        for who, run in sides.items():
            began = time.thread_time()
            run()
            if number:
                times[who].append(1e3 * (time.thread_time() - began))
    medians = {who: statistics.median(side) for who, side in times.items()}
    text = "  ".join(
        f"{who} {medians[who]:7.2f} ms ({min(side):.2f} to {max(side):.2f})"
        for who, side in times.items()
    )
    *others, last = medians.values()
    print(f"{name:32} {text}  ratio {' '.join(f'{x / last:.2f}' for x in others)}", flush=True)


def compare_product(
    operations: cpu_operations.CpuOperations, tokens: int, outputs: int, inputs: int, count: int
) -> None:
    x = torch.randn(tokens, inputs)
    weights = [torch.randn(outputs, inputs) for _ in range(count)]
    packed = [operations.pack([weight]) for weight in weights]
    compare(
        f"{tokens} x {inputs} by {outputs}, {count} weights",
        torch=lambda: [F.linear(x, weight) for weight in weights],
        cpp=lambda: [operations.linear(x, weight) for weight in packed],
    )


def compare_bfloat16(operations: cpu_operations.CpuOperations, tokens: int) -> None:
    x, weights = torch.randn(tokens, 576), [torch.randn(3072, 576) for _ in range(12)]
    wide = [operations.pack([weight]) for weight in weights]
    half = [operations.pack([weight], dtype=torch.bfloat16) for weight in weights]
    plain, given = [weight.bfloat16() for weight in weights], x.bfloat16()
    compare(
        f"{tokens} x 576 by 3072, 12 weights",
        float32=lambda: [operations.linear(x, weight) for weight in wide],
        torch=lambda: [F.linear(given, weight) for weight in plain],
        bfloat16=lambda: [operations.linear(x, weight) for weight in half],
    )


def compare_int8(
    operations: cpu_operations.CpuOperations, tokens: int, outputs: int, inputs: int
) -> None:
    count = max(4, 12 * 3072 * 576 // (outputs * inputs))
    x = torch.randn(tokens, inputs)
    weights = [torch.randn(outputs, inputs) for _ in range(count)]
    rounded = [quantize(weight) for weight in weights]
    widening = cpu_operations.load(operations.name.partition("+")[0])
    wide, bytes_, digits = (
        [made.pack([matrix]) for matrix in matrices]
        for made, matrices in ((operations, weights), (widening, rounded), (operations, rounded))
    )
    compare(
        f"{tokens} x {inputs} by {outputs}, {count} weights",
        float32=lambda: [operations.linear(x, weight) for weight in wide],
        widened=lambda: [widening.linear(x, weight) for weight in bytes_],
        integers=lambda: [operations.linear(x, weight) for weight in digits],
    )


def compare_attention(
    operations: cpu_operations.CpuOperations, name: str, rows: list[tuple[int, int]]
) -> None:
    case = make_case(rows, block_size=16, heads=HEADS)
    spec = LayerSpec(HEADS.dim**-0.5)

    def repeat(backend: AttentionBackend) -> Callable[[], object]:
        plan = backend.plan(case.ragged)
        return lambda: [
            backend.run(plan, case.query, case.key_cache, case.value_cache, spec) for _ in range(5)
        ]

    torch_attention = TorchAttention(HEADS, torch.device("cpu"))
    compare(
        f"{name}, 5 layers",
        torch=repeat(torch_attention),
        cpp=repeat(operations.attention(HEADS)),
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="The C++ kernels against torch, on one thread.")
    parser.add_argument("--set", choices=library.INSTRUCTION_SETS, help="default: the fastest")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--int8", action="store_true")
    options = parser.parse_args()
    operations = cpu_operations.load(options.set)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, kernels {operations.name}, {ROUNDS} rounds")
    if options.bf16:
        for tokens in (1, 4, 8, 14, 64):
            compare_bfloat16(operations, tokens)
        return
    if options.int8:
        for outputs, inputs in ((3072, 576), (576, 1536), (9728, 896)):
            for tokens in (1, 2, 4, 8, 14, 32, 64, 256):
                compare_int8(operations, tokens, outputs, inputs)
        return
    for sizes in PRODUCTS:
        compare_product(operations, *sizes)
    for name, rows in STEPS.items():
        compare_attention(operations, name, rows)


if __name__ == "__main__":
    main()
