"""Which settings would let an engine start that does not fit: numbers, each tried by solving the
equation again.

Owns the words for the command line; ``verdict`` owns those for the custom resource. Pure, like the
equation.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fairlead_runtime.config import EngineConfig, flag_of
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.solve import solve
from fairlead_runtime.sizing.terms import GIB, DeviceFacts, max_model_len

LARGEST = 1 << 16  # GiB of memory: no machine has more
STEP = 0.25  # GiB: steps in which an offload space is suggested


def to_start(
    shape: ModelShape,
    config: EngineConfig,
    device: DeviceFacts,
    measured: Mapping[str, int] | None = None,
) -> str:
    """At most two flags with their values, each of which alone lets the engine start; else the
    memory it needs.
    """

    def starts(facts: DeviceFacts = device, **change: Any) -> bool:
        # A measured term was measured under the settings that do not fit: the planned one follows
        # the change.
        known = {} if change else dict(measured or {})
        kept = {
            name: size for name, size in (measured or {}).items() if name in ("weights", "process")
        }
        plan = solve(shape, replace(config, **change).clamped(), facts, known or kept)
        return plan.used <= plan.budget and plan.num_blocks >= 1

    found = [f"{flag_of(name)} {value}" for name, value in _changes(shape, config, starts)][:2]
    if found:
        return "set " + " or ".join(found)
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
    """Settings and values that let it start, those first that cost least."""
    if config.cpu_offload_space:
        steps = [STEP * i for i in range(int(config.cpu_offload_space / STEP), -1, -1)]
        space = next((value for value in steps if starts(cpu_offload_space=value)), None)
        if space is not None:
            yield "cpu_offload_space", f"{space:g}"
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
