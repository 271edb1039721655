"""Which part of a long list of cases a short run takes: every n-th one, from FAIRLEAD_CASE_OFFSET
(default 0) on. The long form takes all.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

from support.full import LONG_FORM

T = TypeVar("T")
VARIABLE = "FAIRLEAD_CASE_OFFSET"


def offset(one_in: int = 10) -> int:
    """The first case of a short run, below ``one_in``."""
    chosen = int(os.environ.get(VARIABLE) or 0) % one_in
    print(f"case offset {chosen} of {one_in} ({VARIABLE} sets it)")
    return chosen


def share(cases: Sequence[T], one_in: int = 10) -> list[T]:
    """All cases in the long form, else every ``one_in``-th."""
    chosen = list(cases) if LONG_FORM else list(cases[offset(one_in) :: one_in])
    print(f"{len(chosen)} of {len(cases)} cases")
    return chosen
