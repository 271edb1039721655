"""The libraries that stand in for a GPU's (docker/trim_torch.py)."""

import ctypes
import importlib.util
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trim_torch import (
    GPU_CODE,
    erase_gpu_code,
    name_cpu_build,
    symbols,
    versions,
    write_library,
)

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("gcc", "nm", "readelf"))), reason="needs gcc and binutils"
)
CALLER = """
int gpu_add(int, int);
int main(void) { return gpu_add(1, 2); }
"""
REAL = "int gpu_add(int a, int b) { return a + b; }\n"


def build(folder: Path, source: str, *options: str) -> None:
    (folder / "source.c").write_text(source)
    subprocess.run(["gcc", "source.c", *options], cwd=folder, check=True)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program linked with a real library whose symbols have its name as their version."""
    (tmp_path / "map").write_text("libgpu.so.1 { global: *; };\n")
    options = ("-Wl,-soname,libgpu.so.1", "-Wl,--version-script=map", "-o", "libgpu.so.1")
    build(tmp_path, REAL, "-shared", "-fPIC", *options)
    build(tmp_path, CALLER, "-o", "program", "./libgpu.so.1", "-Wl,-rpath,$ORIGIN", "-Wl,-z,now")
    assert subprocess.run([tmp_path / "program"], check=False).returncode == 3
    return tmp_path / "program"


def test_a_program_loads_with_the_stand_in_and_ends_with_the_name_of_what_it_calls(
    program: Path,
) -> None:
    wanted = {name for name in symbols(program, "undefined") if "gpu_add" in name}
    assert wanted == {"gpu_add@libgpu.so.1"}
    assert versions(program)["libgpu.so.1"] == "libgpu.so.1"
    library = program.with_name("libgpu.so.1")
    library.unlink()
    write_library(library, wanted)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == -6
    assert done.stderr == "gpu_add was called, but this image has no GPU libraries\n"


def test_a_function_without_a_version_is_defined_without_one(tmp_path: Path) -> None:
    library = tmp_path / "libplain.so.2"
    write_library(library, {"plain_call"})
    assert symbols(library, "defined") == {"plain_call"}
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).plain_call()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "plain_call was called" in done.stderr


def test_gpu_code_is_erased_and_everything_else_stays(tmp_path: Path) -> None:
    source = f"""
    __attribute__((section("{GPU_CODE}"), used)) const char code[8192] = "kernels";
    const char *first(void) {{ return code; }}
    int answer(void) {{ return 42; }}
    """
    build(tmp_path, source, "-shared", "-fPIC", "-o", "libtorch_demo.so")
    library = tmp_path / "libtorch_demo.so"
    size = library.stat().st_size
    assert b"kernels" in library.read_bytes()
    erase_gpu_code(library)
    assert b"kernels" not in library.read_bytes()
    assert library.stat().st_size == size
    loaded = ctypes.CDLL(str(library))
    loaded.first.restype = ctypes.c_char_p
    assert (loaded.first(), loaded.answer()) == (b"", 42)


def test_a_trimmed_build_says_that_it_has_no_cuda(tmp_path: Path) -> None:
    """The file as this PyTorch's is; one of another form ends the build."""
    version, found = tmp_path / "version.py", importlib.util.find_spec("torch")
    assert found
    assert found.origin
    source = Path(found.origin).with_name("version.py")
    text = source.read_text()
    version.write_text(re.sub("^(cuda.*=).*", r"\1 '13.0'", text, flags=re.MULTILINE))
    name_cpu_build(version)
    before, after = runpy.run_path(str(source)), runpy.run_path(str(version))
    names = before["__all__"]
    assert {name: after[name] for name in names} == {name: before[name] for name in names} | {
        "cuda": None
    }
    version.write_text("cuda13 = 1\n")
    with pytest.raises(SystemExit, match="has 0 lines with the version of CUDA"):
        name_cpu_build(version)
