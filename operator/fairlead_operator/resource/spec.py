"""The parts of an InferenceDeployment's spec outside the engine's sections, as frozen types.

Owns field names, defaults and bounds, which the contract tests compare with the CRD's, and the
forms of a model's source. Reads nothing; ``resource`` fills them from a body.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fairlead_operator.resource.fields import Quantity, ResourceError, bounded

BYTES = r"^[0-9]{1,15}(\.[0-9]{1,3})?([kMGTPE]|[KMGTPE]i)?$"
BYTES_OR_UNSET = r"^([0-9]{1,15}(\.[0-9]{1,3})?([kMGTPE]|[KMGTPE]i)?)?$"
OBJECT_NAME = "^[a-z0-9.-]*$"
NAME = "^[a-z0-9.-]+$"
FILE_PATH = "^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$"
SUB_PATH = "^([A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?$"
# Only here: a volume over the image's own directories would run code that no image pattern allows.
MOUNT_PATH = "^/mnt(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$"
SECRET_KEY = "^[A-Za-z0-9._-]*$"  # noqa: S105 - a pattern, not a secret
_HUB_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
HUB = re.compile(rf"(?:hf://)?({_HUB_NAME}/{_HUB_NAME})")
CLAIM = re.compile(r"pvc://([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)/([A-Za-z0-9._@+=/-]+)")
PATH = re.compile(r"(?:file://)?(/[A-Za-z0-9._@+=/-]+)")


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a model. ``path`` is the hub's owner/name, or a path in the claim or the
    container.
    """

    kind: Literal["demo", "hf", "pvc", "file"]
    path: str = ""
    claim: str = ""

    @classmethod
    def parse(cls, text: str) -> "Source":
        if ".." in text:
            raise ResourceError("spec.model.source", "must not contain '..': give the path itself")
        if text == "demo:":
            return cls("demo")
        if match := HUB.fullmatch(text):
            if "--" in text or text.endswith(".git"):
                form = "of a hub model must not contain '--' nor end with '.git'"
                fix = "no hub has such a name, correct it"
                raise ResourceError("spec.model.source", f"{form}: {fix}")
            return cls("hf", match[1])
        if match := CLAIM.fullmatch(text):
            return cls("pvc", match[2], match[1])
        if match := PATH.fullmatch(text):
            return cls("file", match[1])
        forms = "demo:, hf://owner/name, pvc://claim/path or file:///path"
        raise ResourceError("spec.model.source", f"must be {forms}: correct its form")


@dataclass(frozen=True, slots=True)
class SecretRef:
    name: str = bounded("", longest=253, pattern=OBJECT_NAME)
    key: str = bounded("", longest=253, pattern=SECRET_KEY)


@dataclass(frozen=True, slots=True)
class Model:
    source: str = bounded(longest=512)
    revision: str = bounded("", longest=128)
    served_name: str = bounded("", longest=256, pattern="^[A-Za-z0-9._:/@+-]*$")
    token_secret_ref: SecretRef = bounded(SecretRef)
    trust_remote_code: bool = False

    @property
    def origin(self) -> Source:
        return Source.parse(self.source)


@dataclass(frozen=True, slots=True)
class Accelerator:
    resource_name: str = bounded(
        "nvidia.com/gpu", longest=253, pattern="^[a-z0-9.-]+/[A-Za-z0-9._-]+$"
    )
    count: int = bounded(1, low=0, high=64)
    memory: Quantity = bounded(Quantity(""), longest=32, pattern=BYTES_OR_UNSET)
    node_selector: Mapping[str, str] = bounded(dict, longest=16)


@dataclass(frozen=True, slots=True)
class Resources:
    accelerator: Accelerator = bounded(Accelerator)
    cpu: Quantity = bounded(Quantity("4"), longest=32, pattern=r"^[0-9]{1,15}(\.[0-9]{1,3})?m?$")
    memory: Quantity = bounded(Quantity("16Gi"), longest=32, pattern=BYTES)
    shared_memory: Quantity = bounded(Quantity("1Gi"), longest=32, pattern=BYTES)


@dataclass(frozen=True, slots=True)
class ScaleUp:
    stabilization_seconds: int = bounded(0, low=0, high=3600)
    max_step: int = bounded(4, low=1, high=1000)


@dataclass(frozen=True, slots=True)
class ScaleDown:
    stabilization_seconds: int = bounded(300, low=0, high=3600)
    max_step: int = bounded(1, low=1, high=1000)


Signal = Literal["QueueDepth"]


@dataclass(frozen=True, slots=True)
class Autoscaling:
    min_replicas: int = bounded(1, low=1, high=1000)
    max_replicas: int = bounded(8, low=1, high=1000)
    signal: Signal = "QueueDepth"
    target_per_replica: int | None = bounded(None, low=1, high=1_000_000)
    tolerance: float = bounded(0.1, low=0, high=0.9)
    scale_up: ScaleUp = bounded(ScaleUp)
    scale_down: ScaleDown = bounded(ScaleDown)
    managed_by: Literal["operator", "external"] = "operator"


@dataclass(frozen=True, slots=True)
class Rollout:
    strategy: Literal["Auto", "Surge", "Recreate"] = "Auto"
    max_surge: int = bounded(1, low=0, high=1000)
    max_unavailable: int = bounded(0, low=0, high=1000)
    progress_deadline_seconds: int = bounded(1800, low=30, high=86400)
    drain_timeout_seconds: int = bounded(300, low=0, high=86400)


AccessMode = Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany", "ReadOnlyMany"]


@dataclass(frozen=True, slots=True)
class ModelCache:
    type: Literal["None", "PVC"] = "None"
    claim_name: str = bounded("", longest=253, pattern=OBJECT_NAME)
    size: Quantity = bounded(Quantity(""), longest=32, pattern=BYTES_OR_UNSET)
    storage_class_name: str = bounded("", longest=253, pattern=OBJECT_NAME)
    access_modes: tuple[AccessMode, ...] = bounded((), longest=4)


@dataclass(frozen=True, slots=True)
class Service:
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: int = bounded(80, low=1, high=65535)
    annotations: Mapping[str, str] = bounded(dict, longest=32)


@dataclass(frozen=True, slots=True)
class Security:
    api_key_secret_ref: SecretRef = bounded(SecretRef)
    network_policy: bool = True
    egress_ports: tuple[int, ...] = bounded((), longest=16)


@dataclass(frozen=True, slots=True)
class Toleration:
    key: str | None = bounded(None, longest=253)
    operator: Literal["Equal", "Exists"] | None = None
    value: str | None = bounded(None, longest=63)
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = bounded(None, low=0, high=86400)


@dataclass(frozen=True, slots=True)
class TopologySpread:
    topology_key: str = bounded(longest=253, pattern=".")
    max_skew: int = bounded(1, low=1, high=100)
    when_unsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] = "ScheduleAnyway"


@dataclass(frozen=True, slots=True)
class PullSecret:
    name: str = bounded(longest=253, pattern="^[a-z0-9.-]+$")


@dataclass(frozen=True, slots=True)
class EnvVar:
    name: str = bounded(longest=128, pattern="^[A-Za-z_][A-Za-z0-9_]*$")
    value: str = bounded("", longest=4096)


@dataclass(frozen=True, slots=True)
class NodeRequirement:
    key: str = bounded(longest=253)
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = bounded()
    values: tuple[str, ...] = bounded((), longest=32)


@dataclass(frozen=True, slots=True)
class NodeTerm:
    match_expressions: tuple[NodeRequirement, ...] = bounded((), longest=16)


@dataclass(frozen=True, slots=True)
class NodeTerms:
    node_selector_terms: tuple[NodeTerm, ...] = bounded(longest=8)


@dataclass(frozen=True, slots=True)
class PreferredNodes:
    weight: int = bounded(low=1, high=100)
    preference: NodeTerm = bounded()


@dataclass(frozen=True, slots=True)
class NodeAffinity:
    required_during_scheduling_ignored_during_execution: NodeTerms | None = None
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNodes, ...] = bounded(
        (), longest=8
    )


@dataclass(frozen=True, slots=True)
class LabelRequirement:
    key: str = bounded(longest=253)
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = bounded()
    values: tuple[str, ...] = bounded((), longest=32)


@dataclass(frozen=True, slots=True)
class LabelSelector:
    match_labels: Mapping[str, str] | None = bounded(None, longest=16)
    match_expressions: tuple[LabelRequirement, ...] = bounded((), longest=16)


@dataclass(frozen=True, slots=True)
class PodTerm:
    topology_key: str = bounded(longest=253, pattern=".")
    label_selector: LabelSelector | None = None


@dataclass(frozen=True, slots=True)
class PreferredPods:
    weight: int = bounded(low=1, high=100)
    pod_affinity_term: PodTerm = bounded()


@dataclass(frozen=True, slots=True)
class PodAffinity:
    required_during_scheduling_ignored_during_execution: tuple[PodTerm, ...] = bounded(
        (), longest=8
    )
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredPods, ...] = bounded(
        (), longest=8
    )


@dataclass(frozen=True, slots=True)
class Affinity:
    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


@dataclass(frozen=True, slots=True)
class KeyToPath:
    key: str = bounded(longest=253, pattern="^[A-Za-z0-9._-]+$")
    path: str = bounded(longest=253, pattern=FILE_PATH)


@dataclass(frozen=True, slots=True)
class EmptyDir:
    medium: Literal["", "Memory"] = ""
    size_limit: Quantity = bounded(Quantity(""), longest=32, pattern=BYTES_OR_UNSET)


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """Files of a ConfigMap, or of a Secret in a projected volume."""

    name: str = bounded(longest=253, pattern=NAME)
    items: tuple[KeyToPath, ...] = bounded((), longest=16)
    optional: bool | None = None


@dataclass(frozen=True, slots=True)
class SecretFiles:
    secret_name: str = bounded(longest=253, pattern=NAME)
    items: tuple[KeyToPath, ...] = bounded((), longest=16)
    optional: bool | None = None


@dataclass(frozen=True, slots=True)
class ClaimFiles:
    claim_name: str = bounded(longest=253, pattern=NAME)
    read_only: bool | None = None


@dataclass(frozen=True, slots=True)
class ProjectedSource:
    config_map: NamedFiles | None = None
    secret: NamedFiles | None = None


@dataclass(frozen=True, slots=True)
class Projected:
    sources: tuple[ProjectedSource, ...] = bounded(longest=8)


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume of the pod. Exactly one of the kinds is set."""

    name: str = bounded(longest=63, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    empty_dir: EmptyDir | None = None
    config_map: NamedFiles | None = None
    secret: SecretFiles | None = None
    persistent_volume_claim: ClaimFiles | None = None
    projected: Projected | None = None


@dataclass(frozen=True, slots=True)
class VolumeMount:
    name: str = bounded(longest=63, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    mount_path: str = bounded(longest=512, pattern=MOUNT_PATH)
    sub_path: str = bounded("", longest=512, pattern=SUB_PATH)
    read_only: bool | None = None


@dataclass(frozen=True, slots=True)
class PodTemplate:
    labels: Mapping[str, str] = bounded(dict, longest=32)
    annotations: Mapping[str, str] = bounded(dict, longest=32)
    node_selector: Mapping[str, str] = bounded(dict, longest=16)
    tolerations: tuple[Toleration, ...] = bounded((), longest=16)
    topology_spread: tuple[TopologySpread, ...] = bounded((), longest=8)
    priority_class_name: str = bounded("", longest=253, pattern=OBJECT_NAME)
    service_account_name: str = bounded("", longest=253, pattern=OBJECT_NAME)
    image_pull_secrets: tuple[PullSecret, ...] = bounded((), longest=8)
    env: tuple[EnvVar, ...] = bounded((), longest=64)
    runtime_class_name: str = bounded("", longest=253, pattern=OBJECT_NAME)
    scheduler_name: str = bounded("", longest=253, pattern=OBJECT_NAME)
    affinity: Affinity | None = None
    volumes: tuple[Volume, ...] = bounded((), longest=16)
    volume_mounts: tuple[VolumeMount, ...] = bounded((), longest=16)


@dataclass(frozen=True, slots=True)
class Spec:
    """The spec without the engine's sections; see ``InferenceDeployment.engine`` for those."""

    model: Model = bounded()
    resources: Resources = bounded(Resources)
    replicas: int = bounded(1, low=0, high=1000)
    autoscaling: Autoscaling | None = None
    rollout: Rollout = bounded(Rollout)
    model_cache: ModelCache = bounded(ModelCache)
    service: Service = bounded(Service)
    security: Security = bounded(Security)
    pod_template: PodTemplate = bounded(PodTemplate)
    paused: bool = False
