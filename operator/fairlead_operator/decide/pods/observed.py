"""What one resource looks like in the cluster: a snapshot of the store, with the questions asked of
it. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_operator.cluster.cache import Store
from fairlead_operator.decide.pods.blockers import is_ready
from fairlead_operator.resource.kinds import (
    BUDGET,
    CLAIM,
    DEPLOYMENT,
    POD,
    POLICY,
    QUOTA,
    REVISION_LABEL,
    SERVICE,
    SLICE,
    UID_LABEL,
    Key,
    Object,
)


@dataclass(frozen=True, slots=True)
class Observed:
    """Children by kind; only pods of this very resource, by its uid."""

    children: tuple[Object, ...]
    pods: tuple[Object, ...]
    slices: tuple[Object, ...]
    quotas: tuple[Object, ...]
    events: tuple[Object, ...]

    @property
    def deployment(self) -> Object | None:
        return next((c for c in self.children if c["kind"] == DEPLOYMENT.name), None)

    def ready_pods(self) -> list[Object]:
        """Pods that take traffic and are not on their way out."""
        return [p for p in self.pods if is_ready(p) and not p["metadata"].get("deletionTimestamp")]

    def serving(self, revision: str) -> list[Object]:
        """Ready pods of a revision that the Service sends traffic to."""
        uids = {
            (endpoint.get("targetRef") or {}).get("uid")
            for one in self.slices
            for endpoint in one.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready")
        }
        return [
            p
            for p in self.ready_pods()
            if revision_of_pod(p) == revision and p["metadata"]["uid"] in uids
        ]


def observe(store: Store, key: Key, uid: str) -> Observed:
    children = [
        body
        for kind in (DEPLOYMENT, SERVICE, BUDGET, POLICY, CLAIM)
        for body in store.children(kind, key)
    ]
    pods = [
        pod
        for pod in store.children(POD, key)
        if (pod["metadata"].get("labels") or {}).get(UID_LABEL) == uid and not _finished(pod)
    ]
    known = {pod["metadata"]["uid"] for pod in pods}
    events = [
        event
        for event in store.events_about(known)
        if event["metadata"].get("namespace", "") == key[0]
    ]
    return Observed(
        children=tuple(children),
        pods=tuple(pods),
        slices=tuple(store.children(SLICE, key)),
        quotas=tuple(store.in_namespace(QUOTA, key[0])),
        events=tuple(sorted(events, key=_last_seen)),
    )


def revision_of_pod(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(REVISION_LABEL, ""))


def address_of(pod: Object) -> str:
    return str((pod.get("status") or {}).get("podIP") or "")


def _finished(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}


def _last_seen(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    seen = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return str(seen or event["metadata"].get("creationTimestamp") or "")
