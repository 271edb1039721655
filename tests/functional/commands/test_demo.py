"""`make demo`, as a person runs it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_demo_answers_shows_what_the_engine_did_and_ends_well() -> None:
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
    found, asked = map(int, re.findall(r"\d+", figures["prefix cache"]))
    assert 0 < found < asked
    sizes = [int(size) for size in re.findall(r"(\d+) in \d+ steps", figures["batch sizes"])]
    assert max(sizes) > 1
    assert "exit code 0" in done.stdout
