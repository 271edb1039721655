"""The memory plan with its verdict in words: whether the engine fits, and which setting would make
it fit.

The operator sizes with facts from a resource, the runtime with facts of its machine and, after a
profiling run, with measured terms in place of computed ones: one equation for all three. Owns the
message, which names the fields of the custom resource.
"""

from collections.abc import Mapping
from dataclasses import replace

from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.checkpoint_formats import as_stored
from fairlead_runtime.sizing.element_types import dtype_of
from fairlead_runtime.sizing.fixes import advise, find_fixes, resource_field
from fairlead_runtime.sizing.layer_heads import refuse_mixed
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.solve import CPU_CACHE, MemoryPlan, solve
from fairlead_runtime.sizing.tensor_parallel import refuse
from fairlead_runtime.sizing.terms import GIB, DeviceFacts, gib


def plan_memory(
    shape: ModelShape,
    config: EngineConfig,
    device: DeviceFacts,
    measured: Mapping[str, int] | None = None,
) -> MemoryPlan:
    """Solve for the number of cache blocks, or check the one that ``config`` pins.

    ``measured`` replaces computed terms by name, in bytes (after a profiling run). Raises
    ConfigError when ``max_model_len`` exceeds the model's own, when the accelerators cannot share
    the model, when ``quantization`` names another format than the checkpoint's, or for what is not
    served where layers differ in their heads.
    """
    check_against(shape, config)
    if shape.states and config.deterministic and device.kind == "cuda":
        problem = "the model's layers keep states, which torch computes on GPUs"
        raise ConfigError("deterministic", problem, "use false, or a CPU")
    config = as_stored(config, shape.quantized)
    memory = solve(shape, config, device, measured or {})
    if not memory.fits:
        memory = replace(memory, fixes=find_fixes(shape, config, device, measured or {}))
    memory = replace(memory, widened=_widened(shape, config, memory))
    return replace(memory, message=_message(memory, config, device) + memory.widened)


def check_against(shape: ModelShape, config: EngineConfig) -> None:
    """Refuse the settings that the model's shape alone refuses, whatever the device. Raises
    ConfigError.
    """
    if config.max_model_len is not None and config.max_model_len > shape.max_len:
        raise ConfigError(
            "max_model_len",
            f"{config.max_model_len} is more than the model's own {shape.max_len}",
            f"set at most {shape.max_len} or leave it unset",
        )
    refuse(shape, config.tensor_parallel)
    config = as_stored(config, shape.quantized)
    if shape.mixed:
        refuse_mixed(config)
    if shape.states:
        _refuse_with_states(shape, config)


def _refuse_with_states(shape: ModelShape, config: EngineConfig) -> None:
    """Raise ConfigError for what layers that keep states do not work with yet."""
    if config.fp8_cache and not shape.groups:
        problem = f"{config.cache_dtype}: the model's layers keep states and no keys to round"
        raise ConfigError("cache_dtype", problem, "use auto")
    if config.deterministic and (problem := _in_no_order(shape)):
        raise ConfigError(
            "deterministic", f"the model's layers keep states, {problem}", "use false"
        )
    if config.kernels == "flashinfer":
        problem = "flashinfer: the model's layers keep states, between which it finds no keys"
        raise ConfigError("kernels", problem, "use auto, cpu or torch")
    if config.quantization != "none" and shape.experts:
        problem = f"{config.quantization}: the model's layers keep states, and experts beside these"
        raise ConfigError("quantization", f"{problem} stay whole", "use none")
    if config.quantization != "none" and shape.reads_weights:
        problem = f"{config.quantization}: the code of {shape.model_type!r} reads weights itself"
        raise ConfigError("quantization", problem, "use none")


def _in_no_order(shape: ModelShape) -> str:
    """What of a model with states has sums in no fixed order, on any device; "" for nothing."""
    if shape.experts:
        return "and experts beside these, whose products torch computes"
    return ""


def _widened(shape: ModelShape, config: EngineConfig, memory: MemoryPlan) -> str:
    if shape.held == shape.quantized:
        return ""
    size = f"{gib(memory.weights_bytes)} GiB of weights"
    return (
        f"; its {shape.quantized} experts are held in {dtype_of(shape, config)}, {size}, since "
        "no product takes them packed yet"
    )


def _message(memory: MemoryPlan, config: EngineConfig, device: DeviceFacts) -> str:
    if memory.fits:
        count = memory.full_length_sequences
        sequences = f"{count} sequence{'' if count == 1 else 's'} of {memory.max_model_len} tokens"
        bounds = memory.bounds_for(resource_field)
        return f"fits: {gib(memory.terms['kv'])} GiB of KV cache hold {sequences}{bounds}"
    needed = memory.bytes_needed
    free = memory.budget - memory.used + memory.terms["kv"]
    if free <= 0:
        problem = (
            f"needs {gib(memory.budget - free)} GiB before any KV cache, has {gib(memory.budget)}"
        )
    elif memory.loading > memory.budget:
        problem = memory.too_large_to_load
    elif config.num_blocks is not None and memory.terms["kv"] > free:
        problem = (
            f"numBlocks {config.num_blocks} need {gib(memory.terms['kv'])} GiB of KV cache, "
            f"has {gib(free)}"
        )
    elif memory.num_blocks > memory.most_blocks:
        problem = f"numBlocks {memory.too_many_slots}"
    elif config.num_blocks is not None:
        problem = (
            f"numBlocks {config.num_blocks} hold {memory.concurrent_tokens} "
            f"of {memory.max_model_len} tokens"
            + (" beside one sequence's states" if memory.state_units else "")
        )
    else:
        cpu_limit = CPU_CACHE // config.tensor_parallel
        room = min(free, cpu_limit) if device.kind == "cpu" else free
        bounds = memory.bounds_for(resource_field)
        wanted, there = _told_apart(needed, room)
        problem = f"needs {wanted} GiB of KV cache, has {there}{bounds}"
    return f"{problem}: {advise(memory.fixes, device, flags=False)}"


def _told_apart(more: int, less: int) -> tuple[str, str]:
    """Both in GiB, with as many digits as tell them apart."""
    if gib(more) != gib(less):
        return gib(more), gib(less)
    digits = next((n for n in range(2, 9) if f"{more / GIB:.{n}f}" != f"{less / GIB:.{n}f}"), 9)
    return f"{more / GIB:.{digits}f}", f"{less / GIB:.{digits}f}"
