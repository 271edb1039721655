"""Which part of a long list of cases a short run takes: another one for every commit, so that all
get their turn.
"""

import os
import subprocess
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
FULL = bool(os.environ.get("FAIRLEAD_FULL"))


def offset(one_in: int = 10) -> int:
    """From the commit; 0 outside a repository."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout
    return int(head[:8] or "0", 16) % one_in


def share(cases: Sequence[T], one_in: int = 10) -> list[T]:
    """All cases with FAIRLEAD_FULL=1, else every ``one_in``-th."""
    first = offset(one_in)
    chosen = list(cases) if FULL else list(cases[first::one_in])
    print(f"{len(chosen)} of {len(cases)} cases, offset {0 if FULL else first}")
    return chosen
