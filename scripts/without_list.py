"""Run a command on a terminal of its own, and show all that it writes but lists of packages.

    python3 scripts/without_list.py uv pip install ...

uv shows its bars on a terminal only, and with them 170 lines, ` + name==version`, at the end. Exit
code: the command's. Needs nothing but Python's standard library.
"""

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios

# A line of the list, in its colours; of a line that is not whole yet what decides is its begin.
_LISTED = re.compile(rb" (\x1b\[\d+m)*[-+~](\x1b\[|\s)")
_WHOLE = re.compile(rb"[^\n]*\n")


class Filter:
    """Takes what was written, in any parts, and gives what is to be seen of it."""

    def __init__(self) -> None:
        self._rest = b""

    def __call__(self, data: bytes) -> bytes:
        text, shown = self._rest + data, b""
        while line := _WHOLE.match(text):
            shown += b"" if _LISTED.match(line[0]) else line[0]
            text = text[line.end() :]
        # What has no end yet is shown at once, but for what may be the begin of a listed line.
        self._rest = text if text[:1] == b" " else b""
        return shown if self._rest else shown + text

    def end(self) -> bytes:
        """What was kept, since no more comes: a last line without an end, but for a listed one."""
        rest, self._rest = self._rest, b""
        return b"" if _LISTED.match(rest) else rest


def _read(terminal: int) -> bytes:
    with contextlib.suppress(OSError):  # nobody has their end open any more
        return os.read(terminal, 65536)
    return b""


def run(command: list[str]) -> int:
    """The exit code of the command, whose terminal is as wide as this one's."""
    seen = Filter()
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, termios.tcgetwinsize(2))
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        while data := _read(ours):
            _show(seen(data))
        _show(seen.end())
    finally:
        os.close(ours)  # a command that still writes ends, where nobody reads this one's output
        code = process.wait()
    return code


def _show(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
