"""The instruction sets whose C++ kernels this machine can run, for tests of each of them."""

import pytest
import torch

from fairlead_kernels.cpu import cpu_operations, library
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_runtime.sizing.arithmetic import PANEL
from support.full import LONG_FORM


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
# Of what is the same in all of them, such as the threads, the short form tests the widest.
widest_set = pytest.mark.parametrize("instruction_set", (SETS if LONG_FORM else SETS[:1]) or _NONE)
every_product_set = pytest.mark.parametrize("instruction_set", PRODUCT_SETS or _NONE)


def rows_beyond_the_plan(rows: int) -> int:
    """By how many rows the plan pads a packed head more than the C++ kernels of this machine do: it
    knows no instruction set, and counts the widest panels.
    """
    return -rows % PANEL - rows_to_a_panel(rows)


def rows_to_a_panel(rows: int) -> int:
    """How many rows the C++ kernels of this machine add to a packed matrix of so many."""
    return cpu_operations.load().pack([torch.zeros(rows, 1)]).nbytes // 4 - rows
