"""Resolve a configuration: replace "auto" and unset values by concrete ones, once, in a new object.

Owns the refusal of settings that are not supported, by name, before the model is loaded. Loads and
allocates nothing. A resolved configuration never changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fairlead_runtime.config import ConfigError, EngineConfig
from fairlead_runtime.sizing.advice import suggest_fix
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.solve import MemoryPlan
from fairlead_runtime.sizing.terms import DeviceFacts, gib
from fairlead_runtime.sizing.verdict import plan_memory


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """What one engine is built from. ``config`` is clamped; ``max_model_len`` is the configured one
    or the model's.

    ``capacity``: the most tokens of one request, prompt and output together; less than
    ``max_model_len`` when the cache is smaller.
    """

    config: EngineConfig
    device: str  # "cpu" or "cuda"
    dtype: str  # of weights and activations
    cache_dtype: str
    max_model_len: int
    num_blocks: int
    offload_units: int
    capacity: int
    plan: MemoryPlan
    warnings: tuple[str, ...] = ()


def check_supported(config: EngineConfig) -> None:
    """Raise ConfigError for a setting that would otherwise be ignored silently."""
    if config.tensor_parallel > 1:
        raise ConfigError(
            "tensor_parallel", f"{config.tensor_parallel} is not supported yet", "use 1"
        )
    if config.quantization != "none":
        raise ConfigError("quantization", f"{config.quantization} is not supported yet", "use none")
    if config.cache_dtype != "auto":
        raise ConfigError("cache_dtype", f"{config.cache_dtype} is not supported yet", "use auto")
    if config.kernels in ("cpu", "flashinfer"):
        raise ConfigError("kernels", f"{config.kernels} is not supported yet", "use auto or torch")
    if config.async_batching == "on":
        raise ConfigError("async_batching", "on is not supported yet", "use auto or off")
    if config.cuda_graphs == "on":
        raise ConfigError("cuda_graphs", "on is not supported yet", "use auto or off")


def check_deterministic(config: EngineConfig, dtype: str) -> None:
    """Refuse ``deterministic`` below float32, where rounding depends on the other requests in the
    batch; batch-invariant kernels do not exist yet.
    """
    if config.deterministic and dtype != "float32":
        raise ConfigError(
            "deterministic", f"is not supported in {dtype} yet", "set --dtype float32"
        )


def resolve(
    config: EngineConfig,
    shape: ModelShape,
    device: DeviceFacts,
    *,
    dtype: str,
    measured: Mapping[str, int] | None = None,
) -> ResolvedConfig:
    """Size the cache and give every unset setting a value. ``dtype``: the model's, at run time.

    ``measured`` (bytes by name) replaces planned memory terms. Raises ConfigError when the engine
    cannot be built with these settings; warns when the cache is smaller than one full-length
    sequence.
    """
    check_supported(config)
    check_deterministic(config, dtype)
    config = config.clamped()
    plan = plan_memory(shape, config, device, measured)
    if plan.used > plan.budget or plan.num_blocks < 1:
        problem = (
            "the model does not fit"
            if plan.used > plan.budget
            else "no room for a single cache block"
        )
        raise ConfigError(
            _field_at_fault(config, plan),
            f"{problem}: {plan.formula}",
            suggest_fix(shape, config, device, measured),
        )
    capacity = min(plan.max_model_len, plan.concurrent_tokens)
    warnings = []
    if capacity < plan.max_model_len:
        warnings.append(
            f"the cache holds {capacity} tokens ({plan.num_blocks} blocks of {plan.block_size}), "
            f"less than one sequence of {plan.max_model_len}: requests are limited to {capacity}"
        )
    return ResolvedConfig(
        config=config,
        device=device.kind,
        dtype=dtype,
        cache_dtype=dtype,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        offload_units=plan.offload_units,
        capacity=capacity,
        plan=plan,
        warnings=tuple(warnings),
    )


def _field_at_fault(config: EngineConfig, plan: MemoryPlan) -> str:
    """The setting that the user should change: a fixed number of blocks, an offload space that
    takes too much, else the share of memory.
    """
    if config.num_blocks is not None:
        return "num_blocks"
    return (
        "cpu_offload_space"
        if plan.used - plan.terms.get("offload", 0) <= plan.budget
        else "max_memory_percent"
    )


def summary(resolved: ResolvedConfig) -> str:
    """One log line: the settings that the engine runs with."""
    plan = resolved.plan
    return (
        f"{resolved.device} {resolved.dtype}, {plan.num_blocks} blocks of {plan.block_size} tokens "
        f"({gib(plan.terms['kv'])} GiB), {resolved.capacity} tokens a request, "
        f"{resolved.config.max_requests} requests and "
        f"{resolved.config.max_batch_tokens} tokens a step"
    )
