"""The last words of a process: one JSON line for people and for the operator, why it cannot go on
or how it drained.

Owns the line's shape and where it goes: stderr, and Kubernetes' termination log when there is one.
Decides no exit code.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

VARIABLE = "FAIRLEAD_TERMINATION_LOG"
DEFAULT = "/dev/termination-log"
LARGEST = 4096  # bytes; the kubelet keeps no more of a termination message


def report(
    code: str,
    message: str,
    hint: str = "",
    environ: Mapping[str, str] | None = None,
    *,
    stderr: TextIO | None = None,
) -> None:
    """Write ``{"code","message","hint"}`` as one line to stderr and into the termination log.

    The log is written only when the file already exists (the kubelet makes it); ``environ`` may
    name another with FAIRLEAD_TERMINATION_LOG. A log that cannot be written is no reason to hide
    the message: it is left out.
    """
    text = line(code, message, hint)
    print(text, file=stderr or sys.stderr, flush=True)
    leave(text, environ, stderr=stderr)


def leave(
    text: str, environ: Mapping[str, str] | None = None, *, stderr: TextIO | None = None
) -> None:
    """Write a line into the termination log alone, as ``report`` does."""
    path = Path((environ or {}).get(VARIABLE) or DEFAULT)
    try:
        if path.is_file():
            path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        print(f"{path}: {error.strerror}", file=stderr or sys.stderr, flush=True)


def line(code: str, message: str, hint: str = "", **counts: int) -> str:
    """The JSON line, at most LARGEST bytes with its newline: a longer message is cut, never the
    JSON.

    ``counts`` are keys of their own.
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
