"""The pod template of a resource, as a plain dict with its hash as a label. Pure.

Owns the pod's names, mounts, probes and security. Commands are lists: no string of the CR reaches a
shell. No measured value enters the template: a new one would start a rollout.
"""

import dataclasses
import hashlib
import json
import math
from typing import NamedTuple, Self

from fairlead_operator.decide.pods.pod import FETCH, RUNTIME
from fairlead_operator.resource.fields import as_body
from fairlead_operator.resource.kinds import (
    ADMIN_PORT,
    ADMIN_PORT_NAME,
    HTTP_PORT,
    HTTP_PORT_NAME,
    MANAGED_LABEL,
    MANAGED_VALUE,
    NAME_LABEL,
    REMOTE_CODE_LABEL,
    REVISION_LABEL,
    UID_LABEL,
    Object,
)
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings
from fairlead_runtime.settings.engine_config import Device, EngineConfig

HUB_HOME = "/models"  # HF_HOME: an emptyDir, or the shared claim
CLAIM_ROOT = "/model"  # where a pvc:// source is mounted, read-only
TMP, SHM = "/tmp", "/dev/shm"  # noqa: S108 - emptyDirs of the pod
KEYS, TOKEN = "/var/run/fairlead/api-keys", "/var/run/fairlead/hub-token"
CA_ROOT = "/var/run/fairlead/ca"
# A mesh leaves the admin port alone: probes, scrapes and canaries come from outside it.
MESHES = {
    "traffic.sidecar.istio.io/excludeInboundPorts": str(ADMIN_PORT),
    "config.linkerd.io/skip-inbound-ports": str(ADMIN_PORT),
}
PROBE_SECONDS = 2
NODE_LOST_SECONDS = 30  # after which another node gets the pods of one that does not answer
EXIT_SECONDS = 10  # after the drain, to close connections and exit


def termination_seconds(engine: EngineConfig) -> int:
    """The time from SIGTERM to SIGKILL, long enough for the runtime's whole drain."""
    return math.ceil(engine.drain_grace + engine.drain_timeout) + EXIT_SECONDS


def selector(resource: InferenceDeployment) -> dict[str, str]:
    """Labels that only this resource's pods carry: no user's label adds other pods."""
    return {NAME_LABEL: resource.name, UID_LABEL: resource.uid}


def labels(resource: InferenceDeployment) -> dict[str, str]:
    """Labels of every child and pod. The uid identifies an object that lost its owner reference."""
    trusted = {REMOTE_CODE_LABEL: "trusted"} if resource.spec.model.trust_remote_code else {}
    return {**selector(resource), MANAGED_LABEL: MANAGED_VALUE, **trusted}


def cache_claim(resource: InferenceDeployment) -> str:
    return resource.spec.model_cache.claim_name or f"{resource.name}-model-cache"


def model_argument(resource: InferenceDeployment) -> str:
    """The MODEL argument of the pod's commands."""
    source = resource.spec.model.origin
    if source.kind == "demo":
        return "demo:"
    if source.kind == "hf":
        return f"hf://{source.path}"
    return f"{CLAIM_ROOT}/{source.path.lstrip('/')}" if source.kind == "pvc" else source.path


def pod_image(resource: InferenceDeployment, settings: Settings) -> str:
    """The image of all containers of the pod, so that a node pulls one."""
    return resource.image or settings.image_for(resource.spec.resources.accelerator.count)


class Deadlines(NamedTuple):
    """Seconds that a template holds and that start no rollout."""

    progress: int = 0
    drain: int = 0

    @classmethod
    def of(cls, resource: InferenceDeployment) -> Self:
        rollout = resource.spec.rollout
        return cls(rollout.progress_deadline_seconds, rollout.drain_timeout_seconds)


def pod_template(
    resource: InferenceDeployment, settings: Settings, deadlines: Deadlines | None = None
) -> Object:
    """The pod template with its hash as a label; no measured value ever enters it.

    ``deadlines``: those that its pods run with, where they are not the resource's of today. The
    hash leaves them out: a new deadline needs no new pod, it comes with the next revision.
    """
    bare = json.dumps(_template(_with(resource, Deadlines()), settings), sort_keys=True)
    if deadlines is not None:
        resource = _with(resource, deadlines)
    template = _template(resource, settings)
    revision = hashlib.sha256(bare.encode()).hexdigest()[:10]
    template["metadata"]["labels"][REVISION_LABEL] = revision
    return template


def _with(resource: InferenceDeployment, deadlines: Deadlines) -> InferenceDeployment:
    rollout = dataclasses.replace(
        resource.spec.rollout,
        progress_deadline_seconds=deadlines.progress,
        drain_timeout_seconds=deadlines.drain,
    )
    return dataclasses.replace(
        resource,
        spec=dataclasses.replace(resource.spec, rollout=rollout),
        engine=dataclasses.replace(resource.engine, drain_timeout=float(deadlines.drain)),
    )


def _template(resource: InferenceDeployment, settings: Settings) -> Object:
    extra = resource.spec.pod_template
    return {
        "metadata": {
            "labels": {
                **extra.labels,
                **labels(resource),
                "llm-d.ai/engine-type": "vllm",
            },
            "annotations": {
                "kubectl.kubernetes.io/default-container": RUNTIME,
                **MESHES,
                **extra.annotations,
            },
        },
        "spec": _pod_spec(resource, settings),
    }


def _pod_spec(resource: InferenceDeployment, settings: Settings) -> Object:
    extra, spec = resource.spec.pod_template, resource.spec
    accelerator = spec.resources.accelerator
    pod: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": termination_seconds(resource.engine),
        "securityContext": {
            "runAsNonRoot": True,  # the image's user: a platform may set another
            "seccompProfile": {"type": "RuntimeDefault"},
            **_volume_group(resource, settings),
        },
        "containers": [_runtime(resource, settings)],
        "volumes": _volumes(resource, settings),
        "tolerations": _tolerations(resource),
    }
    if spec.model.origin.kind == "hf":
        pod["initContainers"] = [_fetch(resource, settings)]
    node_selector = dict(extra.node_selector)
    secrets = (*(secret.name for secret in extra.image_pull_secrets), *settings.image_pull_secrets)
    if accelerator.count:
        node_selector |= accelerator.node_selector
    optional = {
        "nodeSelector": node_selector,
        "priorityClassName": extra.priority_class_name,
        "serviceAccountName": extra.service_account_name,
        "runtimeClassName": extra.runtime_class_name,
        "schedulerName": extra.scheduler_name,
        "affinity": as_body(extra.affinity) if extra.affinity else None,
        "imagePullSecrets": [{"name": name} for name in dict.fromkeys(secrets)],
        "topologySpreadConstraints": [
            {**as_body(spread), "labelSelector": {"matchLabels": selector(resource)}}
            for spread in extra.topology_spread
        ],
    }
    return pod | {name: value for name, value in optional.items() if value}


def _volume_group(resource: InferenceDeployment, settings: Settings) -> Object:
    """The group that owns a claim's files: without one only root could write to a new claim."""
    extra, cache = resource.spec.pod_template, resource.spec.model_cache
    cached = resource.spec.model.origin.kind == "hf" and cache.type == "PVC"
    if not settings.fs_group or not (
        cached or any(v.persistent_volume_claim for v in extra.volumes)
    ):
        return {}
    return {"fsGroup": settings.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}


def _runtime(resource: InferenceDeployment, settings: Settings) -> Object:
    spec = resource.spec
    # Never "auto": a pod whose accelerator is missing must say so, and one without an accelerator
    # must not use those of its node.
    device: Device = "cuda" if spec.resources.accelerator.count else "cpu"
    engine = dataclasses.replace(resource.engine, device=device)
    if spec.security.api_key_secret_ref.name:
        engine = dataclasses.replace(
            engine, api_key_file=f"{KEYS}/{spec.security.api_key_secret_ref.key}"
        )
    deadline = math.ceil(spec.rollout.progress_deadline_seconds / PROBE_SECONDS)
    readiness = {
        "httpGet": {"path": "/readyz", "port": ADMIN_PORT_NAME},
        "periodSeconds": PROBE_SECONDS,
    }
    liveness = {
        "httpGet": {"path": "/healthz", "port": ADMIN_PORT_NAME},
        "periodSeconds": 10,
        "timeoutSeconds": 5,
    }
    return {
        "name": RUNTIME,
        "image": pod_image(resource, settings),
        "command": ["fairlead"],
        "args": ["serve", model_argument(resource), "--host=::", *engine.to_args()],
        "env": _environment(resource, {"HF_HUB_OFFLINE": "1"}),
        "ports": [
            {"name": HTTP_PORT_NAME, "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": ADMIN_PORT_NAME, "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "startupProbe": {**readiness, "timeoutSeconds": 2, "failureThreshold": deadline},
        # One answer decides. It may be late: a busy node delays it, and the pod still serves.
        "readinessProbe": {**readiness, "timeoutSeconds": 5, "failureThreshold": 1},
        "livenessProbe": {**liveness, "failureThreshold": 3},
        "resources": _resources(resource, accelerators=True),
        "securityContext": _container_security(),
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            *_mounts(resource, settings, runtime=True),
            *(as_body(mount) for mount in spec.pod_template.volume_mounts),
        ],
    }


def _fetch(resource: InferenceDeployment, settings: Settings) -> Object:
    """The init container that downloads the weights before the runtime starts offline; it serves
    its progress on the admin port.
    """
    model = resource.spec.model
    arguments = ["fetch", model_argument(resource), "--host=::"]
    if model.revision:
        arguments.append(f"--revision={model.revision}")
    hub = {"HF_ENDPOINT": settings.hub, **settings.proxy_environment}
    if settings.ca_config_map:
        # Read by OpenSSL and by the Python libraries that have a list of their own.
        file = f"{CA_ROOT}/{settings.ca_key}"
        hub |= {"SSL_CERT_FILE": file, "REQUESTS_CA_BUNDLE": file}
    if model.token_secret_ref.name:
        hub["HF_TOKEN_PATH"] = f"{TOKEN}/{model.token_secret_ref.key}"
    return {
        "name": FETCH,
        "image": pod_image(resource, settings),
        "command": ["fairlead"],
        "args": arguments,
        "env": _environment(resource, hub),
        "resources": _resources(resource, accelerators=False),
        "securityContext": _container_security(),
        "terminationMessagePolicy": "File",
        "volumeMounts": _mounts(resource, settings, runtime=False),
    }


def _environment(resource: InferenceDeployment, variables: dict[str, str]) -> list[Object]:
    """The environment of a container: the user's variables, then the operator's, which replace any
    of the same name.
    """
    fixed = {
        "HOME": TMP,
        "USER": RUNTIME,  # the uid may have no entry in /etc/passwd
        "HF_HOME": HUB_HOME,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    names = {
        **{variable.name: variable.value for variable in resource.spec.pod_template.env},
        **fixed,
        **variables,
    }
    return [{"name": name, "value": value} for name, value in names.items()]


def _resources(resource: InferenceDeployment, *, accelerators: bool) -> Object:
    resources = resource.spec.resources
    limits: dict[str, str] = {"memory": str(resources.memory)}
    if accelerators and resources.accelerator.count:
        limits[resources.accelerator.resource_name] = str(resources.accelerator.count)
    cache = resource.spec.model_cache
    if resource.spec.model.origin.kind == "hf" and cache.type == "None" and cache.size:
        # The node counts the cache and what the containers write: the temporary directory.
        limits["ephemeral-storage"] = str(cache.size.value + 2**30)
    return {"requests": {"cpu": str(resources.cpu), **limits}, "limits": limits}


def _container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }


def _volumes(resource: InferenceDeployment, settings: Settings) -> list[Object]:
    spec = resource.spec
    source = spec.model.origin
    shared = {"medium": "Memory", "sizeLimit": str(spec.resources.shared_memory)}
    volumes: list[Object] = [
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "shm", "emptyDir": shared},
    ]
    if source.kind == "hf":
        cache: Object = {"emptyDir": own_cache(resource)}
        if spec.model_cache.type == "PVC":
            cache = {"persistentVolumeClaim": {"claimName": cache_claim(resource)}}
        volumes.append({"name": "models", **cache})
    if source.kind == "pvc":
        volumes.append(
            {
                "name": "model",
                "persistentVolumeClaim": {"claimName": source.claim, "readOnly": True},
            }
        )
    for name, secret in (
        ("api-keys", spec.security.api_key_secret_ref),
        ("hub-token", spec.model.token_secret_ref),
    ):
        if secret.name:
            items = [{"key": secret.key, "path": secret.key}]
            volumes.append(
                {
                    "name": name,
                    "secret": {"secretName": secret.name, "items": items, "defaultMode": 0o444},
                }
            )
    if source.kind == "hf" and settings.ca_config_map:
        volumes.append({"name": "ca-bundle", "configMap": {"name": settings.ca_config_map}})
    return [*volumes, *(as_body(volume) for volume in spec.pod_template.volumes)]


def own_cache(resource: InferenceDeployment) -> Object:
    """The emptyDir of a pod that keeps its own download, with modelCache.size as its limit. Unset,
    twice the memory that the weights are loaded into: a download never needs more.
    """
    size, resources = resource.spec.model_cache.size, resource.spec.resources
    if size:
        return {"sizeLimit": str(size)}
    accelerator = resources.accelerator
    memory = accelerator.count * accelerator.memory.value if accelerator.memory else 0
    if accelerator.count == 0:
        memory = resources.memory.value
    return {"sizeLimit": f"{2 * memory / 2**30:.0f}Gi"} if memory >= 2**30 else {}


def _mounts(resource: InferenceDeployment, settings: Settings, *, runtime: bool) -> list[Object]:
    spec = resource.spec
    mounts: list[Object] = [{"name": "tmp", "mountPath": TMP}]
    if runtime:
        mounts.append({"name": "shm", "mountPath": SHM})
    if spec.model.origin.kind == "hf":
        # The runtime only reads what `fetch` wrote.
        mounts.append(
            {"name": "models", "mountPath": HUB_HOME} | ({"readOnly": True} if runtime else {})
        )
    if runtime and spec.model.origin.kind == "pvc":
        mounts.append({"name": "model", "mountPath": CLAIM_ROOT, "readOnly": True})
    if runtime and spec.security.api_key_secret_ref.name:
        mounts.append({"name": "api-keys", "mountPath": KEYS, "readOnly": True})
    if not runtime and spec.model.token_secret_ref.name:
        mounts.append({"name": "hub-token", "mountPath": TOKEN, "readOnly": True})
    if not runtime and settings.ca_config_map:
        mounts.append({"name": "ca-bundle", "mountPath": CA_ROOT, "readOnly": True})
    return mounts


def _tolerations(resource: InferenceDeployment) -> list[Object]:
    tolerations: list[Object] = [
        as_body(toleration) for toleration in resource.spec.pod_template.tolerations
    ]
    accelerator = resource.spec.resources.accelerator
    if accelerator.count:
        tolerations.append(
            {"key": accelerator.resource_name, "operator": "Exists", "effect": "NoSchedule"}
        )
    tolerated_keys = {toleration.key for toleration in resource.spec.pod_template.tolerations}
    for taint in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        # Of several tolerations of a taint the shortest counts: the user's may be longer.
        if taint not in tolerated_keys:
            toleration = {"key": taint, "operator": "Exists", "effect": "NoExecute"}
            tolerations.append({**toleration, "tolerationSeconds": NODE_LOST_SECONDS})
    return tolerations
