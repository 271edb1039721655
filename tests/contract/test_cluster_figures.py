"""benchmarks/cluster.py reads what the tests on a real node write."""

import subprocess
import sys
from pathlib import Path

import pytest

from e2e.harness.figures import FILE, Figures

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "cluster.py"


def test_the_figures_of_a_run_become_a_timeline_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = Figures()
    for name, at in {"container started": 5.0, "Ready": 20.0, "model loaded": 15.0}.items():
        figures.note("apply", f"{name}, s after apply", at)
    figures.note("rollout", "failed", 0)
    monkeypatch.setenv(FILE, str(tmp_path / "figures.json"))
    figures.write()

    command = [sys.executable, str(PROGRAM), str(tmp_path / "figures.json")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fence, *bars = told.partition("\n```\n\n")[0].splitlines()
    assert fence == "```"
    assert [bar.split("  ")[0] for bar in bars] == ["container started", "model loaded", "Ready"]
    starts = [bar.index("█") for bar in bars]
    lengths = [bar.count("█") for bar in bars]
    assert lengths == [15, 30, 15], "a part is as long as its share of 20 s"
    assert starts == [starts[0], starts[0] + 15, starts[0] + 45], "each begins where one ended"
    assert "| rollout | failed | 0 |" in told
