"""A snapshot of the store: the objects of one resource in the cluster. Pure."""

from dataclasses import dataclass

from fairlead_operator.decide.pods.pod import is_deleting, is_ready, is_running, revision_of_pod
from fairlead_operator.resource.kinds import DEPLOYMENT, Object


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The objects of one resource by kind; its pods carry its uid."""

    children: tuple[Object, ...]
    pods: tuple[Object, ...]
    slices: tuple[Object, ...]
    quotas: tuple[Object, ...]
    events: tuple[Object, ...]
    failed: tuple[Object, ...] = ()  # pods that ended in failure, which ``pods`` leaves out

    @property
    def deployment(self) -> Object | None:
        return next((c for c in self.children if c["kind"] == DEPLOYMENT.name), None)

    def ready_pods(self) -> list[Object]:
        """Pods that take traffic and are not being deleted."""
        return [p for p in self.pods if is_ready(p) and not is_deleting(p)]

    def running_pods(self) -> list[Object]:
        """Pods whose runtime runs, ready or not, and that are not being deleted."""
        return [p for p in self.pods if is_running(p) and not is_deleting(p)]

    def serving(self, revision: str) -> list[Object]:
        """Ready pods of a revision that the Service sends traffic to."""
        uids = {
            (endpoint.get("targetRef") or {}).get("uid")
            for endpoint_slice in self.slices
            for endpoint in endpoint_slice.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready")
        }
        return [
            p
            for p in self.ready_pods()
            if revision_of_pod(p) == revision and p["metadata"]["uid"] in uids
        ]
