"""The record of one planted bug."""

from typing import NamedTuple


class PackageBug(NamedTuple):
    """``file`` is relative to the repository, ``tests`` to its folder of tests. ``missed`` is
    the reason why no test catches it; empty for a bug that must be caught. ``quick``: a test of
    the first of ``tests`` that catches it in less than a second, on the same examples in each run;
    such a bug is planted in every run of the suite.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    missed: str = ""
    quick: str = ""

    @property
    def quick_test(self) -> str:
        return f"{self.tests[0]}::{self.quick}"
