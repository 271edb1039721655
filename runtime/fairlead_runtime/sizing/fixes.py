"""Which settings let an engine fit that does not: each value is tried by solving again.

One search for operator and pod, and the advice of both. Pure.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from math import ceil
from typing import Any

from fairlead_runtime.settings.engine_config import EngineConfig, flag_of
from fairlead_runtime.settings.supported import is_supported
from fairlead_runtime.sizing.arithmetic import ceil_div
from fairlead_runtime.sizing.element_types import dtype_of
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.solve import Fix, solve
from fairlead_runtime.sizing.tensor_parallel import COUNTS, reason_against
from fairlead_runtime.sizing.terms import (
    GIB,
    DeviceFacts,
    max_model_len,
    state_units,
    state_versions,
)
from fairlead_runtime.sizing.traffic import DEFAULT_QUEUE

LARGEST = 1 << 16  # GiB of memory: no machine has more
MEMORY = "memory"  # in a fix: GiB of the device, which is no setting
UPPER_BOUNDS = ("max_queue", "cpu_offload_space", "max_batch_tokens", "max_model_len")
_PATHS = {f.name: f.metadata["cr"] or "" for f in fields(EngineConfig)}


def find_fixes(
    shape: ModelShape, config: EngineConfig, device: DeviceFacts, measured: Mapping[str, int]
) -> list[Fix]:
    """At most two changes of settings, each of which alone lets the engine fit, those first that no
    request meets; else the memory that it needs; else nothing. No change has a value that this
    build does not support. ``measured``: bytes of terms, as ``plan_memory`` has them.
    """
    # Terms were measured under the settings that do not fit. With changed settings only those that
    # do not depend on them still hold.
    independent = {name: measured[name] for name in ("weights", "process") if name in measured}
    blocks = blocks_of(shape, config, device.kind)

    def fits(change: Fix) -> bool:
        settings: dict[str, Any] = {**change}
        memory = settings.pop(MEMORY, 0) * GIB or device.total_bytes
        changed, facts = replace(config, **settings), replace(device, total_bytes=memory)
        supported = is_supported(changed, dtype_of(shape, changed), device.kind)
        sizes = independent if settings else measured
        return supported and solve(shape, changed, facts, sizes).fits

    companions: list[Fix] = [{}]
    enough = {"num_blocks": blocks}
    if device.kind == "cpu" and config.num_blocks is None and not fits(enough):
        companions.append(enough)  # a CPU's cache takes more than a few GiB only where it is set

    def nearest(name: str, values: Sequence[float], companion: Fix) -> Iterator[Fix]:
        """The first of ``values`` that fits: all behind it do, too."""
        at = bisect_left(values, True, key=lambda value: fits({**companion, name: value}))
        if at < len(values):
            yield {name: values[at], **companion}

    def search(name: str, values: Sequence[float]) -> Iterator[Fix]:
        """At most one fix, the one without a companion if there is one."""
        return islice((fix for c in companions for fix in nearest(name, values, c)), 1)

    changes = (fix for each in _candidates(shape, config, device, blocks) for fix in search(*each))
    return [*islice(changes, 2)] or [*search(MEMORY, range(device.total_bytes // GIB + 1, LARGEST))]


def blocks_of(shape: ModelShape, config: EngineConfig, kind: str) -> int:
    """Blocks of a cache that holds one sequence of full length."""
    groups = shape.groups
    held = state_versions(config, kind) * state_units(shape, config, groups)
    if not groups:
        return held
    blocks = ceil_div(max_model_len(shape, config), config.block_size)
    return blocks + ceil_div(held, len(groups))


def _candidates(
    shape: ModelShape, config: EngineConfig, device: DeviceFacts, blocks: int
) -> Iterator[tuple[str, Sequence[float]]]:
    """Values of each setting, the nearest to the present one first."""
    length, step = max_model_len(shape, config), config.block_size
    yield (
        "max_queue",
        range((config.max_queue - 1) // DEFAULT_QUEUE * DEFAULT_QUEUE, 0, -DEFAULT_QUEUE),
    )
    yield (
        "cpu_offload_space",
        [n / 4 for n in range(ceil(4 * config.cpu_offload_space) - 1, -1, -1)],
    )
    if config.num_blocks is not None or device.kind == "cpu":
        # Fewer blocks hold no sequence of full length.
        yield "num_blocks", range(max(blocks, (config.num_blocks or 0) - 1), blocks - 1, -1)
    percent = int(100 * config.max_memory_percent)
    yield "max_memory_percent", [n / 100 for n in range(percent + 1, 101)]
    thousands = range((length - 1) // 1024 * 1024, 2047, -1024)
    yield "max_model_len", [*thousands, *range((min(length, 2048) - 1) // step * step, 1, -step)]
    # Quantization is not advised: whether every layer can have it, only a loaded model tells.
    if device.kind == "cuda" and config.quantization == "none":
        more = [n for n in COUNTS if n > config.tensor_parallel and not reason_against(shape, n)]
        yield "tensor_parallel", more
    tokens = config.max_batch_tokens
    halves = (tokens >> i for i in range(1, tokens.bit_length()))
    yield "max_batch_tokens", [n for n in halves if n >= step]


def resource_field(field: str) -> str:
    """The last name of the custom resource's field: ``num_blocks`` → ``numBlocks``."""
    return _PATHS[field].rpartition(".")[2]


def advise(fixes: Sequence[Fix], device: DeviceFacts, *, flags: bool) -> str:
    """What to change, in words, with the flags of the command line or with the last names of the
    custom resource's fields: ``set maxModelLen ≤ 4096 or numBlocks 80``.
    """

    def name(field: str, value: float) -> str:
        if field == MEMORY:
            return f"{value} GiB of memory" if flags else f"memory {value}Gi"
        if flags:
            return f"{flag_of(field)} {value:.12g}"
        bound = "≤ " if value and field in UPPER_BOUNDS else ""
        return f"{resource_field(field)} {bound}{value:.12g}"

    if not fixes:
        return "choose a smaller model"
    more_memory = MEMORY in fixes[0]
    if more_memory and device.kind == "cuda":
        return f"choose an accelerator of {fixes[0][MEMORY]} GiB or a smaller model"
    changes = (" and ".join(name(*change) for change in fix.items()) for fix in fixes)
    return f"{'needs' if more_memory and flags else 'set'} {' or '.join(changes)}"
