"""The record of one planted bug."""

from typing import NamedTuple


class PackageBug(NamedTuple):
    """``file`` and ``tests`` are relative to the repository and to ``tests/unit``. ``missed`` is
    the reason why no test catches it; empty for a bug that must be caught.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    missed: str = ""
