"""Compile the modules of flashinfer that a list names, where flashinfer looks for them.

    python compile_flashinfer.py LIST OUT

LIST is a file like flashinfer_modules.toml; OUT/NAME/NAME.so is made for each module. flashinfer
finds them without a GPU or a compiler when OUT is its folder data/aot. Needs nvcc in CUDA_HOME, a
C++ compiler and ninja; MAX_JOBS bounds the compilers that run at a time. At the end each module is
loaded, which finds symbols that are missing, and must have code for exactly the architectures.
"""

import argparse
import itertools
import os
import resource
import shutil
import struct
import sys
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

# A container of GPU code: magic, version, size of the header, size of the entries (CUDA's
# fatbinary format, the part of it that cuobjdump reads).
CONTAINER = struct.Struct("<IHHQ")
MAGIC = 0xBA55ED50
# An entry: kind, version, size of the header, size of the code; the architecture comes later.
ENTRY = struct.Struct("<HHIQ")
ARCHITECTURE = struct.Struct("<I")
ARCHITECTURE_AT = 28
MACHINE_CODE = 2
FUNCTIONS = ("plan", "ragged_run", "paged_run")


@dataclass(frozen=True, order=True)
class Module:
    """A module of flashinfer's backend fa2 for attention over blocks. ``cache``: the type of keys
    and values, ``dtype`` that of the rest.
    """

    dtype: str
    cache: str
    head_size: int
    window: bool
    soft_cap: bool
    sinks: bool

    @property
    def name(self) -> str:
        """flashinfer's own name, which its wrappers ask for when K and V have equal strides."""
        short = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3"}
        q, kv = short[self.dtype], short[self.cache]
        if self.sinks:
            return f"batch_prefill_attention_sink_{q}_swa_{self.window}_fa2"
        return (
            f"batch_prefill_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{q}"
            f"_dtype_idx_i32_head_dim_qk_{self.head_size}_head_dim_vo_{self.head_size}_posenc_0"
            f"_use_swa_{self.window}_use_logits_cap_{self.soft_cap}_f16qk_False_kv_stride_equal"
        )

    def specification(self) -> Any:
        """flashinfer's description of how to compile it."""
        import torch
        from flashinfer import aot

        dtype, cache = getattr(torch, self.dtype), getattr(torch, self.cache)
        sizes = (self.head_size, self.head_size)
        if self.sinks:
            found = sinks_specification(dtype, cache, self.head_size, window=self.window)
        else:
            kind = (self.window, self.soft_cap)
            (found,) = aot.gen_fa2(dtype, cache, *sizes, *kind, prefill_only=True)
        if found.name != self.name:
            raise SystemExit(f"flashinfer calls {self.name} {found.name}")
        return found


class FoundError(Exception):
    """Ends flashinfer's work where it would compile or load a module."""


def sinks_specification(dtype: Any, cache: Any, head_size: int, *, window: bool) -> Any:
    """The description that the wrapper for sinks makes for itself: those for compiling ahead have
    names that no wrapper asks for.
    """
    import flashinfer
    import torch
    from flashinfer.jit.core import JitSpec

    def stop(specification: Any) -> None:
        raise FoundError(specification)

    with mock.patch.object(JitSpec, "build_and_load", stop):
        try:
            flashinfer.BatchAttentionWithAttentionSinkWrapper(
                torch.empty(1),
                "NHD",
                backend="fa2",
                q_data_type=dtype,
                kv_data_type=cache,
                head_dim_qk=head_size,
                head_dim_vo=head_size,
                window_left=0 if window else -1,
            )
        except FoundError as found:
            return found.args[0]
    raise SystemExit("flashinfer's wrapper for sinks asks for no module when it is made")


def read(path: Path) -> tuple[list[str], list[Module]]:
    """The architectures as nvcc names them (8.0), and every combination of each table's values."""
    table = tomllib.loads(path.read_text())
    modules = set()
    for entry in table["attention"]:
        names = [field.name for field in fields(Module)]
        # What a table does not say: the cache is in the model's type, and there are no sinks.
        given = {"cache": [""], "soft_cap": [False], "sinks": [False]} | entry
        for values in itertools.product(*(given[name] for name in names)):
            module = Module(*values)
            modules.add(module if module.cache else replace(module, cache=module.dtype))
    check_names(modules)
    return table["architectures"], sorted(modules)


def check_names(modules: set[Module]) -> None:
    """The name of a module with sinks says neither the type of the cache nor the size of heads."""
    for module in modules:
        if module.sinks and (module.cache != module.dtype or module.soft_cap):
            raise SystemExit(f"no wrapper asks for sinks with these: {module}")
    same = len(modules) - len({module.name for module in modules})
    if same:
        raise SystemExit(f"{same} of the modules have the name of another")


def architectures(library: bytes) -> set[int]:
    """For which GPUs it has machine code: 80, 90."""
    found = set()
    start = library.find(MAGIC.to_bytes(4, "little"))
    while start >= 0:
        _, version, header, size = CONTAINER.unpack_from(library, start)
        place = start + header
        # The number may occur elsewhere too: a container has the one version there is.
        end = place + size if version == 1 and header == CONTAINER.size else place
        while place + ARCHITECTURE_AT < min(end, len(library)):
            kind, _, length, code = ENTRY.unpack_from(library, place)
            if kind == MACHINE_CODE:
                found.add(ARCHITECTURE.unpack_from(library, place + ARCHITECTURE_AT)[0])
            place += length + code
        start = library.find(MAGIC.to_bytes(4, "little"), max(end, start + 1))
    return found


def check(path: Path, wanted: list[str]) -> None:
    """End the build where a module does not load or lacks what the image promises."""
    import torch  # noqa: F401 - the modules use the CUDA libraries that it loads
    import tvm_ffi

    module = tvm_ffi.load_module(str(path))
    for function in FUNCTIONS:
        module[function]
    found = architectures(path.read_bytes())
    if found != {int("".join(filter(str.isdigit, name))) for name in wanted}:
        raise SystemExit(f"{path.name} has code for {sorted(found)}, not for {wanted}")


def compilers_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("list", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    targets, modules = read(options.list)
    # flashinfer reads it when it is imported, and without it asks for a GPU.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(targets)
    from flashinfer.jit import build_jit_specs

    for module in modules:
        began = compilers_seconds()
        specification = module.specification()
        build_jit_specs([specification], verbose=False, skip_prebuilt=False)
        path = options.out / module.name / f"{module.name}.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(specification.get_library_path(), path)
        path.chmod(0o644)
        check(path, targets)
        size, seconds = path.stat().st_size / 1e6, compilers_seconds() - began
        print(f"{module.name}: {size:.1f} MB, {seconds:.0f} s of processor time", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
