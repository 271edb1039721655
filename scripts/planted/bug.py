"""The record of one planted bug."""

from typing import NamedTuple

from planted import anchor


class PackageBug(NamedTuple):
    """In ``place`` (``planted.anchor``) ``old`` becomes ``new``. ``tests`` are relative to the
    folder of tests. ``missed`` is the reason why no test catches it; empty for a bug that must be
    caught. ``quick``: a test of the first of ``tests`` that catches it in less than a second, on
    the same examples in each run; such a bug is planted in every run of the suite.
    """

    name: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]
    missed: str = ""
    quick: str = ""

    @property
    def file(self) -> str:
        """Relative to the repository."""
        return anchor.file_of(self.place)

    @property
    def quick_test(self) -> str:
        return f"{self.tests[0]}::{self.quick}"
