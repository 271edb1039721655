"""Lines of JSON, one for each test or figure, written as soon as it is known: a run that is ended
has said what it knew. Needs only the standard library.
"""

import json
import os
from pathlib import Path
from typing import Any

# In the environment of a process that writes lines: their file, and the tier that all are of.
FILE, TIER = "FAIRLEAD_RESULTS", "FAIRLEAD_TIER"
LONGEST_ERROR = 1000  # characters


def append(
    name: str,
    ok: bool | None,
    *,
    seconds: float = 0.0,
    value: object = None,
    error: str = "",
    path: Path | None = None,
    **more: Any,
) -> None:
    """Append a line to ``path``, else to the file that the environment names, if it does. ``ok`` is
    None for what did not run, and ``error`` says why. Several processes may write to one file: each
    line is one write to its end.
    """
    place = path or os.environ.get(FILE)
    if not place:
        return
    line = {
        "tier": os.environ.get(TIER, ""),
        "name": name,
        "ok": ok,
        "seconds": round(seconds, 3),
        "value": value,
        "error": error[-LONGEST_ERROR:],
        **more,
    }
    with Path(place).open("a") as file:
        file.write(json.dumps(line) + "\n")
