"""Make Triton run where no C compiler is, and take out what the runtime's kernels do not need.

    python trim_triton.py SITE_PACKAGES PYTHON

Triton compiles its kernels itself, but has a C compiler make one small library, which calls CUDA's
driver, when a process first launches one. Here Triton compiles it, once, and the library is kept
where `fairlead_kernels.gpu.triton_package` looks for it. Then other vendors' GPUs, the profiler,
tests, headers and debugging symbols go: 810 MB of 1,080.

Needs gcc, binutils and Python's headers. At the end PYTHON compiles a kernel for each architecture
of the image with no compiler on its PATH.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Beside driver.c, its source. Paths below are in Triton's own folder.
KEPT = "backends/nvidia/lib"
NVIDIA, AMD = "nvidia = triton.backends.nvidia", "amd = triton.backends.amd"
WASTE = (
    *("backends/amd", "include", "plugins", "instrumentation", "profiler", "_C/libproton.so"),
    *("FileCheck", "_filecheck.py", "_internal_testing.py", "_test_runner.py"),
    *("backends/nvidia/include", "backends/nvidia/lib/cupti*", "backends/nvidia/bin/nvdisasm"),
    # The two assemblers stay: ptxas is for GPUs before Hopper, ptxas-blackwell for all since.
    *("backends/nvidia/bin/cuobjdump", "backends/nvidia/lib/gsan.ll"),
)
BUILD = "from triton.backends.nvidia import driver; driver.CudaUtils()"
CHECK = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(x, SIZE: tl.constexpr):
    at = x + tl.arange(0, SIZE)
    tl.store(at, tl.load(at) * 2)

for capability in (80, 90):
    source = ASTSource(double, {"x": "*fp32", "SIZE": "constexpr"}, {"SIZE": 128})
    target, options = GPUTarget("cuda", capability, 32), {"enable_fp_fusion": True}
    compiled = triton.compile(source, target=target, options=options)
    if not compiled.asm["cubin"]:
        raise SystemExit(f"Triton compiled nothing for sm_{capability}")
"""


def run(*command: str, **environment: str) -> None:
    """With these variables added. Byte code is made later, of all packages alike."""
    more = environment | {"PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, check=True, env=os.environ | more)


def write_driver(folder: Path, source: str) -> None:
    """A library with the name of CUDA's driver, which is the node's, and all functions that the
    source may call: to link with it, and to load what is linked.
    """
    functions = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\()", source)))
    code = folder / "driver.c"
    code.write_text("".join(f"void {name}(void) {{}}\n" for name in functions))
    library = str(folder / "libcuda.so.1")
    run("gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library, str(code))


def compile_library(triton: Path, python: str) -> None:
    """Let Triton make and load its driver's library, and keep that of its cache."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_driver(folder, (triton / "backends/nvidia/driver.c").read_text())
        cache = folder / "cache"
        run(
            *(python, "-c", BUILD),
            TRITON_CACHE_DIR=str(cache),
            TRITON_LIBCUDA_PATH=name,
            LD_LIBRARY_PATH=name,
        )
        (library,) = cache.glob("*/*.so")
        kept = triton / KEPT / library.name
        shutil.copyfile(library, kept)
        kept.chmod(0o644)
        run("strip", "--strip-unneeded", str(kept))


def remove_waste(packages: Path) -> None:
    triton = packages / "triton"
    for pattern in WASTE:
        found = list(triton.glob(pattern))
        if not found:
            raise SystemExit(f"Triton has no {pattern} any more: look where it is now")
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (entries,) = packages.glob("triton-*.dist-info/entry_points.txt")
    # Triton imports every backend that is listed here.
    lines = entries.read_text().splitlines()
    if not {NVIDIA, AMD} <= set(lines):
        raise SystemExit(f"Triton lists other backends: {lines}")
    entries.write_text(f"[triton.backends]\n{NVIDIA}\n")
    for name in ("proton", "proton-viewer"):
        (packages.parents[2] / "bin" / name).unlink(missing_ok=True)
    run("strip", "--strip-unneeded", str(triton / "_C/libtriton.so"))


def check(python: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Triton reads the source of a kernel from its file.
        program = Path(folder) / "check.py"
        program.write_text(CHECK)
        run(python, str(program), PATH="/nowhere", TRITON_CACHE_DIR=folder)


def main() -> int:
    packages, python = Path(sys.argv[1]), sys.argv[2]
    compile_library(packages / "triton", python)
    remove_waste(packages)
    check(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
