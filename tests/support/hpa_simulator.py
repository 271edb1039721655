"""Kubernetes' HorizontalPodAutoscaler with its v2 defaults, as a baseline for our autoscaler.

After the controller's documentation and source: sync every 15 s, a total divided by the target
(AverageValue), tolerance 0.1, the highest recommendation of the last 300 s when shrinking, at most
100 % or 4 pods (whichever is more) added in 15 s, any number removed at once. Its metrics are
exact and without delay, unlike real ones.
"""

import math

from fairlead_operator.decide.scale.autoscale import Policy
from fairlead_operator.decide.scale.simulate import Moment

SYNC, DOWN_WINDOW, TOLERANCE = 15.0, 300.0, 0.1


class HpaScaler:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._recommended: list[tuple[float, int]] = []

    def __call__(self, moment: Moment) -> tuple[int, str]:
        current = moment.supply.current
        if moment.now % SYNC:
            return current, ""
        total = moment.running + moment.waiting
        ratio = total / (self.policy.target * current)
        wanted = (
            current if abs(ratio - 1) <= TOLERANCE else math.ceil(total / self.policy.target - 1e-9)
        )
        self._recommended = [r for r in self._recommended if moment.now - r[0] < DOWN_WINDOW]
        self._recommended.append((moment.now, wanted))
        if wanted < current:
            wanted = min(current, max(count for _, count in self._recommended))
        wanted = min(wanted, current + max(4, current))
        return max(self.policy.min_replicas, min(self.policy.max_replicas, wanted)), ""
