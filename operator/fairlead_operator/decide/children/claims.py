"""The claim that the pods mount: on how many nodes at a time it can be, and how that is known.

Owns the choice of access modes and the blockers for what they rule out. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fairlead_operator.decide.children.manifests import creates_claim, max_replicas, revision_of
from fairlead_operator.decide.children.podtemplate import cache_claim
from fairlead_operator.decide.pods.blockers import Blocker, blocker
from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.decide.pods.pod import is_ready, revision_of_pod
from fairlead_operator.resource.kinds import CLAIM, Object
from fairlead_operator.resource.resource import InferenceDeployment

_ON_MANY_NODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})


@dataclass(frozen=True, slots=True)
class MountedClaim:
    """The claim with a pod's weights. ``known``: from the spec, from the claim itself, or assumed.
    ``exists``: False for a claim that the operator makes and that is not there yet.
    """

    name: str
    modes: tuple[str, ...]
    known: Literal["Declared", "Observed", "Assumed"]
    exists: bool = True

    @property
    def shared(self) -> bool:
        """Whether pods on several nodes can mount it at a time."""
        return any(mode in _ON_MANY_NODES for mode in self.modes)

    def __str__(self) -> str:
        how = {"Declared": "", "Observed": "", "Assumed": "assumed to be "}[self.known]
        return f"claim {self.name} is {how}{', '.join(self.modes)}"


def mounted_claim(resource: InferenceDeployment, children: Iterable[Object]) -> MountedClaim | None:
    """The claim with the weights; None where no pod mounts one."""
    cache, source = resource.spec.model_cache, resource.spec.model.origin
    if source.kind == "pvc":
        name = source.claim
    elif source.kind == "hf" and cache.type == "PVC":
        name = cache_claim(resource)
    else:
        return None
    is_managed = creates_claim(resource)
    live = next(
        (c for c in children if c["kind"] == CLAIM.name and c["metadata"]["name"] == name), None
    )
    exists = live is not None or not is_managed
    if live is not None and (modes := tuple(live["spec"].get("accessModes") or ())):
        return MountedClaim(name, modes, "Observed", exists)
    if cache.access_modes:
        return MountedClaim(name, cache.access_modes, "Declared", exists)
    if is_managed:
        return MountedClaim(name, ("ReadWriteOnce",), "Declared", exists)
    return MountedClaim(name, ("ReadWriteMany",), "Assumed", exists)


def new_claim_blockers(resource: InferenceDeployment, snapshot: Snapshot) -> list[Blocker]:
    """The blocker for a claim still to be made that could not serve all pods: access modes cannot
    be changed later, so nothing is written.
    """
    claim = mounted_claim(resource, snapshot.children)
    if claim is None or claim.exists or claim.shared or max_replicas(resource) <= 1:
        return []
    return [_share_blocker(claim, f"{max_replicas(resource)} pods cannot share it")]


def claim_blockers(
    resource: InferenceDeployment, snapshot: Snapshot, revision: str, replicas: int
) -> list[Blocker]:
    """The blocker for pods that wait for a claim which another node has."""
    claim = mounted_claim(resource, snapshot.children)
    if claim is None or claim.shared or not claim.exists:
        return []
    current = [p for p in snapshot.pods if revision_of_pod(p) == revision]
    if replicas > 1 and len(snapshot.ready_pods()) < replicas:
        return [_share_blocker(claim, f"{replicas} pods share it on one node only")]
    if (
        resource.spec.rollout.strategy == "Surge"
        and len(current) < len(snapshot.pods)
        and not all(is_ready(p) for p in current)
    ):
        hint = "Set rollout.strategy to Auto, or take a claim that several nodes can mount."
        message = f"{claim}: an extra pod on another node cannot mount it"
        return [blocker("SurgeBlocked", f"{CLAIM.name}/{claim.name}", message, hint)]
    return []


def surge_obstacle(resource: InferenceDeployment, snapshot: Snapshot, revision: str) -> str:
    """The reason why an extra pod of a rollout might never start; "" where the claim is no
    obstacle.
    """
    claim = mounted_claim(resource, snapshot.children)
    live = snapshot.deployment
    if claim is None or claim.shared or live is None:
        return ""
    if revision_of(live) == revision and not any(
        revision_of_pod(p) != revision for p in snapshot.pods
    ):
        return ""
    return f"{claim}, an extra pod on another node could not mount it"


def _share_blocker(claim: MountedClaim, effect: str) -> Blocker:
    return blocker("ClaimNotShared", f"{CLAIM.name}/{claim.name}", f"{claim}: {effect}")
