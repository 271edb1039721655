"""InferenceDeployments for tests, and readers of their status."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.harness.apiclient import Api, Object, eventually
from support.operator_bodies import merged

KIND = "InferenceDeployment"
CHILDREN = ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy")
# Pods that the fake kubelet's node takes, and no other.
PROCESSES = {
    "nodeSelector": {"type": "processes"},
    "tolerations": [{"key": "processes", "operator": "Exists"}],
}
CRD = Path(__file__).parents[3] / "crds" / "inferencedeployments.yaml"
START = 90  # seconds that a runtime process may take on a busy machine


def install_crd(api: Api) -> Object:
    """Install the custom resource definition of this tree; returns once it is established."""
    body: Object = yaml.safe_load(CRD.read_text())
    api.apply(body, force="true")

    def established() -> bool:
        live = api.get("CustomResourceDefinition", "", body["metadata"]["name"])
        return condition(live.get("status") or {}, "Established").get("status") == "True"

    eventually(established, 10, "the CRD is Established")
    return body


def create_namespace(api: Api, name: str) -> None:
    """A namespace that enforces Pod Security "restricted"; returns once pods can be created."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.create(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    )
    eventually(
        lambda: api.find("ServiceAccount", name, "default"), 10, "the default ServiceAccount"
    )


def idep(namespace: str, name: str = "chat", **spec: Any) -> Object:
    """A CPU resource on the demo model; ``spec`` is merged in."""
    base = {
        "model": {"source": "demo:"},
        "resources": {"accelerator": {"count": 0}, "cpu": "1", "memory": "4Gi"},
    }
    return {
        "apiVersion": "serving.fairlead.dev/v1alpha1",
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": merged(base, spec),
    }


def status(api: Api, namespace: str, name: str = "chat") -> Object:
    body: Object = api.get(KIND, namespace, name).get("status") or {}
    return body


def condition(body: Mapping[str, Any], kind: str) -> Object:
    return next((c for c in body.get("conditions") or () if c["type"] == kind), {})


def reason(api: Api, namespace: str, name: str = "chat") -> str:
    """The reason of the Ready condition."""
    return str(condition(status(api, namespace, name), "Ready").get("reason", ""))


def ready(api: Api, namespace: str, name: str = "chat") -> Object | None:
    """The status once Ready is true."""
    seen = status(api, namespace, name)
    return seen if condition(seen, "Ready").get("status") == "True" else None


def await_reason(
    api: Api, namespace: str, wanted: str, within: float, name: str = "chat"
) -> Object:
    """The status once Ready has this reason."""

    def look() -> Object | None:
        seen = status(api, namespace, name)
        return seen if condition(seen, "Ready").get("reason") == wanted else None

    return eventually(
        look, within, f"Ready's reason is {wanted}, not {reason(api, namespace, name)}"
    )


def current(api: Api, namespace: str, name: str = "chat") -> bool:
    """Whether the status is about the newest spec."""
    body = api.get(KIND, namespace, name)
    return bool(
        (body.get("status") or {}).get("observedGeneration") == body["metadata"]["generation"]
    )


def owned_by(body: Object, owner: Object) -> bool:
    references = body["metadata"].get("ownerReferences") or ()
    return any(r["uid"] == owner["metadata"]["uid"] and r.get("controller") for r in references)
