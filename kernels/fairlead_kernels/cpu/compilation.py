"""Compiles the C++ kernels: the compiler, its flags, and one library per instruction set.

Used where a package or an image is built, when torch may be absent, and by the first start of an
engine where none was installed. ``python -m fairlead_kernels.cpu.compilation FOLDER`` compiles all
of them into a folder.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fairlead_kernels.cpu.sources import hash_sources, why_not_here

SOURCES = Path(__file__).parents[1] / "csrc"
FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=fast",  # a * b + c becomes one instruction
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
)
LINK_FLAGS = (
    "-shared",
    "-pthread",
    # Images need not have a C++ runtime, and an older one must do.
    "-static-libstdc++",
    "-static-libgcc",
    "-Wl,-s",
)
# Instruction set → the compiler's name of it, the narrowest first.
INSTRUCTION_SETS = {"baseline": "x86-64", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}
# The library of machine.cpp alone, for the baseline: it says which of the others the processor can
# run, and is compiled at once.
PROBE = "machine"


class NotBuiltError(RuntimeError):
    """The kernels cannot be compiled here; the message says why."""


def compiler() -> str:
    """The C++ compiler. Raises NotBuiltError without one, or on another kind of machine."""
    if elsewhere := why_not_here():
        raise NotBuiltError(elsewhere)
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise NotBuiltError(
        "no C++ compiler found (c++, g++, clang++ or the one that CXX names): install g++"
    )


def architecture(name: str) -> str:
    """The compiler's flag for a library of this name."""
    return f"-march={INSTRUCTION_SETS.get(name, INSTRUCTION_SETS['baseline'])}"


def compile_libraries(
    out: Path,
    names: Iterable[str] = tuple(INSTRUCTION_SETS),
    extra: Sequence[str] = (),
    compilers: int | None = None,
) -> list[Path]:
    """Compile the libraries of these instruction sets, or PROBE, into ``out``, with ``extra`` flags
    of the compiler: each file by itself, with so many ``compilers`` at a time, which take up to 400
    MB each; None: one for each core. Raises NotBuiltError.
    """
    program, names = compiler(), list(names)
    out.mkdir(parents=True, exist_ok=True)
    define = f'-DFAIRLEAD_SOURCES="{hash_sources(SOURCES)}"'
    files = {name: _files(name) for name in names}

    def run(arguments: Sequence[str]) -> None:
        try:
            process = subprocess.run(  # noqa: S603 - the compiler
                [program, *arguments], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise NotBuiltError(f"{program} cannot be run: {error.strerror}") from error
        if process.returncode:
            raise NotBuiltError(f"{program} failed: {_reason(process.stderr)}")

    with tempfile.TemporaryDirectory(dir=out, prefix="partial-") as work:

        def compiled(name: str, source: Path) -> str:
            return f"{work}/{name}-{source.stem}.o"

        def compile_file(job: tuple[Path, str]) -> None:
            source, name = job
            flags = (*FLAGS, architecture(name), define, *extra)
            run([*flags, "-c", str(source), "-o", compiled(name, source)])

        def link(name: str) -> Path:
            partial, library = Path(work, f"{name}.so"), out / f"{name}.so"
            objects = [compiled(name, source) for source in files[name]]
            run([*LINK_FLAGS, architecture(name), *extra, *objects, "-o", str(partial)])
            # A process may have the present file mapped: the new one takes its place at once.
            return partial.replace(library)

        # The longest first, so that no core has much more left at the end than another.
        jobs = [(source, name) for name in names for source in files[name]]
        jobs.sort(key=lambda job: job[0].stat().st_size, reverse=True)
        with ThreadPoolExecutor(compilers or len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compile_file, jobs))  # after a failure what has not begun does not begin
            # The baseline's last: where it is, all are, after an end in between, too.
            return [link(name) for name in sorted(names, key="baseline".__eq__)]


def _files(name: str) -> list[Path]:
    return sorted(SOURCES.glob(f"{PROBE}.cpp" if name == PROBE else "*.cpp"))


def _reason(stderr: str) -> str:
    """The lines that say why, of what a compiler or its linker wrote."""
    lines = [line for line in stderr.splitlines() if "error" in line or "cannot find" in line]
    return " ".join(lines[:3]) or stderr[-300:].strip() or "it gave no reason"


if __name__ == "__main__":
    compile_libraries(Path(sys.argv[1]))
