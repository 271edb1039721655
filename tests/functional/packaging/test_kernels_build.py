"""The build hook: what a wheel holds with a compiler, without one, and where none is wanted."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hatch_build
from fairlead_kernels.cpu import library
from support.full import LONG_FORM

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which("c++") or shutil.which("g++")
NATIVE = [f"fairlead_kernels/native/{name}.so" for name in ("avx2", "avx512", "baseline")]
NAMES = {march: name for name, march in hatch_build.INSTRUCTION_SETS.items()}
COPIES = f"""#!{sys.executable}
import shutil, sys
from pathlib import Path
march = next(flag.partition("=")[2] for flag in sys.argv if flag.startswith("-march="))
name = {NAMES}[march]
made = Path("{library.FOLDER}") / f"{{name}}.so"
hashes = [flag for flag in sys.argv if flag.startswith("-DFAIRLEAD_SOURCES=")]
if hashes[0].split('"')[1].encode() not in made.read_bytes():
    sys.exit("error: the libraries are not of these sources: run `make setup`")
shutil.copy(made, sys.argv[sys.argv.index("-o") + 1])
"""


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
    assert not [name for name in names if "csrc" in name]
    return wheel.name, sorted(name for name in names if "native" in name)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_with_a_compiler_the_wheel_has_a_library_per_instruction_set_and_its_platform(
    tmp_path: Path,
) -> None:
    # The hook has compiled for this tree already, which takes two minutes of both cores: the short
    # form's compiler gives what that made of the same sources and flags.
    quick = tmp_path / "c++"
    quick.write_text(COPIES)
    quick.chmod(0o755)
    compiler = {} if LONG_FORM else {"CXX": str(quick)}
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


def test_without_a_compiler_the_wheel_is_pure_and_the_build_says_so(tmp_path: Path) -> None:
    # hatchling runs from its own interpreter; nothing else is on the path.
    done = build(tmp_path, PATH=str(tmp_path), CXX="", FAIRLEAD_BUILD_KERNELS="")
    assert done.returncode == 0, done.stderr
    assert "CPU kernels are not built, plain torch serves: no C++ compiler" in (
        done.stdout + done.stderr
    )
    name, files = native(tmp_path)
    assert files == []
    assert name.endswith("-py3-none-any.whl")


def test_on_another_architecture_the_wheel_is_pure_and_the_build_says_so(tmp_path: Path) -> None:
    # Python reads it in every process that it starts here.
    (tmp_path / "sitecustomize.py").write_text(
        "import platform, sysconfig\n"
        "platform.machine = lambda: 'aarch64'\n"
        "sysconfig.get_platform = lambda: 'linux-aarch64'\n"
    )
    done = build(tmp_path / "out", PYTHONPATH=str(tmp_path), FAIRLEAD_BUILD_KERNELS="")
    assert done.returncode == 0, done.stderr
    assert "plain torch serves: they are for Linux on x86-64, not linux-aarch64" in (
        done.stdout + done.stderr
    )
    name, files = native(tmp_path / "out")
    assert files == []
    assert name.endswith("-py3-none-any.whl")


def test_a_compiler_that_fails_leaves_them_out_unless_they_are_required(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such standard' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = build(tmp_path / "out", CXX=str(broken), FAIRLEAD_BUILD_KERNELS="")
    assert done.returncode == 0, done.stderr
    assert "no such standard" in done.stdout + done.stderr
    assert native(tmp_path / "out")[1] == []
    done = build(tmp_path / "required", CXX=str(broken), FAIRLEAD_BUILD_KERNELS="1")
    assert done.returncode != 0
    assert "no such standard" in done.stdout + done.stderr


def test_they_can_be_left_out(tmp_path: Path) -> None:
    done = build(tmp_path, FAIRLEAD_BUILD_KERNELS="0")
    assert done.returncode == 0, done.stderr
    assert native(tmp_path)[1] == []


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
