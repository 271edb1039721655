"""One deployment for every test of this folder: its two pods serve while something happens."""

from collections.abc import Iterator

import pytest

from e2e.harness.installation import ANY_RUNTIME, Installation
from e2e.harness.served import SMALL, Served, serving


@pytest.fixture(scope="package")
def chat(installation: Installation) -> Iterator[Served]:
    """Two pods that serve. A test that changes more than the size of a batch undoes it."""
    installation.upgrade(*ANY_RUNTIME)
    with serving(installation, "chat", **SMALL, replicas=2) as served:
        yield served
