"""How many requests a deleted pod finished and aborted: the runtime's termination message in the
pod's status. Pure.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from fairlead_operator.decide.pods.pod import is_deleting, runtime_status
from fairlead_operator.resource.kinds import Object

LARGEST = 1 << 20  # more requests than a pod runs at a time


class Drained(NamedTuple):
    """Requests that ran when their pods were terminated."""

    finished: int = 0
    aborted: int = 0

    def plus(self, other: "Drained") -> "Drained":
        return Drained(self.finished + other.finished, self.aborted + other.aborted)


def read(pod: Object) -> Drained | None:
    """The counts of a pod that is being deleted and whose runtime has ended; None for any other pod
    and without a valid termination message.
    """
    if not is_deleting(pod):
        return None
    terminated = (runtime_status(pod).get("state") or {}).get("terminated") or {}
    try:
        line = json.loads(str(terminated.get("message") or ""))
    except ValueError:
        return None
    if not isinstance(line, dict) or line.get("code") != "Drained":
        return None
    counts = [line.get("finished"), line.get("aborted")]
    good = [
        n for n in counts if isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= LARGEST
    ]
    return Drained(*good) if len(good) == len(counts) else None


def of_status(status: Mapping[str, Any]) -> tuple[str, Drained]:
    """The revision a status counts for, and its counts."""
    rollout: Mapping[str, Any] = status.get("rollout") or {}
    counts = Drained(int(rollout.get("drained") or 0), int(rollout.get("aborted") or 0))
    return str(status.get("targetRevision") or ""), counts
