"""`make demo`, run as a user runs it, on a terminal; it says what the README shows."""

import re
import sys
from pathlib import Path

from support.pseudo_terminal import on_a_terminal

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from first_minute import DEMO, ROOT, SET_UP, blocks, missing


def test_the_demo_answers_shows_engine_figures_and_exits_with_0() -> None:
    with on_a_terminal(sys.executable, str(ROOT / "scripts" / "demo.py")) as terminal:
        code = terminal.end()
    said = terminal.text.replace("\r\n", "\n")
    assert code == 0, said
    assert said.startswith(SET_UP), "the walk takes this for the end of the set-up"
    readme = (ROOT / "README.md").read_text("utf-8")
    (block,) = (block for block in blocks(readme) if DEMO in block.commands)
    assert block.output
    assert missing(block.output, said) == []
    assert "Continuous batching lets requests join and leave the batch at every step." in said
    figures = dict(re.findall(r"^  (\S.*?)  +(.+)$", said, re.MULTILINE))
    hits, tokens = map(int, re.findall(r"\d+", figures["prefix cache"]))
    assert 0 < hits < tokens
    sizes = [int(size) for size in re.findall(r"\d+ steps? of (\d+)", figures["batch sizes"])]
    assert max(sizes) > 1
    assert "exit code 0" in said
    starts = said.partition("Ready in")[0].splitlines()
    assert starts[1] == "  imports …"
    assert "  weights …" in starts
