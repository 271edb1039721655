"""The tests of the C++ kernels again, with libraries that check each access and each operation, and
with one in which AMX is emulated.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead_kernels.cpu import compilation
from support.kernel_sets import PRODUCT_SETS, SETS, every_set

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which("g++")
FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TESTS = tuple(f"test_cpu_{name}.py" for name in ("operations", "digits", "attention", "layers"))
ALL_TESTS = """
import sys
from pathlib import Path
import pytest
from fairlead_kernels.cpu import library
library.FOLDER = Path(sys.argv[1])
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--timeout=3000", *sys.argv[2:]]))
"""
# The product reads three rows of eight columns; its x has one element less.
READS_TOO_FAR = """
import ctypes
import sys
from pathlib import Path
import torch
from fairlead_kernels.cpu import cpu_operations as cpu, library
from fairlead_kernels.cpu.cpu_arguments import weight_struct
library.FOLDER = Path(sys.argv[1])
operations = cpu.load(sys.argv[2])
functions = operations.library
panel = functions.panel_width()
packed = operations.pack([torch.ones(panel, 8)])
weight = weight_struct(packed, None, "bias")
x, out = torch.ones(3 * 8 - 1), torch.empty(3 * panel)
functions.linear(x.data_ptr(), 3, None, ctypes.byref(weight), out.data_ptr(), 1)
"""

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not SETS or COMPILER is None, reason="needs g++ and the C++ kernels"),
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(COMPILER))
        compilation.compile_libraries(folder, extra=FLAGS)
    return folder


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    runtime = subprocess.run(
        [str(COMPILER), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        # torch and Python leak on purpose; only our own accesses matter.
        env={
            **os.environ,
            "FAIRLEAD_FULL": "",
            "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_kernels_touch_no_foreign_byte_and_do_nothing_undefined(libraries: Path) -> None:
    tests = (str(ROOT / "tests" / "unit" / "kernels" / name) for name in TESTS)
    done = run(ALL_TESTS, str(libraries), *tests)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
    assert ("skipped" in done.stdout) == (len(PRODUCT_SETS) == len(SETS))


@every_set
def test_one_element_too_far_is_noticed(libraries: Path, instruction_set: str) -> None:
    done = run(READS_TOO_FAR, str(libraries), instruction_set)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


@pytest.mark.skipif(len(PRODUCT_SETS) == len(SETS), reason="needs a processor with VNNI")
def test_products_in_tiles_are_right_where_amx_is_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(COMPILER))
    compilation.compile_libraries(tmp_path, ("baseline", "avx512"), ["-DFAIRLEAD_AMX_EMULATED"])
    tests = (str(ROOT / "tests" / "unit" / "kernels" / name) for name in TESTS)
    done = subprocess.run(
        [sys.executable, "-c", ALL_TESTS, str(tmp_path), "-k", "amx", *tests],
        cwd=ROOT,
        env={
            **os.environ,
            "FAIRLEAD_FULL": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
