"""The errors of kernels that this process cannot use, the words of their reasons, and what becomes
of one for which something slower serves.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

# Set where a fault must not hide: then nothing slower serves in the place of what is broken.
NO_FALLBACK = "FAIRLEAD_NO_FALLBACK"

log = logging.getLogger("fairlead.kernels")


class NotAvailableError(RuntimeError):
    """Kernels that cannot be used here; the message says why."""


class FaultError(NotAvailableError):
    """Kernels that should serve here, and do not compile, do not run or compute something else."""


def fall_back(error: Exception) -> str:
    """The reason why something slower serves. Logs the whole of a fault, and raises it where the
    environment has NO_FALLBACK; that kernels do not serve some type or size is no fault.
    """
    if isinstance(error, FaultError) or not isinstance(error, NotAvailableError):
        log.warning("something slower serves in the place of what fails", exc_info=error)
        if os.environ.get(NO_FALLBACK):
            raise error
    return str(error)


def brief(error: Exception) -> str:
    """The error in one line: those of compilers run to pages."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def name_of(dtype: object) -> str:
    """A type of torch's without its prefix."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def importing(distribution: str, module: str) -> Iterator[None]:
    """Import ``module`` inside. Raises NotAvailableError with the reason where that fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == module:
            raise NotAvailableError(f"{distribution} is not installed") from error
        raise FaultError(f"{distribution} cannot be imported: {error}") from error
    except Exception as error:  # it reads the driver, the compiler and files of its own
        raise FaultError(f"{distribution} cannot be imported: {brief(error)}") from error
