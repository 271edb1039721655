"""Make the pictures of docs/pictures that show a run: the terminal, the page to chat and the page
to watch.

    .venv/bin/python scripts/take_pictures.py [terminal] [chat] [page]

The terminal is drawn by rich of what `fairlead serve demo:` and `fairlead chat` write on one. The
pages are those that their tests see in a real browser. Another run gives other pictures, so this is
no part of `make generate`.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.pseudo_terminal import PseudoTerminal, on_a_terminal  # noqa: E402 - of the tests

FOLDER = ROOT / "docs" / "pictures"
QUESTION = "What is continuous batching?"
COLUMNS = 108
PAGES = {
    "chat": "tests/functional/api/test_chat_page.py::test_an_answer_streams_beside_the_live_batch",
    "page": "tests/functional/api/test_page.py::"
    "test_the_page_shows_the_batch_the_queue_the_blocks_and_the_rates",
}


def lines(written: str) -> Iterator[str]:
    """The lines of a terminal as they stand there in the end, with their styles."""
    for line in written.rstrip().replace("\r\n", "\n").split("\n"):
        yield line.rpartition("\x1b[K")[2].rpartition("\r")[2]


def drawing(shown: Sequence[str], title: str) -> str:
    """An SVG that loads nothing from elsewhere."""
    console = Console(
        record=True, file=StringIO(), width=COLUMNS, force_terminal=True, color_system="truecolor"
    )
    for line in shown:
        console.print(Text.from_ansi(line))
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=title, code_format=form, unique_id="terminal")


def on_a_wide_terminal(*arguments: str) -> AbstractContextManager[PseudoTerminal]:
    command = shlex.join([sys.executable, "-m", "fairlead_runtime", *arguments])
    return on_a_terminal("/bin/bash", "-c", f"stty cols {COLUMNS} rows 40; exec {command}")


def terminal() -> str:
    """`fairlead serve demo:` on its own ports, and a question in `fairlead chat`."""
    with on_a_wide_terminal("serve", "demo:") as server:
        server.until("Ctrl-C ends this server")
        server.until("\n")
        url = re.findall(r"(http://\S+)/v1", server.text)[-1]
        with on_a_wide_terminal("chat", "--url", url) as chat:
            chat.until("> ")
            chat.type(QUESTION + "\r")
            chat.until("\n")
            chat.until("> ")  # the next one, below the answer
            said = chat.text.rpartition("\n")[0]
            chat.type("\x04")
            chat.end()
        served = server.text
        server.type("\x03")
        server.end()
    shown = ["$ fairlead serve demo:", *lines(served), ""]
    return drawing([*shown, f"$ fairlead chat --url {url}", *lines(said)], "fairlead")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    every = ("terminal", *PAGES)
    parser.add_argument("pictures", nargs="*", choices=(*every, []), metavar="PICTURE")
    wanted = parser.parse_args().pictures or every
    if "terminal" in wanted:
        (FOLDER / "terminal.svg").write_text(terminal(), "utf-8")
    if tests := [str(ROOT / PAGES[name]) for name in wanted if name in PAGES]:
        command = [sys.executable, "-m", "pytest", "-q", *tests]
        environ = os.environ | {"FAIRLEAD_PICTURES": str(FOLDER)}
        return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
