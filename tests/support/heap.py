"""Keeps what the tests' modules and libraries have made out of the garbage collector's sight.

They are millions of objects. An engine looks for garbage when it starts, and when it ends lets the
collector see everything again: each of the hundreds that tests start looked through them for half
a second and more, twice.
"""

import gc
from collections.abc import Generator

import pytest


class Heap:
    """Frozen once the tests are collected, and again before a test that follows an unfreezing."""

    def __init__(self) -> None:
        self._frozen, self._unfreeze = True, gc.unfreeze
        gc.unfreeze = self.unfreeze

    def unfreeze(self) -> None:
        self._frozen = False
        self._unfreeze()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        gc.disable()
        try:
            return (yield)
        finally:
            gc.freeze()
            gc.enable()

    def pytest_runtest_setup(self) -> None:
        if not self._frozen:
            gc.freeze()
            self._frozen = True

    def pytest_unconfigure(self) -> None:
        """Libraries that count what is left at the end of the process find nothing."""
        self._unfreeze()
