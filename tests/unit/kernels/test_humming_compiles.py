"""The package humming-kernels itself, without a GPU: it takes what we hand over, and CUDA's
compiler makes the kernels that it chooses.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("capability", "few"),
    [
        (90, True),
        *(pytest.param(x, False, marks=pytest.mark.full) for x in (80, 86, 89, 90, 100, 120)),
    ],
)
def test_its_kernels_for_four_bits_compile_for_a_gpu(
    capability: int, few: bool, tmp_path: Path
) -> None:
    """In a process of its own, which pretends to have one."""
    environment = {
        **os.environ,
        "HUMMING_CACHE_DIR": str(tmp_path / "cache"),
        "HUMMING_TMP_DIR": str(tmp_path / "tmp"),
        "TRITON_INTERPRET": "1",
    }
    command = [sys.executable, "-m", "support.compile_humming", str(capability)]
    run = subprocess.run(
        [*command, "few"] if few else command,
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    *compiled, said = run.stdout.splitlines()
    assert said.startswith("4-bit products by humming 0."), said
    assert "not:" not in said
    kinds = [line.split()[0] for line in compiled]
    assert kinds == (["multiplies"] * 2 if few else ["moves"] * 2 + ["multiplies"] * 4)
    for line in compiled:
        kernel = Path(line.split(maxsplit=1)[1]).read_bytes()
        assert kernel.startswith(b"\x7fELF"), "machine code"
