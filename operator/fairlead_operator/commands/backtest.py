"""`fairlead backtest --trace FILE --policy cr.yaml`: simulate the autoscaler on a trace.

Owns the arguments and the output; the decisions are the operator's own. Uses no network, imports
neither torch nor kopf.
"""

import argparse
import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from fairlead_operator.commands.plan_input import read_resource
from fairlead_operator.commands.plot import sparkline, svg
from fairlead_operator.decide.scale.autoscale import TICK, Policy
from fairlead_operator.decide.scale.simulate import (
    OperatorScaler,
    Pod,
    Result,
    Row,
    TraceError,
    read_trace,
    served_in,
    simulate,
)
from fairlead_operator.decide.scale.target import pod_target, requests_that_fit, typical_request
from fairlead_operator.resource.fields import ResourceError
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_runtime.settings.arguments import ArgumentParser
from fairlead_runtime.settings.terminal import refuse


def main(args: Sequence[str]) -> int:
    """Exit code 0: done. 2: the trace or the policy cannot be used."""
    options = _parser().parse_args(list(args))
    try:
        deployment = InferenceDeployment.from_body(read_resource(options.policy))
        with Path(options.trace).open(encoding="utf-8", newline="") as file:
            lines = list(file)
        policy, pod = _policy(deployment, options, typical_request([served_in(lines)]))
        result = simulate(read_trace(lines, pod), pod, policy, OperatorScaler(policy))
        if options.plot:
            Path(options.plot).write_text(_svg(result, policy), "utf-8")
    except OSError as error:
        refuse("CannotRead", f"{error.filename}: {error.strerror}")
        return 2
    except (UnicodeDecodeError, ResourceError, TraceError) as error:
        refuse("InvalidConfig", str(error))
        return 2
    format_result = {"text": _text, "json": _json, "csv": _csv}[options.output]
    print(format_result(result, policy))  # noqa: T201 - the answer
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fairlead backtest",
        description="Simulate the operator's autoscaler on a trace of arrivals.",
    )
    parser.add_argument(
        "--trace", required=True, metavar="FILE", help="CSV: t,arrivals,prompt_tokens,output_tokens"
    )
    parser.add_argument(
        "--policy", required=True, metavar="cr.yaml", help="an InferenceDeployment with autoscaling"
    )
    parser.add_argument("-o", "--output", choices=("text", "json", "csv"), default="text")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw replicas, queue and load")
    parser.add_argument(
        "--concurrent-tokens",
        type=_positive,
        default=0,
        metavar="N",
        help="concurrentTokens of one pod, as `fairlead plan` prints them",
    )
    parser.add_argument(
        "--start-seconds",
        type=_positive,
        default=60.0,
        metavar="S",
        help="seconds until a pod is ready (60)",
    )
    parser.add_argument(
        "--prefill-rate",
        type=_positive,
        default=8000.0,
        metavar="R",
        help="prompt tokens/s per pod (8000)",
    )
    parser.add_argument(
        "--decode-rate",
        type=_positive,
        default=40.0,
        metavar="R",
        help="output tokens/s per request (40)",
    )
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _policy(
    deployment: InferenceDeployment, options: argparse.Namespace, typical: float | None
) -> tuple[Policy, Pod]:
    autoscaling = deployment.spec.autoscaling
    if autoscaling is None:
        raise ResourceError("spec.autoscaling", "must be set: it is the policy to test")
    max_requests, tokens = deployment.engine.max_requests, int(options.concurrent_tokens)
    slots = max(1, int(requests_that_fit(max_requests, tokens, typical)))
    pod = Pod(slots, options.start_seconds, options.prefill_rate, options.decode_rate)
    target = pod_target(deployment, autoscaling, tokens, typical)
    return Policy.of(autoscaling, target), pod


def _text(result: Result, policy: Policy) -> str:
    rows = result.rows
    figures = [f"{name + ':':20}{value}" for name, value in result.summary().items()]
    limits: dict[str, float] = {}
    for row in rows:
        if row.limited_by:
            limits[row.limited_by] = limits.get(row.limited_by, 0.0) + TICK
    limit_lines = [
        f"  {name:32}{seconds / 60:8.1f} min"
        for name, seconds in sorted(limits.items(), key=lambda i: -i[1])
    ]
    load = [r.running + r.waiting for r in rows]
    charts = [
        f"replicas {sparkline([r.replicas for r in rows])} max {max(r.replicas for r in rows)}",
        f"load     {sparkline(load)} max {max(load):.0f}",
        f"queue    {sparkline([r.waiting for r in rows])} max {result.max_waiting:.0f}",
    ]
    pods = f"{policy.min_replicas} to {policy.max_replicas} pods"
    target = f"target {policy.target:g} requests a pod, {pods}"
    if policy.target_formula:
        target += f"\n{policy.target:g} = {policy.target_formula}"
    return "\n".join(
        [target, "", *charts, "", *figures, "", "limited by", *(limit_lines or ["  nothing"])]
    )


def _json(result: Result, policy: Policy) -> str:
    rows = [{name: getattr(row, name) for name in Row.__slots__} for row in result.rows]
    return json.dumps({"target": policy.target, "summary": result.summary(), "rows": rows})


def _csv(result: Result, _: Policy) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(Row.__slots__)
    for row in result.rows:
        writer.writerow(
            [
                f"{v:.6g}" if isinstance(v, float) else v
                for v in (getattr(row, n) for n in Row.__slots__)
            ]
        )
    return out.getvalue().rstrip("\n")


def _svg(result: Result, policy: Policy) -> str:
    rows = result.rows
    replicas = (
        ("pods, as decided", [r.replicas for r in rows]),
        ("pods, ready", [r.ready for r in rows]),
    )
    load = (
        ("requests, running and waiting", [r.running + r.waiting for r in rows]),
        ("requests, target of the ready pods", [policy.target * r.ready for r in rows]),
    )
    title = f"{result.pod_hours:.1f} pod-hours, {result.seconds_over:.0f} s over target"
    return svg(
        title,
        len(rows) * TICK,
        (replicas, load, (("requests, waiting", [r.waiting for r in rows]),)),
    )
