"""Whether a new revision rolls out by surge or recreate, and why. Pure.

The choice is made when the template changes and kept until the next change, so that a quota whose
usage varies does not rewrite the Deployment.
"""

from collections.abc import Iterable

from fairlead_operator.decide.children.manifests import Strategy, revision_of
from fairlead_operator.decide.pods.observed import Observed
from fairlead_operator.decide.pods.pod import revision_of_pod
from fairlead_operator.resource.fields import Quantity
from fairlead_operator.resource.kinds import Object
from fairlead_operator.resource.resource import InferenceDeployment


def choose(
    resource: InferenceDeployment, seen: Observed, revision: str, before: str
) -> tuple[Strategy, str]:
    """The strategy and its reason. ``revision`` is the target's, ``before`` the last reason."""
    rollout, accelerator = resource.spec.rollout, resource.spec.resources.accelerator
    if rollout.strategy != "Auto":
        return rollout.strategy, f"rollout.strategy is {rollout.strategy}"
    if accelerator.count == 0:
        return "Surge", "no accelerator is needed"
    if waiting := _waiting_for_accelerator(seen, revision, accelerator.resource_name):
        return "Recreate", waiting
    live = seen.deployment
    if live is not None and revision_of(live) == revision:
        strategy: Strategy = (
            "Recreate" if live["spec"]["strategy"]["type"] == "Recreate" else "Surge"
        )
        return strategy, before or "as chosen when the template changed"
    free = _free_in_quota(seen.quotas, accelerator.resource_name)
    needed = accelerator.count * max(1, rollout.max_surge)
    if free is not None and free < needed:
        shortage = f"the quota leaves {free} {accelerator.resource_name}, a surge needs {needed}"
        return "Recreate", shortage
    return "Surge", "neither quota nor pods show a shortage of accelerators"


def _waiting_for_accelerator(seen: Observed, revision: str, name: str) -> str:
    """Which new pod waits for an accelerator while old pods exist; "" when none does."""
    if all(revision_of_pod(p) == revision for p in seen.pods):
        return ""
    for pod in seen.pods:
        if revision_of_pod(pod) != revision:
            continue
        for condition in (pod.get("status") or {}).get("conditions") or ():
            unscheduled = (
                condition.get("type") == "PodScheduled" and condition.get("status") == "False"
            )
            if unscheduled and f"Insufficient {name}" in str(condition.get("message", "")):
                return f"pod {pod['metadata']['name']} found no free {name}"
    return ""


def _free_in_quota(quotas: Iterable[Object], name: str) -> int | None:
    """What the tightest quota leaves of a resource; None when no quota limits it."""
    left = []
    for quota in quotas:
        status = quota.get("status") or {}
        hard = (status.get("hard") or {}).get(f"requests.{name}")
        used = (status.get("used") or {}).get(f"requests.{name}", "0")
        if hard is not None:
            left.append(int(Quantity(hard).exact - Quantity(used).exact))
    return min(left, default=None)
