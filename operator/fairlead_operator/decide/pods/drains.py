"""What became of the requests of a pod that ended: the runtime's last line, in the status the
kubelet leaves. Pure.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from fairlead_operator.resource.kinds import Object

LARGEST = 1 << 20  # no pod runs more at once


class Drained(NamedTuple):
    """Requests that ran when pods were told to end."""

    finished: int = 0
    aborted: int = 0

    def plus(self, other: "Drained") -> "Drained":
        return Drained(self.finished + other.finished, self.aborted + other.aborted)


def read(pod: Object) -> Drained | None:
    """Of a pod that is being deleted and whose runtime has ended; None for any other, and where it
    left no word.
    """
    if not pod["metadata"].get("deletionTimestamp"):
        return None
    main: Mapping[str, Any] = next(
        iter((pod.get("status") or {}).get("containerStatuses") or ()), {}
    )
    ended = (main.get("state") or {}).get("terminated") or {}
    try:
        said = json.loads(str(ended.get("message") or ""))
    except ValueError:
        return None
    if not isinstance(said, dict) or said.get("code") != "Drained":
        return None
    counts = [said.get("finished"), said.get("aborted")]
    good = [
        n for n in counts if isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= LARGEST
    ]
    return Drained(*good) if len(good) == len(counts) else None


def of_status(status: Mapping[str, Any]) -> tuple[str, Drained]:
    """The revision a status counts for, and its counts."""
    rollout: Mapping[str, Any] = status.get("rollout") or {}
    counts = Drained(int(rollout.get("drained") or 0), int(rollout.get("aborted") or 0))
    return str(status.get("targetRevision") or ""), counts
