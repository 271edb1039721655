"""Make PyTorch's CUDA build run without its GPU libraries, which are three gigabytes.

    python trim_torch.py SITE_PACKAGES PYTHON

PyTorch's CPU build is on an index of its own; the package index has the CUDA build. That one also
computes on a CPU, but its libraries name the GPU libraries and load only where those are found.
They are replaced by small ones of the same name that define the functions asked for; each
function ends the process and says its name, since on a CPU none is called. libcudart stays, so
`torch.cuda.is_available()` is answered by the real code. GPU code inside PyTorch's own library is
overwritten with zeros, so that it costs nothing to send. `torch.version.cuda` becomes None, as in a
CPU build: the runtime then uses no GPU. With `--device cuda` it refuses to start, with `auto` it
runs on the CPU.

Of PyTorch's CPU build only headers and tools are taken out. Else needs gcc and binutils. At the end
PYTHON imports the result with every symbol bound.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# PyTorch's CPU build does not have it.
CUDA_LIBRARY = "torch/lib/libtorch_cuda.so"
# Loaded by name when a GPU is first used, and by no other library.
UNUSED = ("libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so")
# The driver's library is not part of any package; everything else with these names is replaced.
GPU_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
GPU_CODE = ".nv_fatbin"
CUDA_VERSION = re.compile(r"^(cuda\b[^=\n]*=).*$", re.MULTILINE)
# Headers and tools, which nothing at run time reads. Paths in the packages' folder.
WASTE = (
    *("torch/include", "torch/share/cmake", "torch/test", "torch/bin/protoc*", "torch/lib/*.a"),
    *("nvidia/*/include", "nvidia/*/lib/*.a", "nvidia/*/lib/cmake", "nvidia/*/bin"),
)
NO_GPU = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((visibility("hidden"), noreturn)) void fairlead_no_gpu(const char *name) {
    fprintf(stderr, "%s was called, but this image has no GPU libraries\\n", name);
    abort();
}
"""
CHECK = """
import torch
a = torch.arange(6.0).reshape(2, 3)
if (a @ a.T).tolist() != [[5.0, 14.0], [14.0, 50.0]] or torch.linalg.inv(a @ a.T).isnan().any():
    raise SystemExit("PyTorch computes wrong results")
if torch.cuda.is_available() or torch.version.cuda:
    raise SystemExit("PyTorch believes that it has a GPU")
"""


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", str(library)))


def versions(library: Path) -> dict[str, str]:
    """Each symbol version that the library asks for, and the library that has to define it."""
    found, file = {}, ""
    for line in run("readelf", "-V", "-W", str(library)).splitlines():
        if names := re.search(r" File: (\S+) ", line):
            file = names[1]
        elif names := re.search(r" Name: (\S+) .*Version: ", line):
            found[names[1]] = file
    return found


def symbols(library: Path, kind: str) -> set[str]:
    """Names, with `@version` where they have one, that the library defines or takes from others."""
    option = f"--{kind}-only"
    lines = run("nm", "-D", option, "--with-symbol-versions", str(library)).splitlines()
    # "w": weak, may stay undefined
    return {line.split()[-1] for line in lines if line.split()[-2] != "w" or kind == "defined"}


def assembly(functions: set[str]) -> str:
    """Functions that hand their name to `fairlead_no_gpu`."""
    lines = ['.section .note.GNU-stack,"",@progbits']
    for count, full in enumerate(sorted(functions)):
        name, _, version = full.partition("@")
        label = f"fairlead_stub_{count}" if version else name
        lines += [
            f'.section .rodata\n.Lname{count}: .asciz "{name}"',
            f".text\n.globl {label}\n.type {label}, @function\n{label}:",
            f"lea .Lname{count}(%rip), %rdi\njmp fairlead_no_gpu\n.size {label}, .-{label}",
        ]
        if version:
            lines.append(f".symver {label}, {name}@@{version}")
    return "\n".join(lines) + "\n"


def write_library(path: Path, functions: set[str]) -> None:
    """A library with the file's name as its soname."""
    versions = sorted({name.partition("@")[2] for name in functions} - {""})
    with tempfile.TemporaryDirectory() as folder:
        stub, code, script = (Path(folder) / name for name in ("stub.s", "no_gpu.c", "versions"))
        stub.write_text(assembly(functions))
        code.write_text(NO_GPU)
        script.write_text("".join(f"{version} {{ }};\n" for version in versions))
        options = ("-shared", "-fPIC", "-s", f"-Wl,-soname,{path.name}", "-Wl,--build-id=none")
        version_script = (f"-Wl,--version-script={script}",) if versions else ()
        run("gcc", *options, *version_script, "-o", str(path), str(stub), str(code))


def erase_gpu_code(library: Path) -> None:
    """Fill the section with zeros; its place and size stay."""
    sections = run("readelf", "-S", "-W", str(library))
    found = re.search(rf" {re.escape(GPU_CODE)} +\w+ +[0-9a-f]+ ([0-9a-f]+) ([0-9a-f]+)", sections)
    if not found:
        return
    start, size = (int(number, 16) for number in found.groups())
    with library.open("r+b") as file:
        file.seek(start)
        for done in range(0, size, 1 << 20):
            file.write(bytes(min(1 << 20, size - done)))


def remove_waste(packages: Path) -> None:
    for pattern in WASTE:
        for path in packages.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_gpu_libraries(packages: Path) -> None:
    torch = packages / "torch"
    for name in UNUSED:
        (torch / "lib" / name).unlink()
    libraries = [*sorted(torch.glob("lib/*.so*")), *torch.glob("_C.*.so")]
    kept = [*libraries, *packages.glob("nvidia/**/*.so*")]
    gone = {name for path in libraries for name in needed(path)} - {path.name for path in kept}
    gone = {name for name in gone if GPU_LIBRARY.match(name)}
    wanted = {name for path in libraries for name in symbols(path, "undefined")}
    defined = {name for path in kept for name in symbols(path, "defined")}
    owner = {version: soname for path in libraries for version, soname in versions(path).items()}
    stubs: dict[str, set[str]] = {soname: set() for soname in gone}
    # Some GPU libraries version no symbol: the loader does not mind which library has those.
    unversioned = min(gone - set(owner.values()))
    for name in wanted - defined:
        _, marked, version = name.partition("@")
        soname = owner.get(version, "") if marked else unversioned
        if soname in gone and (marked or re.match(r"(nccl|cu|nv)[A-Za-z]", name)):
            stubs[soname].add(name)
    for soname, functions in stubs.items():
        write_library(torch / "lib" / soname, functions)
    for library in torch.glob("lib/libtorch_*.so"):
        erase_gpu_code(library)
    name_cpu_build(torch / "version.py")


def name_cpu_build(version: Path) -> None:
    """Say in PyTorch's own file that it has no CUDA. Ends the build where the line is not there."""
    text, count = CUDA_VERSION.subn(r"\1 None", version.read_text())
    if count != 1:
        raise SystemExit(f"{version} has {count} lines with the version of CUDA, not one")
    version.write_text(text)


def main() -> int:
    packages, python = Path(sys.argv[1]), sys.argv[2]
    remove_waste(packages)
    if (packages / CUDA_LIBRARY).exists():
        replace_gpu_libraries(packages)
    # LD_BIND_NOW: a symbol that no library has is an error now, not when it is first called.
    environment = os.environ | {"LD_BIND_NOW": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([python, "-c", CHECK], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
