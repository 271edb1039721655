"""The memory plan with its verdict in words: whether the engine fits, and which setting would make
it fit.

The operator sizes with facts from a resource, the runtime with facts of its machine and, after a
profiling run, with measured terms in place of computed ones: one equation for all three. Owns the
message, which names the fields of the custom resource; ``advice`` names the command line's flags.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.settings.supported import is_supported
from fairlead_runtime.sizing.arithmetic import ceil_div
from fairlead_runtime.sizing.checkpoint_formats import as_stored
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.solve import CPU_CACHE, MemoryPlan, solve
from fairlead_runtime.sizing.tensor_parallel import COUNTS, reason_against, refuse
from fairlead_runtime.sizing.terms import DEFAULT_QUEUE, GIB, DeviceFacts, dtype_of, gib

LARGEST_HOST = 4096  # GiB: no larger machine is suggested


def plan_memory(
    shape: ModelShape,
    config: EngineConfig,
    device: DeviceFacts,
    measured: Mapping[str, int] | None = None,
) -> MemoryPlan:
    """Solve for the number of cache blocks, or check the one that ``config`` pins.

    ``measured`` replaces computed terms by name, in bytes (after a profiling run). Raises
    ConfigError when ``max_model_len`` exceeds the model's own, when the accelerators cannot share
    the model, or when ``quantization`` names another format than the checkpoint's.
    """
    if config.max_model_len is not None and config.max_model_len > shape.max_len:
        raise ConfigError(
            "max_model_len",
            f"{config.max_model_len} is more than the model's own {shape.max_len}",
            f"set at most {shape.max_len} or leave it unset",
        )
    refuse(shape, config.tensor_parallel)
    config = as_stored(config, shape.quantized)
    memory = solve(shape, config, device, measured or {})
    return replace(memory, message=_message(memory, shape, config, device, measured or {}))


def _message(
    memory: MemoryPlan,
    shape: ModelShape,
    config: EngineConfig,
    device: DeviceFacts,
    measured: Mapping[str, int],
) -> str:
    if memory.fits:
        count = memory.full_length_sequences
        sequences = f"{count} sequence{'' if count == 1 else 's'} of {memory.max_model_len} tokens"
        return f"fits: {gib(memory.terms['kv'])} GiB of KV cache hold {sequences}"
    needed = ceil_div(memory.max_model_len, memory.block_size) * memory.block_bytes
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
        return f"numBlocks {memory.too_many_slots}: set numBlocks ≤ {memory.most_blocks}"
    elif config.num_blocks is not None:
        problem = (
            f"numBlocks {config.num_blocks} hold {memory.concurrent_tokens} "
            f"of {memory.max_model_len} tokens"
        )
    else:
        cpu_limit = CPU_CACHE // config.tensor_parallel
        room = min(free, cpu_limit) if device.kind == "cpu" else free
        problem = f"needs {gib(needed)} GiB of KV cache, has {gib(room)}"
    fixes = _fixes(memory, shape, config, device, measured)
    return (
        f"{problem}: set {' or '.join(fixes)}"
        if fixes
        else f"{problem}: choose a larger accelerator or a smaller model"
    )


def _fixes(
    memory: MemoryPlan,
    shape: ModelShape,
    config: EngineConfig,
    device: DeviceFacts,
    measured: Mapping[str, int],
) -> list[str]:
    """At most two changes, each of which alone makes the engine fit: each is tried by solving
    again, and none sets a value that this build does not support.
    """

    def fits(facts: DeviceFacts = device, **change: Any) -> bool:
        changed = replace(config, **change)
        supported = is_supported(changed, dtype_of(shape, changed), facts.kind)
        return supported and solve(shape, changed, facts, measured).fits

    fixes: list[str] = []
    blocks = ceil_div(memory.max_model_len, memory.block_size)
    lengths = range(2, memory.max_model_len)  # shorter ones are refused
    longest = 1 + bisect_left(lengths, True, key=lambda n: not fits(max_model_len=n))
    if longest >= memory.block_size:
        step = 1024 if longest >= 2048 else memory.block_size
        fixes.append(f"maxModelLen ≤ {longest // step * step}")
    if (config.num_blocks is not None or device.kind == "cpu") and fits(num_blocks=blocks):
        fixes.append(f"numBlocks {blocks}")
    parallel = (n for n in COUNTS if n > config.tensor_parallel and not reason_against(shape, n))
    if device.kind == "cuda" and config.quantization == "none":
        fixes += [f"tensorParallel {n}" for n in parallel if fits(tensor_parallel=n)][:1]
    if device.kind == "cuda" and config.cpu_offload_space and fits(cpu_offload_space=0.0):
        fixes.append("cpuOffloadSpace 0")  # the staging buffer's room
    # Quantization is not advised: whether every layer can have it, only a loaded model tells.
    if (
        device.kind == "cpu"
        and config.cpu_offload_space
        and fits(cpu_offload_space=0.0, num_blocks=blocks)
    ):
        quarters = range(1, int(4 * config.cpu_offload_space) + 1)
        fitting = bisect_left(
            quarters, True, key=lambda n: not fits(cpu_offload_space=n / 4, num_blocks=blocks)
        )
        fixes.insert(0, f"cpuOffloadSpace ≤ {fitting / 4:g} and numBlocks {blocks}")
    queues = range(config.max_queue // DEFAULT_QUEUE, 0, -1)
    queue = bisect_left(queues, True, key=lambda n: fits(max_queue=n * DEFAULT_QUEUE))
    if queue < len(queues):
        fixes.insert(0, f"maxQueue ≤ {queues[queue] * DEFAULT_QUEUE}")
    shares = [i / 100 for i in range(int(100 * config.max_memory_percent) + 1, 101)]
    share = bisect_left(shares, True, key=lambda n: fits(max_memory_percent=n))
    if share < len(shares):
        fixes.append(f"maxMemoryPercent {shares[share]}")
    if device.kind == "cpu" and not fixes:
        sizes = range(device.total_bytes // GIB + 1, LARGEST_HOST)
        enough = bisect_left(
            sizes, True, key=lambda n: fits(replace(device, total_bytes=n * GIB), num_blocks=blocks)
        )
        fixes += [f"memory {sizes[enough]}Gi and numBlocks {blocks}"] if enough < len(sizes) else []
    return fixes[:2]
