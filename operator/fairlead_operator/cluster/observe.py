"""Reads one resource's part of the cache as a snapshot."""

from collections.abc import Mapping
from typing import Any

from fairlead_operator.cluster.cache import Store
from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.resource.kinds import (
    BUDGET,
    CLAIM,
    DEPLOYMENT,
    POD,
    POLICY,
    QUOTA,
    SERVICE,
    SLICE,
    UID_LABEL,
    Key,
    Object,
)


def observe(store: Store, key: Key, uid: str) -> Snapshot:
    children = [
        body
        for kind in (DEPLOYMENT, SERVICE, BUDGET, POLICY, CLAIM)
        for body in store.children(kind, key)
    ]
    pods = [
        pod
        for pod in store.children(POD, key)
        if (pod["metadata"].get("labels") or {}).get(UID_LABEL) == uid
    ]
    failed = [pod for pod in pods if _phase(pod) == "Failed"]
    pods = [pod for pod in pods if _phase(pod) not in {"Succeeded", "Failed"}]
    uids = {pod["metadata"]["uid"] for pod in pods}
    events = [
        event
        for event in store.events_about(uids)
        if event["metadata"].get("namespace", "") == key[0]
    ]
    return Snapshot(
        children=tuple(children),
        pods=tuple(pods),
        slices=tuple(store.children(SLICE, key)),
        quotas=tuple(store.in_namespace(QUOTA, key[0])),
        events=tuple(sorted(events, key=_last_seen)),
        failed=tuple(failed),
    )


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "")


def _last_seen(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    stamp = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return str(stamp or event["metadata"].get("creationTimestamp") or "")
