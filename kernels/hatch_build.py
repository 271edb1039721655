"""Hatchling's hook: puts the C++ kernels into an editable install, and into a wheel where that is
asked for.

A wheel is pure Python: who plans needs no kernels, and who serves compiles those of its processor
at the first start (``fairlead_kernels/cpu/first_start.py``). FAIRLEAD_BUILD_KERNELS=1 compiles them
into the wheel, and makes a build without them an error; 0 leaves them out of an editable install,
too. FAIRLEAD_KERNELS names a folder in which ``fairlead_kernels/cpu/compilation.py`` has compiled
them: an image does that in a layer of its own.
"""

import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from fairlead_kernels.cpu.compilation import (
    INSTRUCTION_SETS,
    SOURCES,
    NotBuiltError,
    compile_libraries,
)
from fairlead_kernels.cpu.sources import hash_sources

NATIVE = Path(__file__).parent / "fairlead_kernels" / "native"


def compiled_in(folder: Path) -> list[Path]:
    """The libraries that ``compile_libraries`` has put there. Raises NotBuiltError where one is
    missing, or of other sources.
    """
    libraries = [folder / f"{name}.so" for name in INSTRUCTION_SETS]
    sources = hash_sources(SOURCES).encode()
    for library in libraries:
        if not library.is_file() or sources not in library.read_bytes():
            raise NotBuiltError(f"{library} is missing, or of other sources")
    return libraries


def fill_source_tree(say: Callable[[str], None], *, anew: bool) -> None:
    """Put the libraries beside the sources: what was compiled before for another clone, unless they
    are to be compiled ``anew``; ``say`` hears where that cannot be. Raises NotBuiltError.
    """
    if not anew:
        from fairlead_kernels.cpu import user_cache  # which Windows lacks the modules for

        try:
            libraries = user_cache.provide(tuple(INSTRUCTION_SETS))
        except user_cache.UnusableCacheError as error:
            say(f"the C++ kernels are compiled for this clone alone: {error}")
        else:
            NATIVE.mkdir(exist_ok=True)
            for library in reversed(libraries):  # where the baseline's is, all are
                partial = NATIVE / f"{library.name}.{os.getpid()}"
                shutil.copyfile(library, partial)
                partial.replace(NATIVE / library.name)  # a process may have the old one mapped
            return
    compile_libraries(NATIVE)


class KernelsBuildHook(BuildHookInterface[Any]):
    """Adds the libraries to the wheel; for an editable install they stay in the source tree."""

    PLUGIN_NAME = "custom"
    _temporary: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        setting = os.environ.get("FAIRLEAD_BUILD_KERNELS", "")
        compiled = os.environ.get("FAIRLEAD_KERNELS")
        editable = version == "editable"
        if setting == "0" or not (editable or setting == "1" or compiled):
            return
        try:
            if editable:
                anew = setting == "1" or bool(os.environ.get("CXX"))
                fill_source_tree(self.app.display_warning, anew=anew)
                return
            if compiled:
                libraries = compiled_in(Path(compiled))
            else:
                self._temporary = tempfile.TemporaryDirectory()
                libraries = compile_libraries(Path(self._temporary.name))
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
