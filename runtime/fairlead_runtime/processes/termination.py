"""The termination message of a process: one JSON line for people and for the operator that says
why the process ends or how it drained.

Owns where it is written: stderr, and Kubernetes' termination log if it exists; its form is that of
``settings/terminal.py``. Decides no exit code.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from fairlead_runtime.settings.terminal import json_line, refuse

VARIABLE = "FAIRLEAD_TERMINATION_LOG"
DEFAULT = "/dev/termination-log"


def report(
    code: str,
    message: str,
    hint: str = "",
    environ: Mapping[str, str] | None = None,
    *,
    stderr: TextIO | None = None,
) -> None:
    """Write a refusal to stderr, as text or as JSON, and the JSON into the termination log.

    The log is written only if the file exists already (the kubelet creates it); ``environ`` may
    name another file with FAIRLEAD_TERMINATION_LOG. A log that cannot be written raises no error.
    """
    refuse(code, message, hint, stderr)
    write_log(json_line(code, message, hint), environ, stderr=stderr)


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
