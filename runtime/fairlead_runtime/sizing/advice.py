"""Which flags let an engine start that does not fit in memory: each suggested value is tried by
solving the memory equation again.

Owns the message for the command line; ``verdict`` owns the one for the custom resource. Pure.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fairlead_runtime.settings.engine_config import EngineConfig, flag_of
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.solve import solve
from fairlead_runtime.sizing.terms import DEFAULT_QUEUE, GIB, DeviceFacts, max_model_len

LARGEST = 1 << 16  # GiB of memory: no machine has more
STEP = 0.25  # GiB: steps in which an offload space is suggested


def suggest_fix(
    shape: ModelShape,
    config: EngineConfig,
    device: DeviceFacts,
    measured: Mapping[str, int] | None = None,
) -> str:
    """At most two flags with values, each of which alone lets the engine start; else the memory it
    needs.
    """

    def starts(facts: DeviceFacts = device, **change: Any) -> bool:
        # Terms were measured under the settings that do not fit. With changed settings only those
        # that do not depend on them still hold.
        unaffected = {
            name: size for name, size in (measured or {}).items() if name in ("weights", "process")
        }
        sizes = unaffected if change else measured or {}
        memory_plan = solve(shape, replace(config, **change).clamped(), facts, sizes)
        needed = max(memory_plan.used, memory_plan.loading)
        return needed <= memory_plan.budget and memory_plan.num_blocks >= 1

    flags = [f"{flag_of(name)} {value}" for name, value in _changes(shape, config, starts)][:2]
    if flags:
        return "set " + " or ".join(flags)
    sizes = range(device.total_bytes // GIB + 1, LARGEST)
    at = bisect_left(sizes, True, key=lambda n: starts(replace(device, total_bytes=n * GIB)))
    return (
        f"needs {sizes[at]} GiB of memory with these settings"
        if at < len(sizes)
        else "choose a smaller model"
    )


def _changes(
    shape: ModelShape, config: EngineConfig, starts: Callable[..., bool]
) -> Iterator[tuple[str, object]]:
    """Settings and values that let the engine start, the least costly first."""
    if config.cpu_offload_space:
        steps = range(int(config.cpu_offload_space / STEP), -1, -1)
        at = bisect_left(steps, True, key=lambda n: starts(cpu_offload_space=n * STEP))
        if at < len(steps):
            yield "cpu_offload_space", f"{steps[at] * STEP:g}"
    queues = range(config.max_queue // DEFAULT_QUEUE, 0, -1)
    at = bisect_left(queues, True, key=lambda n: starts(max_queue=n * DEFAULT_QUEUE))
    if at < len(queues):
        yield "max_queue", queues[at] * DEFAULT_QUEUE
    if config.num_blocks is not None:
        blocks = range(config.num_blocks, 0, -1)
        at = bisect_left(blocks, True, key=lambda n: starts(num_blocks=n))
        if at < len(blocks):
            yield "num_blocks", blocks[at]
    shares = [i / 100 for i in range(int(config.max_memory_percent * 100) + 1, 101)]
    at = bisect_left(shares, True, key=lambda share: starts(max_memory_percent=share))
    if at < len(shares):
        yield "max_memory_percent", shares[at]
    for name, largest in (
        ("max_batch_tokens", config.max_batch_tokens),
        ("max_model_len", max_model_len(shape, config)),
    ):
        halves = [
            largest >> i
            for i in range(1, largest.bit_length())
            if largest >> i >= config.block_size
        ]
        half = next((n for n in halves if starts(**{name: n})), None)
        if half is not None:
            yield name, half
