"""A small synchronous client of the API server for tests: plain dicts in, plain dicts out.

Independent of the operator's own client, so that a bug there stays visible. Never retries.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import httpx

from support.full import LONG_FORM

LIMIT = 120.0  # seconds after which a run is broken, however slow the machine is
ASKED_AGAIN = 10  # times at most, client-go's number
RAREST = 0.5  # seconds between two looks
Object = dict[str, Any]
T = TypeVar("T")

# Plural and group/version of every kind the tests touch.
KINDS: Mapping[str, tuple[str, str]] = {
    "InferenceDeployment": ("serving.fairlead.dev/v1alpha1", "inferencedeployments"),
    "CustomResourceDefinition": ("apiextensions.k8s.io/v1", "customresourcedefinitions"),
    "Deployment": ("apps/v1", "deployments"),
    "ReplicaSet": ("apps/v1", "replicasets"),
    "Pod": ("v1", "pods"),
    "Service": ("v1", "services"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "Secret": ("v1", "secrets"),
    "ConfigMap": ("v1", "configmaps"),
    "Event": ("v1", "events"),
    "Namespace": ("v1", "namespaces"),
    "Node": ("v1", "nodes"),
    "PersistentVolume": ("v1", "persistentvolumes"),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims"),
    "ResourceQuota": ("v1", "resourcequotas"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "EndpointSlice": ("discovery.k8s.io/v1", "endpointslices"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    "HorizontalPodAutoscaler": ("autoscaling/v2", "horizontalpodautoscalers"),
    "Role": ("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", "rolebindings"),
    "ClusterRole": ("rbac.authorization.k8s.io/v1", "clusterroles"),
    "ClusterRoleBinding": ("rbac.authorization.k8s.io/v1", "clusterrolebindings"),
    "ValidatingAdmissionPolicy": ("admissionregistration.k8s.io/v1", "validatingadmissionpolicies"),
    "ValidatingAdmissionPolicyBinding": (
        "admissionregistration.k8s.io/v1",
        "validatingadmissionpolicybindings",
    ),
}
CLUSTER_SCOPED = {
    "CustomResourceDefinition",
    "Namespace",
    "Node",
    "PersistentVolume",
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}


class ApiError(Exception):
    """An answer of 400 or above: ``code``, ``reason`` and the server's own ``message``."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code, self.reason, self.message = code, reason, message


def path_of(kind: str, namespace: str = "", name: str = "", sub: str = "") -> str:
    """The URL path of a collection, an object or its subresource."""
    version, plural = KINDS[kind]
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    scope = "" if kind in CLUSTER_SCOPED or not namespace else f"/namespaces/{namespace}"
    return root + scope + f"/{plural}" + (f"/{name}" if name else "") + (f"/{sub}" if sub else "")


class Api:
    """A client of the API server with one identity."""

    def __init__(self, url: str, token: str, ca: str) -> None:
        import ssl

        context = ssl.create_default_context(cafile=ca)
        self.http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, verify=context, timeout=20
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        **query: str,
    ) -> Any:
        """One request; the decoded answer, or ApiError. A server that says when to ask again is
        asked again then, as client-go does: the storage of a new kind takes a while.
        """
        content = None if body is None else json.dumps(body).encode()
        for left in reversed(range(ASKED_AGAIN + 1)):
            answer = self.http.request(
                method, path, content=content, params=query, headers={"Content-Type": content_type}
            )
            if not left or answer.status_code != 429 or "retry-after" not in answer.headers:
                break
            time.sleep(float(answer.headers["retry-after"]))
        if answer.status_code >= 400:
            try:
                status = answer.json()
            except ValueError:
                status = {"message": answer.text}
            raise ApiError(answer.status_code, status.get("reason", ""), status.get("message", ""))
        return answer.json() if answer.content[:1] in {b"{", b"["} else answer.text

    def get(self, kind: str, namespace: str, name: str) -> Object:
        body: Object = self.call("GET", path_of(kind, namespace, name))
        return body

    def find(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object, or None if it does not exist."""
        try:
            return self.get(kind, namespace, name)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def items(self, kind: str, namespace: str = "", **query: str) -> list[Object]:
        bodies: list[Object] = self.call("GET", path_of(kind, namespace), **query)["items"]
        return bodies

    def create(self, body: Object, **query: str) -> Object:
        answer: Object = self.call(
            "POST", path_of(body["kind"], body["metadata"].get("namespace", "")), body, **query
        )
        return answer

    def apply(self, body: Object, manager: str = "tests", **query: str) -> Object:
        """Server-side apply."""
        meta = body["metadata"]
        answer: Object = self.call(
            "PATCH",
            path_of(body["kind"], meta.get("namespace", ""), meta["name"]),
            body,
            "application/apply-patch+yaml",
            fieldManager=manager,
            **query,
        )
        return answer

    def merge(self, kind: str, namespace: str, name: str, patch: Object, sub: str = "") -> Object:
        answer: Object = self.call(
            "PATCH", path_of(kind, namespace, name, sub), patch, "application/merge-patch+json"
        )
        return answer

    def json_patch(self, kind: str, namespace: str, name: str, patch: list[Object]) -> Object:
        answer: Object = self.call(
            "PATCH", path_of(kind, namespace, name), patch, "application/json-patch+json"
        )
        return answer

    def delete(self, kind: str, namespace: str, name: str, **query: str) -> None:
        self.call("DELETE", path_of(kind, namespace, name), **query)


def eventually(look: Callable[[], T | None], within: float, what: str, every: float = 0.05) -> T:
    """The first true result of ``look``; raises AssertionError with ``what`` when there is none.

    ``within`` is a figure in seconds that only the long form checks: the short form waits LIMIT, so
    that it does not depend on the machine's speed. ``every``: seconds between two looks; they grow
    with the time waited, up to RAREST, so that waiting takes little from what is waited for.
    """
    within = within if LONG_FORM else max(within, LIMIT)
    began = time.monotonic()
    while True:
        seen = look()
        if seen:
            return seen
        waited = time.monotonic() - began
        if waited > within:
            raise AssertionError(f"not within {within} s: {what} (last seen: {seen!r})")
        time.sleep(max(every, min(RAREST, waited / 50)))
