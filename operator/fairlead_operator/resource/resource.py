"""InferenceDeployment: a resource's body as one frozen value, and the engine's settings in it.

Owns the parsing of a body and the rules between fields. ``spec`` declares the fields; those of the
engine's sections are EngineConfig's, matched by the path that each setting names. Bounds and rules
repeat the CRD's (the contract tests compare them), because ``fairlead plan`` reads files that no
API server has validated. Does no I/O.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from fairlead_operator.resource.fields import (
    ResourceError,
    bounded,
    check,
    mapping,
    note_unknown,
    read,
)
from fairlead_operator.resource.kinds import RESOURCE
from fairlead_operator.resource.spec import Source, Spec, Toleration
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.settings.supported import IN_RESOURCE, Limit

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
REVISION = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/-]*)?")
ENV = re.compile(r"^(PYTHON|LD_|HF_|FAIRLEAD_)|_PROXY$")
OPEN_KEYS = {
    "labels": re.compile(r"app[.]kubernetes[.]io/(version|part-of)"),
    "annotations": re.compile(
        r"app[.]kubernetes[.]io/(version|part-of)|cluster-autoscaler[.]kubernetes[.]io/safe-to-evict"
    ),
}
# Volumes that the operator adds to a pod.
OUR_VOLUMES = ("tmp", "shm", "models", "model", "api-keys", "hub-token", "ca-bundle")
RESERVED_KEYS = re.compile(
    r"(^|[.])(kubernetes[.]io|k8s[.]io|istio[.]io|iam[.]gke[.]io|amazonaws[.]com|workload[.]identity|fairlead[.]dev)/"
)


@dataclass(frozen=True, slots=True)
class InferenceDeployment:
    """One resource. ``engine`` lacks only the path of the key file, which rendering adds."""

    name: str
    namespace: str
    uid: str
    generation: int
    image: str  # "" means the chart's image
    engine: EngineConfig
    spec: Spec
    unknown: tuple[str, ...] = ()  # paths of fields that a newer definition has; they do nothing

    @classmethod
    def from_body(cls, body: Any, *, stored: bool = False) -> Self:
        """A resource from its body, whether or not an API server has filled in defaults.

        Raises ResourceError, which names the field, for everything the CRD refuses. An unknown
        field is an error too, except in a ``stored`` body: there the CRD may be newer than this
        operator, and its new defaults must not stop what runs.
        """
        ignored: list[str] | None = [] if stored else None
        root = mapping(body, "")
        for key, value in (("apiVersion", RESOURCE.api_version), ("kind", RESOURCE.name)):
            if root.get(key) != value:
                raise ResourceError(key, f"must be {value}, not {str(root.get(key))[:60]!r}")
        meta = mapping(root.get("metadata"), "metadata")
        name = meta.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            form = "must begin with a letter, hold at most 40 of a-z, 0-9 and -, and not end with -"
            raise ResourceError("metadata.name", f"{form}: rename it")
        spec = mapping(root.get("spec"), "spec")
        rest = read(Spec, {k: v for k, v in spec.items() if k not in ENGINE_KEYS}, "spec", ignored)
        _check_forms(rest)
        engine = _engine(spec, rest, name, ignored)
        for field, wrong, message in RULES:
            if wrong(rest, engine):
                raise ResourceError(field, message)
        return cls(
            name=name,
            namespace=str(meta.get("namespace") or "default"),
            uid=str(meta.get("uid") or ""),
            generation=int(meta.get("generation") or 0),
            image=_image(spec),
            engine=engine,
            spec=rest,
            unknown=tuple(ignored or ()),
        )


# -- the engine's sections: EngineConfig declares their fields

ENGINE_KEYS = ("engine", "scheduler", "cache")
IMAGE = bounded("", longest=512, pattern="^([A-Za-z0-9][A-Za-z0-9._:/@-]*)?$")
SETTINGS = {f.metadata["cr"]: f for f in dataclasses.fields(EngineConfig) if f.metadata["cr"]}
# Bounds narrower than the engine's: the resource refuses values that no pod could use.
NARROWER: Mapping[str, tuple[int, int]] = {
    "engine.maxModelLen": (2, 2**24),
    "engine.cudaGraphs.qPaddingInterval": (1, 2**16),
    "engine.cudaGraphs.maxCachedGraphs": (0, 4096),
    "scheduler.maxBatchTokens": (1, 2**20),
    "scheduler.maxRequests": (1, 2**16),
    "scheduler.maxQueue": (1, 1_000_000),
    "scheduler.queueTimeoutSeconds": (1, 86_400),
    "cache.blockSize": (8, 256),
    "cache.numBlocks": (1, 2**31 - 1),
    "cache.cpuOffloadSpace": (0, 2**16),
}


def _engine(
    spec: Mapping[str, Any], rest: Spec, name: str, ignored: list[str] | None
) -> EngineConfig:
    values: dict[str, Any] = {}
    known = {*SETTINGS, "engine.image"}
    for section in ENGINE_KEYS:
        if spec.get(section) is not None:
            body = mapping(spec[section], f"spec.{section}")
            _collect(body, section, known, values, ignored)
    values |= {
        "revision": rest.model.revision,
        "served_name": rest.model.served_name or name,
        "trust_remote_code": rest.model.trust_remote_code,
        "shared_memory": float(rest.resources.shared_memory.exact / 2**30),
        "drain_timeout": float(rest.rollout.drain_timeout_seconds),
    }
    try:
        config = EngineConfig(**values)
    except ConfigError as error:
        path = next(path for path, f in SETTINGS.items() if f.name == error.field)
        raise ResourceError(f"spec.{path}", str(error).partition(": ")[2]) from None
    for path, (low, high) in NARROWER.items():
        value = getattr(config, SETTINGS[path].name)
        if value is not None:
            check({"low": low, "high": high}, value, f"spec.{path}")
    return config


def _collect(
    body: Mapping[str, Any],
    path: str,
    known: set[str],
    values: dict[str, Any],
    ignored: list[str] | None,
) -> None:
    """Add the settings of one section to ``values``; nested sections are prefixes of ``known``."""
    inside = {
        k.removeprefix(path + ".").partition(".")[0] for k in known if k.startswith(path + ".")
    }
    note_unknown(body, inside, f"spec.{path}", ignored)
    for key, value in body.items():
        at = f"{path}.{key}"
        if value is None or key not in inside or at == "engine.image":
            continue
        if at in SETTINGS:
            values[SETTINGS[at].name] = value
        else:
            _collect(mapping(value, f"spec.{at}"), at, known, values, ignored)


@dataclass(frozen=True, slots=True)
class _Image:
    image: str = IMAGE


def _image(spec: Mapping[str, Any]) -> str:
    engine = spec.get("engine") or {}
    return read(_Image, {"image": engine.get("image")}, "spec.engine").image


# -- rules between fields, as in the CRD

Rule = tuple[str, Callable[[Spec, EngineConfig], bool], str]


def _refusal(limit: Limit) -> Callable[[Spec, EngineConfig], bool]:
    def refuses(spec: Spec, engine: EngineConfig) -> bool:
        device = "cpu" if spec.resources.accelerator.count == 0 else "cuda"
        return limit.refuses(engine, device=device)

    return refuses


RULES: tuple[Rule, ...] = (
    (
        "spec.autoscaling.minReplicas",
        lambda s, _: (
            s.autoscaling is not None and s.autoscaling.min_replicas > s.autoscaling.max_replicas
        ),
        (
            "autoscaling.minReplicas must be at most autoscaling.maxReplicas: "
            "lower the one or raise the other"
        ),
    ),
    (
        "spec.rollout.maxSurge",
        lambda s, _: s.rollout.max_surge == 0 and s.rollout.max_unavailable == 0,
        (
            "rollout.maxSurge and rollout.maxUnavailable must not both be 0, "
            "no pod could ever be replaced: set one of them to 1"
        ),
    ),
    (
        "spec.scheduler.maxBatchTokens",
        lambda _, e: e.max_batch_tokens < e.max_requests,
        (
            "scheduler.maxBatchTokens must be at least scheduler.maxRequests, "
            "every request gets a token a step: raise the one or lower the other"
        ),
    ),
    (
        "spec.resources.accelerator.count",
        lambda s, e: s.resources.accelerator.count not in (0, e.tensor_parallel),
        (
            "resources.accelerator.count must equal engine.tensorParallel, or be 0 for a CPU, "
            "else accelerators stay idle: set it to engine.tensorParallel"
        ),
    ),
    (
        "spec.engine.tensorParallel",
        lambda s, e: s.resources.accelerator.count == 0 and e.tensor_parallel > 1,
        "engine.tensorParallel must be 1 on a CPU (resources.accelerator.count is 0): set it to 1",
    ),
    (
        "spec.modelCache.type",
        lambda s, _: (
            s.model_cache.type == "PVC" and not s.model_cache.claim_name and not s.model_cache.size
        ),
        (
            "modelCache.type PVC needs modelCache.claimName, an existing claim, "
            "or modelCache.size, for a new one: set one of them"
        ),
    ),
    (
        "spec.modelCache.storageClassName",
        lambda s, _: bool(s.model_cache.storage_class_name and s.model_cache.claim_name),
        (
            "modelCache.storageClassName is for a claim that the operator makes, "
            "modelCache.claimName names an existing one: remove one of them"
        ),
    ),
    (
        "spec.modelCache.accessModes",
        lambda s, _: (
            s.model_cache.type == "PVC" and s.model_cache.access_modes == ("ReadOnlyMany",)
        ),
        (
            "modelCache.accessModes ReadOnlyMany does not let pods write what they download: "
            "add ReadWriteOnce or ReadWriteMany"
        ),
    ),
    (
        "spec.model.revision",
        lambda s, _: bool(s.model.revision) and s.model.origin.kind != "hf",
        (
            "model.revision is for a hub model, demo:, pvc:// and file:// have no revisions: "
            "remove it"
        ),
    ),
    (
        "spec.model.tokenSecretRef",
        lambda s, _: bool(s.model.token_secret_ref.name) != bool(s.model.token_secret_ref.key),
        "model.tokenSecretRef needs both name and key: set the other one too",
    ),
    (
        "spec.security.apiKeySecretRef",
        lambda s, _: (
            bool(s.security.api_key_secret_ref.name) != bool(s.security.api_key_secret_ref.key)
        ),
        "security.apiKeySecretRef needs both name and key: set the other one too",
    ),
    *((f"spec.{limit.path}", _refusal(limit), limit.message) for limit in IN_RESOURCE),
)


ONE_KIND = (
    "must have exactly one of emptyDir, configMap, secret, persistentVolumeClaim and projected"
)


def _check_forms(spec: Spec) -> None:
    """The CRD's rules on single values."""
    Source.parse(spec.model.source)
    if not REVISION.fullmatch(spec.model.revision) or ".." in spec.model.revision:
        form = "must be a commit, branch or tag (letters, digits, . _ / -, no '..')"
        raise ResourceError("spec.model.revision", f"{form}: correct it")
    names = [variable.name for variable in spec.pod_template.env]
    for index, name in enumerate(names):
        at = f"spec.podTemplate.env[{index}].name"
        if ENV.search(name.upper()):
            form = (
                "must not begin with PYTHON, LD_, HF_ or FAIRLEAD_ nor end with _PROXY, in any case"
            )
            raise ResourceError(at, f"{form}: remove the entry")
        if name in names[:index]:
            raise ResourceError(at, f"{name} occurs twice: remove one")
    modes, ports = spec.model_cache.access_modes, spec.security.egress_ports
    if len(set(modes)) < len(modes):
        raise ResourceError("spec.modelCache.accessModes", "names a mode twice: remove one")
    for port in ports:
        check({"low": 1, "high": 65535}, port, "spec.security.egressPorts")
    if len(set(ports)) < len(ports):
        raise ResourceError("spec.security.egressPorts", "names a port twice: remove one")
    _check_volumes(spec)
    for index, toleration in enumerate(spec.pod_template.tolerations):
        if wrong := _wrong_toleration(toleration):
            raise ResourceError(f"spec.podTemplate.tolerations[{index}]", wrong)
    for place, keys in (
        ("labels", spec.pod_template.labels),
        ("annotations", spec.pod_template.annotations),
    ):
        for key in keys:
            if RESERVED_KEYS.search(key) and not OPEN_KEYS[place].fullmatch(key):
                form = "must not use keys of Fairlead, Kubernetes, Istio or a cloud's identities"
                raise ResourceError(f"spec.podTemplate.{place}", f"{key[:80]}: {form}: remove it")


def _check_volumes(spec: Spec) -> None:
    names: list[str] = []
    for index, volume in enumerate(spec.pod_template.volumes):
        at = f"spec.podTemplate.volumes[{index}]"
        kinds = (
            volume.empty_dir,
            volume.config_map,
            volume.secret,
            volume.persistent_volume_claim,
            volume.projected,
        )
        if sum(kind is not None for kind in kinds) != 1:
            raise ResourceError(at, f"{ONE_KIND}: set one of them")
        for source in volume.projected.sources if volume.projected else ():
            if (source.config_map is None) == (source.secret is None):
                raise ResourceError(at, "projected sources must have a configMap or a secret each")
        if volume.name in OUR_VOLUMES:
            raise ResourceError(at, "name must not be one of the operator's: rename it")
        if volume.name in names:
            raise ResourceError(at, f"{volume.name} occurs twice: remove one")
        names.append(volume.name)
    paths: list[str] = []
    for index, mount in enumerate(spec.pod_template.volume_mounts):
        at = f"spec.podTemplate.volumeMounts[{index}]"
        if mount.name not in names:
            raise ResourceError(at, "name must be one of podTemplate.volumes: add the volume")
        if mount.mount_path in paths:
            raise ResourceError(at, f"{mount.mount_path} occurs twice: remove one")
        paths.append(mount.mount_path)


def _wrong_toleration(toleration: Toleration) -> str:
    """The reason why the API server would refuse a toleration in a Deployment, with its fix; ""
    where it would not.
    """
    if toleration.operator == "Exists" and toleration.value:
        return "operator Exists must not have a value: remove the value, or set operator to Equal"
    if not toleration.key and toleration.operator != "Exists":
        return "without key must have operator Exists: set the one or the other"
    if toleration.toleration_seconds is not None and toleration.effect != "NoExecute":
        return (
            "tolerationSeconds must have effect NoExecute: set effect, or remove tolerationSeconds"
        )
    return ""
