"""The termination message of a process: one JSON line for people and for the operator that says
why the process ends or how it drained.

Owns the line's shape and where it is written: stderr, and Kubernetes' termination log if it exists.
Decides no exit code.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

VARIABLE = "FAIRLEAD_TERMINATION_LOG"
DEFAULT = "/dev/termination-log"
LARGEST = 4096  # bytes; the kubelet cuts a longer termination message


def report(
    code: str,
    message: str,
    hint: str = "",
    environ: Mapping[str, str] | None = None,
    *,
    stderr: TextIO | None = None,
) -> None:
    """Write ``{"code","message","hint"}`` as one line to stderr and into the termination log.

    The log is written only if the file exists already (the kubelet creates it); ``environ`` may
    name another file with FAIRLEAD_TERMINATION_LOG. A log that cannot be written raises no error.
    """
    line = json_line(code, message, hint)
    print(line, file=stderr or sys.stderr, flush=True)
    write_log(line, environ, stderr=stderr)


def write_log(
    line: str, environ: Mapping[str, str] | None = None, *, stderr: TextIO | None = None
) -> None:
    """Write a line to the termination log only, as ``report`` does."""
    path = Path((environ or {}).get(VARIABLE) or DEFAULT)
    try:
        if path.is_file():
            path.write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        print(f"{path}: {error.strerror}", file=stderr or sys.stderr, flush=True)


def json_line(code: str, message: str, hint: str = "", **counts: int) -> str:
    """The JSON line, at most LARGEST bytes with its newline: long texts are cut, so that the JSON
    stays valid. Each of ``counts`` becomes a key of the object.
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
