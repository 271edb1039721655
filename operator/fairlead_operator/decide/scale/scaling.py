"""The number of replicas that a resource should have now, and who decides it. Pure: returns what to
remember.

The operator's count lives in the Deployment and nowhere else: it is the current value after a
restart, and each tick starts from it. Between ticks nothing is decided, however often a pass runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from fairlead_operator.decide.pods.events import Note
from fairlead_operator.decide.pods.load import Load
from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.decide.pods.pod import is_deleting, is_ready, is_started
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.scale.autoscale import TICK, Decision, Policy, Supply, decide
from fairlead_operator.decide.scale.state import ScalingMemory, awaits_probes
from fairlead_operator.decide.scale.target import NO_STATES, States, pod_target, typical_request
from fairlead_operator.resource.kinds import Object
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.spec import Autoscaling

LOAD_SECONDS = 30.0  # the status' load is written at most this often
LOAD_SHARE = 0.2  # and only for a change of this share, or from or to nothing
DECISIONS = 10
CRASHES = 3  # a pod with this many restarts is not counted as starting


@dataclass(frozen=True, slots=True)
class Scaling:
    """The count to write, and what follows once it is written.

    ``requeue_after``: seconds until the next pass. Commit ``memory`` and write ``events`` only once
    the Deployment has the count. ``status``: status.autoscaling.
    """

    replicas: int
    condition: tuple[str, str, str]
    memory: ScalingMemory
    requeue_after: float = 3600.0
    status: Mapping[str, Any] | None = None
    events: tuple[Note, ...] = ()


def hold(resource: InferenceDeployment, snapshot: Snapshot, memory: ScalingMemory) -> Scaling:
    """No decision: the count is the spec's or, where the operator scales, the Deployment's."""
    policy = resource.spec.autoscaling
    if policy is None or policy.managed_by == "external":
        external = policy is not None
        text = "an HPA or KEDA writes spec.replicas" if external else "spec.autoscaling is not set"
        fact = ("True", "External", text) if external else ("False", "NotAutoscaled", text)
        return Scaling(resource.spec.replicas, fact, replace(memory, status=None))
    live = snapshot.deployment
    # A Deployment that was deleted returns with the count that it had.
    last = (memory.status or {}).get("desired", resource.spec.replicas)
    count = int(last) if live is None else replicas_of(live)
    count = max(policy.min_replicas, min(policy.max_replicas, count))
    status = dict(memory.status or {"desired": count})
    return Scaling(count, memory.condition, memory, TICK, status)


def scale(
    resource: InferenceDeployment,
    snapshot: Snapshot,
    memory: ScalingMemory,
    results: ProbeResults,
    tokens: int,
    now: datetime,
    clock: float,
    connections: int = 0,
    states: States = NO_STATES,
) -> Scaling:
    """The count for now: decided at a tick where the operator scales, else held. ``clock`` is the
    monotonic clock that dates samples; ``tokens``: concurrentTokens of one pod, ``connections``
    those that it takes, 0 while they are not known; ``states``: what a sequence's take of it.
    """
    baseline = hold(resource, snapshot, memory)
    policy, live = resource.spec.autoscaling, snapshot.deployment
    events = _owner_events(resource, snapshot, memory)
    memory_now = replace(
        baseline.memory,
        operator_scales=_operator_scales(policy),
        spec_replicas=resource.spec.replicas,
    )
    baseline = replace(baseline, memory=memory_now, events=events)
    due = clock - memory.decided_at >= TICK * 0.9 and not awaits_probes(memory, results, clock)
    if policy is None or not _operator_scales(policy) or live is None or resource.spec.paused:
        return baseline
    return (
        _tick(
            resource, policy, snapshot, baseline, results, tokens, connections, now, clock, states
        )
        if due
        else baseline
    )


def _tick(
    resource: InferenceDeployment,
    policy: Autoscaling,
    snapshot: Snapshot,
    baseline: Scaling,
    results: ProbeResults,
    tokens: int,
    connections: int,
    now: datetime,
    clock: float,
    states: States,
) -> Scaling:
    count, memory, events = baseline.replicas, baseline.memory, baseline.events
    supply = supply_of(snapshot, count, resource.spec.rollout.progress_deadline_seconds, now)
    samples = (results.samples.get(uid) for uid in supply.running)
    typical = typical_request(s.served for s in samples if s is not None) or memory.typical
    rules = Policy.of(policy, pod_target(resource, policy, tokens, typical, connections, states))
    decision = decide(rules, memory.history, results.samples, supply, clock)
    if decision.replicas != count:
        reason = "ScaledUp" if decision.replicas > count else "ScaledDown"
        text = f"{count} → {decision.replicas} pods: {decision.message}"
        events = (*events, Note(reason, text, now.isoformat()))
    status = {
        "desired": decision.replicas,
        "supply": supply.pods,
        "pending": supply.starting,
        "limitedBy": decision.limited_by,
        "decisions": _decisions(memory.status or {}, decision, now),
    }
    condition = _condition(len(supply.running), int(decision.inputs["fresh"]))
    return Scaling(
        replicas=decision.replicas,
        condition=condition,
        memory=replace(
            memory,
            history=decision.history,
            typical=typical,
            decided_at=clock,
            status=status,
            condition=condition,
        ),
        requeue_after=TICK,
        status=status,
        events=events,
    )


def _decisions(
    autoscaling_status: Mapping[str, Any], decision: Decision, now: datetime
) -> list[Any]:
    """The last decisions, newest first; one that repeats the last adds none."""
    decisions = list(autoscaling_status.get("decisions") or ())
    last = (decisions[0]["to"], autoscaling_status.get("limitedBy", "")) if decisions else None
    if last != (decision.replicas, decision.limited_by):
        decisions.insert(0, decision.entry(now.strftime("%Y-%m-%dT%H:%M:%SZ")))
    return decisions[:DECISIONS]


def _condition(running: int, fresh: int) -> tuple[str, str, str]:
    if not running:
        return ("False", "NoRunningPods", "no running pod has started: holding")
    if stale := running - fresh:
        text = f"{stale} of {running} running pods have no fresh metrics: never scaling down"
        return ("False", "StaleMetrics", text)
    return ("True", "Deciding", "every running pod is measured")


def replicas_of(deployment: Object) -> int:
    return int(deployment["spec"].get("replicas", 1))


def supply_of(snapshot: Snapshot, current: int, deadline: float, now: datetime) -> Supply:
    """Running pods past their start by uid, and the number of pods that will be ready: they load
    or wait for a node, are younger than the start-up deadline and not crash-looping.
    """
    started = [p for p in snapshot.running_pods() if is_started(p)]
    ready = sorted(p["metadata"]["uid"] for p in started if is_ready(p))
    unready = sorted(p["metadata"]["uid"] for p in started if not is_ready(p))
    waiting = [p for p in snapshot.pods if not is_started(p) and not is_deleting(p)]
    starting = [p for p in waiting if _age(p, now) < deadline and not _crashing(p)]
    return Supply(current, tuple(ready), len(starting), tuple(unready))


def load_of(
    results: ProbeResults,
    load_at: float,
    pods: Iterable[Object],
    status: Mapping[str, Any],
    clock: float,
) -> tuple[Mapping[str, int] | None, float]:
    """``status.load``, the sum over running pods, and when it was written last: both as before
    while the change is small or soon. A pod without a fresh sample counts with its last, as it
    does where the operator scales.
    """
    uids = [p["metadata"]["uid"] for p in pods]
    samples = [results.samples[uid] for uid in uids if uid in results.samples]
    old: Mapping[str, int] | None = status.get("load")
    if not any(sample.fresh(clock) for sample in samples) or clock - load_at < LOAD_SECONDS:
        return old, load_at
    total = Load(sum(s.load.running for s in samples), sum(s.load.waiting for s in samples))
    new = {"running": round(total.running), "waiting": round(total.waiting)}
    if old is not None and not _worth(
        old.get("running", 0) + old.get("waiting", 0), sum(new.values())
    ):
        return old, load_at
    return new, load_at if new == old else clock


def _worth(old: int, new: int) -> bool:
    return (old == 0) != (new == 0) or abs(new - old) >= LOAD_SHARE * max(old, 1)


def _operator_scales(policy: Autoscaling | None) -> bool:
    return policy is not None and policy.managed_by == "operator"


def _owner_events(
    resource: InferenceDeployment, snapshot: Snapshot, memory: ScalingMemory
) -> tuple[Note, ...]:
    """The Event when another party sets the count from now on, or when a scale had no effect."""
    live, spec_replicas = snapshot.deployment, resource.spec.replicas
    scales = _operator_scales(resource.spec.autoscaling)
    about = str(resource.generation)
    if live is not None and memory.operator_scales == (not scales):
        count = replicas_of(live)
        if scales:
            text = (
                f"autoscaling starts from the {count} existing pods; "
                f"spec.replicas ({spec_replicas}) has no effect now"
            )
            return (Note("ScalingTakenOver", text, about),)
        text = f"{count} → {spec_replicas} pods: autoscaling is off, spec.replicas counts"
        return (Note("ScalingHandedOver", text, about),)
    if scales and memory.spec_replicas is not None and memory.spec_replicas != spec_replicas:
        text = (
            f"spec.replicas {memory.spec_replicas} → {spec_replicas} has no effect while "
            "spec.autoscaling is set: set autoscaling.minReplicas and maxReplicas, "
            "or remove spec.autoscaling"
        )
        return (Note("ScaleIgnored", text, about),)
    return ()


def _age(pod: Object, now: datetime) -> float:
    created = str(pod["metadata"].get("creationTimestamp") or "")
    return (now - datetime.fromisoformat(created)).total_seconds() if created else 0.0


def _crashing(pod: Object) -> bool:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any(int(s.get("restartCount") or 0) >= CRASHES for s in statuses)
