"""Forward progress of the engine, read by the health checks of another thread.

Owns when the last step ended and how long the next may take. The engine thread writes single
attributes; a reader may see a value one step old, never half a value.
"""

from collections.abc import Callable

READY_STEP_SECONDS = 5.0  # a longer step makes the server not ready
ALIVE_STEP_SECONDS = 60.0  # a longer step makes the server not alive
SLACK = 2.0  # a step may take this many times the usual time per token


class StepProgress:
    """``working``: the engine has work. ``last_change``: when work arrived or a step began or
    ended.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.working = False
        self.last_change = now()
        self._tokens = 0
        self._per_token = 0.0

    def begin(self, tokens: int = 0) -> None:
        """Work arrives at an idle engine, or a step of this many tokens starts."""
        self._tokens = tokens
        self.last_change = self._now()
        self.working = True

    def end(self, *, working: bool) -> None:
        """A step ends. The time per token is a running mean over the last few steps."""
        now = self._now()
        if self._tokens:
            seconds = (now - self.last_change) / self._tokens
            self._per_token = (
                seconds if not self._per_token else 0.8 * self._per_token + 0.2 * seconds
            )
        self._tokens = 0
        self.last_change = now
        self.working = working

    def age(self) -> float | None:
        """Seconds since ``last_change``; None while there is no work."""
        return self._now() - self.last_change if self.working else None

    def allowance(self) -> float:
        """Seconds the running step may take, from earlier steps: a long prefill on a slow device is
        not a hang.
        """
        return SLACK * self._tokens * self._per_token
