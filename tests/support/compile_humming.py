"""Compile humming's kernels for 4-bit weights on a machine without a GPU.

    python -m support.compile_humming CAPABILITY FEW

All of the package runs as on a GPU of this compute capability (90 for 9.0) but what only a GPU can
do: moving a matrix into the package's order, and a launch. Its own checks see what we hand over,
its rules choose the tiles, and CUDA's compiler makes the kernels. With FEW those for few tokens and
for many, of one matrix, else all of several. Prints what was compiled, and the words of the choice.
"""

import contextlib
import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fairlead_kernels.packages import humming_package, humming_products
from fairlead_kernels.packages.humming_package import HummingPackage
from fairlead_kernels.packages.humming_products import UNBOUNDED, HummingProducts
from fairlead_kernels.plain.torch_operations import TorchOperations
from support import humming_standin
from support.operation_cases import int4_matrix

CPU = torch.device("cpu")
# Of what an H100 says of itself, as far as a GPU is asked.
FACTS = {
    "index": 0,
    "name": "NVIDIA H100",
    "is_ppu": False,
    "sm_count": 132,
    "max_registers_per_sm": 65536,
    "max_threads_per_sm": 2048,
    "max_smem_size": 227 << 10,
    "l2_cache_size": 50 << 20,
    "memory_bandwidth_gbps": 3350.0,
    "tensorcore_tops": {"float16": 989.0, "bfloat16": 989.0},
}


# A type, rows, columns and groups of a row: the usual ones, groups of 32 columns, a single one, and
# of the sizes that are taken the smallest and odd multiples.
CASES = (
    (torch.bfloat16, 512, 1024, 8),
    (torch.float16, 1152, 896, 28),
    (torch.bfloat16, 128, 64, 1),
    (torch.float16, 384, 320, 5),
)


class _NoSwitch(contextlib.nullcontext[None]):
    """In the place of ``torch.cuda.device``."""

    def __init__(self, _device: object) -> None:
        super().__init__()


def pretend(capability: int) -> list[str]:
    """Let the package believe in a GPU; the names of the kernels' files come into the list."""
    device: Any = importlib.import_module("humming.device")
    found = SimpleNamespace(
        **FACTS,
        sm_version=capability,
        sm_major=capability // 10,
        sm_minor=capability % 10,
    )
    device.DeviceInfo.__new__ = lambda cls, _index=None: device.current_device
    device.current_device._value = found
    replaced: Any = torch.cuda
    replaced.current_device = lambda: 0
    replaced.device = _NoSwitch
    ops: Any = importlib.import_module("humming.ops")
    ops.repack_weight = _repacked
    ops.unpack_weight = lambda words, _bits: humming_standin.unpacked(words)
    kernel: Any = importlib.import_module("humming.kernel.humming").HummingKernel
    files: list[str] = []

    def register(self: Any) -> None:
        files.append(self.kernel_filename)
        self.kernel_id = len(files)

    kernel.register_kernel = register
    return files


def _repacked(inputs: Tensor, *, weight_bits: int, activation_bits: int, **_: Any) -> Tensor:
    """Of its shape alone."""
    assert inputs.dtype is torch.int32
    assert inputs.is_contiguous()
    rows, words = inputs.shape[1:]
    tile = 256 // activation_bits
    return inputs.reshape(1, words * 32 // weight_bits // tile, rows * tile * weight_bits // 32)


def multiplying(package: HummingPackage) -> HummingPackage:
    """The same, whose launches are the stand-in's products with the weights that were given."""
    given: dict[int, tuple[Any, dict[str, Tensor]]] = {}

    def transform(tensors: Any, rows: int, columns: int, schema: Any, **more: Any) -> Any:
        theirs = humming_standin.HummingWeightSchema(
            b_dtype="uint4",
            bs_dtype=str(schema.bs_dtype),
            weight_scale_group_size=schema.weight_scale_group_size,
            has_zero_point=schema.has_zero_point,
        )
        config, held = package.transform(tensors, rows, columns, schema, **more)
        stood_in = humming_standin.prepare_and_transform_humming_tensors
        given[held["weight"].data_ptr()] = stood_in(tensors, rows, columns, theirs, **more)
        return config, held

    def launch(*, configs: Tensor, inputs: Tensor, weight: Tensor, **_: Any) -> Any:
        bounds = configs.view(-1, 4)[:, :2].tolist()
        assert sum(above < len(inputs) <= upto for above, upto in bounds) == 1
        config, held = given[weight.data_ptr()]
        kernel = json.dumps([(0, UNBOUNDED, {"rows": config.rows})])
        return humming_standin.humming_forward(
            config,
            inputs,
            held["weight"],
            held["weight_scale"],
            held["zero_point"],
            compute_config=humming_products.WHOLE_SUMS,
            tuning_config=kernel,
        )

    importlib.import_module("humming.ops.gemm").__dict__["launch_kernel"] = launch
    return HummingPackage(
        package.version, package.schema, transform, package.heuristics, package.forward
    )


def main() -> None:
    package, capability = humming_package.load(), int(sys.argv[1])
    files = pretend(capability)
    few = sys.argv[2:] == ["few"]
    if few:
        humming_products.BOUNDS = humming_products.BOUNDS[:1]  # type: ignore[assignment]
    repack: Any = importlib.import_module("humming.kernel.repack_weight").RepackWeightKernel
    unpack: Any = importlib.import_module("humming.kernel.unpack_weight").UnpackWeightKernel
    if not few:
        print(
            "moves",
            repack(weight_bits=4, activation_bits=16, is_weight_packed=True).kernel_filename,
        )
        print("moves", unpack(num_bits=4).kernel_filename)
    package = multiplying(package)
    for dtype, rows, columns, groups in CASES[:1] if few else CASES:
        ours = HummingProducts(package, dtype, CPU, 2)
        ours.repack(TorchOperations().pack([int4_matrix(rows, columns, groups)]))
        print("choice", ours)
    for file in files:
        print("multiplies", file)


if __name__ == "__main__":
    main()
