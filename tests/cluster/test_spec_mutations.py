"""Hundreds of changes of one resource, some invalid: the API server refuses a change, or it is
applied and reverted.
"""

import random
import time
from collections import Counter
from collections.abc import Callable

import pytest

from cluster.harness.apiclient import Api, ApiError, Object, eventually
from cluster.harness.case_selection import share
from cluster.harness.controlplane import ControlPlane
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import CHILDREN, KIND, current, idep, status
from cluster.harness.spec_mutations import fields, mutation, patched
from fairlead_operator.decide.children.diff import diff
from fairlead_operator.decide.children.manifests import Replacement, render
from fairlead_operator.decide.children.podtemplate import pod_template
from fairlead_operator.decide.children.rollout import ONE_BY_ONE, RECREATE
from fairlead_operator.decide.children.upgrade import DEADLINES_MARK, deadlines_of, marks
from fairlead_operator.resource.fields import ResourceError
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd", "nodes")]
STEPS = 50  # changes per seed; there are ten seeds
SETTINGS = Settings(runtime_image="registry.test/fairlead-runtime:1", hub="http://127.0.0.1:9")
REFUSAL_CODES = {
    "NotAllowed",
    "WriteRefused",
}  # refusals by the chart or by the API server's rules for the children only


def missing(api: Api, namespace: str) -> str:
    """What the cluster lacks of the spec; "" when it is applied, or refused with a blocker."""
    if not current(api, namespace):
        return "the status is old"
    body, seen = api.get(KIND, namespace, "chat"), status(api, namespace)
    if REFUSAL_CODES & {b["code"] for b in seen["blockers"]} or body["spec"]["paused"]:
        return ""
    resource = InferenceDeployment.from_body(body)
    children = [child for kind in CHILDREN if (child := api.find(kind, namespace, "chat"))]
    deployment = next((c for c in children if c["kind"] == "Deployment"), None)
    if deployment is None:
        return "no Deployment"
    count, policy = deployment["spec"]["replicas"], resource.spec.autoscaling
    if policy is None or policy.managed_by == "external":
        count = resource.spec.replicas
    elif not policy.min_replicas <= count <= policy.max_replicas:
        return f"{count} replicas"
    rollout = resource.spec.rollout
    surge = Replacement("RollingUpdate", rollout.max_surge, rollout.max_unavailable)
    one_by_one = ONE_BY_ONE if rollout.max_surge else surge
    replacements = {"Surge": surge, "OneByOne": one_by_one, "Recreate": RECREATE}
    replacement = replacements[seen["rollout"]["strategyChosen"]]
    # New deadlines come with the next revision: until then the template holds the marked ones.
    carried = marks(deployment)
    template = pod_template(resource, SETTINGS, deadlines_of(carried[DEADLINES_MARK]))
    wanted = render(resource, SETTINGS, count, replacement, template=template, marks=carried)
    writes = diff(wanted, children, resource.uid)
    if (
        seen["desiredReplicas"] != count
        or seen["observedGeneration"] != body["metadata"]["generation"]
    ):
        return "the status is about another count"
    reasons = [apply.reason for apply in writes.apply]
    reasons += [delete.reason for delete in writes.delete]
    return str(reasons or "")[2:-2]


def revert(api: Api, namespace: str, spec: Object) -> None:
    api.json_patch(KIND, namespace, "chat", [{"op": "replace", "path": "/spec", "value": spec}])
    eventually(lambda: not missing(api, namespace), 10, "reverted")
    assert not REFUSAL_CODES & {b["code"] for b in status(api, namespace)["blockers"]}


def server_refusal(api: Api, namespace: str, patch: Object) -> str:
    """The API server's refusal of this patch of the spec; "" when it accepts it."""
    path = f"/apis/serving.fairlead.dev/v1alpha1/namespaces/{namespace}/inferencedeployments/chat"
    try:
        api.call(
            "PATCH", path, {"spec": patch}, "application/merge-patch+json", fieldValidation="Strict"
        )
    except ApiError as error:
        if error.code not in {400, 422}:
            raise
        return error.message
    return ""


def operator_refusal(body: Object) -> str:
    """Why the operator itself would refuse this body; "" when it would not."""
    try:
        InferenceDeployment.from_body(body)
    except ResourceError as error:
        return str(error)
    return ""


def mutate(api: Api, namespace: str, seed: int, explain: Callable[[], str]) -> Counter[str]:
    """STEPS changes one after the other, then back to the first spec; counts the outcomes."""
    rng, all_fields, outcomes = random.Random(seed), fields(), Counter[str]()
    origin, revision = (
        api.get(KIND, namespace, "chat")["spec"],
        status(api, namespace)["targetRevision"],
    )
    for number in range(STEPS):
        patch, body = mutation(rng, all_fields), api.get(KIND, namespace, "chat")
        wanted = {**body, "spec": patched(body["spec"], patch)}
        what = f"seed {seed}, step {number}: {patch}"
        why, refusal = operator_refusal(wanted), server_refusal(api, namespace, patch)
        assert bool(why) == bool(refusal), f"{what}\nthe operator: {why}\nthe API server: {refusal}"
        if refusal:
            outcomes["refused"] += 1
            continue
        try:
            eventually(lambda: not missing(api, namespace), 10, "reached")
        except AssertionError as error:
            raise AssertionError(f"{what}: {missing(api, namespace)}\n{explain()}") from error
        codes = {b["code"] for b in status(api, namespace)["blockers"]}
        not_applied = bool(wanted["spec"].get("paused") or REFUSAL_CODES & codes)
        outcomes["reported" if not_applied else "applied"] += 1
        if not_applied:
            revert(api, namespace, body["spec"])
    revert(api, namespace, origin)
    assert status(api, namespace)["targetRevision"] == revision
    return outcomes


@pytest.mark.timeout(1800)
def test_each_change_of_a_resource_is_refused_or_applied_and_can_be_reverted(
    plane: ControlPlane, api: Api, namespace: str
) -> None:
    began, outcomes = time.monotonic(), Counter[str]()
    with OperatorProcess(plane, (namespace,)) as operator:
        first = operator.process
        api.create(idep(namespace, replicas=2, podTemplate={"nodeSelector": {"type": "nowhere"}}))
        eventually(lambda: not missing(api, namespace), 10, "created")
        for seed in share(range(10)):
            outcomes += mutate(api, namespace, seed, operator.tail)
        assert operator.process is first
        assert not operator.tracebacks()
    print(f"{outcomes.total()} steps in {time.monotonic() - began:.0f} s: {dict(outcomes)}")
    assert outcomes["refused"] >= 0.1 * outcomes.total()
    assert outcomes["applied"] >= 0.3 * outcomes.total()
