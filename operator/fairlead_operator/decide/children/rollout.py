"""The replacement of old pods by those of a new revision: with an extra pod, one by one, or all at
once.

Owns the choice of the Deployment's strategy and its reason. A rollout takes no ready pod while an
extra pod can come. When the extra pod finds no room, ``Auto`` replaces one pod at a time, after
the status has announced it. Everything is read from the cluster, so a new operator goes on where
the last one stopped.
"""

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from fairlead_operator.decide.children.claims import surge_obstacle
from fairlead_operator.decide.children.manifests import Replacement, revision_of
from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.decide.pods.pod import can_find_room, revision_of_pod
from fairlead_operator.resource.fields import Quantity
from fairlead_operator.resource.kinds import Object
from fairlead_operator.resource.resource import InferenceDeployment

Strategy = Literal["Surge", "OneByOne", "Recreate"]
ROOM_SECONDS = 60.0  # how long an extra pod may wait for a node
NODE_SECONDS = 600.0  # the same while a node autoscaler says that a node is coming
# Reasons of Events by which cluster-autoscaler and Karpenter announce a node for a pod.
NODE_IS_COMING = frozenset({"TriggeredScaleUp", "Nominated"})
# What the scheduler says of a node that our own old pods fill.
_NO_ROOM = re.compile(
    r"Insufficient |Too many pods|didn't have free ports|anti-affinity rules"
    r"|topology spread constraints"
)
# The scopes of a quota that our pods are in, besides PriorityClass: they have requests, no deadline
# of their own, and no affinity to pods of other namespaces.
_OUR_SCOPES = frozenset({"NotTerminating", "NotBestEffort"})
ONE_BY_ONE = Replacement("RollingUpdate", max_surge=0, max_unavailable=1)
RECREATE = Replacement("Recreate")
NO_SURGE = "rollout.maxSurge is 0"


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of strategy: ``replacement`` for the Deployment now, ``strategy`` and ``message``
    for the status. With ``announced_only`` they run ahead of ``replacement`` by one pass: the
    status says first that ready pods will go.
    """

    replacement: Replacement
    strategy: Strategy
    message: str
    announced_only: bool = False


def choose(
    resource: InferenceDeployment,
    snapshot: Snapshot,
    revision: str,
    replicas: int,
    status: Mapping[str, Any],
    now: datetime,
) -> Choice:
    """The strategy for the revision and replicas to come. ``status``: as it was written last."""
    rollout = resource.spec.rollout
    surge = Replacement("RollingUpdate", rollout.max_surge, rollout.max_unavailable)
    if rollout.strategy == "Recreate":
        text = "rollout.strategy is Recreate: a rollout interrupts the service"
        return Choice(RECREATE, "Recreate", text)
    if rollout.strategy == "Surge":
        return Choice(surge, "Surge", "rollout.strategy is Surge")
    interruption = "this interrupts the service, it has one replica" if replicas <= 1 else ""
    if rollout.max_surge == 0:
        count = rollout.max_unavailable
        effect = interruption or f"{count} pod{'s are' if count > 1 else ' is'} replaced at a time"
        return Choice(surge, "OneByOne", f"{NO_SURGE}: {effect}")
    if not _replaces(snapshot, revision):
        return Choice(surge, "Surge", "an extra pod comes before an old one goes")
    rollout_status = status.get("rollout") or {}
    announcement = str(rollout_status.get("why", ""))
    is_announced = (
        status.get("targetRevision") == revision
        and rollout_status.get("strategyChosen") == "OneByOne"
        and not announcement.startswith(NO_SURGE)
    )
    effect = interruption or "one pod is replaced at a time"
    if is_announced:
        # Kept to the end of this rollout: room that comes and goes must not turn it to and fro.
        message = f"{announcement.rpartition(': ')[0] or announcement}: {effect}"
        if message == announcement:
            return Choice(ONE_BY_ONE, "OneByOne", message)
        return Choice(surge, "OneByOne", message, announced_only=True)
    shortage = surge_obstacle(resource, snapshot, revision)
    if shortage := shortage or _shortage(resource, snapshot, revision, now):
        return Choice(surge, "OneByOne", f"{shortage}: {effect}", announced_only=True)
    return Choice(surge, "Surge", "an extra pod comes before an old one goes")


def _replaces(snapshot: Snapshot, revision: str) -> bool:
    """Whether pods of another revision are there, or are about to be replaced."""
    live = snapshot.deployment
    changes = live is not None and revision_of(live) != revision
    return changes or any(revision_of_pod(p) != revision for p in snapshot.pods)


def _shortage(
    resource: InferenceDeployment, snapshot: Snapshot, revision: str, now: datetime
) -> str:
    """The reason why no extra pod can come; "" while one may still come."""
    accelerator, live = resource.spec.resources.accelerator, snapshot.deployment
    if accelerator.count and (live is None or revision_of(live) != revision):
        priority = _priority_class(resource, snapshot)
        quotas = [quota for quota in snapshot.quotas if _counts(quota, priority)]
        free = _free_in_quota(quotas, accelerator.resource_name)
        if free is not None and free < accelerator.count:
            name = accelerator.resource_name
            return f"the quota leaves {free} {name}, an extra pod needs {accelerator.count}"
    if live is not None and revision_of(live) == revision:
        for condition in (live.get("status") or {}).get("conditions") or ():
            message = str(condition.get("message", ""))
            if (
                condition.get("type") == "ReplicaFailure"
                and condition.get("status") == "True"
                and "exceeded quota" in message
            ):
                return "the namespace's quota has no room for an extra pod"
    return _unscheduled(resource, snapshot, revision, now)


def _unscheduled(
    resource: InferenceDeployment, snapshot: Snapshot, revision: str, now: datetime
) -> str:
    deadline = float(resource.spec.rollout.progress_deadline_seconds)
    nominated_uids = {
        (event.get("involvedObject") or {}).get("uid")
        for event in snapshot.events
        if event.get("reason") in NODE_IS_COMING
    }
    for pod in snapshot.pods:
        if revision_of_pod(pod) != revision or pod["metadata"].get("deletionTimestamp"):
            continue
        for condition in (pod.get("status") or {}).get("conditions") or ():
            if condition.get("type") != "PodScheduled" or condition.get("status") != "False":
                continue
            message = str(condition.get("message", ""))
            if not (_NO_ROOM.search(message) and can_find_room(message)):
                continue  # no node would ever take it, even with fewer old pods
            is_nominated = pod["metadata"]["uid"] in nominated_uids
            patience = min(deadline, NODE_SECONDS) if is_nominated else ROOM_SECONDS
            wait = _seconds_since(condition.get("lastTransitionTime"), pod, now)
            if wait >= patience:
                return f"pod {pod['metadata']['name']} found no room for {patience:.0f} s"
    return ""


def _seconds_since(stamp: Any, pod: Object, now: datetime) -> float:
    text = str(stamp or pod["metadata"].get("creationTimestamp") or "")
    return (now - datetime.fromisoformat(text)).total_seconds() if text else 0.0


def _priority_class(resource: InferenceDeployment, snapshot: Snapshot) -> str:
    """The priority class of the pods to come: their resource's, else the default of the cluster,
    which it gave to pods of a template without one; "" where there is none.
    """
    live = snapshot.deployment
    own = resource.spec.pod_template.priority_class_name
    if own or live is None or _pod_spec(live["spec"]["template"]).get("priorityClassName"):
        return own
    pods = [pod for pod in snapshot.pods if revision_of_pod(pod) == revision_of(live)]
    return next((str(_pod_spec(pod).get("priorityClassName", "")) for pod in pods), "")


def _pod_spec(pod: Object) -> Mapping[str, Any]:
    return pod.get("spec") or {}


def _counts(quota: Object, priority: str) -> bool:
    """Whether a quota counts pods of ours with this priority class: they are in all its scopes."""
    spec = quota.get("spec") or {}
    scopes = [{"scopeName": name, "operator": "Exists"} for name in spec.get("scopes") or ()]
    scopes += (spec.get("scopeSelector") or {}).get("matchExpressions") or ()
    return all(_is_in_scope(scope, priority) for scope in scopes)


def _is_in_scope(scope: Mapping[str, Any], priority: str) -> bool:
    operator, name = scope["operator"], scope["scopeName"]
    if name != "PriorityClass":
        return name in _OUR_SCOPES
    if operator in {"In", "NotIn"}:
        return (priority in (scope.get("values") or ())) is (operator == "In")
    return bool(priority) is (operator == "Exists")


def _free_in_quota(quotas: Iterable[Object], name: str) -> int | None:
    """The amount that the tightest quota leaves of a resource; None where no limit is known."""
    free_counts = []
    for quota in quotas:
        status = quota.get("status") or {}
        hard = (status.get("hard") or {}).get(f"requests.{name}")
        used = (status.get("used") or {}).get(f"requests.{name}", "0")
        if hard is not None:
            with contextlib.suppress(ValueError):  # a quantity beyond ours is no limit known
                free_counts.append(int(Quantity(hard).exact - Quantity(used).exact))
    return min(free_counts, default=None)
