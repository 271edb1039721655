"""The real API server accepts what the operator renders, in a namespace that enforces Pod
Security "restricted".
"""

import pytest

from cluster.harness.apiclient import Api, Object
from fairlead_operator.decide.children.diff import diff
from fairlead_operator.decide.children.manifests import SURGE, Replacement, render
from fairlead_operator.decide.children.rollout import ONE_BY_ONE, RECREATE
from fairlead_operator.resource.resource import InferenceDeployment
from support.operator_bodies import AFFINITY, SETTINGS, VOLUMES, resource_body

pytestmark = pytest.mark.cluster

FULL: Object = {
    "model": {
        "source": "owner/name",
        "revision": "abc",
        "tokenSecretRef": {"name": "hub", "key": "token"},
    },
    "engine": {"tensorParallel": 1, "maxModelLen": 4096, "dtype": "bfloat16"},
    "cache": {"cpuOffloadSpace": 1.5, "dtype": "auto"},
    "resources": {
        "accelerator": {"count": 1, "memory": "80Gi", "nodeSelector": {"gpu": "h200"}},
        "cpu": "500m",
    },
    "autoscaling": {"minReplicas": 1, "maxReplicas": 4},
    "rollout": {"maxSurge": 2, "maxUnavailable": 1, "progressDeadlineSeconds": 60},
    "modelCache": {"type": "PVC", "size": "50Gi"},
    "service": {
        "type": "NodePort",
        "port": 8080,
        "annotations": {"metallb.io/address-pool": "a"},
    },
    "security": {"apiKeySecretRef": {"name": "keys", "key": "list"}, "egressPorts": [15012]},
    "podTemplate": {
        "labels": {"team": "x"},
        "annotations": {"note": "y"},
        "nodeSelector": {"zone": "a"},
        "tolerations": [
            {"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        ],
        "topologySpread": [
            {"topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "priorityClassName": "system-node-critical",
        "serviceAccountName": "default",
        "imagePullSecrets": [{"name": "pull"}],
        "env": [{"name": "A", "value": "1"}],
        "schedulerName": "default-scheduler",
        "affinity": AFFINITY,
        "volumes": VOLUMES,
        "volumeMounts": [{"name": "data", "mountPath": "/mnt/data", "subPath": "a"}],
    },
}
VARIANTS: dict[str, Object] = {
    "demo on a CPU": {},
    "everything set": FULL,
    "a model in a claim": {"model": {"source": "pvc://weights/llama"}},
    "a path in the image": {"model": {"source": "file:///opt/model"}},
    "a shared claim that exists": {
        "model": {"source": "owner/name"},
        "modelCache": {"type": "PVC", "claimName": "shared"},
    },
}


def rendered(namespace: str, replacement: Replacement, spec: Object) -> list[Object]:
    body = resource_body(**spec)
    body["metadata"] |= {"namespace": namespace, "uid": "00000000-0000-0000-0000-000000000001"}
    return render(InferenceDeployment.from_body(body), SETTINGS, 2, replacement)


@pytest.mark.parametrize("replacement", [SURGE, ONE_BY_ONE, RECREATE], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_child_is_accepted_and_its_stored_form_shows_no_difference(
    api: Api, namespace: str, variant: str, replacement: Replacement
) -> None:
    wanted = rendered(namespace, replacement, VARIANTS[variant])
    stored = []
    for manifest in wanted:
        answer = api.apply(manifest, "fairlead-operator", dryRun="All", fieldValidation="Strict")
        stored.append(answer)
    writes = diff(wanted, stored, "00000000-0000-0000-0000-000000000001")
    assert [(one.manifest["kind"], one.reason) for one in writes.apply] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pod_is_admitted_as_restricted(api: Api, namespace: str, variant: str) -> None:
    for manifest in rendered(namespace, SURGE, VARIANTS[variant]):
        if manifest["kind"] == "Deployment":
            template = manifest["spec"]["template"]
            body = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {**template["metadata"], "name": "p", "namespace": namespace},
                "spec": {**template["spec"], "priorityClassName": ""},
            }
            api.create(body, dryRun="All", fieldValidation="Strict")
