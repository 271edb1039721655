"""The operator's own settings, frozen; the composition root reads them once from arguments and
environment.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fairlead_operator.resource.json_text import json_value
from fairlead_operator.resource.kinds import Object

# Keys for bookkeeping: no Service, policy or agent is expected to select by them.
_BOOKKEEPING = r"([a-z0-9.-]+/)?(team|owner|contact|department|cost-cent(er|re)|billing-code)"
OPEN_LABELS = (_BOOKKEEPING, r"app\.kubernetes\.io/(part-of|version)")
OPEN_ANNOTATIONS = (
    *OPEN_LABELS,
    r"([a-z0-9.-]+/)?description",
    r"prometheus\.io/(scrape|port|path|scheme)",
    r"cluster-autoscaler\.kubernetes\.io/safe-to-evict",
    r"karpenter\.sh/do-not-disrupt",
)
# What clouds and MetalLB read to make a Service's load balancer.
OPEN_SERVICE_ANNOTATIONS = (
    *OPEN_ANNOTATIONS,
    r"service(\.beta)?\.kubernetes\.io/.+",
    r"(cloud\.google\.com|networking\.gke\.io|metallb\.(io|universe\.tf))/.+",
)


_DOCKER_HUB = "docker.io"
_PUBLIC_HUB = "https://huggingface.co"
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class SettingsError(ValueError):
    """An invalid setting; the message names it and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that the chart passes. Patterns are regular expressions that must match whole
    values.
    """

    namespaces: tuple[str, ...] = ()  # empty: all
    lease_namespace: str = "default"
    identity: str = "fairlead-operator"
    probe_port: int = 8080
    log_format: str = "auto"
    runtime_image: str = "fairlead-runtime:latest"  # of pods without accelerators
    accelerator_image: str = ""  # of pods with accelerators; "": runtime_image
    image_pull_secrets: tuple[str, ...] = ()  # of runtime pods, beside those of their resource
    allowed_images: tuple[str, ...] = ()
    allowed_service_accounts: tuple[str, ...] = ()
    allowed_priority_classes: tuple[str, ...] = ()
    allowed_labels: tuple[str, ...] = ()
    allowed_annotations: tuple[str, ...] = ()
    allowed_service_annotations: tuple[str, ...] = ()
    allow_remote_code: bool = False
    create_model_cache: bool = False
    upgrade_concurrency: int = 1  # deployments that changed defaults may roll at a time; 0: none
    # NetworkPolicyPeers that may read the admin port: the operator itself and the chart's
    # metrics.from.
    admin_peers: tuple[Object, ...] = ()
    hub: str = _PUBLIC_HUB
    # Of the containers that download; "" where there is none.
    http_proxy: str = ""
    https_proxy: str = ""
    no_proxy: str = ""
    ca_config_map: str = ""  # in each served namespace, with ca_key
    ca_key: str = "ca.crt"
    fs_group: int = 0  # owner of a claim's files; 0: the platform sets one

    @property
    def release(self) -> str:
        """The name of this release in the resources that it serves: where its Lease is. All its
        replicas have it, and an operator that replaces them.
        """
        return self.lease_namespace

    @property
    def proxies(self) -> dict[str, str]:
        """The proxies by scheme, as urllib has them."""
        proxies = {"http": self.http_proxy, "https": self.https_proxy, "no": self.no_proxy}
        return {name: value for name, value in proxies.items() if value}

    @property
    def proxy_environment(self) -> dict[str, str]:
        """The variables for proxies in both spellings, as libraries read one or the other."""
        variables = {
            "HTTP_PROXY": self.http_proxy,
            "HTTPS_PROXY": self.https_proxy,
            "NO_PROXY": self.no_proxy,
        }
        return {
            spelt: value
            for name, value in variables.items()
            for spelt in (name, name.lower())
            if value
        }

    @property
    def proxy_ports(self) -> tuple[int, ...]:
        return tuple(_port(proxy) for proxy in (self.http_proxy, self.https_proxy) if proxy)

    @property
    def hub_port(self) -> int:
        return _port(self.hub)

    def image_for(self, accelerators: int) -> str:
        """The image of pods with so many accelerators, where their resource names none."""
        image = self.accelerator_image if accelerators else ""
        return image or self.runtime_image

    def allows_image(self, image: str) -> bool:
        """Whether a resource may name this image. Docker Hub's images have two names, with
        ``docker.io/`` and without; either may be in the list and in the resource.
        """
        names = _names(image)
        return (
            not image
            or not {self.image_for(0), self.image_for(1)}.isdisjoint(names)
            or any(_matches(self.allowed_images, name) for name in names)
        )

    def allows_service_account(self, name: str) -> bool:
        return not name or _matches(self.allowed_service_accounts, name)

    def allows_priority_class(self, name: str) -> bool:
        return not name or _matches(self.allowed_priority_classes, name)

    def allows_label(self, key: str) -> bool:
        return _matches((*OPEN_LABELS, *self.allowed_labels), key)

    def allows_annotation(self, key: str) -> bool:
        return _matches((*OPEN_ANNOTATIONS, *self.allowed_annotations), key)

    def allows_service_annotation(self, key: str) -> bool:
        return _matches((*OPEN_SERVICE_ANNOTATIONS, *self.allowed_service_annotations), key)


def _names(image: str) -> tuple[str, ...]:
    """The image's name as written, and the other one of an image of Docker Hub."""
    host, slash, rest = image.partition("/")
    if slash and host == _DOCKER_HUB:
        return image, rest
    elsewhere = slash and ("." in host or ":" in host or host == "localhost")
    return (image,) if elsewhere else (image, f"{_DOCKER_HUB}/{image}")


def _port(address: str) -> int:
    parts = urlsplit(address)
    return parts.port or (80 if parts.scheme == "http" else 443)


def _matches(patterns: Sequence[str], value: str) -> bool:
    return any(re.fullmatch(pattern, value) for pattern in patterns)


def settings_of(options: argparse.Namespace, environ: Mapping[str, str], hostname: str) -> Settings:
    """The settings that the flags of `fairlead operator` and the environment say. Raises
    SettingsError.
    """
    pod_namespace = environ.get("POD_NAMESPACE", "")
    for name in (*options.namespace, options.lease_namespace or pod_namespace or "default"):
        if not _NAMESPACE.fullmatch(name):
            raise SettingsError(f"{name[:80]!r} is not a namespace name: correct it")
    if not 1 <= options.probe_port <= 65535:
        raise SettingsError(
            f"--probe-port {options.probe_port} is not a port: choose one from 1 to 65535"
        )
    if not options.namespace and not options.all_namespaces:
        if not pod_namespace:
            raise SettingsError("no namespace to serve: give --namespace or --all-namespaces")
        options.namespace = [pod_namespace]
    lease = (
        options.lease_namespace
        or pod_namespace
        or (options.namespace[0] if options.namespace else "")
    )
    if not lease:
        raise SettingsError(
            "no namespace for the Lease: give --lease-namespace or set POD_NAMESPACE"
        )
    image = environ.get("FAIRLEAD_RUNTIME_IMAGE", "")
    if not image:
        raise SettingsError("FAIRLEAD_RUNTIME_IMAGE is not set: name the image that pods run")
    return Settings(
        namespaces=tuple(dict.fromkeys(options.namespace)),
        lease_namespace=lease,
        identity=environ.get("POD_NAME") or hostname,
        probe_port=options.probe_port,
        log_format=options.log_format,
        runtime_image=image,
        accelerator_image=environ.get("FAIRLEAD_ACCELERATOR_IMAGE", ""),
        image_pull_secrets=_lines(environ, "FAIRLEAD_IMAGE_PULL_SECRETS"),
        allowed_images=_patterns(environ, "FAIRLEAD_ALLOWED_IMAGES"),
        allowed_service_accounts=_patterns(environ, "FAIRLEAD_ALLOWED_SERVICE_ACCOUNTS"),
        allowed_priority_classes=_patterns(environ, "FAIRLEAD_ALLOWED_PRIORITY_CLASSES"),
        allowed_labels=_patterns(environ, "FAIRLEAD_ALLOWED_LABELS"),
        allowed_annotations=_patterns(environ, "FAIRLEAD_ALLOWED_ANNOTATIONS"),
        allowed_service_annotations=_patterns(environ, "FAIRLEAD_ALLOWED_SERVICE_ANNOTATIONS"),
        allow_remote_code=_switch(environ, "FAIRLEAD_ALLOWED_REMOTE_CODE"),
        create_model_cache=_switch(environ, "FAIRLEAD_ALLOWED_MODEL_CACHE_CREATE"),
        upgrade_concurrency=_count(environ, "FAIRLEAD_UPGRADE_CONCURRENCY", 1),
        admin_peers=tuple(_json_list(environ, "FAIRLEAD_ADMIN_PEERS")),
        hub=_address("HF_ENDPOINT", environ.get("HF_ENDPOINT") or _PUBLIC_HUB),
        http_proxy=_address("FAIRLEAD_HTTP_PROXY", environ.get("FAIRLEAD_HTTP_PROXY", "")),
        https_proxy=_address("FAIRLEAD_HTTPS_PROXY", environ.get("FAIRLEAD_HTTPS_PROXY", "")),
        no_proxy=environ.get("FAIRLEAD_NO_PROXY", ""),
        ca_config_map=environ.get("FAIRLEAD_CA_CONFIG_MAP", ""),
        ca_key=environ.get("FAIRLEAD_CA_KEY") or "ca.crt",
        fs_group=int(environ.get("FAIRLEAD_FS_GROUP") or 0),
    )


def _address(name: str, address: str) -> str:
    if not address:
        return ""
    try:
        parts = urlsplit(address.rstrip("/"))
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or "@" in parts.netloc:
        raise SettingsError(
            f"{name} must be http(s)://host or http(s)://host:port, not {address[:120]!r}"
        )
    return address.rstrip("/")


def _lines(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in environ.get(name, "").splitlines() if line.strip())


def _patterns(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    patterns = _lines(environ, name)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise SettingsError(
                f"{name}: {pattern!r} is not a regular expression ({error}): correct it"
            ) from None
    return patterns


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "") or str(default)
    if not re.fullmatch("[0-9]{1,4}", text):
        raise SettingsError(f"{name} must be a number from 0 to 9999, not {text[:40]!r}")
    return int(text)


def _switch(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "false").lower()
    if value not in {"true", "false"}:
        raise SettingsError(f'{name} must be "true" or "false", not {value!r}')
    return value == "true"


def _json_list(environ: Mapping[str, str], name: str) -> list[Any]:
    try:
        value = json_value(environ.get(name, "[]"))
    except ValueError as error:
        raise SettingsError(f"{name} is not JSON: {error}: correct it") from None
    if not isinstance(value, list):
        raise SettingsError(f"{name} must be a JSON list: correct it")
    return value
