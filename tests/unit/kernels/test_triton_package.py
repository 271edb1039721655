"""What Triton finds in a pod without a C compiler and, perhaps, without a home to write to."""

import atexit
import importlib
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fairlead_kernels.gpu import triton_package
from fairlead_kernels.interface.not_available import NotAvailableError

LIBRARY = "backends/nvidia/lib/cuda_utils.cpython-311-x86_64-linux-gnu.so"


class Triton(ModuleType):
    """As much of the package as is set, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__("triton")
        self.folder = folder
        self.__path__ = [str(folder)]
        self.knobs = SimpleNamespace(
            build=SimpleNamespace(impl=None),
            nvidia=SimpleNamespace(libcuda_path=None),
            cache=SimpleNamespace(dir=str(folder / "home/.triton/cache")),
        )


@pytest.fixture
def triton(tmp_path: Path) -> Triton:
    return Triton(tmp_path)


def compiled(triton: Triton) -> Path:
    path = triton.folder / LIBRARY
    path.parent.mkdir(parents=True)
    path.write_bytes(b"library")
    return path


def build(triton: Triton, name: str) -> str:
    """As triton.runtime.build asks for a library."""
    made: Callable[..., str] = triton.knobs.build.impl
    return made(name, "/source.c", "/tmp/work", ["/usr/lib"], ["/include"], ["libcuda.so.1"])


def test_the_library_that_was_compiled_ahead_takes_the_compilers_place(triton: Triton) -> None:
    library = compiled(triton)
    triton_package.hand_out_library(triton, triton.folder)
    assert build(triton, "cuda_utils") == str(library)
    # Any folder: it is not asked what the machine has.
    assert triton.knobs.nvidia.libcuda_path == str(library.parent)


def test_another_library_is_not_answered_with_that_one(triton: Triton) -> None:
    compiled(triton)
    triton_package.hand_out_library(triton, triton.folder)
    with pytest.raises(RuntimeError, match="no C compiler, and gsan_utils was not compiled ahead"):
        build(triton, "gsan_utils")


def test_where_nothing_was_compiled_ahead_triton_compiles_as_it_always_does(
    triton: Triton,
) -> None:
    triton_package.hand_out_library(triton, triton.folder)
    assert triton.knobs.build.impl is None
    assert triton.knobs.nvidia.libcuda_path is None


def test_a_place_of_the_driver_that_the_user_gives_stays(triton: Triton) -> None:
    compiled(triton)
    triton.knobs.nvidia.libcuda_path = "/driver"
    triton_package.hand_out_library(triton, triton.folder)
    assert triton.knobs.nvidia.libcuda_path == "/driver"


def test_kernels_are_kept_where_triton_keeps_them(
    triton: Triton, caplog: pytest.LogCaptureFixture
) -> None:
    home = triton.knobs.cache.dir
    triton_package.keep_kernels(triton)
    assert triton.knobs.cache.dir == home
    assert list(Path(home).iterdir()) == []
    assert caplog.records == []


def not_writable(triton: Triton) -> None:
    """Below a file nobody can make a folder, root neither."""
    triton.knobs.cache.dir = str(triton.folder / "file/cache")
    (triton.folder / "file").write_text("")


def test_without_such_a_place_they_are_compiled_into_a_folder_of_this_process_and_the_log_says_so(
    triton: Triton, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_exit: list[tuple[Any, ...]] = []
    monkeypatch.setattr(atexit, "register", lambda *call, **_: at_exit.append(call))
    monkeypatch.setattr(tempfile, "tempdir", str(triton.folder))
    not_writable(triton)
    triton_package.keep_kernels(triton)
    folder = Path(triton.knobs.cache.dir)
    assert folder.parent == triton.folder
    assert os.access(folder, os.W_OK)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "compiles its kernels again at each start" in record.getMessage()
    assert f"{triton.folder}/file/cache (NotADirectoryError" in record.getMessage()
    ((remove, removed),) = at_exit
    assert removed == str(folder)
    remove(removed)
    assert not folder.exists()


def test_a_folder_that_exists_and_cannot_be_written_to_is_no_such_place(
    triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a read-only root."""
    home = triton.knobs.cache.dir
    Path(home).mkdir(parents=True)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    monkeypatch.setattr(tempfile, "tempdir", str(triton.folder))
    monkeypatch.setattr(atexit, "register", lambda *_, **__: None)
    triton_package.keep_kernels(triton)
    assert triton.knobs.cache.dir != home


def test_without_any_folder_to_write_to_the_reason_is_said(
    triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_writable(triton)
    monkeypatch.setattr(tempfile, "tempdir", str(triton.folder / "file"))
    with pytest.raises(NotAvailableError, match="no folder to write to: NotADirectoryError"):
        triton_package.keep_kernels(triton)


def test_the_module_is_imported_after_triton_knows_its_library(
    triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compiled(triton)
    kernels = ModuleType("kernels_of_ours")
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    own = importlib.import_module

    def imported(name: str) -> ModuleType:
        if name == "kernels_of_ours":
            assert build(triton, "cuda_utils") == str(library)
            return kernels
        return own(name)

    monkeypatch.setattr(importlib, "import_module", imported)
    assert triton_package.load("kernels_of_ours") is kernels
    assert Path(triton.knobs.cache.dir).is_dir()
