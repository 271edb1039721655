"""`fairlead plan (-f cr.yaml | MODEL --memory 24Gi)`: print what one pod can hold and whether the
model fits.

Owns the command line and the printing. Imports neither torch nor kopf.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fairlead_operator.commands.plan_input import (
    PLANNED,
    config_of,
    deployment_of,
    with_host_memory,
)
from fairlead_operator.decide.children.capacity import (
    PlanError,
    host_shortage,
    plan_of,
    planned_capacity,
)
from fairlead_operator.decide.scale.target import pod_target
from fairlead_operator.decide.status import states_of
from fairlead_operator.resource.fields import ResourceError
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_runtime.settings.arguments import ArgumentParser
from fairlead_runtime.settings.engine_config import EngineConfig, add_arguments, flag_of
from fairlead_runtime.settings.terminal import BOLD, GREEN, RED, paint, refuse
from fairlead_runtime.sizing.fixes import resource_field
from fairlead_runtime.sizing.solve import MemoryPlan
from fairlead_runtime.sizing.terms import gib

BOUNDS = {
    "connections": "connections",
    "requests": "requests",
    "waitingPromptTokens": "waiting tokens",
    "bodyBytes": "bytes of a body",
    "openFiles": "open files",
}  # what they are called here, by the names of reports
BAR = 24  # characters
FOUR_BITS = (
    "A 4-bit checkpoint (AWQ or GPTQ) of the model takes about a quarter of the weights' memory: "
    "plan with its config.json."
)


def main(args: Sequence[str]) -> int:
    """Exit code 0: it fits. 1: it does not. 2: it cannot be planned."""
    parser = _parser()
    options = parser.parse_args(list(args))
    _check(parser, options)
    try:
        deployment = deployment_of(options)
        config = config_of(options, deployment)
        plan = plan_of(config, deployment)
        if options.model:
            deployment = with_host_memory(deployment, plan)
        capacity = planned_capacity(plan, deployment)
    except OSError as error:
        refuse("CannotRead", f"{error.filename}: {error.strerror}")
        return 2
    except (UnicodeDecodeError, ResourceError, PlanError) as error:
        hint = getattr(error, "hint", "")
        refuse(getattr(error, "reason", "InvalidConfig"), str(error), hint)
        return 2
    as_json = options.output == "json"
    print(json.dumps(capacity, indent=2) if as_json else _text(capacity, deployment, plan))  # noqa: T201 - the answer
    return 0 if capacity["fits"] and not host_shortage(deployment, plan) else 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fairlead plan",
        usage="fairlead plan (-f cr.yaml | MODEL --memory SIZE [settings]) [--config FILE | "
        "--download] [-o text|json]",
        description="Exit code 0: fits; 1: does not; 2: cannot be planned.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="as of `fairlead serve`, in place of -f"
    )
    parser.add_argument(
        "-f", "--file", metavar="cr.yaml", help="an InferenceDeployment; - for stdin"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="of one accelerator, or of the pod on a CPU, as in 24Gi"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="of MODEL (default: cuda)"
    )
    parser.add_argument("--revision", default="", help="of MODEL on the hub (default: main)")
    parser.add_argument(
        "--config",
        metavar="config.json",
        help="the model's config.json (demo: and paths have their own)",
    )
    parser.add_argument(
        "--download", action="store_true", help="read config.json from the hub, without a token"
    )
    parser.add_argument(
        "-o",
        "--output",
        choices=("text", "json"),
        default="text",
        help="json: status.capacity (default: text)",
    )
    names = {f.name for f in PLANNED}
    add_arguments(parser, without={f.name for f in dataclasses.fields(EngineConfig)} - names)
    return parser


def _check(parser: ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse a command line that says neither, or both, of a file and a model."""
    if bool(options.file) == bool(options.model):
        problem = (
            "-f and MODEL are two ways to say one thing" if options.file else "nothing to plan"
        )
        parser.refuse(problem, "give -f cr.yaml, or MODEL --memory 24Gi")
    if options.file:
        given = [f.name for f in PLANNED if getattr(options, f.name) != f.default]
        given += [name for name in ("memory", "revision") if getattr(options, name)]
        if given:
            problem = f"{flag_of(given[0])}: the file of -f says it"
            parser.refuse(problem, "set it there, or plan MODEL without -f")
    elif options.model.endswith((".yaml", ".yml")):
        parser.refuse(f"{options.model} is no model", f"a resource's file is -f {options.model}")
    elif not options.memory:
        parser.refuse("--memory: is missing", "give the memory of one accelerator, as in 24Gi")


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
        states = states_of(planned_capacity(plan, deployment)["planned"])
        target = pod_target(deployment, scaling, tokens, None, states=states)
        formula = f" ({target.formula})" if target.formula else ""
        rows.append(("autoscaler's target", f"{target.requests:g}{formula}"))
    return rows


def _text(capacity: Mapping[str, Any], deployment: InferenceDeployment, plan: MemoryPlan) -> str:
    planned = capacity["planned"]
    held = planned.get("stateBytesPerSequence")
    rows = (
        ("weights", f"{gib(planned['weightsBytes'])} GiB"),
        ("KV cache per token", f"{planned['kvBytesPerToken']:,} bytes"),
        *([("states per sequence", f"{held:,} bytes")] if held else ()),
        ("cache blocks", f"{planned['numBlocks']:,}"),
        ("concurrent tokens", f"{planned['concurrentTokens']:,}"),
        ("full-length sequences", f"{planned['fullLengthSequences']:,}"),
        ("what binds the cache", _cache_bound(deployment, plan)),
        *_host(deployment, plan),
        *_bounds(deployment, plan),
    )
    fits, short = capacity["fits"], host_shortage(deployment, plan)
    no = "DOES NOT FIT THE HOST:" if fits else "DOES NOT FIT:"
    words = paint(no, RED, sys.stdout) if short or not fits else paint("FITS:", GREEN, sys.stdout)
    lines = [
        *_memory(deployment, plan),
        "",
        *(f"{name + ':':24}{value}" for name, value in rows),
        "",
        f"{words} {capacity['message'].removeprefix('fits: ')}",
    ]
    on_gpu = deployment.spec.resources.accelerator.count > 0
    if not fits and on_gpu and plan.message.endswith("or a smaller model"):
        lines.append(FOUR_BITS)
    return "\n".join(lines)


def _host(deployment: InferenceDeployment, plan: MemoryPlan) -> list[tuple[str, str]]:
    """The row of the memory that a pod takes beside its accelerators; on a CPU it has no other."""
    if deployment.spec.resources.accelerator.count == 0:
        return []
    has = deployment.spec.resources.memory.value
    return [("memory of the host", f"{gib(sum(plan.host.values()))} of {gib(has)} GiB")]


def _cache_bound(deployment: InferenceDeployment, plan: MemoryPlan) -> str:
    """What keeps the cache from having more blocks."""
    if deployment.engine.num_blocks is not None:
        return "numBlocks"
    if plan.bounds and "cache" in plan.bounds[0]:
        return plan.bounds_for(resource_field).removeprefix("; ").partition("; ")[0]
    return "memory: it has what the other terms leave"


def _memory(deployment: InferenceDeployment, plan: MemoryPlan) -> list[str]:
    """The equation as a table: each term's GiB and its part of the budget."""
    count = deployment.spec.resources.accelerator.count
    whose = "the pod" if count == 0 else "one accelerator" if count == 1 else f"each of {count}"
    share = f"{plan.budget / max(1, plan.total):.3g} of {gib(plan.total)} GiB"
    lines = [paint(f"{'memory of ' + whose:<24}{'GiB':>8}", BOLD, sys.stdout)]
    for name, size in sorted(plan.terms.items(), key=lambda term: -term[1]):
        if not size:
            continue
        part = size / max(1, plan.budget)
        bar = "█" * min(BAR, round(BAR * part))
        lines.append(f"{name:<24}{gib(size):>8}{100 * part:6.0f} %  {bar}".rstrip())
    left = plan.budget - plan.used
    lines.append(f"{'left' if left >= 0 else 'too much':<24}{gib(abs(left)):>8}")
    lines.append(f"{'budget':<24}{gib(plan.budget):>8}   {share}")
    return lines
