"""`fairlead plan -f cr.yaml`: print what one pod can hold and whether the model fits.

Owns reading the two files and printing the result. Uses no network, and imports neither torch nor
kopf.
"""

import argparse
import importlib.resources
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fairlead_operator.decide.children.capacity import PlanError, plan_of, planned_capacity
from fairlead_operator.decide.scale.target import pod_target
from fairlead_operator.resource.fields import ResourceError
from fairlead_operator.resource.json_text import json_object
from fairlead_operator.resource.kinds import RESOURCE
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_runtime.sizing.fixes import resource_field
from fairlead_runtime.sizing.solve import MemoryPlan
from fairlead_runtime.sizing.terms import gib

CONFIG_BYTES = 1 << 20
BOUNDS = {
    "connections": "connections",
    "requests": "requests",
    "waitingPromptTokens": "waiting tokens",
    "bodyBytes": "bytes of a body",
    "openFiles": "open files",
}  # what they are called here, by the names of reports


def main(args: Sequence[str]) -> int:
    """Exit code 0: it fits. 1: it does not. 2: it cannot be planned."""
    options = _parser().parse_args(list(args))
    try:
        deployment = InferenceDeployment.from_body(read_resource(options.file))
        config = _config(options.config, deployment)
        plan = plan_of(config, deployment)
        capacity = planned_capacity(plan, deployment)
    except (OSError, ResourceError, PlanError) as error:
        print(f"fairlead plan: {error}", file=sys.stderr)  # noqa: T201 - an error
        return 2
    as_json = options.output == "json"
    print(json.dumps(capacity, indent=2) if as_json else _text(capacity, deployment, plan))  # noqa: T201 - the answer
    return 0 if capacity["fits"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fairlead plan",
        description="Exit code 0: fits; 1: does not; 2: cannot be planned.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-f", "--file", required=True, metavar="cr.yaml", help="an InferenceDeployment; - for stdin"
    )
    parser.add_argument(
        "--config",
        metavar="config.json",
        help="the model's config.json (demo: and paths have their own)",
    )
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="json: status.capacity"
    )
    return parser


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
    return next(
        (b for b in bodies if isinstance(b, Mapping) and b.get("kind") == RESOURCE.name), bodies[0]
    )


def _config(config_path: str | None, deployment: InferenceDeployment) -> Mapping[str, Any]:
    source = deployment.spec.model.origin
    if config_path is not None:
        text = _read_config(Path(config_path))
    elif source.kind == "demo":
        text = (importlib.resources.files("fairlead_runtime") / "demo" / "config.json").read_text(
            "utf-8"
        )
    elif source.kind == "file" and (Path(source.path) / "config.json").is_file():
        text = _read_config(Path(source.path) / "config.json")
    else:
        where = f"the config.json of {deployment.spec.model.source}"
        raise PlanError(
            "ConfigUnavailable",
            f"{where} is not on this machine, and plan downloads nothing: give it with --config",
        )
    try:
        return json_object(text)
    except ValueError as error:
        raise PlanError(
            "ConfigUnavailable", f"config.json must hold a JSON object: {error}"
        ) from None


def _read_config(file: Path) -> str:
    if file.stat().st_size > CONFIG_BYTES:
        raise PlanError(
            "ConfigUnavailable", f"{file} is larger than 1 MiB: give the model's config.json"
        )
    return file.read_text("utf-8")


def _bounds(deployment: InferenceDeployment, plan: MemoryPlan) -> list[tuple[str, str]]:
    """The rows of what a pod takes in, each with what binds it."""
    traffic = plan.traffic
    rows = [
        (BOUNDS[name], f"{bound.most:,} ({bound.text(resource_field)})")
        for name, bound in traffic.bounds().items()
    ]
    length = traffic.full_queue_tokens
    which = "maxQueue"
    if length < plan.max_model_len:
        which += f" up to {length:,} prompt tokens a request, beyond them waiting tokens"
    rows.append(("what binds the queue", which))
    scaling, tokens = deployment.spec.autoscaling, plan.concurrent_tokens
    if scaling is not None:
        target = pod_target(deployment, scaling, tokens, None)
        formula = f" ({target.formula})" if target.formula else ""
        rows.append(("autoscaler's target", f"{target.requests:g}{formula}"))
    return rows


def _text(capacity: Mapping[str, Any], deployment: InferenceDeployment, plan: MemoryPlan) -> str:
    planned = capacity["planned"]
    rows = (
        ("weights", f"{gib(planned['weightsBytes'])} GiB"),
        ("KV cache per token", f"{planned['kvBytesPerToken']:,} bytes"),
        ("cache blocks", f"{planned['numBlocks']:,}"),
        ("concurrent tokens", f"{planned['concurrentTokens']:,}"),
        ("full-length sequences", f"{planned['fullLengthSequences']:,}"),
        *_bounds(deployment, plan),
        ("equation (GiB)", planned["formula"]),
    )
    lines = [f"{name + ':':24}{value}" for name, value in rows]
    return "\n".join(
        [
            *lines,
            "",
            ("FITS: " if capacity["fits"] else "DOES NOT FIT: ")
            + capacity["message"].removeprefix("fits: "),
        ]
    )
