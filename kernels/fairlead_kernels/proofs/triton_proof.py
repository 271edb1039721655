"""The Triton kernels, proven where they will run: each launches once before it serves.

Owns a few random inputs and the comparison with the reference. It finds at start what else the
first request would find: no C compiler for Triton's launcher, a driver or a GPU that its compiler
does not know.
"""

from functools import partial

import torch
from torch import Tensor

from fairlead_kernels.formats.int4 import Int4Matrix
from fairlead_kernels.formats.quantize import quantize
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.layer import LayerOperations, Norm
from fairlead_kernels.proofs.comparison import prove

TOKENS, QUERIES, KV, DIM, ROWS = 5, 3, 1, 64, 33


def prove_operations(
    operations: LayerOperations,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """Compare each kind of kernel with the reference, in this type on this device, with a cache in
    ``cache_dtype``, if that is another.

    Compiles them, which takes seconds. Raises NotAvailableError with the reason where one does not
    run or computes something else.
    """
    compute = partial(_results, operations, dtype, device, cache_dtype or dtype)
    expected = _results(reference, dtype, torch.device("cpu"), cache_dtype or dtype)
    prove(f"{operations.name}'s layer", compute, expected, dtype, "operation")


def _results(
    operations: LayerOperations,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: torch.dtype,
) -> Tensor:
    """The results of every kind of kernel, on the same numbers for all implementations."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, as_type: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, as_type)

    norm = Norm(random(DIM), 1e-6)
    residual = random(TOKENS, DIM, as_type=torch.float32)
    normed = operations.norm(random(TOKENS, DIM), norm, residual)
    qkv = random(TOKENS, (QUERIES + 2 * KV) * DIM)
    angles = random(TOKENS, DIM, as_type=torch.float32)
    cache = 2, 4, KV, DIM
    keys, values = (torch.zeros(*cache, dtype=cache_dtype, device=device) for _ in range(2))
    slots = torch.arange(TOKENS, device=device) + 1
    query = operations.rope_write(qkv, angles.cos(), angles.sin(), slots, keys, values, norm, norm)
    gated = operations.gated(random(TOKENS, 2 * DIM), "silu")
    numbers = [quantize(random(ROWS, DIM, as_type=torch.float32))]
    product = operations.linear(random(TOKENS, DIM), operations.pack(numbers, factor=1 / DIM))
    integers = torch.randint(0, 256, (ROWS, DIM // 2), generator=generator, dtype=torch.uint8)
    zeros = torch.arange(2 * ROWS).view(ROWS, 2) % 16
    order = torch.arange(DIM, dtype=torch.int32).flip(0)
    scales = random(ROWS, 2, as_type=torch.float32)
    weight = Int4Matrix("int4", integers, scales.cpu(), zeros.to(torch.uint8), order).to(device)
    int4_product = operations.linear(random(TOKENS, DIM), operations.pack([weight], factor=1 / DIM))
    dense = operations.linear(random(70, 96), operations.pack([random(40, 96)], dtype=dtype))
    results = *normed, query, keys, values, gated, product, int4_product, dense
    return torch.cat([result.flatten().double() for result in results])
