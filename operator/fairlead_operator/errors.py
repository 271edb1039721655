"""How talking to the API server fails."""


class ApiError(Exception):
    """No good answer. ``code`` 0: none at all; ``retry_after`` is the server's wish in seconds."""

    def __init__(self, code: int, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{code} {reason}: {message}"[:1024])
        self.code, self.reason, self.message, self.retry_after = code, reason, message, retry_after


class FencedError(Exception):
    """A write was asked for while this process does not hold the Lease."""
