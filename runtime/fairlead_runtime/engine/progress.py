"""Forward progress of the engine, read by the health checks of another thread.

Owns when the last step ended and how long the next may take. The engine thread writes single
attributes; a reader may see a value one step old, never half a value.
"""

from collections.abc import Callable
from typing import NamedTuple

READY_STEP_SECONDS = 5.0  # a longer step makes the server not ready
ALIVE_STEP_SECONDS = 60.0  # a longer step makes the server not alive
SLACK = 3.0  # a step may take this many times the expected time
# No step may take longer, unless the profiling run's own full step with SLACK does.
LONGEST_STEP_SECONDS = 600.0
DECAY = 0.99  # per step, of the longest step that is remembered


class StepTimes(NamedTuple):
    """The profiling run's times in seconds. It computes no attention, hence SLACK."""

    per_token: float = 0.0  # of a step as large as the run computes
    decode: float = 0.0  # one step of decodes
    full: float = 0.0  # a step of max_batch_tokens


NO_TIMES = StepTimes()


class StepProgress:
    """``working``: the engine has work. ``last_change``: when work arrived or a step began or
    ended.
    """

    def __init__(self, now: Callable[[], float], profiled: StepTimes = NO_TIMES) -> None:
        self._now = now
        self.working = False
        self.last_change = now()
        self._tokens = 0
        self._profiled = profiled
        self._longest = profiled.decode  # of recent steps, in seconds
        self._cap = max(LONGEST_STEP_SECONDS, SLACK * profiled.full)

    def begin(self, tokens: int = 0) -> None:
        """Work arrives at an idle engine, or a step of this many tokens starts."""
        self._tokens = tokens
        self.last_change = self._now()
        self.working = True

    def end(self, *, working: bool) -> None:
        """A step ends."""
        now = self._now()
        if self._tokens:
            self._longest = max(now - self.last_change, DECAY * self._longest)
        self._tokens = 0
        self.last_change = now
        self.working = working

    def age(self) -> float | None:
        """Seconds since ``last_change``; None while there is no work."""
        return self._now() - self.last_change if self.working else None

    def allowance(self) -> float:
        """Seconds the running step may take: a long prefill on a slow device is not a hang.

        Expected is what its tokens took in the profiling run, or the longest recent step, whichever
        is more. Small steps say little about the time per token, so they do not change that.
        """
        if not self._tokens:
            return 0.0
        expected = max(self._profiled.per_token * self._tokens, self._longest)
        return min(self._cap, SLACK * expected)
