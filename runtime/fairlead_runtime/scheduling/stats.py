"""What can be counted: gauges of the moment, counters since the start, and what the last step held.
Values only.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """What the last committed step holds. Tokens are rows' tokens: a resumed prefill counts again."""

    rows: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preempted: int = 0
    units_held: int = 0  # by requests, after the step's blocks were taken


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges (now) and counters (since start) for metrics and debugging. Units, not whole-model
    blocks.
    """

    running: int
    waiting: int
    offloaded: int  # of the waiting ones
    units: int
    free: int
    cached: int  # evictable: nobody references them, they count as free
    used: int
    preemptions: int
    offloads: int  # of the preemptions
    prefix_queries: int  # tokens looked up
    prefix_hits: int  # tokens found
    last: StepStats

    @property
    def usage(self) -> float:
        """Share of units that requests hold, 0..1: 0 at rest."""
        return self.used / self.units
