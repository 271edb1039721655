"""scripts/steps.py on a Makefile of its own: what it prints, and what ends what."""

import subprocess
import sys
from pathlib import Path

STEPS = Path(__file__).parents[3] / "scripts" / "steps.py"
MAKEFILE = """
passes fails hides later last:
\t@$($@)
passes := echo passed
fails := echo FAILED tests/test_one.py::test - AssertionError; echo table; exit 3
hides := sleep 0.3; echo of the other step
"""


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "Makefile").write_text(MAKEFILE)
    command = [sys.executable, str(STEPS), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_test_that_fails_beside_another_step_is_named_under_the_table(tmp_path: Path) -> None:
    done = run(tmp_path, "passes", "fails,later+hides", "last")
    assert done.returncode == 2, "the exit code of make"
    assert "hides: of the other step\n" in done.stdout
    table = done.stdout[done.stdout.index("step  ") :].splitlines()
    assert [line.split()[0] for line in table[1:5]] == ["passes", "fails", "hides", "all"]
    assert table[2].endswith("failed")
    assert [line.split() for line in table[5:7]] == [
        ["later", "was", "not", "run"],
        ["last", "was", "not", "run"],
    ]
    assert table[7:] == ["fails: FAILED tests/test_one.py::test - AssertionError"]


def test_steps_that_succeed_end_with_their_table(tmp_path: Path) -> None:
    done = run(tmp_path, "passes", "hides+passes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
