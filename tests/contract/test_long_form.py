"""FAIRLEAD_FULL has one meaning, and a value that has none is an error."""

import re
from pathlib import Path

import pytest

from support.full import VARIABLE, long_form

TESTS = Path(__file__).parents[1]


def test_only_1_asks_for_the_long_form() -> None:
    assert long_form("1")
    assert not long_form("")


@pytest.mark.parametrize("value", ["0", "true", "yes", " 1"])
def test_any_other_value_is_an_error_that_names_the_variable(value: str) -> None:
    with pytest.raises(ValueError, match=VARIABLE):
        long_form(value)


def test_only_its_module_reads_the_variable() -> None:
    readers = [
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if re.search(rf"""environ.*["']{VARIABLE}["']""", path.read_text())
    ]
    assert readers == []
