"""How many replicas a resource should have now, and who says so. Pure but for what it notes in
``Known``.

The operator's count lives in the Deployment and nowhere else: that is the current value after a
restart, and what a tick starts from. Between ticks nothing is decided, however often a pass runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairlead_operator.decide.pods.events import Note
from fairlead_operator.decide.pods.load import Load
from fairlead_operator.decide.pods.observed import Observed
from fairlead_operator.decide.pods.pod import is_deleting, is_ready
from fairlead_operator.decide.scale.autoscale import TICK, Policy, Supply, decide
from fairlead_operator.decide.scale.state import Known
from fairlead_operator.resource.kinds import Object
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.spec import Autoscaling

LOAD_SECONDS = 30.0  # the status' load is written at most this often
LOAD_SHARE = 0.2  # and only for a change of this share, or from or to nothing
DECISIONS = 10
CRASHES = 3  # a pod that ended this often is no supply


@dataclass(frozen=True, slots=True)
class Scaling:
    """``again``: seconds until the next look."""

    replicas: int
    condition: tuple[str, str, str]
    again: float = 3600.0
    status: Mapping[str, Any] | None = None


def scale(
    resource: InferenceDeployment,
    seen: Observed,
    known: Known,
    full_sequences: int | None,
    now: datetime,
    clock: float,
) -> Scaling:
    """``clock`` is the monotonic clock that dates samples; ``full_sequences`` the planned ones, if
    planned.
    """
    policy = resource.spec.autoscaling
    _notice(resource, seen, known)
    if policy is None or policy.managed_by == "external":
        known.autoscaled = None
        external = policy is not None
        text = "an HPA or KEDA writes spec.replicas" if external else "spec.autoscaling is not set"
        fact = ("True", "External", text) if external else ("False", "NotAutoscaled", text)
        return Scaling(resource.spec.replicas, fact)
    live = seen.deployment
    count = resource.spec.replicas if live is None else int(live["spec"].get("replicas", 1))
    count = max(policy.min_replicas, min(policy.max_replicas, count))
    due = clock - known.decided_at >= TICK * 0.9 and not known.in_the_dark(clock)
    if live is not None and not resource.spec.paused and due:
        count = _tick(resource, policy, seen, known, count, full_sequences, now, clock)
    return Scaling(count, known.scaling_fact, TICK, dict(known.autoscaled or {"desired": count}))


def _tick(
    resource: InferenceDeployment,
    policy: Autoscaling,
    seen: Observed,
    known: Known,
    count: int,
    full_sequences: int | None,
    now: datetime,
    clock: float,
) -> int:
    supply = supply_of(seen, count, resource.spec.rollout.progress_deadline_seconds, now)
    rules = Policy.of(policy, resource.engine, full_sequences)
    decision = decide(rules, known.history, known.samples, supply, clock)
    known.history, known.decided_at = decision.history, clock
    before = known.autoscaled or {}
    decisions = list(before.get("decisions") or ())
    if not decisions or (decisions[0]["to"], before.get("limitedBy", "")) != (
        decision.replicas,
        decision.limited_by,
    ):
        decisions.insert(0, decision.entry(now.strftime("%Y-%m-%dT%H:%M:%SZ")))
    if decision.replicas != count:
        reason = "ScaledUp" if decision.replicas > count else "ScaledDown"
        known.untold.append(
            Note(reason, f"{count} → {decision.replicas} pods: {decision.why}", now.isoformat())
        )
    known.autoscaled = {
        "desired": decision.replicas,
        "supply": supply.pods,
        "pending": supply.starting,
        "limitedBy": decision.limited_by,
        "decisions": decisions[:DECISIONS],
    }
    stale = len(supply.ready) - int(decision.inputs["fresh"])
    if not supply.ready:
        known.scaling_fact = ("False", "NoReadyPods", "no pod is ready to be measured: holding")
    elif stale:
        text = (
            f"{stale} of {len(supply.ready)} ready pods have no fresh metrics: never scaling down"
        )
        known.scaling_fact = ("False", "StaleMetrics", text)
    else:
        known.scaling_fact = ("True", "Deciding", "every ready pod is measured")
    return decision.replicas


def supply_of(seen: Observed, current: int, deadline: float, now: datetime) -> Supply:
    """Ready pods by uid, and pods that will be: younger than the start-up deadline and not
    crash-looping.
    """
    ready = tuple(sorted(p["metadata"]["uid"] for p in seen.ready_pods()))
    waiting = [p for p in seen.pods if not is_ready(p) and not is_deleting(p)]
    starting = [p for p in waiting if _age(p, now) < deadline and not _crashing(p)]
    return Supply(current, ready, len(starting), sum(_unplaced(p) for p in waiting))


def load_of(
    known: Known, pods: Iterable[Object], before: Mapping[str, Any], clock: float
) -> Mapping[str, int] | None:
    """``status.load``: the sum over ready pods, or what was written last while the change is small
    or young.
    """
    samples = [known.samples.get(p["metadata"]["uid"]) for p in pods]
    fresh = [s.load for s in samples if s is not None and s.fresh(clock)]
    old: Mapping[str, int] | None = before.get("load")
    if not fresh or clock - known.load_at < LOAD_SECONDS:
        return old
    total = Load(sum(one.running for one in fresh), sum(one.waiting for one in fresh))
    new = {"running": round(total.running), "waiting": round(total.waiting)}
    if old is not None and not _worth(
        old.get("running", 0) + old.get("waiting", 0), sum(new.values())
    ):
        return old
    if new != old:
        known.load_at = clock
    return new


def _worth(old: int, new: int) -> bool:
    return (old == 0) != (new == 0) or abs(new - old) >= LOAD_SHARE * max(old, 1)


def _notice(resource: InferenceDeployment, seen: Observed, known: Known) -> None:
    """Note what a user should hear: who owns the count changed, or a scale had no effect."""
    policy, live, wanted = resource.spec.autoscaling, seen.deployment, resource.spec.replicas
    mine = policy is not None and policy.managed_by == "operator"
    about = str(resource.generation)
    if live is not None and known.count_is_ours is not None and known.count_is_ours != mine:
        count = int(live["spec"].get("replicas", 1))
        if mine:
            text = f"autoscaling starts from the {count} pods there are; spec.replicas ({wanted}) has no effect now"
            known.untold.append(Note("ScalingTakenOver", text, about))
        else:
            text = f"{count} → {wanted} pods: autoscaling is off, spec.replicas counts"
            known.untold.append(Note("ScalingHandedOver", text, about))
    elif mine and known.asked_replicas is not None and known.asked_replicas != wanted:
        text = f"spec.replicas {known.asked_replicas} → {wanted} has no effect while spec.autoscaling is set"
        fix = "set autoscaling.minReplicas and maxReplicas, or remove spec.autoscaling"
        known.untold.append(Note("ScaleIgnored", f"{text}: {fix}", about))
    known.count_is_ours, known.asked_replicas = mine, wanted


def _age(pod: Object, now: datetime) -> float:
    created = str(pod["metadata"].get("creationTimestamp") or "")
    return (now - datetime.fromisoformat(created)).total_seconds() if created else 0.0


def _crashing(pod: Object) -> bool:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any(int(s.get("restartCount") or 0) >= CRASHES for s in statuses)


def _unplaced(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "PodScheduled" and c.get("status") == "False" for c in conditions)
