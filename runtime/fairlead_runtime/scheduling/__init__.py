"""Decides which requests run in the next step: plan (pure), commit, update.

No module here uses torch, a clock or randomness.
"""

from fairlead_runtime.scheduling.plan import (
    Event,
    Finished,
    Limits,
    Plan,
    Result,
    Row,
    Token,
    Work,
)
from fairlead_runtime.scheduling.scheduler import (
    InvariantViolation,
    Scheduler,
    SchedulerStats,
    StepStats,
)

__all__ = [
    "Event",
    "Finished",
    "InvariantViolation",
    "Limits",
    "Plan",
    "Result",
    "Row",
    "Scheduler",
    "SchedulerStats",
    "StepStats",
    "Token",
    "Work",
]
