"""Compiles every Triton kernel by the path of a launch, to machine code of GPUs that need not be
there: everything but the launch itself. A program: prints kernel, GPU and bytes of each, a line
each, and fails where a step of another size would compile again, or a program takes more shared
memory than a GPU has.
"""

import sys
from typing import Any, get_args

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from fairlead_kernels.formats.int4 import Int4Matrix
from fairlead_kernels.gpu import (
    triton_attention_kernels,
    triton_cut_kernels,
    triton_expert_kernels,
    triton_fixed_kernels,
    triton_kernels,
)
from fairlead_kernels.gpu.triton_attention import TritonAttention
from fairlead_kernels.gpu.triton_cuts import TritonCuts
from fairlead_kernels.gpu.triton_experts import TritonExperts
from fairlead_kernels.gpu.triton_fixed import FixedAttention, FixedOperations
from fairlead_kernels.gpu.triton_operations import TritonOperations
from fairlead_kernels.interface.attention import Heads, LayerSpec
from fairlead_kernels.interface.layer import Activation, Norm, Packed
from fairlead_kernels.sampling.sample_rows import RowParameters
from support.attention_cases import make_case
from support.warm import warm_folder

ALL = {
    **dict.fromkeys(
        ("norm", "rope_write", "activate", "multiply_int8", "multiply_int4"), triton_kernels
    ),
    **dict.fromkeys(("attend", "merge"), triton_attention_kernels),
    **dict.fromkeys(("multiply", "attend_in_order"), triton_fixed_kernels),
    "multiply_experts": triton_expert_kernels,
    "find_cuts": triton_cut_kernels,
}
# Of a program, on the GPUs from compute capability 8.0 on that have least.
SHARED_BYTES = 99 << 10
# Heads of which attention is compiled: of every power of two that a row of them is padded to. Few
# are the first of each type and the largest.
BFLOAT16 = (
    Heads(32, 8, 128, 128, torch.bfloat16),
    Heads(10, 2, 64, 64, torch.bfloat16, fp8_cache=True),
    Heads(71, 1, 256, 256, torch.bfloat16),
    Heads(8, 1, 512, 512, torch.bfloat16),
)
FLOAT16 = (Heads(32, 32, 80, 80, torch.float16, fp8_cache=True),)
FLOAT32 = (
    Heads(32, 8, 128, 128, torch.float32),
    Heads(8, 4, 256, 256, torch.float32, fp8_cache=True),
)


class Driver:
    """What Triton asks CUDA's driver before it launches."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


class Kernel:
    def __init__(self, name: str) -> None:
        self._kernel = getattr(ALL[name], name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid)
        return lambda *arguments, **more: self._kernel.warmup(*arguments, grid=grid, **more)


class Kernels:
    """The kernels, which end where they would be launched."""

    def __getattr__(self, name: str) -> Kernel:
        return Kernel(name)


def compiled(capability: int) -> list[tuple[str, int, int]]:
    """The kernels that there are for a GPU, with the bytes of their machine code and of the shared
    memory of a program.
    """
    return [
        (name, len(kernel.asm["cubin"]), kernel.metadata.shared)
        for name, module in ALL.items()
        for kernel in getattr(module, name).device_caches[capability][0].values()
    ]


def attend(heads: Heads, rows: int, *, every: bool) -> None:
    """A layer's attention in a step of decodes and prefills; with ``every`` all kinds of layers."""
    cpu = torch.device("cpu")
    backends = TritonAttention(heads, cpu, Kernels()), FixedAttention(heads, cpu, Kernels())
    sinks = torch.zeros(heads.query, dtype=heads.dtype)
    kinds = ((None, None, None), (7, 5.0, None), (7, None, sinks)) if every else ((7, None, None),)
    for window, softcap, sink in kinds:
        steps = [(20, 1)] * rows + [(9, 5), (3, 2 + rows)]
        case = make_case(steps, block_size=16, window=window, heads=heads)
        spec = LayerSpec(0.3, window, softcap, sink)
        for ours in backends:
            plan: Any = ours.plan(case.ragged)
            ours.run(plan, case.query, case.key_cache, case.value_cache, spec)


def cut(rows: int) -> None:
    """Rows whose parameters are where those of other numbers of rows are not."""
    table = torch.zeros(rows + 1, 3, dtype=torch.int64)[rows % 2 :][:rows]
    of_32, of_64 = table.view(torch.float32), table.view(torch.float64)
    parameters = RowParameters(of_32[:, 0], of_32[:, 1], table[:, 1], of_64[:, 2], table[:, 0])
    TritonCuts(Kernels())(torch.zeros(rows, 4096), parameters)


def launch(dtype: torch.dtype, tokens: int, *, every: bool) -> None:
    """A layer's launches with heads of 128; with ``every`` those of all kinds of layers."""
    ours = TritonOperations(Kernels())
    x, residual = torch.zeros(tokens, 4096, dtype=dtype), torch.zeros(tokens, 4096)
    norm = Norm(torch.zeros(4096, dtype=dtype), 1e-6)
    layer_norm = Norm(norm.weight, 1e-6, 0.0, norm.weight, centered=True)
    for kind in (norm, layer_norm) if every else (norm,):
        ours.norm(residual, kind)
        ours.norm(x, kind, residual)
    qkv, angles = torch.zeros(tokens, 6 * 128, dtype=dtype), torch.zeros(tokens, 128)
    cache, slots = torch.zeros(2, 16, 1, 128, dtype=dtype), torch.arange(tokens)
    of_heads = (Norm(torch.zeros(128, dtype=dtype), 1e-6),) * 2
    for norms in ((), of_heads) if every else ((),):
        for kept in (cache, cache.to(torch.float8_e4m3fn)):
            ours.rope_write(qkv, angles, angles, slots, kept, kept, *norms)
    for activation in get_args(Activation) if every else ("silu",):
        ours.gated(x, activation)
    packed = Packed(torch.zeros(512, 4096, dtype=torch.int8), 512, 4096, scales=torch.zeros(512))
    for bias in (None, torch.zeros(512, dtype=dtype)) if every else (None,):
        ours.linear(x, packed, bias)
    # Groups of 32 columns are read 32 at a time, those of 128 at once.
    for groups in (128, 32) if every else (32,):
        numbers = torch.zeros(512, 2048, dtype=torch.uint8)
        scales, zeros = torch.zeros(512, groups), torch.zeros(512, groups, dtype=torch.uint8)
        order = torch.arange(4096, dtype=torch.int32) if groups == 32 else None
        fours = ours.pack([Int4Matrix("int4", numbers, scales, zeros, order)])
        ours.linear(x, fours, torch.zeros(512, dtype=dtype) if every else None)
    if every:
        ours.activate(x, "gelu")
    fixed = FixedOperations(Kernels(), Kernels())
    plain = Packed(torch.zeros(512, 4096, dtype=dtype), 512, 4096)
    for weight in (plain, packed):
        fixed.linear(x, weight, torch.zeros(512, dtype=dtype) if every else None)
    of_experts, ends = torch.zeros(8, 4096, 512, dtype=dtype), torch.zeros(8, dtype=torch.int32)
    experts = TritonExperts(Kernels())
    if every:  # as gpt-oss stores them, with a bias
        experts(x, of_experts, ends, torch.zeros(8, 512, dtype=dtype))
    experts(x, of_experts.view(8, 512, 4096).transpose(1, 2), ends)
    cut(tokens)


if __name__ == "__main__":
    few = sys.argv[1:] == ["few"]
    # Triton's names of files are hashes of kernel, compiler and GPU: what has not changed since the
    # last run is not compiled again.
    triton.knobs.cache.dir = str(warm_folder("triton"))
    for capability, dtype, every, attended in (
        (90, torch.bfloat16, True, (BFLOAT16[0], BFLOAT16[-1]) if few else BFLOAT16),
        (80, torch.float16, False, FLOAT16),
        (80, torch.float32, False, FLOAT32[:1] if few else FLOAT32),
    ):
        driver.set_active(Driver(capability))
        for tokens in (3, 300):  # products of few and of many tokens have other tiles
            launch(dtype, tokens, every=every)
        for heads in attended:
            attend(heads, 3, every=every and heads is attended[0])
        before = compiled(capability)
        for tokens in (1, 16, 257):
            launch(dtype, tokens, every=every)
        for heads in attended:
            for tokens in (1, 16):
                attend(heads, tokens, every=every and heads is attended[0])
        assert compiled(capability) == before, "another number of tokens compiles again"
    for capability in (80, 90):
        for name, size, shared in compiled(capability):
            print(name, f"sm{capability}", size, shared)
            assert shared <= SHARED_BYTES, f"{name} takes {shared} bytes of shared memory"
