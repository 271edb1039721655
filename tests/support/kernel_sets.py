"""The instruction sets whose C++ kernels this machine can run, for tests of each of them."""

import pytest

from fairlead_kernels import library
from fairlead_kernels.not_available import NotAvailableError


def _available() -> list[str]:
    try:
        return library.supported()
    except NotAvailableError:
        return []


# What follows a "+" matters to the products of some weights only.
PRODUCT_SETS = _available()
SETS = [name for name in PRODUCT_SETS if "+" not in name]
# Without a compiler there is nothing to test, and the report says so.
_NONE = [pytest.param("none", marks=pytest.mark.skip(reason="the C++ kernels are not built"))]
every_set = pytest.mark.parametrize("instruction_set", SETS or _NONE)
every_product_set = pytest.mark.parametrize("instruction_set", PRODUCT_SETS or _NONE)
