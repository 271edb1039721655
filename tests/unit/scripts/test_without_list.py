"""uv's output on a terminal, without its list of packages."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from without_list import Filter

from support.pseudo_terminal import on_a_terminal

SCRIPT = str(Path(__file__).parents[3] / "scripts" / "without_list.py")
BAR = b"\x1b[2mDownloading...\x1b[0m\r"
LISTED = b" \x1b[32m+\x1b[39m \x1b[1mtqdm\x1b[0m\x1b[2m==4.70.1\x1b[0m\r\n"
REMOVED = b" \x1b[31m-\x1b[39m \x1b[1mtqdm\x1b[0m\x1b[2m==4.69\x1b[0m\r\n"
OTHER = b"\x1b[2mInstalled \x1b[1m2 packages\x1b[0m\x1b[0m\r\n  - a hint of uv's\r\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_list_is_left_out_in_whatever_parts_it_comes(size: int) -> None:
    written, seen = BAR + OTHER + LISTED + REMOVED + b" + plain==1\r\nend", Filter()
    parts = [seen(written[at : at + size]) for at in range(0, len(written), size)]
    assert b"".join(parts) == BAR + OTHER + b"end"
    assert seen(BAR) == BAR, "what has no end is shown at once"
    assert seen.end() == b""


@pytest.mark.parametrize(("last", "shown"), [(b" a hint", b" a hint"), (b" + x==1", b"")])
def test_a_last_line_without_an_end_is_shown(last: bytes, shown: bytes) -> None:
    seen = Filter()
    assert (seen(OTHER + last), seen.end()) == (OTHER, shown)
    code = f"import os; os.write(1, {last!r})"
    with on_a_terminal(sys.executable, SCRIPT, sys.executable, "-c", code) as terminal:
        assert terminal.end() == 0
    assert terminal.text == shown.decode()


def test_output_that_nobody_reads_is_an_error_and_ends_the_command() -> None:
    code = "import os, time\nwhile True: os.write(1, b'x' * 9999); time.sleep(0.001)"
    words = [sys.executable, SCRIPT, sys.executable, "-c", code]
    ours, theirs = pty.openpty()  # it asks its stderr for a width
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    try:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 1
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_the_command_has_a_terminal_and_its_exit_code_is_kept() -> None:
    code = (
        "import os, sys, time; print(os.isatty(1) and os.isatty(2), flush=True)\n"
        "for n in range(9): os.write(1, b' + tqdm==4.70.1\\n'); time.sleep(0.02)\n"
        "print('end', flush=True); sys.exit(3)"
    )
    with on_a_terminal(sys.executable, SCRIPT, sys.executable, "-c", code) as terminal:
        assert terminal.end() == 3
    assert terminal.text.split() == ["True", "end"]
