"""The package humming-kernels itself, without a GPU: it takes what we hand over, and CUDA's
compiler makes the kernels that it chooses.
"""

import os
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
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
    lines = [line.partition(" ")[::2] for line in run.stdout.splitlines()]
    said = [text for kind, text in lines if kind == "choice"]
    compiled = [(kind, text) for kind, text in lines if kind != "choice"]
    assert said == [f"4-bit products by humming {version('humming-kernels')}"] * (1 if few else 4)
    # A few tokens and many, or all four numbers, of which some have one kernel.
    wanted = {"multiplies": (2, 2)} if few else {"moves": (2, 2), "multiplies": (8, 16)}
    counts = Counter(kind for kind, _ in compiled)
    assert counts.keys() == wanted.keys()
    for kind, (least, most) in wanted.items():
        assert least <= counts[kind] <= most
    for _, file in compiled:
        assert Path(file).read_bytes().startswith(b"\x7fELF"), "machine code"
