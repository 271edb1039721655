"""Resources of an author who wants more rights than they have: each is refused or does no harm.

The author may write InferenceDeployments and nothing else; the namespace holds objects of others.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness.apiclient import Api, ApiError, Object, eventually
from cluster.harness.cel_cases import CASES, build
from cluster.harness.controlplane import ControlPlane
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import KIND, current, idep, owned_by, status

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("collector", "nodes")]
NAMESPACE = "hostile"
IMAGE = "registry.test/fairlead-runtime:1"
FOREIGN_OBJECTS: tuple[tuple[str, str, Object], ...] = (
    ("v1", "Service", {"spec": {"selector": {"app": "db"}, "ports": [{"port": 80}]}}),
    (
        "apps/v1",
        "Deployment",
        {
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": {"app": "db"}},
                "template": {
                    "metadata": {"labels": {"app": "db"}},
                    "spec": {"containers": [{"name": "c", "image": "x"}]},
                },
            }
        },
    ),
    (
        "networking.k8s.io/v1",
        "NetworkPolicy",
        {"spec": {"podSelector": {}, "policyTypes": ["Ingress"]}},
    ),
    (
        "policy/v1",
        "PodDisruptionBudget",
        {"spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"app": "db"}}}},
    ),
    ("v1", "Secret", {"stringData": {"password": "hunter2"}}),
    ("v1", "ConfigMap", {"data": {"a": "b"}}),
)


@pytest.fixture(scope="module")
def mallory(plane: ControlPlane, api: Api, crd: Object) -> Iterator[Api]:
    """The hostile author's client, in a restricted namespace with other people's objects in it."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.create(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    )
    for version, kind, rest in FOREIGN_OBJECTS:
        api.create({"apiVersion": version, "kind": kind, "metadata": _meta("db"), **rest})
    rules = [
        {
            "apiGroups": ["serving.fairlead.dev"],
            "resources": ["inferencedeployments"],
            "verbs": ["create", "get", "patch"],
        }
    ]
    rbac = "rbac.authorization.k8s.io"
    api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta("mallory")})
    api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta("admin")})
    api.create(
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": _meta("mallory"), "rules": rules}
    )
    api.create(
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": _meta("mallory"),
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "mallory"},
            "subjects": [{"kind": "ServiceAccount", "name": "mallory", "namespace": NAMESPACE}],
        }
    )
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/mallory/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    with plane.api(api.call("POST", path, request)["status"]["token"]) as client:
        yield client


def _meta(name: str) -> Object:
    return {"name": name, "namespace": NAMESPACE}


@pytest.fixture(scope="module", autouse=True)
def operator(plane: ControlPlane, mallory: Api) -> Iterator[OperatorProcess]:
    with OperatorProcess(plane, (NAMESPACE,)) as started:
        yield started
        assert not started.tracebacks()


def hostile(
    label: str, name: str = "evil", meta: Object | None = None, **spec: Any
) -> tuple[str, Object]:
    body = idep(NAMESPACE, name, **spec)
    body["metadata"] |= meta or {}
    return label, body


OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "db", "uid": "", "controller": True}
LONG = "x" * 200_000
ACCEPTED = dict(
    (
        hostile("the name of another's Service, Deployment and policies", "db"),
        hostile("another image", engine={"image": "evil.test/miner:1"}),
        hostile("an image that only begins like ours", engine={"image": IMAGE + ".evil"}),
        hostile("another's service account", podTemplate={"serviceAccountName": "admin"}),
        hostile(
            "the default service account by name", podTemplate={"serviceAccountName": "default"}
        ),
        hostile(
            "a node-critical priority", podTemplate={"priorityClassName": "system-node-critical"}
        ),
        hostile("code of a model", model={"trustRemoteCode": True}),
        hostile(
            "a claim of its own", modelCache={"type": "PVC", "size": "1Ti"}, model={"source": "a/b"}
        ),
        hostile("a model that is an address", model={"source": "127.0.0.1/admin"}),
        hostile(
            "a model that is the metadata service", model={"source": "hf://169.254.169.254/latest"}
        ),
        hostile("a path of the machine", model={"source": "file:///proc/self/environ"}),
        hostile("a path of the token", model={"source": "file:///var/run/secrets/token"}),
        hostile("another's claim", model={"source": "pvc://db/data"}),
        hostile(
            "another's Secret as keys",
            security={"apiKeySecretRef": {"name": "db", "key": "password"}},
        ),
        hostile(
            "another's Secret as hub token",
            model={"source": "a/b", "tokenSecretRef": {"name": "db", "key": "p"}},
        ),
        hostile("every toleration", podTemplate={"tolerations": [{"operator": "Exists"}]}),
        hostile(
            "the control plane's nodes",
            podTemplate={"nodeSelector": {"node-role.kubernetes.io/control-plane": ""}},
        ),
        hostile("a shell in the served name's place", model={"servedName": "a/b:c@d+e"}),
        hostile(
            "a shell in the environment",
            podTemplate={"env": [{"name": "X", "value": "$(rm -rf /); `id`"}]},
        ),
        hostile(
            "an expansion in the environment",
            podTemplate={"env": [{"name": "X", "value": "$(HOME)"}]},
        ),
        hostile(
            "control characters in an annotation",
            podTemplate={"annotations": {"description": "\x1b[31m\nevil: true"}},
        ),
        hostile(
            "the label by which another's Service picks pods", podTemplate={"labels": {"app": "db"}}
        ),
        hostile(
            "it in a crowd of good ones",
            podTemplate={"labels": {"team": "x", "app": "db", "owner": "y"}},
        ),
        hostile(
            "a label of a database's operator", podTemplate={"labels": {"cnpg.io/cluster": "db"}}
        ),
        hostile(
            "a foreign network", podTemplate={"annotations": {"k8s.v1.cni.cncf.io/networks": "db"}}
        ),
        hostile(
            "a foreign address",
            podTemplate={"annotations": {"cni.projectcalico.org/ipAddrs": '["10.0.0.1"]'}},
        ),
        hostile(
            "a foreign sidecar with secrets",
            podTemplate={"annotations": {"vault.hashicorp.com/agent-inject": "true"}},
        ),
        hostile("an owner that is another's", meta={"ownerReferences": [OWNER]}),
        hostile("a finalizer of its own", meta={"finalizers": ["evil.test/stay"]}),
        hostile("our labels on the resource", meta={"labels": {"serving.fairlead.dev/name": "db"}}),
        hostile("a huge annotation", meta={"annotations": {"a": LONG}}),
        hostile(
            "a thousand pods", replicas=1000, podTemplate={"nodeSelector": {"type": "nowhere"}}
        ),
        hostile("a status of its own making", meta={}, paused=False),
    )
)
ACCEPTED["a status of its own making"]["status"] = {
    "blockers": [{"code": "x\x1b[2J", "message": "m"}],
    "replicas": 7,
}
REFUSED = [case for case in CASES if case.message is not None]


def versions(api: Api) -> dict[str, str]:
    return {
        kind: api.get(kind, NAMESPACE, "db")["metadata"]["resourceVersion"]
        for _, kind, _ in FOREIGN_OBJECTS
    }


def test_there_are_at_least_sixty_cases() -> None:
    assert len(ACCEPTED) + len(REFUSED) >= 60


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_the_schema_forbids_is_refused_by_the_api_server(mallory: Api, case: Any) -> None:
    body = build(case)
    body["metadata"]["namespace"] = NAMESPACE
    with pytest.raises(ApiError) as refusal:
        mallory.create(body)
    assert refusal.value.code == 422


@pytest.mark.parametrize("label", ACCEPTED)
def test_what_is_accepted_does_no_harm(
    api: Api, mallory: Api, operator: OperatorProcess, label: str
) -> None:
    before = versions(api)
    body = ACCEPTED[label]
    for reference in body["metadata"].get("ownerReferences", ()):
        reference["uid"] = api.get(reference["kind"], NAMESPACE, reference["name"])["metadata"][
            "uid"
        ]
    name = body["metadata"]["name"]
    owner = mallory.create(body)
    eventually(lambda: current(api, NAMESPACE, name), 10, "the status is current")
    try:
        assert versions(api) == before, "an object of another owner was changed"
        seen = status(api, NAMESPACE, name)
        assert "\x1b" not in str(seen)
        for kind in (
            "Deployment",
            "Service",
            "NetworkPolicy",
            "PodDisruptionBudget",
            "PersistentVolumeClaim",
        ):
            for child in api.items(kind, NAMESPACE):
                if child["metadata"]["name"] != "db":
                    assert owned_by(child, owner), (
                        f"{kind} {child['metadata']['name']} has another owner"
                    )
        for deployment in api.items("Deployment", NAMESPACE):
            if owned_by(deployment, owner):
                _harmless(deployment["spec"]["template"]["spec"])
                _not_selected(api, deployment["spec"]["template"]["metadata"])
        assert api.items("PersistentVolumeClaim", NAMESPACE) == []
    finally:
        api.merge(KIND, NAMESPACE, name, {"metadata": {"finalizers": None}})
        api.delete(KIND, NAMESPACE, name)
        mine = {"uid": owner["metadata"]["uid"]}
        eventually(
            lambda: (
                not any(owned_by(d, {"metadata": mine}) for d in api.items("Deployment", NAMESPACE))
            ),
            20,
            "gone",
        )


def _not_selected(api: Api, meta: Object) -> None:
    """No selector of another owner matches these labels, and no agent reads these annotations."""
    selectors = [api.get("Service", NAMESPACE, "db")["spec"]["selector"]]
    for kind in ("Deployment", "PodDisruptionBudget"):
        selectors.append(api.get(kind, NAMESPACE, "db")["spec"]["selector"]["matchLabels"])
    for selector in selectors:
        assert not selector.items() <= meta["labels"].items()
    ours = {
        "kubectl.kubernetes.io/default-container",
        "traffic.sidecar.istio.io/excludeInboundPorts",
        "config.linkerd.io/skip-inbound-ports",
        "description",
    }
    assert set(meta["annotations"]) <= ours


def _harmless(pod: Object) -> None:
    """The pod has no identity and no privilege, and only our image and command."""
    assert pod.get("serviceAccountName", "default") in {"default", ""}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert not pod.get("priorityClassName")
    for volume in pod["volumes"]:
        assert set(volume) - {"name"} <= {"emptyDir", "secret", "persistentVolumeClaim"}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container["image"] == IMAGE
        assert container["command"] == ["fairlead"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert "--trust-remote-code" not in container["args"]
