"""The package triton: imported here, and told where its compiled parts are and may be.

Owns what a pod lacks that Triton expects: a C compiler, for the library that calls CUDA's driver,
and a home to keep compiled kernels in. Written for 3.9. docs/design/0007-gpu-layers.md has the
reasons.
"""

import atexit
import importlib
import importlib.util
import logging
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from fairlead_kernels.interface.not_available import FaultError, NotAvailableError, brief

log = logging.getLogger(__name__)

# In Triton's folder, where docker/trim_triton.py leaves what a build stage compiled; the name ends
# with that of Python and of the machine.
COMPILED = "backends/nvidia/lib/cuda_utils.*.so"


def load(module: str) -> Any:
    """The module of ours that has this name and Triton kernels, which are compiled at their first
    launch. Raises NotAvailableError with the reason.
    """
    if importlib.util.find_spec("triton") is None:
        raise NotAvailableError("Triton is not installed")
    try:
        triton = importlib.import_module("triton")
        hand_out_library(triton, Path(triton.__path__[0]))
        kernels = importlib.import_module(module)
    except Exception as error:  # it looks for drivers and reads files of its own
        raise FaultError(f"Triton cannot be imported: {brief(error)}") from error
    keep_kernels(triton)
    return kernels


def hand_out_library(triton: ModuleType, folder: Path) -> None:
    """Let Triton take the library that was compiled ahead, if there is one below its folder, in
    place of a C compiler's result.
    """
    library = next(folder.glob(COMPILED), None)
    if library is None:
        return

    def built(name: str, *_: Any) -> str:
        if name != library.name.partition(".")[0]:
            raise RuntimeError(f"this image has no C compiler, and {name} was not compiled ahead")
        return str(library)

    triton.knobs.build.impl = built
    if triton.knobs.nvidia.libcuda_path is None:
        # Else it would ask ldconfig where the driver is, to link with it. Nothing is linked.
        triton.knobs.nvidia.libcuda_path = str(library.parent)


def keep_kernels(triton: ModuleType) -> None:
    """Give Triton a folder of this process where it cannot write to its own (``~/.triton`` or
    TRITON_CACHE_DIR), and say so: each start then compiles again. Raises NotAvailableError where
    no folder can be written to.
    """
    cache = triton.knobs.cache
    try:
        Path(cache.dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache.dir):
            return
    except OSError as error:
        reason = brief(error)
    try:
        folder = tempfile.mkdtemp(prefix="fairlead-triton-")
    except OSError as error:
        raise NotAvailableError(f"Triton has no folder to write to: {brief(error)}") from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    log.warning(
        "Triton compiles its kernels again at each start: it cannot keep them in %s (%s)",
        cache.dir,
        reason,
    )
    cache.dir = folder
