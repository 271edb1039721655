"""The error of kernels that this process cannot use."""


class NotAvailableError(RuntimeError):
    """These kernels cannot be used here; the message says why."""


def brief(error: Exception) -> str:
    """The error in one line: those of compilers run to pages."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
