"""The stand-in of humming-kernels has the package's own signatures.

`make setup` installs the package without its dependencies (requirements-gpu.lock): what we call of
it can be imported without a GPU.
"""

import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from fairlead_kernels.packages import humming_package
from support import humming_standin

CALLED = ("schema", "transform", "heuristics", "forward")


def parameters(function: Callable[..., Any]) -> list[tuple[str, object, object]]:
    """Name, kind and default of each."""
    found = inspect.signature(function).parameters.values()
    return [(x.name, x.kind, x.default) for x in found]


@pytest.mark.parametrize("name", CALLED)
def test_the_stand_in_takes_what_the_package_takes(name: str) -> None:
    package = humming_package.load()
    theirs, ours = (getattr(x, name) for x in (package, humming_standin.package()))
    assert ours.__name__ == theirs.__name__
    assert parameters(ours) == parameters(theirs)


def test_the_package_says_its_version() -> None:
    assert humming_package.load().version == importlib.metadata.version("humming-kernels")
