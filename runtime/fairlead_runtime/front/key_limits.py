"""What one API key may use and which priorities it may send, what it uses, and when a request
beyond that is worth a retry.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fairlead_runtime.front.errors import ApiError, invalid

MINUTE = 60.0  # seconds
NEW_DURATION_WEIGHT = 0.2  # of the last request in the mean duration
PRIORITIES = range(-(2**31), 2**31)  # of any request; the lower one runs first
# A request of a key that names none may go behind those of the other keys, and never before them.
USUAL_PRIORITIES = range(PRIORITIES.stop)


class KeyLimits(NamedTuple):
    """None: no limit. ``priorities``: those that a request may have."""

    requests_per_minute: int | None = None
    concurrent_requests: int | None = None
    priorities: range = USUAL_PRIORITIES

    def priority(self, sent: int | None) -> int:
        """The priority that was sent, else the one nearest to 0. Raises ApiError 400 for one that
        the key may not send.
        """
        low, high = self.priorities[0], self.priorities[-1]
        if sent is None:
            return min(max(low, 0), high)
        if sent not in self.priorities:
            raise invalid("priority", f"this API key may send {low} to {high}: change it")
        return sent


class KeyUsage:
    """The requests of one key: those that run, and when those of the last minute began. ``now``:
    a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._begun: deque[float] = deque()
        self._running = 0
        self._mean_seconds = 0.0

    @contextmanager
    def request(self, limits: KeyLimits) -> Iterator[None]:
        """Count one request while it runs. Raises ApiError 429, which is not counted, beyond
        ``limits``; any 60 seconds have at most ``requests_per_minute`` requests.
        """
        begun = self._now()
        self._check(limits, begun)
        if limits.requests_per_minute is not None:
            self._begun.append(begun)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            seconds = self._now() - begun
            weight = NEW_DURATION_WEIGHT if self._mean_seconds else 1.0
            self._mean_seconds += weight * (seconds - self._mean_seconds)

    def _check(self, limits: KeyLimits, now: float) -> None:
        while self._begun and self._begun[0] <= now - MINUTE:
            self._begun.popleft()
        per_minute, concurrent, _ = limits
        if per_minute is not None and len(self._begun) >= per_minute:
            # The limit may have been lowered since: so many must be older than a minute.
            wait = self._begun[len(self._begun) - per_minute] + MINUTE - now
            raise _refusal(f"{per_minute} requests a minute", wait)
        if concurrent is not None and self._running >= concurrent:
            # One of those that run ends after their mean duration divided by their number.
            excess = self._running - concurrent + 1
            wait = self._mean_seconds * excess / self._running
            raise _refusal(f"{concurrent} requests at a time", wait)


def _refusal(limit: str, wait: float) -> ApiError:
    retry_after = max(1, math.ceil(wait))
    return ApiError(
        429,
        f"this API key may send {limit}; retry after {retry_after} s",
        headers={"retry-after": str(retry_after)},
    )
