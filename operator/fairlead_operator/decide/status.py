"""Builds a resource's status from the findings of one pass. Pure; takes only times from the
previous status.

Equal findings give an equal status, so that an unchanged resource costs no write.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fairlead_operator.decide.children.claims import mounted_claim
from fairlead_operator.decide.children.podtemplate import selector
from fairlead_operator.decide.pods.blockers import NORMAL, Blocker, printable
from fairlead_operator.decide.pods.drains import DrainedRequests
from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.decide.pods.pod import revision_of_pod
from fairlead_operator.decide.pods.startup import startup
from fairlead_operator.decide.scale.target import NO_STATES, States
from fairlead_operator.resource.kinds import Object
from fairlead_operator.resource.resource import InferenceDeployment

# What each pod of a rollout changes, apart from parts of the next four.
_STEPS = frozenset(
    {
        "replicas",
        "readyReplicas",
        "updatedReplicas",
        "drainingReplicas",
        "currentRevision",
        "startup",
    }
)
_PARTLY_STEPS = frozenset({"rollout", "blockers", "conditions", "autoscaling"})


def states_of(figures: Mapping[str, Any]) -> States:
    """What a sequence's states take, by the planned or measured figures of a capacity."""
    state_bytes, token_bytes = figures.get("stateBytesPerSequence"), figures.get("kvBytesPerToken")
    if not state_bytes:
        return NO_STATES
    if not token_bytes:
        return States(sequences=int(figures.get("fullLengthSequences") or 0))
    return States(state_bytes / token_bytes)


@dataclass(frozen=True, slots=True)
class Capacity:
    """``status.capacity``, or why there is no plan yet; without a plan only ``measured``."""

    body: Mapping[str, Any] | None = None
    reason: str = "ConfigUnavailable"
    message: str = "the model's config.json is not known yet"

    @property
    def concurrent_tokens(self) -> int:
        """Tokens that one pod holds at a time: measured once a pod has started, else planned; 0
        while they are not known.
        """
        body = self.body or {}
        token_counts = [
            body.get(name, {}).get("concurrentTokens") for name in ("measured", "planned")
        ]
        return int(token_counts[0] or token_counts[1] or 0)

    @property
    def states(self) -> States:
        """What a sequence's states take of one pod's cache, measured or else planned."""
        body = self.body or {}
        return next(
            (states_of(body[name]) for name in ("measured", "planned") if body.get(name)), NO_STATES
        )

    @property
    def connections(self) -> int:
        """Connections that one pod takes, as it reports them; 0 while none has."""
        return int((self.body or {}).get("measured", {}).get("connections") or 0)


@dataclass(frozen=True, slots=True)
class Findings:
    """The decisions of one pass and the answers of pods; the store's objects are in Snapshot."""

    desired: int
    revision: str
    strategy: str
    rollout_message: str
    served_by: str = ""  # the release
    blockers: Sequence[Blocker] = ()
    capacity: Capacity = field(default_factory=Capacity)
    drained: DrainedRequests = field(default_factory=DrainedRequests)
    canaries: frozenset[str] = frozenset()  # uids of pods that produced a token
    startups: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict
    )  # by uid: seconds of each part of the start, as the runtime reports them
    load: Mapping[str, int] | None = None
    autoscaling: Mapping[str, Any] | None = None
    scaling: tuple[str, str, str] = ("False", "NotAutoscaled", "spec.autoscaling is not set")


def status_of(
    resource: InferenceDeployment,
    snapshot: Snapshot,
    findings: Findings,
    previous: Mapping[str, Any],
    now: datetime,
) -> Object:
    """The whole status. Blockers and conditions that did not change keep their times from
    ``previous``.
    """
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    blockers = _blockers(findings, previous, stamp)
    serving = [
        p for p in snapshot.serving(findings.revision) if p["metadata"]["uid"] in findings.canaries
    ]
    current = sorted(
        {revision_of_pod(p) for p in snapshot.ready_pods()}, key=lambda r: r == findings.revision
    )
    draining = [p for p in snapshot.pods if p["metadata"].get("deletionTimestamp")]
    status: Object = {
        "observedGeneration": resource.generation,
        "replicas": len(snapshot.pods) - len(draining),
        "desiredReplicas": findings.desired,
        "readyReplicas": len(snapshot.ready_pods()),
        "updatedReplicas": sum(
            revision_of_pod(p) == findings.revision and p not in draining for p in snapshot.pods
        ),
        "drainingReplicas": len(draining),
        "selector": ",".join(f"{k}={v}" for k, v in selector(resource).items()),
        "url": _url(resource),
        "targetRevision": findings.revision,
        "rollout": {
            "phase": _phase(snapshot, findings),
            "strategyChosen": findings.strategy,
            "why": findings.rollout_message,
            "drained": findings.drained.finished,
            "aborted": findings.drained.aborted,
        },
        "blockers": blockers,
    }
    if findings.served_by:
        status["servedBy"] = findings.served_by
    if current:
        status["currentRevision"] = current[-1]
    if findings.capacity.body:
        status["capacity"] = dict(findings.capacity.body)
    if findings.load is not None:
        status["load"] = dict(findings.load)
    if findings.autoscaling is not None:
        status["autoscaling"] = dict(findings.autoscaling)
    if seconds := startup(serving, findings.startups, previous.get("startup") or {}):
        status["startup"] = dict(seconds)
    facts = _conditions(snapshot, findings, blockers, serving)
    if resource.spec.model.trust_remote_code:
        facts.append(
            (
                "RemoteCode",
                "True",
                "Trusted",
                "spec.model.trustRemoteCode is set; no model's own code is run yet",
            )
        )
    if claim := mounted_claim(resource, snapshot.children):
        text = str(claim)
        if claim.known == "Assumed":
            text += ": set modelCache.accessModes if it is another"
        facts.append(("ClaimShared", str(claim.shared), claim.known, text))
    if resource.unknown:
        fields = ", ".join(resource.unknown)
        fix = "upgrade the operator to the definition's version, or remove them"
        text = f"this operator does not know these fields and ignores them: {fields}: {fix}"
        facts.append(("SpecUnderstood", "False", "UnknownFields", text))
    status["conditions"] = [_condition(resource, *fact, previous, stamp) for fact in facts]
    return status


def invalid_status(
    generation: int, blocker: Blocker, previous: Mapping[str, Any], now: datetime
) -> Object:
    """The status of a resource with an invalid spec: the previous one, with the reason first."""
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    base = {
        k: v
        for k, v in previous.items()
        if k not in {"blockers", "challenger", "conditions", "observedGeneration"}
    }
    body = _blocker_body(blocker, previous, stamp)
    ready = {
        "type": "Ready",
        "status": "False",
        "reason": blocker.code,
        "message": blocker.message,
        "observedGeneration": generation,
        "lastTransitionTime": _since(previous, "Ready", "False", stamp),
    }
    return {**base, "observedGeneration": generation, "blockers": [body], "conditions": [ready]}


def is_progress(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two statuses differ only in how far a rollout is: in counts, in messages and in the
    stages of a normal start, and in no condition's status.
    """
    return _without_steps(old) == _without_steps(new)


def _without_steps(status: Mapping[str, Any]) -> Object:
    stable_fields = {k: v for k, v in status.items() if k not in _STEPS | _PARTLY_STEPS}
    rollout, scaling = (status.get(name) or {} for name in ("rollout", "autoscaling"))
    return stable_fields | {
        "rollout": {k: v for k, v in rollout.items() if k not in {"drained", "aborted"}},
        "blockers": [b["code"] for b in status.get("blockers") or () if b["code"] not in NORMAL],
        "conditions": [
            tuple(c.get(name) for name in ("type", "status", "observedGeneration"))
            for c in status.get("conditions") or ()
        ],
        "autoscaling": scaling.get("desired"),
    }


def _conditions(
    snapshot: Snapshot, findings: Findings, blockers: Sequence[Object], serving: Sequence[Object]
) -> list[tuple[str, str, str, str]]:
    """Type, status, reason and message of every condition."""
    first = blockers[0] if blockers else None
    count = f"{len(serving)} of {findings.desired} pods of revision {findings.revision} serve"
    ready = bool(serving)
    reason, message = (
        ("Serving", f"{count}; a canary token went through") if ready else _not_ready_reason(first)
    )
    available = len(snapshot.ready_pods()) >= findings.desired > 0
    phase = _phase(snapshot, findings)
    capacity = findings.capacity
    planned = ("Unknown", capacity.reason, capacity.message)
    if capacity.body is not None and "fits" in capacity.body:
        fits = bool(capacity.body.get("fits"))
        text = str(capacity.body.get("message", ""))
        planned = ("True", "Fits", text) if fits else ("False", "DoesNotFit", text)
    progressing = phase in {"Rolling", "Starting"}
    return [
        ("Ready", "True" if ready else "False", reason, message),
        ("Planned", *planned),
        (
            "Progressing",
            "True" if progressing else "False",
            first["code"] if progressing and first else phase,
            first["message"] if progressing and first else f"revision {findings.revision}",
        ),
        (
            "Available",
            "True" if available else "False",
            "EnoughPods" if available else "TooFewPods",
            f"{len(snapshot.ready_pods())} of {findings.desired} pods are ready",
        ),
        ("AutoscalingActive", *findings.scaling),
    ]


def _not_ready_reason(first: Object | None) -> tuple[str, str]:
    if first is None:
        return "Starting", "waiting for pods of the current revision to serve"
    return first["code"], f"{first['message']} ({first['hint']})"


def _phase(snapshot: Snapshot, findings: Findings) -> str:
    pods = [p for p in snapshot.pods if not p["metadata"].get("deletionTimestamp")]
    if findings.desired == 0:
        return "Stopped"
    if any(revision_of_pod(p) != findings.revision for p in pods):
        return "Rolling"
    return (
        "Complete" if len(snapshot.serving(findings.revision)) >= findings.desired else "Starting"
    )


def _blockers(findings: Findings, previous: Mapping[str, Any], stamp: str) -> list[Object]:
    return [_blocker_body(blocker, previous, stamp) for blocker in findings.blockers][:16]


def _blocker_body(blocker: Blocker, previous: Mapping[str, Any], stamp: str) -> Object:
    same_blockers = (
        b
        for b in previous.get("blockers") or ()
        if (b["code"], b.get("object")) == (blocker.code, blocker.object)
    )
    since = next((b["since"] for b in same_blockers), stamp)
    return {
        "code": blocker.code,
        "since": since,
        "object": blocker.object,
        "message": blocker.message,
        "hint": blocker.hint,
    }


def _condition(
    resource: InferenceDeployment,
    kind: str,
    status: str,
    reason: str,
    message: str,
    previous: Mapping[str, Any],
    stamp: str,
) -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": printable(message, 2048),
        "observedGeneration": resource.generation,
        "lastTransitionTime": _since(previous, kind, status, stamp),
    }


def reports_generation(status: Mapping[str, Any], generation: int) -> bool:
    """Whether the Ready condition is of this generation."""
    return any(
        c.get("type") == "Ready" and c.get("observedGeneration") == generation
        for c in status.get("conditions") or ()
    )


def _since(previous: Mapping[str, Any], kind: str, status: str, stamp: str) -> str:
    for condition in previous.get("conditions") or ():
        if condition.get("type") == kind and condition.get("status") == status:
            return str(condition.get("lastTransitionTime") or stamp)
    return stamp


def _url(resource: InferenceDeployment) -> str:
    port = resource.spec.service.port
    return f"http://{resource.name}.{resource.namespace}.svc" + ("" if port == 80 else f":{port}")
