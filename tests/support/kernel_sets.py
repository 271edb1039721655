"""The instruction sets whose C++ kernels this machine can run, for tests of each of them."""

import pytest

from fairlead_kernels import library
from fairlead_kernels.not_available import NotAvailableError


def _available() -> list[str]:
    try:
        return library.supported()
    except NotAvailableError:
        return []


SETS = _available()
# Without a compiler there is nothing to test, and the report says so.
every_set = pytest.mark.parametrize(
    "instruction_set",
    SETS or [pytest.param("none", marks=pytest.mark.skip(reason="the C++ kernels are not built"))],
)
