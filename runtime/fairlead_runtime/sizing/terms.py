"""Where one engine's memory goes, as a single equation.

budget = max_memory_percent * total  ≥  weights + activations + attention + logits + sampling +
graphs + batch [+ process + offload + shared_memory on a CPU] + kv

Owns the terms and the number of cache blocks that solves the equation, nothing else: ``memory``
turns the outcome into words and reports. Allocates nothing and asks no device anything; ``host``
reads a machine's limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fairlead_runtime.config import EngineConfig
from fairlead_runtime.sizing.groups import LayerGroup, group_layers, layers_per_unit
from fairlead_runtime.sizing.shape import DTYPE_BYTES, ModelShape

MIB, GIB = 1 << 20, 1 << 30
PROCESS = GIB  # a runtime's interpreter, libraries and buffers before any weight; measured at start
CPU_CACHE = 4 * GIB  # a CPU's cache takes no more unless num_blocks asks for it
GRAPH = 16 * MIB  # what one captured graph keeps beyond the pool that all share
FLASHINFER = 256 * MIB  # its workspaces: float, integer and page-locked
STRIP = 256  # queries of one row that the torch attention masks and scores together
KEPT_MASKS = 1 << 24  # elements of masks that it keeps for the other layers of a step
# Elements that one pass of the sampler works on, and the bytes of its temporaries for each.
SAMPLED = {"cpu": 1 << 20, "cuda": 1 << 26}
SAMPLING_BYTES = 16
HISTOGRAM = 33 << 10  # bytes a row's counts take while top-k and top-p look for their cut
GROWTH = 2  # host buffers of a batch are made twice as large as what they must hold
TERMS = ("weights", "activations", "attention", "logits", "sampling", "graphs", "batch")
HOST_TERMS = ("process", "offload", "shared_memory")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One accelerator, or the host when ``kind`` is cpu. ``total_bytes``: its memory, or the
    container's limit.
    """

    kind: Literal["cpu", "cuda"]
    total_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The solved equation, in bytes of one accelerator unless said otherwise. ``terms`` sum to at
    most ``budget`` when ``fits``; a block is ``block_size`` tokens in every layer, a unit the share
    of one layer group.
    """

    terms: Mapping[str, int]  # TERMS, on a CPU HOST_TERMS, then kv
    total: int
    budget: int
    weights_bytes: int  # the whole model's
    kv_bytes_per_token: int  # the whole model's, windows ignored
    block_size: int
    block_bytes: int
    unit_bytes: int
    num_blocks: int
    num_units: int
    offload_units: int  # units that cpu_offload_space holds
    max_model_len: int
    full_length_sequences: int
    fits: bool
    message: str

    @property
    def concurrent_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def used(self) -> int:
        return sum(self.terms.values())

    @property
    def formula(self) -> str:
        """The equation with its numbers, for people."""
        share = f"{self.budget / max(1, self.total):.3g} * {gib(self.total)} GiB"
        parts = " + ".join(f"{name} {gib(size)}" for name, size in self.terms.items())
        return f"{share} = {gib(self.budget)} ≥ {parts} ({self.num_blocks} blocks * {self.block_bytes} bytes)"


def terms_of(
    shape: ModelShape, config: EngineConfig, device: DeviceFacts, groups: Sequence[LayerGroup]
) -> dict[str, int]:
    """Every planned term but the cache, in bytes of one accelerator."""
    a, tp = bytes_of(shape, config), config.tensor_parallel
    cpu = device.kind == "cpu"
    tokens, longest = config.max_batch_tokens, max_model_len(shape, config)
    rows = min(config.max_requests, tokens)
    queries, keys = split(shape.heads * shape.head_dim, tp), split(shape.kv_width, tp)
    # Alive at once: the residual and its norm (in float32), and either attention's projections
    # before and after the rotary embedding or the widest MLP; and the rotary tables, of which
    # models with windows have two.
    rotary = 2 * shape.head_dim * len(set(shape.windows))
    width = 4 * shape.hidden + rotary + max(3 * queries + 4 * keys, split(shape.mlp_width, tp))
    table_entries = len(groups) * rows * -(-longest // config.block_size)
    buffers = 1 if cpu or config.async_batching == "off" else 2
    chosen = min(rows, max(1, SAMPLED[device.kind] // shape.vocab))
    terms = {
        "weights": _weights(shape, config, tp),
        "activations": tokens * width * a,
        "attention": _attention(shape, config, groups, a) if cpu else FLASHINFER,
        "logits": rows * max(width, 2 * shape.hidden + shape.logit_copies * shape.vocab) * a,
        "sampling": chosen * (shape.vocab * SAMPLING_BYTES + HISTOGRAM) + rows * shape.vocab * 8,
        "graphs": 0 if cpu or config.cuda_graphs == "off" else config.max_cached_graphs * GRAPH,
        "batch": buffers
        * GROWTH
        * (tokens * (16 + 8 * len(groups)) + rows * 64 + table_entries * 4),
    }
    return terms | host_terms(config) if cpu else terms


def host_terms(config: EngineConfig) -> dict[str, int]:
    """What the pod takes of its host's memory besides a CPU's weights and cache."""
    offload, shared = int(config.cpu_offload_space * GIB), int(config.shared_memory * GIB)
    return dict(zip(HOST_TERMS, (PROCESS, offload, shared), strict=True))


def max_model_len(shape: ModelShape, config: EngineConfig) -> int:
    return config.max_model_len or shape.max_len


def bytes_of(shape: ModelShape, config: EngineConfig) -> int:
    """Bytes of one weight, activation and, unless its own type is set, cache element."""
    return DTYPE_BYTES[(shape.dtype or "float32") if config.dtype == "auto" else config.dtype]


def sequence_units(groups: Sequence[LayerGroup], length: int, block_size: int) -> int:
    """Units that one sequence of ``length`` tokens holds while it decodes, windows taken into
    account.
    """
    blocks = -(-length // block_size)
    return sum(
        blocks if g.window is None else min(blocks, -(-(g.window - 1) // block_size) + 1)
        for g in groups
    )


def solve(
    shape: ModelShape, config: EngineConfig, device: DeviceFacts, measured: Mapping[str, int]
) -> MemoryPlan:
    """The number of blocks that fills the budget, or the pinned one. ``message`` is left empty."""
    groups, longest = group_layers(shape.windows), max_model_len(shape, config)
    element = 1 if config.cache_dtype == "fp8" else bytes_of(shape, config)
    token_layer = 2 * split(shape.kv_heads, config.tensor_parallel) * shape.head_dim * element
    unit = layers_per_unit(groups) * config.block_size * token_layer
    block = unit * len(groups)
    budget = int(device.total_bytes * config.max_memory_percent)
    terms = terms_of(shape, config, device, groups)
    terms |= {name: measured[name] for name in terms if name in measured}
    left = budget - sum(terms.values())
    blocks = config.num_blocks
    if blocks is None:
        blocks = max(0, min(left, CPU_CACHE) if device.kind == "cpu" else left) // block
    units = blocks * len(groups)
    return MemoryPlan(
        terms=terms | {"kv": blocks * block},
        total=device.total_bytes,
        budget=budget,
        weights_bytes=_weights(shape, config, 1),
        kv_bytes_per_token=2 * shape.layers * shape.kv_width * element,
        block_size=config.block_size,
        block_bytes=block,
        unit_bytes=unit,
        num_blocks=blocks,
        num_units=units,
        offload_units=int(config.cpu_offload_space * GIB) // unit,
        max_model_len=longest,
        full_length_sequences=units // sequence_units(groups, longest, config.block_size),
        fits=left >= blocks * block and blocks * config.block_size >= longest,
        message="",
    )


def _weights(shape: ModelShape, config: EngineConfig, tp: int) -> int:
    """The layers' matrices are quantized and split over accelerators; embeddings, norms and biases
    are neither.
    """
    a = bytes_of(shape, config)
    matrices = shape.layer_matrices * a
    if config.quantization != "none":
        matrices = (
            shape.layer_matrices + 4 * shape.layer_channels
        )  # one byte each, a float32 scale per row
    return split(matrices, tp) + (shape.parameters - shape.layer_matrices) * a


def _attention(
    shape: ModelShape, config: EngineConfig, groups: Sequence[LayerGroup], a: int
) -> int:
    """The torch attention's scratch: the longest sequence's keys and values gathered, its masks,
    explicit scores.
    """
    longest = max_model_len(shape, config)
    chunk = min(config.max_batch_tokens, longest)
    gathered = longest * (
        2 * shape.kv_width * a + 16 * len(groups)
    )  # with their slots and positions
    masks = len(groups) * min(chunk * longest, KEPT_MASKS) * a + min(STRIP, chunk) * longest * (
        a + 2
    )
    if not shape.explicit_scores:
        return gathered + masks
    # Scores before and after their cap or sinks, in float32, and every key once for each head that
    # shares it.
    spread = 2 * longest * shape.heads * shape.head_dim * a
    return gathered + masks + spread + 3 * shape.heads * min(STRIP, chunk) * longest * 4


def split(count: int, parts: int) -> int:
    """The largest share when ``count`` is dealt out to ``parts``."""
    return -(-count // parts)


def gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size >= GIB / 10 or size == 0 else f"{size / GIB:.3f}"
