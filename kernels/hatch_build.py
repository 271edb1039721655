"""Hatchling's hook: compiles the C++ kernels while a wheel or an editable install is made.

Owns the compiler's flags and where the libraries go. There is one library per instruction set; the
loader (``fairlead_kernels/cpu/library.py``) picks one when a process starts. Without a compiler the
wheel is pure Python and plain torch does the work.

FAIRLEAD_BUILD_KERNELS=0 leaves them out, 1 makes a build without them an error. FAIRLEAD_KERNELS
names a folder in which ``python hatch_build.py FOLDER`` has compiled them: an image does that in a
layer of its own.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from fairlead_kernels.cpu.sources import hash_sources, why_not_here

PACKAGE = Path(__file__).parent / "fairlead_kernels"
SOURCES = PACKAGE / "csrc"
FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=fast",  # a * b + c becomes one instruction
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
    # Images need not have a C++ runtime, and an older one must do.
    "-static-libstdc++",
    "-static-libgcc",
    "-Wl,-s",
)
# Instruction set → the compiler's name of it.
INSTRUCTION_SETS = {"baseline": "x86-64", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}


class NotBuiltError(RuntimeError):
    """The kernels cannot be built here; the message says why."""


def compiler() -> str:
    """The C++ compiler. Raises NotBuiltError without one, or on another kind of machine."""
    if elsewhere := why_not_here():
        raise NotBuiltError(elsewhere)
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise NotBuiltError("no C++ compiler found (c++, g++, clang++ or the one that CXX names)")


def compile_all(out: Path, extra: Sequence[str] = ()) -> list[Path]:
    """Compile the library of each instruction set into ``out``. Raises NotBuiltError."""
    program = compiler()
    out.mkdir(parents=True, exist_ok=True)
    define = f'-DFAIRLEAD_SOURCES="{hash_sources(SOURCES)}"'
    files = sorted(map(str, SOURCES.glob("*.cpp")))

    def build(name: str) -> Path:
        library = out / f"{name}.so"
        # A process may have the present file mapped: the new one takes its place at once.
        partial = out / f"{name}.so.{os.getpid()}"
        flags = [*FLAGS, f"-march={INSTRUCTION_SETS[name]}", define, *extra]
        command = [program, *flags, *files, "-o", str(partial)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the compiler
        if process.returncode:
            lines = [line for line in process.stderr.splitlines() if "error" in line][:3]
            raise NotBuiltError(f"{program} failed: {' '.join(lines) or process.stderr[-300:]}")
        partial.replace(library)
        return library

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(build, INSTRUCTION_SETS))


def compiled_in(folder: Path) -> list[Path]:
    """The libraries that ``compile_all`` has put there. Raises NotBuiltError where one is missing,
    or of other sources.
    """
    libraries = [folder / f"{name}.so" for name in INSTRUCTION_SETS]
    sources = hash_sources(SOURCES).encode()
    for library in libraries:
        if not library.is_file() or sources not in library.read_bytes():
            raise NotBuiltError(f"{library} is missing, or of other sources")
    return libraries


class KernelsBuildHook(BuildHookInterface[Any]):
    """Adds the libraries to the wheel; for an editable install they stay in the source tree."""

    PLUGIN_NAME = "custom"
    _temporary: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        setting = os.environ.get("FAIRLEAD_BUILD_KERNELS", "")
        if setting == "0":
            return
        try:
            if version == "editable":
                compile_all(PACKAGE / "native")
                return
            if compiled := os.environ.get("FAIRLEAD_KERNELS"):
                libraries = compiled_in(Path(compiled))
            else:
                self._temporary = tempfile.TemporaryDirectory()
                libraries = compile_all(Path(self._temporary.name))
        except NotBuiltError as error:
            if setting == "1":
                raise
            self.app.display_warning(f"CPU kernels are not built, plain torch serves: {error}")
            return
        build_data["force_include"].update(
            {str(path): f"fairlead_kernels/native/{path.name}" for path in libraries}
        )
        build_data["pure_python"] = False
        # The libraries know neither Python's nor torch's version, only the platform.
        target = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{target}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling's signature
        if self._temporary is not None:
            self._temporary.cleanup()


if __name__ == "__main__":
    compile_all(Path(sys.argv[1]))
