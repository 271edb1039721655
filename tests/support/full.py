"""Whether the tests run in their long form: FAIRLEAD_FULL=1, as `make test-full` sets it."""

import os

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
