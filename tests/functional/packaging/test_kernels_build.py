"""The build hook: what a wheel holds as it is, and where the kernels are wanted in it, with a
compiler and without one; what an editable install takes from the user's cache.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hatch_build
from fairlead_kernels.cpu import library
from support.copying_compiler import CopyingCompiler
from support.full import LONG_FORM

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which("c++") or shutil.which("g++")
NATIVE = [f"fairlead_kernels/native/{name}.so" for name in ("avx2", "avx512", "baseline")]


def build(out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def native(out: Path) -> tuple[str, list[str]]:
    (wheel,) = out.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    return wheel.name, sorted(name for name in names if "native" in name)


def test_a_wheel_is_pure_has_the_sources_and_calls_no_compiler(tmp_path: Path) -> None:
    compiler = CopyingCompiler(tmp_path)
    done = build(tmp_path / "out", FAIRLEAD_BUILD_KERNELS="", CXX=str(compiler.path))
    assert done.returncode == 0, done.stderr
    name, files = native(tmp_path / "out")
    assert files == []
    assert name.endswith("-py3-none-any.whl")
    assert compiler.links() == []
    (wheel,) = (tmp_path / "out").glob("*.whl")
    sources = {f"fairlead_kernels/csrc/{path.name}" for path in library.SOURCES.iterdir()}
    assert sources <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_with_a_compiler_the_wheel_has_a_library_per_instruction_set_and_its_platform(
    tmp_path: Path,
) -> None:
    # The hook has compiled for this tree already, which takes two minutes of both cores: the short
    # form's compiler gives what that made of the same sources and flags.
    compiler = {} if LONG_FORM else {"CXX": str(CopyingCompiler(tmp_path).path)}
    done = build(tmp_path, FAIRLEAD_BUILD_KERNELS="1", **compiler)
    assert done.returncode == 0, done.stderr
    name, files = native(tmp_path)
    assert files == NATIVE
    assert name.endswith("-py3-none-linux_x86_64.whl")
    # An image need not have the C++ runtime.
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    linked = subprocess.run(
        ["ldd", *(str(tmp_path / file) for file in files)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "libc.so" in linked
    assert "libstdc++" not in linked
    assert "libgcc" not in linked


def test_without_a_compiler_a_wheel_with_kernels_is_an_error(tmp_path: Path) -> None:
    # hatchling runs from its own interpreter; nothing else is on the path.
    done = build(tmp_path, PATH=str(tmp_path), CXX="", FAIRLEAD_BUILD_KERNELS="1")
    assert done.returncode != 0
    assert "no C++ compiler found" in done.stdout + done.stderr


def test_on_another_architecture_a_wheel_with_kernels_is_an_error(tmp_path: Path) -> None:
    # Python reads it in every process that it starts here.
    (tmp_path / "sitecustomize.py").write_text(
        "import platform, sysconfig\n"
        "platform.machine = lambda: 'aarch64'\n"
        "sysconfig.get_platform = lambda: 'linux-aarch64'\n"
    )
    done = build(tmp_path / "out", PYTHONPATH=str(tmp_path), FAIRLEAD_BUILD_KERNELS="1")
    assert done.returncode != 0
    assert "they are for Linux on x86-64, not linux-aarch64" in done.stdout + done.stderr


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such standard' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = build(tmp_path / "required", CXX=str(broken), FAIRLEAD_BUILD_KERNELS="1")
    assert done.returncode != 0
    assert "no such standard" in done.stdout + done.stderr


def test_they_can_be_left_out_where_a_folder_has_them(tmp_path: Path) -> None:
    compiled = {"FAIRLEAD_KERNELS": str(library.FOLDER), "FAIRLEAD_BUILD_KERNELS": "0"}
    done = build(tmp_path, **compiled)
    assert done.returncode == 0, done.stderr
    assert native(tmp_path)[1] == []


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_an_editable_install_takes_what_was_compiled_for_another_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, said = CopyingCompiler(tmp_path), list[str]()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler.path))
    for clone in ("one", "two"):
        monkeypatch.setattr(hatch_build, "NATIVE", tmp_path / clone)
        hatch_build.fill_source_tree(said.append, anew=False)
        assert len(hatch_build.compiled_in(tmp_path / clone)) == 3
        assert len(list((tmp_path / clone).iterdir())) == 3
    assert sorted(compiler.links()) == ["avx2.so", "avx512.so", "baseline.so"]
    hatch_build.fill_source_tree(said.append, anew=True)
    assert len(compiler.links()) == 6
    assert said == []
    (tmp_path / "cache" / "fairlead").chmod(0o777)
    monkeypatch.setattr(hatch_build, "NATIVE", tmp_path / "three")
    hatch_build.fill_source_tree(said.append, anew=False)
    assert len(hatch_build.compiled_in(tmp_path / "three")) == 3
    assert "for this clone alone: others may write to" in said[0]


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_libraries_that_an_earlier_layer_has_compiled_are_taken_if_they_are_of_these_sources(
    tmp_path: Path,
) -> None:
    shutil.copytree(library.FOLDER, tmp_path / "native")
    # No compiler is found, so whatever the wheel has was there before.
    alone = {"PATH": str(tmp_path), "CXX": "", "FAIRLEAD_BUILD_KERNELS": "1"}
    taken = {**alone, "FAIRLEAD_KERNELS": str(tmp_path / "native")}
    done = build(tmp_path / "out", **taken)
    assert done.returncode == 0, done.stderr
    name, files = native(tmp_path / "out")
    assert files == NATIVE
    assert name.endswith("-py3-none-linux_x86_64.whl")
    (tmp_path / "native" / "avx2.so").write_bytes(b"of other sources")
    done = build(tmp_path / "other", **taken)
    assert done.returncode != 0
    assert "avx2.so is missing, or of other sources" in done.stdout + done.stderr
