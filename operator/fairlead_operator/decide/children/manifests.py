"""The children of one resource, as plain dicts. Pure: the same input gives the same bytes.

Owns which objects exist, their names and labels; ``podtemplate`` owns the pods. The operator
enforces every field that is rendered; all others belong to the cluster or the user.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fairlead_operator.decide.children.podtemplate import (
    cache_claim,
    labels,
    pod_template,
    selector,
)
from fairlead_operator.resource.kinds import (
    ADMIN_PORT,
    BUDGET,
    CLAIM,
    DEPLOYMENT,
    GROUP,
    HTTP_PORT,
    HTTP_PORT_NAME,
    POLICY,
    RESOURCE,
    REVISION_LABEL,
    SERVICE,
    Kind,
    Object,
)
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings

ANNOTATIONS_MARK = f"{GROUP}/service-annotations"
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Replacement:
    """The way in which the Deployment replaces pods; the limits count for RollingUpdate only."""

    type: Literal["RollingUpdate", "Recreate"]
    max_surge: int = 0
    max_unavailable: int = 0

    def body(self) -> Object:
        if self.type == "Recreate":
            return {"type": "Recreate"}
        limits = {"maxSurge": self.max_surge, "maxUnavailable": self.max_unavailable}
        return {"type": "RollingUpdate", "rollingUpdate": limits}


SURGE = Replacement("RollingUpdate", max_surge=1)


def render(
    resource: InferenceDeployment,
    settings: Settings,
    replicas: int,
    replacement: Replacement,
    *,
    template: Object | None = None,
    marks: Mapping[str, str] | None = None,
    cached: bool = False,
) -> list[Object]:
    """Every child the resource should have, in the order in which they are written.

    ``template``: the pod template, if it is not the one of today's settings. ``marks``:
    annotations of the Deployment. ``cached``: the claim holds the weights, so that no new pod
    needs the hub.
    """
    if template is None:
        template = pod_template(resource, settings)
    deployment = _deployment(resource, replicas, replacement, template)
    if marks:
        deployment["metadata"]["annotations"] = dict(marks)
    children = [_service(resource), deployment]
    if resource.spec.security.network_policy:
        children.insert(0, _network_policy(resource, settings, cached=cached))
    if max_replicas(resource) > 1:
        children.append(_budget(resource))
    if creates_claim(resource):
        children.insert(0, _claim(resource))
    return children


def keeps_weights(resource: InferenceDeployment) -> bool:
    """Whether the weights that one pod downloads serve every later pod: they are in a claim, and
    the revision is a commit, which never moves.
    """
    cache, model = resource.spec.model_cache, resource.spec.model
    return cache.type == "PVC" and bool(_COMMIT.fullmatch(model.revision))


def max_replicas(resource: InferenceDeployment) -> int:
    scaling = resource.spec.autoscaling
    return scaling.max_replicas if scaling else resource.spec.replicas


def creates_claim(resource: InferenceDeployment) -> bool:
    """Whether the operator makes the claim: the resource names none, and there is something to
    download.
    """
    cache, source = resource.spec.model_cache, resource.spec.model.origin
    return cache.type == "PVC" and not cache.claim_name and source.kind == "hf"


def revision_of(deployment: Object) -> str:
    """The template hash in the pod labels of a Deployment."""
    labels = deployment["spec"]["template"]["metadata"].get("labels") or {}
    return str(labels.get(REVISION_LABEL, ""))


def _object(resource: InferenceDeployment, kind: Kind, name: str, spec: Object) -> Object:
    owner = {
        "apiVersion": RESOURCE.api_version,
        "kind": RESOURCE.name,
        "name": resource.name,
        "uid": resource.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {
            "name": name,
            "namespace": resource.namespace,
            "labels": labels(resource),
            "ownerReferences": [owner],
        },
        "spec": spec,
    }


def _deployment(
    resource: InferenceDeployment, replicas: int, replacement: Replacement, template: Object
) -> Object:
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": selector(resource)},
        "strategy": replacement.body(),
        "minReadySeconds": 5,
        "progressDeadlineSeconds": resource.spec.rollout.progress_deadline_seconds,
        "revisionHistoryLimit": 2,
        "template": template,
    }
    return _object(resource, DEPLOYMENT, resource.name, spec)


def _service(resource: InferenceDeployment) -> Object:
    port = {
        "name": HTTP_PORT_NAME,
        "port": resource.spec.service.port,
        "targetPort": HTTP_PORT_NAME,
        "protocol": "TCP",
    }
    spec = {"type": resource.spec.service.type, "selector": selector(resource), "ports": [port]}
    service = _object(resource, SERVICE, resource.name, spec)
    annotations = dict(resource.spec.service.annotations)
    # The list of keys shows the removal of one.
    annotations[ANNOTATIONS_MARK] = ",".join(sorted(annotations))
    service["metadata"]["annotations"] = annotations
    return service


def _budget(resource: InferenceDeployment) -> Object:
    """The disruption budget: a pod that is not ready never holds up a node's drain."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(resource)},
    }
    return _object(resource, BUDGET, resource.name, spec)


def _network_policy(resource: InferenceDeployment, settings: Settings, *, cached: bool) -> Object:
    """Opens the API to everyone and the admin port to ``admin_peers``; egress reaches
    ``egressPorts``, and the hub where pods download weights.
    """
    ingress: list[Object] = [{"ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}]
    if settings.admin_peers:
        ports = [{"port": ADMIN_PORT, "protocol": "TCP"}]
        ingress.append({"from": list(settings.admin_peers), "ports": ports})
    egress_ports = set(resource.spec.security.egress_ports)
    if resource.spec.model.origin.kind == "hf" and not cached:
        egress_ports |= {settings.hub_port, *settings.proxy_ports}
    egress: list[Object] = []
    if egress_ports:
        # Policies see the port behind a Service: some clusters serve DNS on 5353 there.
        names = [{"port": n, "protocol": p} for n in (53, 5353) for p in ("UDP", "TCP")]
        hosts = [{"port": port, "protocol": "TCP"} for port in sorted(egress_ports)]
        egress = [{"ports": [*names, *hosts]}]
    spec = {
        "podSelector": {"matchLabels": selector(resource)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return _object(resource, POLICY, resource.name, spec)


def _claim(resource: InferenceDeployment) -> Object:
    cache = resource.spec.model_cache
    spec: dict[str, Any] = {
        "accessModes": list(cache.access_modes) or ["ReadWriteOnce"],
        "resources": {"requests": {"storage": str(cache.size)}},
    }
    if cache.storage_class_name:
        spec["storageClassName"] = cache.storage_class_name
    return _object(resource, CLAIM, cache_claim(resource), spec)
