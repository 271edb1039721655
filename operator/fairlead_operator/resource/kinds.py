"""The kinds that the operator knows and their paths on the API server, the labels that mark its
objects, and the ports of its pods.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

Object = dict[str, Any]
Key = tuple[str, str]  # namespace, name

GROUP = "serving.fairlead.dev"
VERSION = "v1alpha1"
MANAGER = "fairlead-operator"  # field manager and Lease

NAME_LABEL = f"{GROUP}/name"
UID_LABEL = f"{GROUP}/uid"
REMOTE_CODE_LABEL = f"{GROUP}/remote-code"
REVISION_LABEL = f"{GROUP}/revision"
MANAGED_LABEL = "app.kubernetes.io/managed-by"
MANAGED_VALUE = "fairlead"

# The runtime's ports: the public API; probes, metrics and operations.
HTTP_PORT, HTTP_PORT_NAME = 8000, "http"
ADMIN_PORT, ADMIN_PORT_NAME = 9000, "admin"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind: its API path, and the label and field selectors of the objects that the operator
    reads.
    """

    name: str
    api_version: str
    plural: str
    labels: str = ""
    fields: str = ""

    def path(self, namespace: str = "", name: str = "", sub: str = "") -> str:
        """URL path of a collection (all namespaces when none is given), an object or its
        subresource.
        """
        root = "/apis/" if "/" in self.api_version else "/api/"
        scope = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
        tail = "".join(f"/{quote(part, safe='')}" for part in (name, sub) if part)
        return f"{root}{self.api_version}{scope}/{self.plural}{tail}"


_MANAGED_OBJECTS = f"{MANAGED_LABEL}={MANAGED_VALUE}"

RESOURCE = Kind("InferenceDeployment", f"{GROUP}/{VERSION}", "inferencedeployments")
DEPLOYMENT = Kind("Deployment", "apps/v1", "deployments", labels=_MANAGED_OBJECTS)
SERVICE = Kind("Service", "v1", "services", labels=_MANAGED_OBJECTS)
BUDGET = Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets", labels=_MANAGED_OBJECTS)
POLICY = Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies", labels=_MANAGED_OBJECTS)
CLAIM = Kind("PersistentVolumeClaim", "v1", "persistentvolumeclaims", labels=_MANAGED_OBJECTS)
POD = Kind("Pod", "v1", "pods", labels=_MANAGED_OBJECTS)
# The endpoint slice controller copies the Service's labels to its slices.
SLICE = Kind("EndpointSlice", "discovery.k8s.io/v1", "endpointslices", labels=_MANAGED_OBJECTS)
QUOTA = Kind("ResourceQuota", "v1", "resourcequotas")
# Of pods only, and without what every healthy start says; a node autoscaler's Events are Normal.
_ROUTINE = ("Scheduled", "Pulling", "Pulled", "Created", "Started", "Killing")
_POD_EVENTS = ",".join(("involvedObject.kind=Pod", *(f"reason!={name}" for name in _ROUTINE)))
EVENT = Kind("Event", "v1", "events", fields=_POD_EVENTS)
LEASE = Kind("Lease", "coordination.k8s.io/v1", "leases")

WATCHED = (RESOURCE, DEPLOYMENT, SERVICE, BUDGET, POLICY, POD, SLICE, QUOTA, EVENT)
BY_NAME: Mapping[str, Kind] = {kind.name: kind for kind in (*WATCHED, CLAIM, LEASE)}


def watched_kinds(*, claims: bool) -> tuple[Kind, ...]:
    """The kinds to watch; claims only where the chart's ``modelCache.create`` grants the verbs."""
    return (*WATCHED, CLAIM) if claims else WATCHED


def key_of(body: Mapping[str, Any]) -> Key:
    meta = body["metadata"]
    return meta.get("namespace", ""), meta["name"]


def controller_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The owner reference with ``controller: true``, if any."""
    for owner in body["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return owner  # type: ignore[no-any-return]
    return None


def version_of(body: Mapping[str, Any]) -> int:
    """The resourceVersion as a number, which it is since Kubernetes 1.35; 0 without one."""
    text = body.get("metadata", {}).get("resourceVersion", "")
    return int(text) if text.isdigit() else 0
