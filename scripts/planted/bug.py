"""The record of one planted bug."""

from typing import NamedTuple


class PackageBug(NamedTuple):
    """``file`` is relative to the repository, ``tests`` to its folder of tests. ``missed`` is
    the reason why no test catches it; empty for a bug that must be caught.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    missed: str = ""
