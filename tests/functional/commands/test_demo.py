"""`make demo`, run as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_demo_answers_shows_engine_figures_and_exits_with_0() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo.py")],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "Continuous batching lets requests join and leave the batch at every step." in done.stdout
    )
    figures = dict(re.findall(r"^  (\S.*?)  +(.+)$", done.stdout, re.MULTILINE))
    hits, tokens = map(int, re.findall(r"\d+", figures["prefix cache"]))
    assert 0 < hits < tokens
    sizes = [int(size) for size in re.findall(r"\d+ steps? of (\d+)", figures["batch sizes"])]
    assert max(sizes) > 1
    assert "exit code 0" in done.stdout
    starts = done.stdout.partition("Ready in")[0].splitlines()
    assert starts[1] == "  imports …"
    assert "  weights …" in starts
