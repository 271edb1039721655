"""Scaling's memory of one resource between passes. Pure: ``scale`` returns the next value, and
``reconcile`` commits it once the count is written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.scale.autoscale import History

# That probes have before a pass takes "not known" for an answer; a canary may take 12.
FIRST_LOOK_SECONDS = 13.0


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """Memory of one resource's scaling. Times are of the monotonic clock."""

    first_pass_at: float
    history: History = field(default_factory=History)
    decided_at: float = float("-inf")  # the last tick
    status: Mapping[str, Any] | None = None  # status.autoscaling of the last tick
    condition: tuple[str, str, str] = ("Unknown", "NoData", "nothing measured yet: holding")
    typical: float | None = None  # mean tokens of a request when it was last measured
    load_at: float = float("-inf")  # the last write of status.load
    operator_scales: bool | None = None  # in the last pass; None before it
    spec_replicas: int | None = None  # spec.replicas of the last pass

    @classmethod
    def first(cls, status: Mapping[str, Any], clock: float) -> Self:
        """The memory at the first pass of this operator: the resource's status has the last
        decisions.
        """
        return cls(first_pass_at=clock, status=status.get("autoscaling"))


def awaits_probes(memory: ScalingMemory, results: ProbeResults, clock: float) -> bool:
    """Whether the first probes may still answer, so that a missing result means nothing yet.

    Otherwise an operator that restarts would report a Ready resource as not Ready for a moment.
    """
    waits = bool(results.canaries_due) or not results.complete
    return waits and clock - memory.first_pass_at < FIRST_LOOK_SECONDS
