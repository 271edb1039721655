"""The memory equation of one engine, solved for the number of cache blocks.

budget = max_memory_percent * total  ≥  weights + activations + attention + logits + sampling +
graphs + batch [+ process + offload + shared_memory + grammars + tokenizers + http + bookkeeping on
a CPU] [+ staging on a GPU with an offload space] + kv

Owns the equation and MemoryPlan, its solution; ``terms`` counts the terms, ``verdict`` puts the
solution into words. Pure: allocates nothing and reads no device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.arithmetic import ceil_div
from fairlead_runtime.sizing.element_types import cache_bytes_of
from fairlead_runtime.sizing.graph_sizes import padding_bound
from fairlead_runtime.sizing.groups import LayerGroup, pool_units
from fairlead_runtime.sizing.load_peak import loading_bytes
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.terms import (
    GIB,
    PROCESS,
    Bookkeeping,
    DeviceFacts,
    gib,
    host_terms,
    max_model_len,
    offload_units,
    state_units,
    state_versions,
    terms_of,
    unit_bytes,
)
from fairlead_runtime.sizing.traffic import Traffic
from fairlead_runtime.sizing.weight_bytes import held_weights

# A slot is a token's place in one layer group. Block tables hold int32, as does the arithmetic of
# kernels on them, so all units together have fewer slots than this.
SLOTS = 1 << 31
# Values that together let an engine fit, by field of EngineConfig or ``fixes.MEMORY``.
Fix = Mapping[str, float]
CPU_CACHE = 4 * GIB  # a CPU's cache takes no more unless num_blocks asks for it
CPU_BOUND = (
    f"a CPU's cache takes at most {CPU_CACHE // GIB} GiB unless {{num_blocks}} asks for more"
)
SLOTS_BOUND = f"a cache has fewer than {SLOTS} slots"
BOUND_FIELDS = ("num_blocks", "q_padding_interval", "max_cached_graphs")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The solved equation, in bytes of one accelerator unless noted otherwise. ``terms`` sum to at
    most ``budget`` when ``fits``; a block is ``block_size`` tokens in every layer, a unit one layer
    group's share of a block.
    """

    terms: Mapping[str, int]  # TERMS, staging where a GPU has it, on a CPU the host's, then kv
    host: Mapping[str, int]  # of host memory: HOST_TERMS, http where it is any, then bookkeeping
    total: int
    budget: int
    weights_bytes: int  # the whole model's
    kv_bytes_per_token: int  # the whole model's, windows ignored
    block_size: int
    block_bytes: int
    unit_bytes: int
    num_blocks: int
    num_units: int
    most_blocks: int  # with more the cache has too many slots, whatever the memory
    offload_units: int  # units that cpu_offload_space holds, of one accelerator
    loading: int  # the most that is taken while the weights are loaded; 0: no more than serving
    max_model_len: int
    full_length_sequences: int
    fits: bool
    message: str
    traffic: Traffic  # what the pod takes in
    # Of a model with states: the units of one version, how many a running sequence has, and the
    # tokens that the cache holds of one sequence beside all; without states None.
    state_units: int = 0
    state_versions: int = 0
    cache_tokens: int | None = None
    widened: str = ""  # what is said of weights that are held larger than they are stored
    bounds: Sequence[str] = ()  # what binds in place of memory or a setting, for ``bounds_for``
    fixes: Sequence[Fix] = ()  # each of them alone lets an engine fit that does not

    @property
    def concurrent_tokens(self) -> int:
        tokens = self.cache_tokens
        return self.num_blocks * self.block_size if tokens is None else tokens

    @property
    def state_bytes_per_sequence(self) -> int:
        """Bytes that a running sequence has for states, whatever its length."""
        return self.state_units * self.state_versions * self.unit_bytes

    @property
    def bytes_needed(self) -> int:
        """Bytes of a cache that holds one sequence of full length."""
        blocks = ceil_div(self.max_model_len, self.block_size) if self.kv_bytes_per_token else 0
        return blocks * self.block_bytes + self.state_bytes_per_sequence

    @property
    def too_many_slots(self) -> str:
        """The reason against ``num_blocks`` beyond ``most_blocks``, after the field's name."""
        return (
            f"{self.num_blocks} make {self.num_units * self.block_size} slots in all groups of "
            f"layers, of which a cache has fewer than {SLOTS}"
        )

    @property
    def too_large_to_load(self) -> str:
        return f"needs {gib(self.loading)} GiB to load the weights, has {gib(self.budget)}"

    def bounds_for(self, name: Callable[[str], str]) -> str:
        """``bounds`` in words, each after a semicolon. ``name``: how the reader knows a field."""
        names = {field: name(field) for field in BOUND_FIELDS}
        return "".join(f"; {bound.format(**names)}" for bound in self.bounds)

    @property
    def used(self) -> int:
        return sum(self.terms.values())

    @property
    def formula(self) -> str:
        """The equation with its numbers, for logs and messages."""
        share = f"{self.budget / max(1, self.total):.3g} * {gib(self.total)} GiB"
        summands = " + ".join(f"{name} {gib(size)}" for name, size in self.terms.items())
        blocks = f"{self.num_blocks} blocks * {self.block_bytes} bytes"
        return f"{share} = {gib(self.budget)} ≥ {summands} ({blocks})"


def sequence_units(groups: Sequence[LayerGroup], length: int, block_size: int) -> int:
    """Units that one decoding sequence of ``length`` tokens holds, less what windows free."""
    blocks = ceil_div(length, block_size)
    return sum(
        blocks if g.window is None else min(blocks, ceil_div(g.window - 1, block_size) + 1)
        for g in groups
    )


def beside_states(blocks: int, groups: int, held: int, block_size: int, longest: int) -> int:
    """Tokens that the cache holds beside the ``held`` units of one sequence's states. Where no
    layer keeps keys: of as many sequences of the ``longest`` text as it has states for.
    """
    if not groups:
        return blocks // held * longest
    return max(0, blocks - ceil_div(held, groups)) * block_size


def solve(
    shape: ModelShape, config: EngineConfig, device: DeviceFacts, measured: Mapping[str, int]
) -> MemoryPlan:
    """The number of blocks that fills the budget, or the pinned number. ``message`` stays empty.

    ``measured`` replaces computed terms by name, in bytes; the process keeps at least PROCESS.
    """
    groups, longest = shape.groups, max_model_len(shape, config)
    loading = loading_bytes(shape, config, device.kind)
    unit = unit_bytes(shape, config, groups)
    block = unit * pool_units(1, len(groups))
    budget = int(device.total_bytes * config.max_memory_percent)
    terms = terms_of(shape, config, device, groups)
    terms |= {name: measured[name] for name in terms if name in measured}
    if "process" in terms:
        terms["process"] = max(PROCESS, terms["process"])  # a reservation, not an estimate
    room, cpu, bound = budget - sum(terms.values()), device.kind == "cpu", ""
    max_blocks = (SLOTS - 1) // (config.block_size * len(groups) or 1)
    traffic = Traffic.of(config, longest, budget if cpu else None)
    bookkeeping = Bookkeeping.of(shape, config, len(groups), traffic.waiting_bytes)
    blocks = config.num_blocks
    if blocks is None:
        blocks = bookkeeping.blocks(room, block) if cpu else max(0, room) // block
        if cpu and (cpu_blocks := CPU_CACHE // config.tensor_parallel // block) < blocks:
            blocks, bound = cpu_blocks, CPU_BOUND
        if max_blocks < blocks:
            blocks, bound = max_blocks, SLOTS_BOUND
    units = pool_units(blocks, len(groups))
    of_states = state_units(shape, config, groups)
    versions = state_versions(config, device.kind)
    held = of_states * versions
    tokens = blocks * config.block_size
    if of_states:
        tokens = beside_states(blocks, len(groups), held, config.block_size, longest)
    bookkeeping_term = {"bookkeeping": bookkeeping.size(blocks)}
    if cpu:
        terms |= bookkeeping_term
        room -= bookkeeping_term["bookkeeping"]
    possible = blocks <= max_blocks and loading <= budget
    return MemoryPlan(
        terms=terms | {"kv": blocks * block},
        host=host_terms(shape, config, device.kind) | bookkeeping_term,
        total=device.total_bytes,
        budget=budget,
        weights_bytes=held_weights(shape, config, 1, device.kind),
        kv_bytes_per_token=shape.kept_width * cache_bytes_of(shape, config),
        block_size=config.block_size,
        block_bytes=block,
        unit_bytes=unit,
        num_blocks=blocks,
        num_units=units,
        most_blocks=max_blocks,
        offload_units=offload_units(shape, config, groups),
        loading=loading,
        max_model_len=longest,
        full_length_sequences=units // (sequence_units(groups, longest, config.block_size) + held),
        fits=room >= blocks * block and longest <= tokens and possible,
        message="",
        traffic=traffic,
        state_units=of_states,
        state_versions=versions,
        cache_tokens=tokens if of_states else None,
        bounds=[text for text in (bound, padding_bound(config, device.kind)) if text],
    )
