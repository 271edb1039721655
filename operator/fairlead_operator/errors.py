"""Errors of requests to the API server."""


class ApiError(Exception):
    """A request that failed. ``code`` is the HTTP status, 0 without an answer; ``retry_after`` are
    the seconds that the server asks to wait.
    """

    def __init__(self, code: int, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{code} {reason}: {message}"[:1024])
        self.code, self.reason, self.message, self.retry_after = code, reason, message, retry_after


class FencedError(Exception):
    """A write that was attempted while this process does not hold the Lease."""
