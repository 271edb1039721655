"""Forward progress of the engine, read by the health checks of another thread.

Owns when the last step ended and how long the next may take. Writes are plain attribute assignments
by the engine thread; a reader may see a value one step old, never a torn one.
"""

from collections.abc import Callable

READY_WITHIN = 5.0  # seconds a step may take before traffic is sent elsewhere
ALIVE_WITHIN = 60.0  # seconds after which the process is taken for hung
SLACK = 2.0  # how much longer than usual a step may take, per token


class Progress:
    """``working``: there is something to do; ``pulse``: when it last moved, by the clock given."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.working = False
        self.pulse = now()
        self._tokens = 0
        self._per_token = 0.0

    def begin(self, tokens: int = 0) -> None:
        """Work arrived at an idle engine, or a step over this many tokens starts."""
        self._tokens = tokens
        self.pulse = self._now()
        self.working = True

    def end(self, *, working: bool) -> None:
        """A step is over; the time per token is a running mean that follows within a few steps."""
        now = self._now()
        if self._tokens:
            seconds = (now - self.pulse) / self._tokens
            self._per_token = (
                seconds if not self._per_token else 0.8 * self._per_token + 0.2 * seconds
            )
        self._tokens = 0
        self.pulse = now
        self.working = working

    def age(self) -> float | None:
        """Seconds since the engine last moved; None while there is no work."""
        return self._now() - self.pulse if self.working else None

    def allowance(self) -> float:
        """Seconds the running step may take by experience: a long prefill on a slow device is no
        hang.
        """
        return SLACK * self._tokens * self._per_token
