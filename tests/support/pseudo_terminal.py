"""A command on a terminal of its own, as a person starts it."""

import os
import pty
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

WITHIN = 300.0  # seconds; a limit for hung processes, long enough for a busy machine


class PseudoTerminal:
    """The process and all that it has written."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.text = ""
        self._found = 0  # characters of it
        self._code: int | None = None
        self.pid, self._fd = pty.fork()
        if not self.pid:
            # A shell's background job, as this may be, ignores Ctrl-C; one on a terminal does not.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            try:
                os.execve(command[0], list(command), {**os.environ, "TERM": "xterm", **environ})
            finally:
                os._exit(127)

    def until(self, text: str) -> None:
        """Read until ``text`` comes, behind what earlier calls have found."""
        end = time.monotonic() + WITHIN
        while text not in self.text[self._found :]:
            assert self._read(), f"it ended without {text!r}:\n{self.text}"
            assert time.monotonic() < end, f"no {text!r} comes:\n{self.text}"
        self._found = self.text.index(text, self._found) + len(text)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def end(self) -> int:
        """The exit code, once it has ended."""
        while self._read():
            pass
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def close(self) -> None:
        if self._code is None:
            os.kill(self.pid, 9)
            self.end()
        os.close(self._fd)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._fd], [], [], WITHIN)
        assert ready, f"nothing comes:\n{self.text}"
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # nobody has the terminal open any more
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


@contextmanager
def on_a_terminal(*command: str, **environ: str) -> Iterator[PseudoTerminal]:
    terminal = PseudoTerminal(command, {"NO_COLOR": "", **environ})
    try:
        yield terminal
    finally:
        terminal.close()
