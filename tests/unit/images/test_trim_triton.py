"""How the CUDA image's Triton is made to run without a C compiler."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import trim_triton
from trim_triton import WASTE, compile_library, remove_waste, write_driver

BACKENDS = "[triton.backends]\namd = triton.backends.amd\nnvidia = triton.backends.nvidia\n"
# Arguments: Triton's folder in the image. The driver's library is not there, so functions are
# looked for when they are called; none is.
LOAD = """
import os, sys
from pathlib import Path
import triton
from fairlead_kernels.gpu import triton_package
sys.setdlopenflags(os.RTLD_LAZY)
triton_package.hand_out_library(triton, Path(sys.argv[1]))
from triton.backends.nvidia import driver
print(callable(driver.CudaUtils().launch))
"""

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton comes with torch's CUDA build alone",
)
needs_a_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="it needs gcc and Python's headers",
)


@needs_triton
@needs_a_compiler
def test_the_library_that_a_build_stage_compiles_serves_where_no_compiler_is(
    tmp_path: Path,
) -> None:
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "backends/nvidia/driver.c"
    triton = tmp_path / "triton"
    (triton / "backends/nvidia/lib").mkdir(parents=True)
    shutil.copy(source, triton / "backends/nvidia/driver.c")
    compile_library(triton, sys.executable)
    (library,) = (triton / "backends/nvidia/lib").iterdir()
    assert library.name.startswith("cuda_utils.")
    assert library.stat().st_mode & 0o777 == 0o644

    write_driver(tmp_path, "")
    programs = tmp_path / "bin"
    programs.mkdir()
    environment = os.environ | {
        "PATH": str(programs),
        "HOME": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, "-c", LOAD, str(triton)]
    for loaded, folder in ((True, triton), (False, programs)):
        command[-1] = str(folder)
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        shutil.rmtree(tmp_path / ".triton")
        if loaded:
            assert (run.returncode, run.stdout) == (0, "True\n"), run.stderr
        else:
            assert run.returncode == 1


def test_the_library_asks_for_the_driver_by_its_name_and_for_all_functions_of_the_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A function that the stand-in lacks would keep the library from being loaded in the stage."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(trim_triton, "run", lambda *command: commands.append(command))
    write_driver(tmp_path, "x = cuInit(0); CHECK(cuModuleLoadData(&m, d)); cuda_y(); cuType *z;")
    code = (tmp_path / "driver.c").read_text()
    assert code == "void cuInit(void) {}\nvoid cuModuleLoadData(void) {}\n"
    assert "-Wl,-soname,libcuda.so.1" in commands[0]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with a Triton in which everything is small."""
    monkeypatch.setattr(trim_triton, "run", lambda *_: None)  # strip
    packages = tmp_path / "lib/python3.11/site-packages"
    for pattern in WASTE:
        path = packages / "triton" / pattern.replace("*", "-12")
        if path.suffix or path.name in {"FileCheck", "nvdisasm", "cuobjdump"}:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        else:
            path.mkdir(parents=True)
    for name in ("backends/nvidia/bin/ptxas", "backends/nvidia/lib/libdevice.10.bc"):
        (packages / "triton" / name).write_text("")
    (packages / "triton-3.9.0.dist-info").mkdir()
    (packages / "triton-3.9.0.dist-info/entry_points.txt").write_text(BACKENDS)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/proton").write_text("")
    (tmp_path / "bin/python").write_text("")
    return packages


def test_what_no_kernel_of_ours_needs_is_taken_out(packages: Path) -> None:
    remove_waste(packages)
    left = {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()}
    assert left == {
        "triton/backends/nvidia/bin/ptxas",
        "triton/backends/nvidia/lib/libdevice.10.bc",
        "triton-3.9.0.dist-info/entry_points.txt",
    }
    assert [path.name for path in (packages.parents[2] / "bin").iterdir()] == ["python"]


def test_the_backend_that_is_taken_out_is_no_longer_listed(packages: Path) -> None:
    """Triton imports every backend that is."""
    remove_waste(packages)
    entries = (packages / "triton-3.9.0.dist-info/entry_points.txt").read_text()
    assert entries == "[triton.backends]\nnvidia = triton.backends.nvidia\n"


def test_a_triton_in_which_something_has_moved_ends_the_build(packages: Path) -> None:
    (packages / "triton/plugins").rmdir()
    with pytest.raises(SystemExit, match="no plugins any more"):
        remove_waste(packages)


def test_a_triton_with_other_backends_ends_the_build(packages: Path) -> None:
    (packages / "triton-3.9.0.dist-info/entry_points.txt").write_text("[triton.backends]\n")
    with pytest.raises(SystemExit, match="lists other backends"):
        remove_waste(packages)
