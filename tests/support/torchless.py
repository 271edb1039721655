"""`make quick`: what needs torch or transformers is skipped, with the reason, when it imports them.

They take seconds to import, and what a change of operator, scheduler or sizing breaks is seen
without them.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

PACKAGES = frozenset({"torch", "transformers"})


class Torchless:
    """A finder of modules that stands before all others."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in PACKAGES:
            pytest.skip(f"needs {name}: `make check` runs it", allow_module_level=True)
        return None


def refuse_torch() -> None:
    """From here on, in this process. Raises RuntimeError where one is imported already."""
    if imported := PACKAGES & sys.modules.keys():
        raise RuntimeError(f"{', '.join(sorted(imported))} is imported before any test")
    sys.meta_path.insert(0, Torchless())
