"""Builds the libraries of C++ kernels in a copy of the repository: of the instruction sets that
find a bug, and each file again only when it, or a header that it includes, has changed.
"""

import hashlib
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from fairlead_kernels.cpu import compilation
from fairlead_kernels.cpu.sources import hash_sources

EMULATED = Path(__file__).with_name("emulated")
PACKAGE = Path("kernels", "fairlead_kernels")  # in a copy
SUFFIXES = (".cpp", ".h")
_INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_CHOICE = re.compile(r"^INSTRUCTION_SETS = .*$", re.MULTILINE)


class Build(NamedTuple):
    """``libraries``: what is compiled, each with the compiler's flags beside the package's.
    ``choice``: the instruction sets that the copy's ``fairlead_kernels.cpu.library`` may choose
    from.
    """

    libraries: tuple[tuple[str, tuple[str, ...]], ...]
    choice: tuple[str, ...]


_MARCH = compilation.architecture("baseline")
# One instruction set is enough to find most bugs.
BASELINE = Build((("baseline", (_MARCH,)),), ("baseline",))
# What VNNI, AMX and BF16 compute has tests of its own. Here they are emulated, on every processor.
# Optimised, vectors that no register holds compile for minutes.
_ON_EVERY_PROCESSOR = (_MARCH, "-DFAIRLEAD_AMX_EMULATED", "-D__builtin_cpu_supports(name)=1")
DIGITS = Build(
    (
        ("baseline", _ON_EVERY_PROCESSOR),
        ("avx512", (*_ON_EVERY_PROCESSOR, "-D__AVX512F__", f"-I{EMULATED}", "-Og")),
    ),
    ("avx512+amx", "avx512+vnni", "baseline"),
)


def choose(copy: Path, build: Build) -> None:
    """Let the copy's loader choose from what the build has."""
    loader = copy / PACKAGE / "cpu" / "library.py"
    text, count = _CHOICE.subn(f"INSTRUCTION_SETS = {build.choice!r}", loader.read_text())
    if count != 1:
        raise RuntimeError(f"{loader} sets INSTRUCTION_SETS {count} times, not once")
    loader.write_text(text)


def compile_copy(copy: Path, build: Build, objects: Path) -> None:
    """Compile the copy's libraries; ``objects`` keeps what its files were compiled to. Raises
    ``compilation.NotBuiltError``.
    """
    sources = copy / PACKAGE / "csrc"
    program = compilation.compiler()
    define = f'-DFAIRLEAD_SOURCES="{hash_sources(sources)}"'

    def run(*arguments: str) -> None:
        process = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        if process.returncode:
            raise compilation.NotBuiltError(process.stderr[-2000:])

    def compile_file(source: Path, more: Sequence[str]) -> str:
        text = "".join(path.read_text() for path in _closure(source))
        flags = [*compilation.FLAGS, *more]
        if "FAIRLEAD_SOURCES" in text:
            flags.append(define)
        key = hashlib.sha256("\0".join([source.name, *flags, text]).encode()).hexdigest()
        path = objects / f"{key}.o"
        if not path.exists():
            partial = path.with_suffix(f".{threading.get_ident()}")
            run(*flags, "-c", str(source), "-o", str(partial))
            partial.replace(path)
        return str(path)

    files = sorted(sources.glob("*.cpp"))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, flags in build.libraries:
            compiled = list(pool.map(compile_file, files, repeat(flags)))
            library = copy / PACKAGE / "native" / f"{name}.so"
            partial = library.with_suffix(".partial")
            run(*compilation.LINK_FLAGS, *compiled, "-o", str(partial))
            partial.replace(library)


def _closure(source: Path) -> Iterator[Path]:
    """A file and the headers beside it that it includes, each once."""
    paths, visited = [source], set[Path]()
    while paths:
        path = paths.pop()
        if path not in visited:
            visited.add(path)
            yield path
            paths += [path.with_name(name) for name in _INCLUDED.findall(path.read_text())]
