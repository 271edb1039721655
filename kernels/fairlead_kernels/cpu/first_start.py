"""The first start of an engine compiles the C++ kernels where none of these sources were installed:
of the one instruction set that this processor uses, into the user's cache.

docs/design/0005-cpu-kernels.md says why then.
"""

import ctypes
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fairlead_kernels.cpu import compilation, user_cache
from fairlead_kernels.cpu.compilation import INSTRUCTION_SETS, PROBE, NotBuiltError
from fairlead_kernels.cpu.sources import hash_sources, why_not_here

log = logging.getLogger("fairlead.kernels")

SETTING = "FAIRLEAD_BUILD_KERNELS"  # 0: nothing is compiled
OUTDATED = "those installed are of other sources (run `make setup`, or install again)"
NOT_STARTED = "no engine has started on a CPU, which compiles them"
_attempt = {"failure": ""}  # of this process


def compile_missing(
    installed: Path, begun: Callable[[], None], compilers: int | None = None
) -> None:
    """Let the cache have the library of the widest instruction set that this processor runs, unless
    the folder ``installed`` has libraries of these sources.

    ``begun`` is called before anything is compiled, by so many ``compilers`` at a time. A failure
    is logged, and is then the reason that ``find`` gives.
    """
    _attempt["failure"] = ""
    if _has_libraries(installed) or why_not_here() or _forbidden():
        return
    try:
        if user_cache.find(PROBE) is None:
            begun()
            user_cache.provide([PROBE])
        supports = _supports(installed)
        name = next(name for name in reversed(INSTRUCTION_SETS) if supports(name.encode()))
        if user_cache.find(name) is not None:
            return
        begun()
        # A warning, so that a person reads it also where nobody has configured logs.
        log.warning(
            "compiling the C++ kernels for this processor (%s), once: about a minute; kept in %s",
            name,
            user_cache.folder(),
        )
        began = time.monotonic()
        user_cache.provide([name], compilers)
        log.info("compiled the C++ kernels in %.1f s", time.monotonic() - began)
    except NotBuiltError as error:
        _attempt["failure"] = str(error)
        log.warning(
            "the C++ kernels are not compiled; without them plain torch serves, slower: %s", error
        )


def find(name: str, installed: Path) -> Path:
    """The library of this name, installed or compiled by a start. Raises NotBuiltError with the
    reason where there is none.
    """
    if _has_libraries(installed):
        return installed / f"{name}.so"
    if elsewhere := why_not_here():
        raise NotBuiltError(elsewhere)
    if (library := user_cache.find(name)) is not None:
        return library
    reason = _forbidden() or _attempt["failure"]
    if _baseline(installed).exists():
        raise NotBuiltError(f"{OUTDATED}; {reason or NOT_STARTED}")
    raise NotBuiltError(reason or f"they were not installed; {NOT_STARTED}")


def supported(names: Sequence[str], installed: Path) -> list[str]:
    """Of these instruction sets those that the processor runs and that have a library. Raises
    NotBuiltError with the reason where there is none.
    """
    supports = _supports(installed)
    runs = [name for name in names if supports(name.encode())]
    if _has_libraries(installed):
        return runs
    compiled = [name for name in runs if user_cache.find(name.partition("+")[0]) is not None]
    if not compiled:
        find(runs[0].partition("+")[0], installed)  # says why
    return compiled


def _supports(installed: Path) -> Callable[[bytes], int]:
    """What says whether the processor runs an instruction set, of a library that any processor
    runs. Raises NotBuiltError where there is none that can be loaded.
    """
    has_libraries = _has_libraries(installed)
    library = find("baseline" if has_libraries else PROBE, installed)
    try:
        supports = ctypes.CDLL(str(library)).fairlead_supports
    except OSError as error:
        fix = (
            "install again"
            if has_libraries
            else "set XDG_CACHE_HOME to a folder that may hold programs"
        )
        raise NotBuiltError(f"it cannot be loaded: {error}: {fix}") from error
    supports.argtypes, supports.restype = (ctypes.c_char_p,), ctypes.c_int32
    return supports


def _baseline(installed: Path) -> Path:
    return installed / "baseline.so"


def _has_libraries(installed: Path) -> bool:
    """Whether the folder has libraries, of these sources: others may have been pulled since."""
    library, sources = _baseline(installed), compilation.SOURCES
    if not library.exists():
        return False
    return not sources.exists() or hash_sources(sources).encode() in library.read_bytes()


def _forbidden() -> str:
    return f"{SETTING} is 0" if os.environ.get(SETTING) == "0" else ""
