"""The README, followed on a terminal as a newcomer does, without its set-up and `make demo`, which
``test_demo.py`` runs.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# What a newcomer waits for. Goals in seconds are for idle cores: scripts/first_minute.py --goals.
REACHED = {
    "address",
    "end",
    "end of the server",
    "first answer",
    "first picture",
    "page",
    "prompt",
    "refusal",
}


def test_every_block_of_the_readme_works_and_says_what_the_readme_shows() -> None:
    script = str(ROOT / "scripts" / "first_minute.py")
    done = subprocess.run(
        [sys.executable, script, "--here"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| (.*) \| ([a-z ]+) \| ([\d.]+) \| (\d*) \|$", done.stdout, re.MULTILINE)
    assert {row[1] for row in rows} == REACHED
    assert all(float(row[2]) > 0 for row in rows)
