"""The seconds of each part of the last start: from a pod's status and its runtime's metrics. Pure.

A container that restarts in its pod is not scheduled again and downloads nothing: such a start has
the runtime's parts only.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from fairlead_operator.decide.pods.load import LoadError, series
from fairlead_operator.decide.pods.pod import fetch_status, runtime_status
from fairlead_operator.resource.kinds import Object
from fairlead_runtime.settings.metric_names import PHASE, STARTUP

# The runtime's own, as the status and as its metrics have them. A pod's runtime downloads nothing.
PARTS = {
    "imports": "imports",
    "weights": "weights",
    "kernels": "kernels",
    "selfTest": "self_test",
    "profile": "profile",
    "cache": "cache",
}
OUTSIDE = ("scheduled", "imagePulled", "weightsFetched")
SERIES = (STARTUP,)  # all that is read here


def read(text: str, model: str = "") -> Mapping[str, float]:
    """The runtime's parts, in seconds, from its metrics, without those that are missing or not
    finite and positive.
    """
    try:
        measured_parts = {
            labels.get(PHASE, ""): value for _, labels, value in series(text, SERIES, model)
        }
    except LoadError:
        return {}
    return {
        name: round(measured_parts[phase], 1)
        for name, phase in PARTS.items()
        if 0 < measured_parts.get(phase, math.inf) < math.inf
    }


def startup(
    serving: Sequence[Object],
    measured: Mapping[str, Mapping[str, float]],
    previous: Mapping[str, Any],
) -> Mapping[str, Any]:
    """The newest serving pod's start. ``measured``: what ``read`` returned, by pod uid.
    ``previous``, the start in the status, stays until that is known, without parts that an older
    operator named otherwise: the resource's schema has them no longer.
    """
    previous = {name: value for name, value in previous.items() if name in (*OUTSIDE, *PARTS)}
    if not serving:
        return previous
    pod = max(
        serving,
        key=lambda p: (str(p["metadata"].get("creationTimestamp", "")), p["metadata"]["name"]),
    )
    if pod["metadata"]["uid"] not in measured:
        return previous
    return {**_outside(pod), **measured[pod["metadata"]["uid"]]}


def _outside(pod: Object) -> dict[str, int]:
    """The parts before the runtime's process that the pod's status has, in whole seconds."""
    runtime, fetch = runtime_status(pod), fetch_status(pod)
    if runtime.get("restartCount"):
        return {}
    fetched = (fetch.get("state") or {}).get("terminated") or {}
    running = (runtime.get("state") or {}).get("running") or {}
    first = fetched.get("startedAt") or running.get("startedAt")
    conditions = (pod.get("status") or {}).get("conditions") or ()
    at = {c["type"]: c.get("lastTransitionTime") for c in conditions}
    spans = {
        "scheduled": (pod["metadata"].get("creationTimestamp"), at.get("PodScheduled")),
        # The status of a download that was tried again has the times of its last try only.
        "imagePulled": (at.get("PodScheduled"), None if fetch.get("restartCount") else first),
        "weightsFetched": (fetched.get("startedAt"), fetched.get("finishedAt")),
    }
    seconds = {name: _span(begin, finish) for name, (begin, finish) in spans.items()}
    return {name: value for name, value in seconds.items() if value is not None}


def _span(begin: str | None, finish: str | None) -> int | None:
    if not begin or not finish:
        return None
    try:
        passed = datetime.fromisoformat(finish) - datetime.fromisoformat(begin)
    except ValueError:
        return None
    return max(0, round(passed.total_seconds()))
