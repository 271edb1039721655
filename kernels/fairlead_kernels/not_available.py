"""The error of kernels that this process cannot use."""


class NotAvailableError(RuntimeError):
    """These kernels cannot be used here; the message says why."""
