"""Whether the tests run in their long form: FAIRLEAD_FULL=1, as `make test-full` sets it."""

import itertools
import os
from collections.abc import Sequence

VARIABLE = "FAIRLEAD_FULL"


def long_form(value: str) -> bool:
    """Read the variable's value: "1" is the long form, empty the short one. Raises ValueError for
    any other.
    """
    if value not in {"", "1"}:
        raise ValueError(
            f"{VARIABLE}={value!r}: set it to 1 for the long form, or unset it for the short one"
        )
    return value == "1"


LONG_FORM = long_form(os.environ.get(VARIABLE, ""))


def pairs(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """Every pair of values in the long form, in the short one each value in some pair."""
    if LONG_FORM:
        return list(itertools.product(first, second))
    count = max(len(first), len(second))
    return [(first[i % len(first)], second[i % len(second)]) for i in range(count)]
