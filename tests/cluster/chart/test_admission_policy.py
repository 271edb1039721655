"""The chart's admission policy: authors name only Secrets and claims that they may get."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.harness.apiclient import Api, ApiError, Object, eventually
from cluster.harness.charts import Helm, only, token_of
from cluster.harness.controlplane import ControlPlane
from cluster.harness.resources import KIND, idep

pytestmark = [pytest.mark.cluster("helm"), pytest.mark.usefixtures("crd")]
RBAC = "rbac.authorization.k8s.io"
POLICIES = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
NAMED: tuple[tuple[str, str, Object], ...] = (
    (
        "secrets",
        "model.tokenSecretRef",
        {"model": {"source": "a/b", "tokenSecretRef": {"name": "x", "key": "k"}}},
    ),
    (
        "secrets",
        "security.apiKeySecretRef",
        {"security": {"apiKeySecretRef": {"name": "x", "key": "k"}}},
    ),
    (
        "secrets",
        "podTemplate.imagePullSecrets",
        {"podTemplate": {"imagePullSecrets": [{"name": "x"}]}},
    ),
    (
        "persistentvolumeclaims",
        "modelCache.claimName",
        {"modelCache": {"type": "PVC", "claimName": "x"}},
    ),
    ("persistentvolumeclaims", "model.source", {"model": {"source": "pvc://x/a/b"}}),
    *(
        (right, "podTemplate.volumes", {"podTemplate": {"volumes": [{"name": "v", **volume}]}})
        for right, volume in (
            ("secrets", {"secret": {"secretName": "x"}}),
            ("secrets", {"projected": {"sources": [{"secret": {"name": "x"}}]}}),
            ("persistentvolumeclaims", {"persistentVolumeClaim": {"claimName": "x"}}),
        )
    ),
)


def grant(
    api: Api, namespace: str, name: str, *rules: tuple[str, str, list[str], list[str]]
) -> None:
    """A role of the author: group, resource, names and verbs of each rule."""
    meta = {"name": name, "namespace": namespace}
    body = [
        {"apiGroups": [group], "resources": [resource], "verbs": verbs}
        | ({"resourceNames": names} if names else {})
        for group, resource, names, verbs in rules
    ]
    api.create({"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": meta, "rules": body})
    subject = {"kind": "ServiceAccount", "name": "author", "namespace": namespace}
    role = {"apiGroup": RBAC, "kind": "Role", "name": name}
    binding = {"apiVersion": f"{RBAC}/v1", "kind": "RoleBinding", "metadata": meta, "roleRef": role}
    api.create({**binding, "subjects": [subject]})


@contextmanager
def policy_installed(api: Api, tmp_path: Path, namespace: str) -> Iterator[None]:
    bodies = Helm(tmp_path).render("--set", "admission.create=true", namespace=namespace)
    for kind in POLICIES:
        api.create(only(bodies, kind))
    yield
    for kind in POLICIES:
        api.delete(kind, "", only(bodies, kind)["metadata"]["name"])


def test_an_author_names_only_secrets_and_claims_of_their_own(
    plane: ControlPlane, api: Api, namespace: str, tmp_path: Path
) -> None:
    api.create(
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "author", "namespace": namespace},
        }
    )
    grant(
        api,
        namespace,
        "write",
        ("serving.fairlead.dev", "inferencedeployments", [], ["create", "patch"]),
    )
    with (
        plane.api(token_of(api, namespace, "author")) as author,
        policy_installed(api, tmp_path, namespace),
    ):

        def refusal(**spec: Any) -> str:
            try:
                author.create(idep(namespace, **spec), dryRun="All")
            except ApiError as error:
                if error.code not in {403, 422}:
                    raise
                return error.message
            return ""

        eventually(lambda: refusal(**NAMED[0][2]), 15, "the policy is in force")
        for _, path, spec in NAMED:
            assert f"{path}" in refusal(**spec), path
            assert "that you may get: name another" in refusal(**spec)
        assert refusal() == "", "a resource without such names needs no right"
        for resource in ("secrets", "persistentvolumeclaims"):
            grant(api, namespace, resource, ("", resource, ["x"], ["get"]))
        for _, path, spec in NAMED:
            eventually(lambda spec=spec: refusal(**spec) == "", 5, f"{path} may be named")  # type: ignore[misc]
        other: Object = {"security": {"apiKeySecretRef": {"name": "y", "key": "k"}}}
        assert refusal(**other), "the right is for one name"

        api.create(idep(namespace, **other))  # as the administrator
        author.merge(KIND, namespace, "chat", {"spec": {"replicas": 2}})
        with pytest.raises(ApiError, match="name another"):
            author.merge(KIND, namespace, "chat", {"spec": {"model": {"source": "pvc://y/a"}}})
        api.delete(KIND, namespace, "chat")
