"""The package humming-kernels: imported here and nowhere else.

Owns which of its names are used, how many of its compilers may run at a time, and says why it
cannot be used. Written for 0.1.19. docs/design/0011-quantization.md has the reasons.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fairlead_kernels.interface.not_available import importing


@dataclass(frozen=True, slots=True)
class HummingPackage:
    """The functions of the package that we call, under its own names in the comments.

    They are not typed here: the package's signatures are compared with those of the stand-in that
    the tests run, not with annotations of ours.
    """

    version: str
    schema: Callable[..., Any]  # schema.HummingWeightSchema
    transform: Callable[..., Any]  # transform.prepare_and_transform_humming_tensors
    heuristics: Callable[..., Any]  # tune.get_heuristics_config
    forward: Callable[..., Any]  # forward.humming_forward


def load() -> HummingPackage:
    """Import the package, which takes seconds. Raises NotAvailableError with the reason."""
    # Without the setting it starts two processes that look for what its wheel brings.
    setting = _environment(HUMMING_DISABLE_PARALLEL_BUILD="1")
    with importing("humming-kernels", "humming"), setting:
        package, schema, transform, tune, forward = (
            importlib.import_module(f"humming{name}")
            for name in ("", ".schema", ".transform", ".tune", ".forward")
        )
    return HummingPackage(
        version=str(package.__version__),
        schema=schema.HummingWeightSchema,
        transform=transform.prepare_and_transform_humming_tensors,
        heuristics=tune.get_heuristics_config,
        forward=forward.humming_forward,
    )


@contextmanager
def compilers(count: int) -> Iterator[None]:
    """Let the package run so many compilers at a time while it prepares kernels."""
    with _environment(HUMMING_MAX_PARALLEL_BUILD_WORKERS=str(count)):
        yield


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
