"""The error of kernels that this process cannot use, and the words of its reasons."""

from collections.abc import Iterator
from contextlib import contextmanager


class NotAvailableError(RuntimeError):
    """These kernels cannot be used here; the message says why."""


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
        raise NotAvailableError(f"{distribution} cannot be imported: {error}") from error
    except Exception as error:  # it reads the driver, the compiler and files of its own
        raise NotAvailableError(f"{distribution} cannot be imported: {brief(error)}") from error
