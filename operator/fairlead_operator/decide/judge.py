"""The judgement of one pass: all blockers of a resource, and its plan beside what pods measured.
Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairlead_operator.decide.children import claims
from fairlead_operator.decide.children.capacity import PlanError, capacity_of, with_measured
from fairlead_operator.decide.pods import blockers, downloads
from fairlead_operator.decide.pods.blockers import Blocker, blocker
from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.status import Capacity
from fairlead_operator.resource.kinds import RESOURCE, Object
from fairlead_operator.resource.resource import InferenceDeployment


def judge(
    resource: InferenceDeployment,
    snapshot: Snapshot,
    results: ProbeResults,
    revision: str,
    replicas: int,
    capacity: Capacity,
    refusals: Sequence[Blocker],
    status: Mapping[str, Any],
) -> list[Blocker]:
    """All blockers at this moment, most important first. ``status``: as it was written last."""
    about = f"{RESOURCE.name}/{resource.name}"
    reasons = list(refusals)
    if replicas == 0:
        return sorted([*reasons, blocker("NoReplicas", about, "spec.replicas is 0")])
    live = snapshot.deployment
    surging = live is not None and live["spec"]["strategy"]["type"] != "Recreate"
    reasons += blockers.find(
        revision=revision,
        pods=snapshot.pods,
        deployment=live,
        events=snapshot.events,
        surging=surging,
        downloads=downloads.messages(results.downloads, snapshot.pods, status),
    )
    reasons += blockers.failed_pod_blockers(snapshot.failed, snapshot.pods, revision, replicas)
    reasons += claims.claim_blockers(resource, snapshot, revision, replicas)
    body = capacity.body
    if body is not None and body.get("fits") is False and not snapshot.ready_pods():
        reasons.append(blocker("DoesNotFit", about, str(body.get("message", ""))))
    reasons += _canary_blockers(about, snapshot.serving(revision), results, first=not reasons)
    return sorted(reasons)


def _canary_blockers(
    about: str, serving: Sequence[Object], results: ProbeResults, *, first: bool
) -> list[Blocker]:
    """The serving pods whose canary failed. ``first``: nothing else blocks, so that without a token
    of any pod the resource still starts.
    """
    reasons = []
    for pod in serving:
        if failure := results.canary_failures.get(pod["metadata"]["uid"]):
            reasons.append(blocker("CanaryFailed", f"Pod/{pod['metadata']['name']}", failure))
    is_generating = any(p["metadata"]["uid"] in results.canaries for p in serving)
    if first and not reasons and not is_generating:
        text = (
            "waiting for the first token of a ready pod"
            if serving
            else "no pod is in the Service's endpoints yet"
        )
        reasons.append(blocker("Starting", about, text))
    return reasons


def with_measurement(capacity: Capacity, results: ProbeResults) -> Capacity:
    """The plan beside what a pod measured. Without a plan, what it measured stands alone."""
    if not results.measured:
        return capacity
    return replace(capacity, body=with_measured(capacity.body or {}, results.measured))


def plan_capacity(
    resource: InferenceDeployment, config: Mapping[str, Any] | None, config_error: tuple[str, str]
) -> Capacity:
    """The plan for the model of this config.json. ``config_error``: reason and message where there
    is none.
    """
    if config is None:
        return Capacity(None, *config_error)
    try:
        return Capacity(capacity_of(config, resource))
    except PlanError as error:
        return Capacity(None, error.reason, str(error))
