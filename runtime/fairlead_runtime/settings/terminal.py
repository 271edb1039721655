"""The form of what a command says on stderr: text on a terminal, one JSON object a line elsewhere.

Owns ``--log-format``, the form that this process uses, and how logs and refusals look as text.
Reads the environment's NO_COLOR and TERM. What a command prints as its result is none of its
business, except that a character which the stream cannot encode must not end the command.
"""

import contextlib
import io
import json
import logging
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Literal, TextIO

LogFormat = Literal["auto", "text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("auto", "text", "json")
LOG_FORMAT_FLAG = "--log-format"
LOG_FORMAT_HELP = "form of logs and refusals; auto: text on a terminal, JSON lines elsewhere"
LARGEST = 4096  # bytes; the kubelet cuts a longer termination message
BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"
_LEVELS = {"WARNING": YELLOW, "ERROR": RED, "CRITICAL": RED}
_JOINERS = "\n\t\u200c\u200d"  # the last two are of scripts and emojis
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_chosen: dict[str, LogFormat] = {"format": "auto"}  # of this process
_FRESH = "\r\x1b[K"  # to the begin of the line, and erase it
_line = {"shared": False}


def use(log_format: str) -> None:
    """Let this process write in this form. Raises ValueError for none of LOG_FORMATS."""
    if log_format not in LOG_FORMATS:
        raise ValueError(log_format)
    _chosen["format"] = log_format


def chosen() -> LogFormat:
    return _chosen["format"]


def as_text(stream: TextIO | None = None) -> bool:
    """Whether ``stream`` (default: stderr) gets text."""
    if chosen() != "auto":
        return chosen() == "text"
    return (stream or sys.stderr).isatty()


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """``text`` in a colour where ``stream`` (default: stderr) is a terminal that has some, and
    https://no-color.org does not forbid it.
    """
    if not _steers(stream or sys.stderr):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


@contextlib.contextmanager
def live_line(first: str) -> Iterator[Callable[[str], None]]:
    """A line of stderr that is written over, ``first`` with this text, then with each that the
    function gets; it is gone at the end. Nothing is written where escape sequences are not wanted.
    Log lines and refusals of this process come in its place.
    """
    if not as_text() or not _steers(sys.stderr):
        yield lambda _: None
        return

    def show(text: str) -> None:
        sys.stderr.write(_FRESH + paint(printable(text)[: terminal_width() - 1], DIM))
        sys.stderr.flush()

    share_line(shared=True)
    show(first)
    try:
        yield show
    finally:
        share_line(shared=False)
        sys.stderr.write(_FRESH)
        sys.stderr.flush()


def share_line(*, shared: bool) -> None:
    """Whether a process has a live line on this one's stderr, which log lines then write over."""
    _line["shared"] = shared and as_text() and _steers(sys.stderr)


def _fresh() -> str:
    return _FRESH if _line["shared"] else ""


def terminal_width() -> int:
    with contextlib.suppress(OSError):
        return max(20, os.get_terminal_size(sys.stderr.fileno()).columns)
    return 80


def _steers(stream: TextIO) -> bool:
    """Whether escape sequences are for ``stream``."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and stream.isatty()


def printable(text: str) -> str:
    """``text`` on one line, without characters that would steer a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def harmless(text: str, stream: TextIO | None = None) -> str:
    """``text``, as another program made it, for ``stream`` (default: stdout): a terminal gets no
    characters that would steer it. Lines, blanks and what joins letters stay.
    """
    if not (stream or sys.stdout).isatty():
        return text
    return "".join(c if c.isprintable() or _is_blank(c) else repr(c)[1:-1] for c in text)


def _is_blank(character: str) -> bool:
    return character in _JOINERS or unicodedata.category(character) == "Zs"


def refuse(code: str, message: str, hint: str = "", stream: TextIO | None = None) -> None:
    """Write a refusal to ``stream`` (default: stderr): ``error: …`` and, if there is one,
    ``hint: …``, or one line of JSON.
    """
    out = stream or sys.stderr
    out.write(_fresh() if out is sys.stderr else "")
    if not as_text(out):
        print(json_line(code, message, hint), file=out, flush=True)
        return
    print(paint("error:", RED, out), printable(message), file=out, flush=True)
    if hint:
        print(paint("hint:", CYAN, out), printable(hint), file=out, flush=True)


def json_line(code: str, message: str, hint: str = "", **counts: int) -> str:
    """``{"code","message","hint"}``, at most LARGEST bytes with its newline: long texts are cut, so
    that the JSON stays valid. Each of ``counts`` becomes a key of the object.
    """
    for keep in (max(len(message), len(hint)), 1500, 500, 100):
        text = json.dumps(
            {"code": code, "message": _cut(message, keep), "hint": _cut(hint, keep), **counts}
        )
        if len(text) < LARGEST:
            return text
    return json.dumps({"code": code[:100], "message": "", "hint": ""})


def _cut(text: str, keep: int) -> str:
    return text if len(text) <= keep else text[:keep] + "…"


def extras(record: logging.LogRecord) -> Mapping[str, Any]:
    """The fields that a call passed as ``extra``."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """``12:03:58 message name=value``: levels from warning on, then the fields of ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        time = paint(f"{datetime.fromtimestamp(record.created):%H:%M:%S}", DIM)  # noqa: DTZ006 - the reader's own
        level = record.levelname
        head = f"{paint(f'{level.lower()}:', _LEVELS[level])} " if level in _LEVELS else ""
        fields = " ".join(f"{name}={value}" for name, value in extras(record).items())
        tail = paint(f" {printable(fields)}", DIM) if fields else ""
        line = f"{_fresh()}{time} {head}{printable(record.getMessage())}{tail}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def replace_unencodable() -> None:
    """Let both streams write ``?`` for a character that their encoding lacks, instead of raising
    UnicodeEncodeError.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
