"""The facts that the operator reads of one pod, one definition each. Pure.

The operator's containers are found by name: a service mesh injects its own before or after them.
"""

import re
from collections.abc import Mapping
from typing import Any

from fairlead_operator.resource.kinds import REVISION_LABEL, Object

RUNTIME = "runtime"  # the container that serves
FETCH = "fetch"  # the init container that downloads the weights
# The scheduler counts the nodes on which no other pod's end would help.
_HOPELESS = re.compile(
    r"preemption: 0/(?P<nodes>\d+) nodes are available: "
    r"(?P<hopeless>\d+) Preemption is not helpful for scheduling"
)


def runtime_status(pod: Object) -> Mapping[str, Any]:
    """The container status of the runtime; empty while the kubelet reports none."""
    return _status(pod, "containerStatuses", RUNTIME)


def fetch_status(pod: Object) -> Mapping[str, Any]:
    """The container status of the download; empty while there is none."""
    return _status(pod, "initContainerStatuses", FETCH)


def container_statuses(pod: Object) -> list[Mapping[str, Any]]:
    """The status of every container: the download's, the runtime's, then those of others."""
    status = pod.get("status") or {}
    statuses = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    return sorted(statuses, key=is_injected)


def is_injected(container: Mapping[str, Any]) -> bool:
    return container.get("name") not in {RUNTIME, FETCH}


def is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def is_running(pod: Object) -> bool:
    """Whether the runtime's process runs: it may load, serve or hang."""
    return is_ready(pod) or "running" in (runtime_status(pod).get("state") or {})


def is_started(pod: Object) -> bool:
    """Whether the runtime is past its start: its startup probe succeeded once."""
    return is_ready(pod) or (is_running(pod) and runtime_status(pod).get("started") is True)


def is_deleting(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def revision_of_pod(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(REVISION_LABEL, ""))


def can_find_room(message: str) -> bool:
    """Whether a node would take the unscheduled pod if other pods left it. ``message``: that of its
    condition PodScheduled; where the scheduler does not say, one may.
    """
    node_counts = _HOPELESS.search(message)
    return node_counts is None or node_counts["nodes"] != node_counts["hopeless"]


def address_of(pod: Object) -> str:
    return str((pod.get("status") or {}).get("podIP") or "")


def _status(pod: Object, field: str, name: str) -> Mapping[str, Any]:
    statuses = (pod.get("status") or {}).get(field) or ()
    return next((status for status in statuses if status.get("name") == name), {})
