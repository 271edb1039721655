"""Resolve a configuration: replace "auto" and unset values by concrete ones, once, in a new object.

Refuses the settings that ``supported`` lists and those that do not fit in memory. Loads and
allocates nothing. A resolved configuration never changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig, flag_of
from fairlead_runtime.settings.supported import without_effect
from fairlead_runtime.sizing.checkpoint_formats import check_stored
from fairlead_runtime.sizing.fixes import advise
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.solve import MemoryPlan
from fairlead_runtime.sizing.terms import GIB, PROCESS, DeviceFacts, gib
from fairlead_runtime.sizing.traffic import surplus_queue
from fairlead_runtime.sizing.verdict import plan_memory

# A prompt's tokens in a step that also decodes, on a CPU: there a decode step takes as long as
# reading the weights, and so do some fixed number of prompt tokens, whatever the model's size.
CPU_PREFILL_BESIDE_DECODES = 96


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

    @property
    def prefill_beside_decodes(self) -> int:
        """The bound of ``Limits`` of this name; 0 where it would change nothing, and on GPUs,
        where it is not measured.
        """
        bound = CPU_PREFILL_BESIDE_DECODES if self.device == "cpu" else 0
        first = self.config.scheduler_type == "prefill_first"
        return 0 if first or bound >= self.config.max_batch_tokens else bound


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
    config = check_stored(
        config, shape.quantized, dtype, device.kind, unfused=shape.plain_on(device.kind)
    ).clamped()
    plan = plan_memory(shape, config, device, measured)

    def refusal(field: str, problem: str) -> ConfigError:
        return ConfigError(field, problem, advise(plan.fixes, device, flags=True))

    if plan.used > plan.budget or plan.num_blocks < 1:
        problem = (
            "the model does not fit"
            if plan.used > plan.budget
            else "no room for a single cache block"
        )
        raise refusal(_field_at_fault(config, plan), f"{problem}: {plan.formula}{plan.widened}")
    if plan.loading > plan.budget:
        rounds = config.quantization != "none" and not shape.quantized
        field = "quantization" if rounds else "max_memory_percent"
        raise refusal(field, f"{plan.too_large_to_load}{plan.widened}")
    if plan.num_blocks > plan.most_blocks:
        raise refusal("num_blocks", plan.too_many_slots)
    capacity = min(plan.max_model_len, plan.concurrent_tokens)
    if capacity < 1:
        problem = f"no room for one sequence's states and a block beside them: {plan.formula}"
        raise refusal(_field_at_fault(config, plan), problem)
    warnings = list(without_effect(config))
    process = (measured or {}).get("process", 0)
    if process > PROCESS:
        warnings.append(
            f"the pod takes {process / GIB:.2f} GiB before any weight, more than the "
            f"{gib(PROCESS)} GiB of every plan: the cache gets the difference less"
        )
    if capacity < plan.max_model_len:
        warnings.append(
            f"the cache holds {capacity} tokens ({plan.num_blocks} blocks of {plan.block_size}), "
            f"less than one sequence of {plan.max_model_len}: requests are limited to {capacity}"
            f"{plan.bounds_for(flag_of)}"
        )
    return ResolvedConfig(
        config=config,
        device=device.kind,
        dtype=dtype,
        cache_dtype="float8_e4m3fn" if config.fp8_cache else dtype,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        offload_units=plan.offload_units,
        capacity=capacity,
        plan=plan,
        warnings=tuple(warnings),
    )


def _field_at_fault(config: EngineConfig, plan: MemoryPlan) -> str:
    """The setting that the user should change: a fixed number of blocks, an offload space that
    or a queue that takes too much, else the share of memory.
    """
    if config.num_blocks is not None:
        return "num_blocks"
    if plan.used - sum(plan.terms.get(name, 0) for name in ("offload", "staging")) <= plan.budget:
        return "cpu_offload_space"
    queue = surplus_queue(config, plan.max_model_len, plan.budget)
    if "bookkeeping" in plan.terms and plan.used - queue <= plan.budget:
        return "max_queue"
    return "max_memory_percent"


def summary(resolved: ResolvedConfig) -> str:
    """One log line: the settings that the engine runs with."""
    plan = resolved.plan
    same_dtype = resolved.cache_dtype == resolved.dtype
    cache = "" if same_dtype else f" with a cache in {resolved.cache_dtype}"
    bound = resolved.prefill_beside_decodes
    chunks = f", {bound} of them of prompts while answers run" if bound else ""
    return (
        f"{resolved.device} {resolved.dtype}{cache}, {plan.num_blocks} blocks of "
        f"{plan.block_size} tokens "
        f"({gib(plan.terms['kv'])} GiB), {resolved.capacity} tokens a request, "
        f"{resolved.config.max_requests} requests and "
        f"{resolved.config.max_batch_tokens} tokens a step{chunks}{plan.bounds_for(flag_of)}"
    )
