"""The real API server accepts the CRD, `kubectl explain` describes it, and invalid objects are
refused.
"""

import json
from typing import Any

import pytest

from cluster.harness.apiclient import Api, ApiError, Object, eventually
from cluster.harness.cel_cases import BASE, CASES, Case, build
from cluster.harness.controlplane import ControlPlane
from cluster.harness.kubectl import kubectl

pytestmark = [pytest.mark.cluster("kubectl"), pytest.mark.usefixtures("crd")]


@pytest.fixture(scope="module")
def dry_run_namespace(api: Api) -> str:
    """One namespace for all dry runs of this module: nothing is stored in it."""
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "crd"}})
    return "crd"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_api_server_judges_the_object_as_designed(
    api: Api, dry_run_namespace: str, case: Case
) -> None:
    body: dict[str, Any] = build(case)
    body["metadata"]["namespace"] = dry_run_namespace
    if case.message is None:
        api.create(body, dryRun="All", fieldValidation="Strict")
        return
    with pytest.raises(ApiError) as refusal:
        api.create(body, dryRun="All")
    assert refusal.value.code == 422
    assert case.message in refusal.value.message


def test_no_rule_of_the_crd_is_too_costly_or_ill_formed(api: Api, crd: Object) -> None:
    seen = api.get("CustomResourceDefinition", "", crd["metadata"]["name"])
    assert not [c for c in seen["status"]["conditions"] if c["type"] == "NonStructuralSchema"]
    assert len(json.dumps(crd)) < 60_000


def test_kubectl_explain_describes_a_field(plane: ControlPlane, crd: Object) -> None:
    text = eventually(
        lambda: kubectl(plane, "explain", "inferencedeployments.spec.scheduler.safetyMargin"),
        10,
        "explain",
    )
    assert "Share of cache blocks kept free" in text


def test_kubectl_get_shows_the_state_at_a_glance(
    plane: ControlPlane, api: Api, namespace: str, crd: Object
) -> None:
    api.create({**BASE, "metadata": {"name": "demo", "namespace": namespace}})
    api.merge(
        "InferenceDeployment",
        namespace,
        "demo",
        {
            "status": {
                "replicas": 2,
                "desiredReplicas": 3,
                "load": {"waiting": 7, "running": 1},
                "conditions": [
                    {
                        "type": "Ready",
                        "status": "False",
                        "reason": "InsufficientAccelerator",
                        "message": "m",
                        "lastTransitionTime": "2026-01-01T00:00:00Z",
                    }
                ],
            }
        },
        sub="status",
    )
    header, row = kubectl(plane, "get", "idep", "-n", namespace).splitlines()
    assert header.split() == [
        "NAME",
        "READY",
        "REPLICAS",
        "DESIRED",
        "REASON",
        "MODEL",
        "QUEUE",
        "AGE",
    ]
    assert row.split()[:7] == ["demo", "False", "2", "3", "InsufficientAccelerator", "demo:", "7"]


def test_a_resource_that_no_operator_serves_says_so(
    plane: ControlPlane, api: Api, namespace: str, crd: Object
) -> None:
    api.create({**BASE, "metadata": {"name": "demo", "namespace": namespace}})
    header, row = kubectl(plane, "get", "idep", "-n", namespace).splitlines()
    assert header.split()[1:5] == ["READY", "REPLICAS", "DESIRED", "REASON"]
    assert row.split()[1:3] == ["Unknown", "NoOperator"]


def test_the_scale_subresource_reads_and_writes_replicas(
    plane: ControlPlane, api: Api, namespace: str, crd: Object
) -> None:
    api.create({**BASE, "metadata": {"name": "demo", "namespace": namespace}})
    kubectl(plane, "scale", "idep/demo", "--replicas=3", "-n", namespace)
    assert api.get("InferenceDeployment", namespace, "demo")["spec"]["replicas"] == 3
