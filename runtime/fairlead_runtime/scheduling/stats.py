"""The scheduler's statistics: current gauges, counters since the start, and the last step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """The last committed step. A token that is recomputed after a preemption counts again."""

    rows: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preempted: int = 0
    units_held: int = 0  # by requests, after commit took the step's blocks


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges (now) and counters (since the start) for metrics and debugging. They count units, not
    whole-model blocks.
    """

    running: int
    prefilling: int  # of the running, those whose prompts are not all computed
    waiting: int
    offloaded: int  # waiting sequences whose blocks are in host memory
    units: int
    free: int
    cached: int  # unreferenced units with content; available, since they can be evicted
    used: int
    preemptions: int
    preempted_tokens: int  # of the sequences that wait since a preemption
    offloads: int  # preemptions that moved blocks to host memory
    prefix_queries: int  # tokens looked up
    prefix_hits: int  # tokens found
    last: StepStats

    @property
    def usage(self) -> float:
        """The share of units that requests hold, 0 to 1."""
        return self.used / self.units
