"""The reasons why a resource is not ready: observed pods, events and quota in, ordered reasons with
hints out. Pure.

Every code is listed in ``CODES``, in the order of importance: the first blocker is Ready's reason.
A message repeats what Kubernetes or the runtime reported, cut and made printable; a hint is the
fix.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairlead_operator.decide.pods.pod import (
    FETCH,
    can_find_room,
    container_statuses,
    fetch_status,
    is_deleting,
    is_injected,
    is_ready,
    revision_of_pod,
    runtime_status,
)
from fairlead_operator.resource.json_text import json_object
from fairlead_operator.resource.kinds import Object

# code → hint. The order is the order of importance.
CODES: Mapping[str, str] = {
    "InvalidSpec": "Correct the named field.",
    "NotAllowed": "Use a value on the chart's allow-list, or have it added there.",
    "Conflict": "Rename this resource, or remove the object that has its name.",
    "WriteRefused": "The API server refuses an object of this resource: read the message.",
    "DoesNotFit": "Follow the message, or give the pod more memory.",
    "PodsRefused": (
        "The namespace's rules refuse the pods: read the message, ask its administrator."
    ),
    "QuotaExceeded": "Free some of the namespace's quota, have it raised, or ask for less.",
    "InsufficientAccelerator": "Free or add accelerators, or lower resources.accelerator.count.",
    "SurgeBlocked": "No room for the extra pod: free some, or set rollout.strategy to Auto.",
    "ClaimNotShared": (
        "Set modelCache.accessModes to [ReadWriteMany] if the claim allows it, or take one replica."
    ),
    "VolumeMissing": "Create the PersistentVolumeClaim that the message names.",
    "VolumePending": "The claim has no volume yet: see its own events.",
    "Unschedulable": (
        "No node takes the pod: compare nodeSelector, tolerations and resources with the nodes."
    ),
    "SecretMissing": "Create the Secret and key that the message names.",
    "ConfigMapMissing": "Create the ConfigMap that the message names, or see the chart's caBundle.",
    "ImagePullBackOff": "Check the image's name, and imagePullSecrets for a private registry.",
    "InvalidSource": (
        "Write model.source as demo:, hf://owner/name, pvc://claim/path or file:///path."
    ),
    "ModelNotFound": "Check model.source and model.revision.",
    "WeightsUnauthorized": "Give model.tokenSecretRef a token that may read this model.",
    "HubUnreachable": "Check HF_ENDPOINT, the proxy and the NetworkPolicy of the namespace.",
    "NoSpace": "Give modelCache a larger volume.",
    "NoSafetensors": "Take a model that publishes safetensors: no other format is read.",
    "BadWeights": "The files are damaged: pin another revision.",
    "BadModelFiles": "The files are damaged: pin another revision.",
    "RemoteCodeRefused": "Serve a model whose architecture is part of transformers.",
    "UnsupportedModel": "Take a model of a supported family.",
    "NoAccelerator": (
        "Take an image of the GPU build where the message names a CPU build; else check the "
        "node's driver and device plugin, and resources.accelerator.resourceName."
    ),
    "OutOfMemory": (
        "Raise resources.memory, or lower cache.numBlocks, engine.maxModelLen or "
        "cache.cpuOffloadSpace."
    ),
    "SelfTestFailed": (
        "The model computes something else than the reference: try engine.dtype float32, and "
        "report it."
    ),
    "InvalidConfig": "The runtime refused a setting: correct what the message names.",
    "RuntimeRefused": "Read the message and the pod's log.",
    "EngineDead": "The engine gave up after failures in a row: read the message and the pod's log.",
    "ProcessKilled": (
        "Wait for the restart. The kubelet or an administrator ended it: see the node's log."
    ),
    "ProcessEnded": "Wait for the restart, and read the log: kubectl logs --previous.",
    "CrashLoop": "Read the pod's log: kubectl logs --previous.",
    "ProbeFailed": "The pod stopped serving: see its log and /healthz.",
    "ProgressDeadlineExceeded": (
        "The start takes longer than rollout.progressDeadlineSeconds: raise it, or see the pod."
    ),
    "Evicted": "The node ran short of something: read the message, set modelCache.size.",
    "NodeRefused": "The node refused the pod and another follows: read the message.",
    "FetchingWeights": "Wait: the weights are being downloaded.",
    "Starting": "Wait: the model is being loaded and tested.",
    "CanaryFailed": "The pod is ready but generates no token: see its log.",
    "UpgradeHeld": (
        "Fix the deployment that the message names, or change the chart's default again."
    ),
    "RollingOut": "Wait: pods of the new revision replace the old ones.",
    "NoReplicas": "Set replicas above 0.",
}
_ORDER = {code: index for index, code in enumerate(CODES)}
# Stages of a normal start, not faults.
NORMAL = frozenset({"FetchingWeights", "Starting", "RollingOut", "NoReplicas"})

_PULL = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "RegistryUnavailable",
    }
)
KILLED = 137  # SIGKILL
LOOP = 3  # restarts from which on an end is one of many
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError"})


@dataclass(frozen=True, slots=True, order=True)
class Blocker:
    """One reason why a resource is not ready. ``object`` is ``Kind/name``."""

    rank: int
    code: str
    object: str
    message: str
    hint: str


def blocker(code: str, about: str, message: str, hint: str = "") -> Blocker:
    return Blocker(
        _ORDER[code], code, about[:512], printable(message), printable(hint or CODES[code])
    )


def printable(text: str, limit: int = 1024) -> str:
    """External text made safe for a terminal: no control characters, one line, at most ``limit``
    characters.
    """
    clean = "".join(c if c.isprintable() else " " for c in text)
    clean = re.sub(r" +", " ", clean).strip()
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def find(
    *,
    revision: str,
    pods: Iterable[Object],
    deployment: Object | None,
    events: Sequence[Object],
    surging: bool,
    downloads: Mapping[str, str] | None = None,
) -> list[Blocker]:
    """The reasons seen in the cluster, most important first.

    ``revision``: the template hash that should serve; pods of other revisions are never blockers.
    ``surging``: a rollout keeps old pods until new ones are ready. ``downloads``: the progress of
    each pod's download, by uid.
    """
    pods = list(pods)
    current = [p for p in pods if revision_of_pod(p) == revision and not is_deleting(p)]
    older = any(revision_of_pod(p) != revision for p in pods)
    reasons = _deployment_blockers(deployment)
    for pod in current:
        progress = (downloads or {}).get(pod["metadata"]["uid"], "")
        reasons += _pod_blockers(
            pod, [e for e in events if _about(e, pod)], progress, surge_blocked=surging and older
        )
    if older and not reasons and not current:
        reasons.append(blocker("RollingOut", "", "pods of the previous revision still serve"))
    unique = {(b.code, b.message): b for b in sorted(reasons, reverse=True)}
    return sorted(unique.values())[:16]


def _about(event: Object, pod: Object) -> bool:
    about = event.get("involvedObject") or {}
    return bool(about.get("uid") == pod["metadata"].get("uid"))


def _deployment_blockers(deployment: Object | None) -> list[Blocker]:
    if deployment is None:
        return []
    about = f"Deployment/{deployment['metadata']['name']}"
    reasons = []
    for condition in (deployment.get("status") or {}).get("conditions") or ():
        message = str(condition.get("message", ""))
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            code = (
                "QuotaExceeded"
                if "exceeded quota" in message or "must specify" in message
                else "PodsRefused"
            )
            reasons.append(blocker(code, about, message))
        elif (
            condition["type"] == "Progressing"
            and condition.get("reason") == "ProgressDeadlineExceeded"
        ):
            reasons.append(blocker("ProgressDeadlineExceeded", about, message))
    return reasons


def _pod_blockers(
    pod: Object, events: Sequence[Object], progress: str, *, surge_blocked: bool
) -> list[Blocker]:
    about = f"Pod/{pod['metadata']['name']}"
    status = pod.get("status") or {}
    if is_ready(pod):
        return []
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return [
                _unscheduled(
                    pod, about, str(condition.get("message", "")), surge_blocked=surge_blocked
                )
            ]
    containers = container_statuses(pod)
    for container in containers:
        moving = container.get("name") != FETCH or bool(progress)
        if reason := _container_blocker(container, about, moving=moving):
            return [reason]
    mounts = [e for e in events if e.get("reason") in {"FailedMount", "FailedAttachVolume"}]
    if mounts and not any(c.get("started") for c in containers):
        message = str(mounts[-1].get("message", ""))
        return [blocker(_missing_code(message) or "VolumePending", about, message)]
    return _stage_blockers(pod, events, about, progress)


def _stage_blockers(
    pod: Object, events: Sequence[Object], about: str, progress: str
) -> list[Blocker]:
    if "running" in (fetch_status(pod).get("state") or {}):
        message = progress or "the init container downloads the weights"
        return [blocker("FetchingWeights", about, message)]
    runtime = runtime_status(pod)
    if runtime.get("started"):
        messages = [str(e.get("message", "")) for e in events if e.get("reason") == "Unhealthy"]
        # The startup probe fails until the model is loaded, in every start.
        if failed_probes := [
            message for message in messages if not message.startswith("Startup probe")
        ]:
            return [blocker("ProbeFailed", about, failed_probes[-1])]
    if "running" in (runtime.get("state") or {}):
        return [blocker("Starting", about, "the runtime loads and tests the model")]
    return [blocker("Starting", about, "the pod is being set up")]


def _unscheduled(pod: Object, about: str, message: str, *, surge_blocked: bool) -> Blocker:
    if missing := _missing_code(message):
        return blocker(missing, about, message)
    resource_names = {
        name
        for container in (pod.get("spec") or {}).get("containers") or ()
        for name in (container.get("resources") or {}).get("limits") or {}
        if "/" in name
    }
    if any(f"Insufficient {name}" in message for name in resource_names):
        waits = surge_blocked and can_find_room(message)
        return blocker("SurgeBlocked" if waits else "InsufficientAccelerator", about, message)
    return blocker("Unschedulable", about, message)


def _missing_code(message: str) -> str:
    if re.search(r'persistentvolumeclaim "[^"]+" not found', message, re.IGNORECASE):
        return "VolumeMissing"
    if "unbound immediate PersistentVolumeClaims" in message:
        return "VolumePending"
    if re.search(
        r'secret "[^"]+" not found|non-existent secret key|couldn\'t find key',
        message,
        re.IGNORECASE,
    ):
        return "SecretMissing"
    if re.search(r'configmap "[^"]+" not found|non-existent config key', message, re.IGNORECASE):
        return "ConfigMapMissing"
    return ""


def _container_blocker(container: Mapping[str, Any], about: str, *, moving: bool) -> Blocker | None:
    """The fault of one container. ``moving``: a container that runs again after a failure has
    passed the point where it failed; otherwise the failure remains the reason.
    """
    injected = is_injected(container)
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
    if reason in _PULL:
        return blocker(
            "ImagePullBackOff", about, message or f"{reason}: {container.get('image', '')}"
        )
    if reason in _CONFIG:
        return blocker(_missing_code(message) or "CrashLoop", about, message or reason)
    terminated = state.get("terminated")
    if not terminated and reason == "CrashLoopBackOff":
        terminated = (container.get("lastState") or {}).get("terminated") or {}
    if not terminated and not (container.get("started") and moving):
        terminated = (container.get("lastState") or {}).get("terminated")
    if terminated is not None and terminated.get("exitCode", 1) != 0:
        if injected:
            return _injected_blocker(container, terminated, about)
        loops = reason == "CrashLoopBackOff" or container.get("restartCount", 0) >= LOOP
        return _end_blocker(terminated, about, loops=loops)
    return None


def _injected_blocker(
    container: Mapping[str, Any], terminated: Mapping[str, Any], about: str
) -> Blocker:
    """The end of a container that others put into the pod: its message has no code of the runtime,
    and its memory is not the resource's.
    """
    text = str(terminated.get("message") or terminated.get("reason") or "")
    message = f"container {container.get('name')}: exit code {terminated.get('exitCode', '?')}"
    hint = "Read the log of the container that the message names; the operator did not add it."
    return blocker("CrashLoop", about, f"{message}: {text}" if text else message, hint)


def _end_blocker(terminated: Mapping[str, Any], about: str, *, loops: bool) -> Blocker:
    """The blocker for a container that ended. ``loops``: it ended repeatedly."""
    if terminated.get("reason") == "OOMKilled":
        return blocker(
            "OutOfMemory",
            about,
            "the kernel ended the container: it used more than its memory limit",
        )
    text = str(terminated.get("message") or "")
    message_of_runtime = termination(text)
    if message_of_runtime is not None:
        code, message, hint = message_of_runtime
        return blocker(code, about, message, hint)
    exit_code = terminated.get("exitCode", "?")
    code = "CrashLoop" if loops else "ProcessKilled" if exit_code == KILLED else "ProcessEnded"
    return blocker(code, about, f"exit code {exit_code}" + (f": {text}" if text else ""))


def failed_pod_blockers(
    failed: Iterable[Object], pods: Iterable[Object], revision: str, replicas: int
) -> list[Blocker]:
    """The blocker for the newest pod that its node ended or refused, while a pod is missing or not
    ready.

    ``failed``: such pods; Kubernetes keeps them for a while.
    """
    current = [p for p in pods if revision_of_pod(p) == revision and not is_deleting(p)]
    if sum(is_ready(p) for p in current) >= replicas:
        return []
    failed_pods = [
        p for p in failed if revision_of_pod(p) == revision and p["status"].get("reason")
    ]
    since = max((_created(p) for p in current if is_ready(p)), default="")
    newest = max((p for p in failed_pods if _created(p) >= since), key=_created, default=None)
    if newest is None:
        return []
    reason, message = newest["status"]["reason"], str(newest["status"].get("message", ""))
    code = "Evicted" if reason in {"Evicted", "Preempting"} else "NodeRefused"
    return [blocker(code, f"Pod/{newest['metadata']['name']}", f"{reason}: {message}")]


def _created(pod: Object) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")


def termination(text: str) -> tuple[str, str, str] | None:
    """Code, message and hint of the runtime's termination message; None without a valid one."""
    for line in reversed(text.strip().splitlines()):
        try:
            value = json_object(line)
        except ValueError:
            continue
        if isinstance(value.get("code"), str):
            code = value["code"] if value["code"] in CODES else "RuntimeRefused"
            return code, str(value.get("message", "")), str(value.get("hint", ""))
    return None
