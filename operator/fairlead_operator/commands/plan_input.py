"""What `fairlead plan` plans: the resource of a file, or one made of a model's name and flags, and
the model's config.json.

Owns the reading of both, and the words for what cannot be read. Uses the network with --download
alone.
"""

import argparse
import asyncio
import dataclasses
import importlib.resources
import os
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fairlead_operator.decide.children.capacity import PlanError
from fairlead_operator.resource.fields import Quantity, ResourceError
from fairlead_operator.resource.json_text import json_object
from fairlead_operator.resource.kinds import RESOURCE
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.solve import MemoryPlan

CONFIG_BYTES = 1 << 20
HUB = "https://huggingface.co"
# Settings that have flags of `fairlead plan`: those that the resource's engine sections have.
PLANNED = tuple(
    f
    for f in dataclasses.fields(EngineConfig)
    if (f.metadata["cr"] or "").partition(".")[0] in ("engine", "scheduler", "cache")
)
LEAST_MEMORY = 1 << 20  # bytes; less is a quantity without its unit


def deployment_of(options: argparse.Namespace) -> InferenceDeployment:
    """Raises ResourceError, PlanError or OSError."""
    if options.file:
        body = read_resource(options.file)
    else:
        body = _resource(options)
    try:
        deployment = InferenceDeployment.from_body(body)
    except ResourceError as error:
        if options.file or not error.field.startswith("spec.resources."):
            raise
        raise ResourceError("--memory", error.message) from None
    resources = deployment.spec.resources
    for path, size in (
        ("resources.accelerator.memory", resources.accelerator.memory),
        ("resources.memory", resources.memory),
    ):
        if size and size.value < LEAST_MEMORY:
            name = path if options.file else "--memory"
            fix = f"write its unit, as in {size}Gi"
            raise PlanError("InvalidConfig", f"{name}: {size} is {size.value} bytes: {fix}")
    return deployment


def with_host_memory(deployment: InferenceDeployment, plan: MemoryPlan) -> InferenceDeployment:
    """With at least the host memory that the plan needs: a MODEL of the command line has no pod
    that could lack it.
    """
    resources = deployment.spec.resources
    needed = sum(plan.host.values())
    if resources.accelerator.count == 0 or needed <= resources.memory.value:
        return deployment
    more = replace(resources, memory=Quantity(f"{-(-needed // 2**30)}Gi"))
    return replace(deployment, spec=replace(deployment.spec, resources=more))


def read_resource(file: str) -> Any:
    """The first InferenceDeployment of a YAML or JSON file. Raises ResourceError or OSError."""
    text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    try:
        bodies = [b for b in yaml.safe_load_all(text) if b is not None]
    except yaml.YAMLError as error:
        raise ResourceError("", f"{file} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ResourceError("", f"{file} is nested too deeply: write an {RESOURCE.name}") from None
    if not bodies:
        raise ResourceError("", f"{file} is empty: it should hold an {RESOURCE.name}")
    ours = [b for b in bodies if isinstance(b, Mapping) and b.get("kind") == RESOURCE.name]
    if len(ours) > 1:
        others = ", ".join(str((b.get("metadata") or {}).get("name")) for b in ours[1:])
        words = f"{file} holds {len(ours)} of kind {RESOURCE.name}: the first is used, not {others}"
        print(f"note: {words}", file=sys.stderr)  # noqa: T201 - to the person
    return next(iter(ours), bodies[0])


def _resource(options: argparse.Namespace) -> Mapping[str, Any]:
    """A resource for --memory of one accelerator, or of a pod on a CPU."""
    spec: dict[str, Any] = {"model": {"source": _source(options.model)}}
    if options.revision:
        spec["model"]["revision"] = options.revision
    if options.device == "cpu":
        spec["resources"] = {"accelerator": {"count": 0}, "memory": options.memory}
    else:
        accelerator = {"count": options.tensor_parallel, "memory": options.memory}
        spec["resources"] = {"accelerator": accelerator}
    for f in PLANNED:
        if (value := getattr(options, f.name)) != f.default:
            *folders, last = f.metadata["cr"].split(".")
            place = spec
            for folder in folders:
                place = place.setdefault(folder, {})
            place[last] = value
    meta = {"name": "plan"}
    return {
        "apiVersion": RESOURCE.api_version,
        "kind": RESOURCE.name,
        "metadata": meta,
        "spec": spec,
    }


def _source(model: str) -> str:
    """``spec.model.source`` of MODEL as `fairlead serve` takes it. Raises ResourceError."""
    if ":" in model:
        return model
    path = Path(model).expanduser()
    if model.startswith(("/", ".", "~")) or path.is_dir():
        if not path.is_dir():
            raise ResourceError("", f"{model}: no such directory")
        return f"file://{path.resolve()}"
    return f"hf://{model}"


def config_of(options: argparse.Namespace, deployment: InferenceDeployment) -> Mapping[str, Any]:
    """The model's config.json. Raises PlanError or OSError."""
    source = deployment.spec.model.origin
    if options.config is not None:
        text = _read_config(Path(options.config))
    elif source.kind == "demo":
        text = (importlib.resources.files("fairlead_runtime") / "demo" / "config.json").read_text(
            "utf-8"
        )
    elif source.kind == "file" and (Path(source.path) / "config.json").is_file():
        text = _read_config(Path(source.path) / "config.json")
    elif source.kind == "hf" and options.download:
        return _download(deployment)
    else:
        where = f"the config.json of {deployment.spec.model.source}"
        fix = "give it with --config"
        if source.kind == "hf":
            revision = deployment.spec.model.revision or "main"
            url = f"{_hub()}/{source.path}/resolve/{revision}/config.json"
            fix += f", or let --download take it from {url}"
        raise PlanError(
            "ConfigUnavailable",
            f"{where} is not on this machine, and plan downloads nothing by itself",
            fix,
        )
    try:
        return json_object(text)
    except ValueError as error:
        raise PlanError(
            "ConfigUnavailable", f"config.json must hold a JSON object: {error}"
        ) from None


def _hub() -> str:
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def _download(deployment: InferenceDeployment) -> Mapping[str, Any]:
    """The config.json of a hub model, as the operator reads it: without a token. Raises
    PlanError.
    """
    from fairlead_operator.probe.hub import LATER, Hub, HubError

    async def fetch() -> Mapping[str, Any]:
        hub = Hub(_hub(), proxies=urllib.request.getproxies())
        try:
            return await hub.config(deployment.spec.model.origin, deployment.spec.model.revision)
        finally:
            await hub.close()

    try:
        return asyncio.run(fetch())
    except HubError as error:
        message = str(error).removesuffix(f"; {LATER}")
        raise PlanError(error.reason, f"{message}; --config takes a file") from None


def _read_config(file: Path) -> str:
    if file.stat().st_size > CONFIG_BYTES:
        raise PlanError(
            "ConfigUnavailable", f"{file} is larger than 1 MiB: give the model's config.json"
        )
    return file.read_text("utf-8")
