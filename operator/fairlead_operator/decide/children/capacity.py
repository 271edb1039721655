"""``status.capacity``: what one pod of a resource can hold, by the runtime's own sizing.

Owns the mapping from a resource to the device it requests, and the shape of the status. Does no
I/O: the caller passes the model's config.json as a mapping.
"""

from collections.abc import Mapping
from typing import Any

from fairlead_operator.resource.json_text import count_of
from fairlead_operator.resource.resource import SETTINGS, InferenceDeployment
from fairlead_runtime.settings.engine_config import ConfigError, flag_of
from fairlead_runtime.sizing.checkpoint_formats import check_stored
from fairlead_runtime.sizing.config_json import ShapeError, UnknownFamilyError
from fairlead_runtime.sizing.element_types import dtype_of
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.solve import MemoryPlan
from fairlead_runtime.sizing.terms import DeviceFacts, gib
from fairlead_runtime.sizing.verdict import plan_memory

MEASURED = (
    "weightsBytes",
    "kvBytesPerToken",
    "numBlocks",
    "concurrentTokens",
    "fullLengthSequences",
    "stateBytesPerSequence",
)


class PlanError(ValueError):
    """Capacity is unknown. ``reason`` is the Planned condition's; the message names the fix, or
    ``hint`` does.
    """

    def __init__(self, reason: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.hint = hint


def device_of(deployment: InferenceDeployment) -> DeviceFacts:
    """The device to plan for: one accelerator of the pod; on a CPU, the pod's memory limit."""
    accelerator, resources = deployment.spec.resources.accelerator, deployment.spec.resources
    if accelerator.count == 0:
        return DeviceFacts("cpu", resources.memory.value)
    if not accelerator.memory:
        fix = "set resources.accelerator.memory, e.g. 80Gi, to plan before a pod runs"
        raise PlanError(
            "AcceleratorMemoryUnknown", f"the memory of one accelerator is not known: {fix}"
        )
    return DeviceFacts("cuda", accelerator.memory.value)


def plan_of(config: Mapping[str, Any], deployment: InferenceDeployment) -> MemoryPlan:
    """The sizing of this resource for the model of this config.json. Raises PlanError."""
    device = device_of(deployment)
    try:
        shape = ModelShape.from_config(config)
        dtype = dtype_of(shape, deployment.engine)
        unfused = shape.plain_on(device.kind)
        check_stored(deployment.engine, shape.quantized, dtype, device.kind, unfused=unfused)
        return plan_memory(shape, deployment.engine, device)
    except UnknownFamilyError as error:
        raise PlanError("FamilyUnknown", str(error)) from None
    except ShapeError as error:
        raise PlanError("UnsupportedModel", str(error)) from None
    except ConfigError as error:
        path = next(path for path, setting in SETTINGS.items() if setting.name == error.field)
        raise PlanError(
            "InvalidConfig", f"spec.{path}{str(error).removeprefix(flag_of(error.field))}"
        ) from None


def capacity_of(config: Mapping[str, Any], deployment: InferenceDeployment) -> dict[str, Any]:
    """``status.capacity`` as planned, without measurements of pods. Raises PlanError."""
    return planned_capacity(plan_of(config, deployment), deployment)


def planned_capacity(plan: MemoryPlan, deployment: InferenceDeployment) -> dict[str, Any]:
    """``status.capacity`` of a plan for this resource."""
    short = host_shortage(deployment, plan)
    size = plan.state_bytes_per_sequence
    states = {"stateBytesPerSequence": size} if size else {}
    return {
        "planned": {
            "weightsBytes": plan.weights_bytes,
            "kvBytesPerToken": plan.kv_bytes_per_token,
            "numBlocks": plan.num_blocks,
            "concurrentTokens": plan.concurrent_tokens,
            "fullLengthSequences": plan.full_length_sequences,
            **states,
            "formula": plan.formula,
        },
        "fits": plan.fits,
        "message": f"{plan.message}; but {short}" if short else plan.message,
    }


def host_shortage(deployment: InferenceDeployment, plan: MemoryPlan) -> str:
    """The reason why a pod with accelerators would run out of host memory; "" when it would not."""
    resources = deployment.spec.resources
    needed, has = sum(plan.host.values()), resources.memory.value
    if resources.accelerator.count == 0 or needed <= has:
        return ""
    parts = " + ".join(f"{name} {gib(size)}" for name, size in plan.host.items())
    fix = f"set resources.memory to at least {-(-needed // 2**30)}Gi"
    return f"the host needs {parts} = {gib(needed)} GiB, resources.memory is {gib(has)}: {fix}"


def _connections(bounds: Any) -> int:
    """The connections of a pod's ``/debug/memory``; 0 for what is no report of them."""
    connections = bounds.get("connections") if isinstance(bounds, Mapping) else None
    most = connections.get("most") if isinstance(connections, Mapping) else None
    return count_of(most) or 0


def _weights(terms: Any) -> int | None:
    """The measured bytes of the weights among a pod's terms; None for what is no report of them."""
    for term in terms if isinstance(terms, list) else ():
        if isinstance(term, Mapping) and term.get("name") == "weights":
            return count_of(term.get("measuredBytes"))
    return None


def with_measured(capacity: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """``capacity`` with the figures of a pod's ``/debug/memory``, and the drift of its number of
    blocks in percent.
    """
    counts = {key: count_of(report.get(key)) for key in MEASURED}
    if (weights := _weights(report.get("terms"))) is not None:
        counts["weightsBytes"] = weights
    counts["connections"] = _connections(report.get("bounds")) or None
    measured = {key: count for key, count in counts.items() if count is not None}
    merged = {**capacity, "measured": measured}
    planned = capacity.get("planned", {}).get("numBlocks")
    if planned and "numBlocks" in measured:
        merged["driftPercent"] = round(100 * (measured["numBlocks"] - planned) / planned, 1)
    return merged
