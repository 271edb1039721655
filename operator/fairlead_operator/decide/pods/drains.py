"""The requests that a deleted pod finished and aborted: the runtime's termination message in the
pod's status. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fairlead_operator.decide.pods.pod import is_deleting, runtime_status
from fairlead_operator.resource.json_text import count_of, json_object
from fairlead_operator.resource.kinds import Object

LARGEST = 1 << 20  # more requests than a pod runs at a time


class DrainedRequests(NamedTuple):
    """Requests that ran when their pods were terminated."""

    finished: int = 0
    aborted: int = 0

    def plus(self, requests: "DrainedRequests") -> "DrainedRequests":
        return DrainedRequests(self.finished + requests.finished, self.aborted + requests.aborted)


NO_REQUESTS = DrainedRequests()


def read(pod: Object) -> DrainedRequests | None:
    """The counts of a pod that is being deleted and whose runtime has ended; None for any other pod
    and without a valid termination message.
    """
    if not is_deleting(pod):
        return None
    terminated = (runtime_status(pod).get("state") or {}).get("terminated") or {}
    try:
        line = json_object(str(terminated.get("message") or ""))
    except ValueError:
        return None
    if line.get("code") != "Drained":
        return None
    finished, aborted = (count_of(line.get(name), LARGEST) for name in ("finished", "aborted"))
    return None if finished is None or aborted is None else DrainedRequests(finished, aborted)


@dataclass(frozen=True, slots=True)
class DrainCounts:
    """The sum since a revision became the target, and the pods that ended and are in it already."""

    revision: str
    total: DrainedRequests = NO_REQUESTS
    pods: frozenset[str] = frozenset()

    @classmethod
    def of_status(cls, status: Mapping[str, Any]) -> "DrainCounts":
        rollout: Mapping[str, Any] = status.get("rollout") or {}
        counts = DrainedRequests(int(rollout.get("drained") or 0), int(rollout.get("aborted") or 0))
        return cls(str(status.get("targetRevision") or ""), counts)

    def plus(self, pod: str, requests: DrainedRequests) -> "DrainCounts":
        """The counts with one more pod that ended; a pod counts once."""
        if pod in self.pods:
            return self
        return replace(self, total=self.total.plus(requests), pods=self.pods | {pod})

    def since(self, revision: str) -> "DrainCounts":
        """The counts of this revision; another one starts at zero."""
        return (
            self
            if revision == self.revision
            else replace(self, revision=revision, total=NO_REQUESTS)
        )

    def of_pods(self, uids: frozenset[str]) -> "DrainCounts":
        """The counts without the uids of pods that are gone; the requests of those remain."""
        return replace(self, pods=self.pods & uids)
