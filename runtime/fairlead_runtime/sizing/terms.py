"""The terms of the memory equation: what one engine takes beside its cache, each in bytes.

Owns the arithmetic of every term but the cache; ``solve`` puts them into the equation. Pure:
allocates nothing and reads no device; ``build/host.py`` reads a machine's limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from fairlead_kernels.cpu.slabs import SLAB
from fairlead_kernels.packages.humming_memory import COMPILER
from fairlead_kernels.plain.strips import STRIP, scored_strip
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.arithmetic import ceil_div
from fairlead_runtime.sizing.element_types import (
    bytes_of,
    cache_bytes_of,
    dtype_of,
    fuses_on_cpu,
    packs_on_cpu,
)
from fairlead_runtime.sizing.graph_sizes import graph_bytes, may_capture, plan_bytes
from fairlead_runtime.sizing.groups import LayerGroup
from fairlead_runtime.sizing.offload_space import Staging, units_of
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.states import DECODES, StateLayout, aligned_width
from fairlead_runtime.sizing.traffic import Traffic
from fairlead_runtime.sizing.weight_bytes import FLOAT32, held_weights, packaged, widened

GIB = 1 << 30
PROCESS = GIB  # reserved for all processes of the pod: interpreter, libraries, buffers
KEPT_MASKS = 1 << 24  # mask elements that it keeps for the other layers of a step
# Logits that one pass of the sampler works on, and the bytes of its temporaries for each.
SAMPLER_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
SAMPLING_BYTES = 16
ROW_SAMPLING_BYTES = 8  # of each logit of the step's other rows
# The same of the draw of decodes on a GPU, which makes no shape of its data.
DRAW_CHUNK, DRAW_BYTES = 1 << 23, 48
HISTOGRAM = 33 << 10  # bytes of a row's counts while top-k and top-p search for their cut
# Of the C++ kernels, in floats: beside a token's digits (csrc/vnni.h); its ids and positions.
DIGITS_HEAD, TOKEN_INDICES = 32, 8
PAIRS_END = 128  # bytes at most behind a row in bfloat16 (csrc/pairs.h)
WIDE_ROWS = 256  # of a product in a model's own code of 16 bits, for which it makes floats at once
GROWTH = 2  # a batch's host buffers are allocated twice as large as needed
# Of an id of the vocabulary, in llguidance's tokenizers: the engine's has tries for faster masks,
# that of the child, which takes GRAMMAR_CHILD besides, has one without.
GRAMMAR_ID_BYTES, GRAMMAR_CHILD = 1500, 16 << 20
# Of a word of the vocabulary, in the tokenizers of text: a rank's, and the HTTP process's together
# with its helper's for large texts. Those of seven published vocabularies take 560 to 1,280 and
# 855 to 1,710 bytes (docs/design/0003-processes.md).
RANK_WORD_BYTES, FRONT_WORD_BYTES = 1300, 1750
# What host memory keeps of a token: its id in both processes, again in a sequence's array, which
# grows by an eighth, and the counts for penalties.
TOKEN_BYTES = 21
# Of a block of one sequence: its digest, in an array that grows by an eighth, and its entry in each
# layer group's table, which grows alike.
DIGEST_BYTES, ENTRY_BYTES = 40, 16
# Of a unit of the pool: its state and place, counts in a check, its digest, its place among cached
# ones and in the index, two thirds of which a change may leave empty.
UNIT_BYTES = 454
# Of a row that a GPU keeps of a sequence: its numbers, a block; of a step's row: three indices, and
# the token's and 20 likeliest log-probabilities, each with a number.
ROW_BYTES, ENTRY, INDEX = 80, 4, 24 + 21 * 12
# Ids in the list of what a row changes in its logits, at most, and the bytes of one.
LIST_ROOM, LISTED = 4096, 12
# Versions that a running sequence has of its state where each step is waited for.
WAITED_VERSIONS = 2
# Of the states of one layer that a step of decodes reads, copies that are alive at once, measured.
STATE_COPIES = 6
INDEX_BYTES = 32  # of a token's id, position and places in a step
TERMS = ("weights", "activations", "attention", "logits", "sampling", "graphs", "batch")
HOST_TERMS = ("process", "offload", "shared_memory", "grammars", "tokenizers")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One accelerator, or the host when ``kind`` is cpu. ``total_bytes``: its memory, or the
    container's limit.
    """

    kind: Literal["cpu", "cuda"]
    total_bytes: int


def terms_of(
    shape: ModelShape, config: EngineConfig, device: DeviceFacts, groups: Sequence[LayerGroup]
) -> dict[str, int]:
    """Every planned term but the cache, in bytes of one accelerator."""
    element, tp = bytes_of(shape, config), config.tensor_parallel
    cpu = device.kind == "cpu"
    tokens, longest = config.max_batch_tokens, max_model_len(shape, config)
    rows = config.max_rows
    # Alive at once: the residual and its norm (in float32), the rotary tables (models with windows
    # have two), and the larger of the widest layer's attention and the widest MLP.
    # In 16 bits some of it is in float32, as all of a norm of hidden states is.
    half = element < FLOAT32
    moments = shape.half_moments if half else shape.moments
    attended = max((heads.alive_width(moments) for heads in shape.heads_on(tp)), default=0)
    norms, indices = (4 * shape.hidden, INDEX_BYTES // element) if half else (0, 0)
    filled = 4 * shape.mixer_width * (-tokens % shape.mixer_chunk)
    rotary = shape.rotary_width
    # Experts also keep copies of the hidden states, which are not split.
    inside = shape.half_mlp_width if half else shape.mlp_width
    inside = inside if shape.experts else ceil_div(inside, tp)
    width = 4 * shape.hidden + shape.beside_width + rotary + indices
    if shape.experts and not cpu and config.kernels != "torch" and half:
        width += shape.hidden  # layers fused around experts keep the residual in float32
    # The C++ kernels compute layers without experts in float32. They have no fp8 cache.
    packed = cpu and packs_on_cpu(shape, config)
    fused = cpu and fuses_on_cpu(shape, config)
    layer = 4 if fused else element
    # Of one token; mixers compute in float32, between hidden states of the model's type.
    layer_bytes = max(
        (width + max(attended, inside, norms)) * layer, width * element + 4 * shape.mixer_width
    )
    # What a product in C++ takes and gives in a layer that is the model's own in 16 bits.
    # A processor that multiplies bfloat16 has what the product takes in that, too.
    inner = max(attended, inside)
    pairs = 2 * max(shape.hidden, inner) + PAIRS_END
    wide = 4 * (shape.hidden + inner) + pairs if packed and half and not fused else 0
    # Logits that come from all ranks are there in shards, too, before they are joined.
    copies = max(shape.logit_copies, half and shape.half_logit_copies, 3 if tp > 1 else 0)
    # The kernels' head takes and gives float32.
    head = (2 * shape.hidden + copies * shape.vocab) * (4 if packed else element)
    head += 2 * shape.hidden + PAIRS_END if packed and half else 0
    table_entries = len(groups) * rows * ceil_div(longest, config.block_size)
    decoded = state_scratch(shape, config, min(rows, DECODES))
    if shape.states:  # its own code widens quantized weights in each pass
        decoded += widened(shape, config, device.kind, rows)
    terms = {
        "weights": held_weights(shape, config, tp, device.kind),
        "activations": _in_slabs(shape, config, tokens, rotary)
        if packed and fused and shape.slab_width
        else tokens * layer_bytes
        + min(tokens, WIDE_ROWS) * wide
        + widened(shape, config, device.kind, tokens)
        + filled
        + state_scratch(shape, config, 1),
        "attention": _attention(shape, config, groups, element),
        "logits": max(rows * (layer_bytes + wide) + decoded, rows * head),
        "sampling": sampler_rows(rows, shape.vocab, device.kind)
        * (shape.vocab * SAMPLING_BYTES + HISTOGRAM)
        + rows * shape.vocab * ROW_SAMPLING_BYTES,
        "graphs": 0,
        "batch": GROWTH * (tokens * (16 + 8 * len(groups)) + rows * 64 + table_entries * 4),
    }
    versions = state_versions(config, device.kind)
    if shape.states:
        units = state_units(shape, config, groups)
        # The units that each row reads and writes, beside the lists that the scheduler keeps.
        terms["batch"] += rows * units * (GROWTH * 2 * 8 + ENTRY_BYTES * versions)
    if not cpu and (not shape.states or versions > WAITED_VERSIONS):
        terms["batch"] += decode_state(shape, config, groups)
    if not cpu and (units := offload_units(shape, config, groups)):
        unit = unit_bytes(shape, config, groups)
        terms["staging"] = Staging.of(units, unit).nbytes(unit)
    if may_capture(config, device.kind) and not shape.states:
        terms["graphs"] = graph_bytes(
            config,
            shape,
            groups=len(groups),
            blocks=ceil_div(longest, config.block_size),
            step=terms["logits"]
            + min(rows * shape.vocab, DRAW_CHUNK) * DRAW_BYTES
            + rows * list_room(shape.vocab) * LISTED,
            element=element,
        )
    # Each rank on a CPU has its share of the pod; the one that is planned keeps the books.
    host = {
        name: size if name == "grammars" else ceil_div(size, tp)
        for name, size in host_terms(shape, config, device.kind).items()
    }
    return terms | host if cpu else terms


def _in_slabs(shape: ModelShape, config: EngineConfig, tokens: int, rotary: int) -> int:
    """Bytes of activations of a model whose layers the C++ kernels compute, in float32: of all
    tokens hidden states, rotary tables and indices, of a slab's the rest.
    """
    width = shape.hidden + shape.slab_width
    slab = min(tokens, SLAB)
    digits = shape.hidden // 2 + DIGITS_HEAD if config.quantization == "int8" else 0
    values = tokens * (shape.hidden + rotary + TOKEN_INDICES) + slab * (width + digits)
    return 4 * values


def decode_state(shape: ModelShape, config: EngineConfig, groups: Sequence[LayerGroup]) -> int:
    """Bytes of what a GPU keeps of decoding sequences between steps: a row each, and one of
    padding, with the blocks of every group and a list of changed logits; the unit that
    padding writes to; the tokens' hashes.
    """
    rows = config.max_rows
    blocks = len(groups) * ceil_div(max_model_len(shape, config), config.block_size)
    row = ROW_BYTES + ENTRY * blocks + LISTED * list_room(shape.vocab)
    cached = unit_bytes(shape, config, groups)
    return (rows + 1) * row + rows * INDEX + cached + shape.vocab * ENTRY


def sampler_rows(rows: int, vocabulary: int, kind: str) -> int:
    """Rows that one pass of the sampler works on, of a step's."""
    return min(rows, max(1, SAMPLER_CHUNK[kind] // vocabulary))


def list_room(vocabulary: int) -> int:
    """Ids that the list of a row's changed logits has room for."""
    return min(LIST_ROOM, vocabulary)


def unit_bytes(shape: ModelShape, config: EngineConfig, groups: Sequence[LayerGroup]) -> int:
    """Bytes that one accelerator holds of ``block_size`` tokens in the layers of one group: those
    of the widest, so a unit serves every group. Tensors of states may begin at a unit; where no
    layer keeps keys it is a whole state.
    """
    if not groups:
        return state_layout(shape, config).nbytes
    width = max(sum(_kv_width(shape, config, layer) for layer in g.layers) for g in groups)
    column = config.block_size * cache_bytes_of(shape, config)
    return column * (aligned_width(width, column) if shape.states else width)


def state_scratch(shape: ModelShape, config: EngineConfig, rows: int) -> int:
    """Bytes that one call of a mixer keeps of the states of one layer, of ``rows`` decodes or of
    one chunk: those that it reads and writes, as they lie in units and apart, and what a recurrence
    makes of them.
    """
    if not shape.states:
        return 0
    layout = state_layout(shape, config)
    largest = max(sum(part.nbytes for part in layer) for layer in layout.layers.values())
    return STATE_COPIES * rows * largest


def state_layout(shape: ModelShape, config: EngineConfig) -> StateLayout:
    """Where each tensor of a sequence's state lies."""
    return StateLayout.of(shape.states, dtype_of(shape, config))


def state_units(shape: ModelShape, config: EngineConfig, groups: Sequence[LayerGroup]) -> int:
    """Units of one version of a sequence's state."""
    if not shape.states:
        return 0
    return state_layout(shape, config).units(unit_bytes(shape, config, groups))


def state_versions(config: EngineConfig, kind: str) -> int:
    """Versions that a running sequence has of its state: a step reads one and writes the other, and
    where the next is launched before its tokens are known, that writes a third.
    """
    launches = config.async_batching != "off" and not config.deterministic
    return WAITED_VERSIONS + (kind == "cuda" and launches)


def _kv_width(shape: ModelShape, config: EngineConfig, layer: int) -> int:
    """Elements of one token's key and value that an accelerator keeps of this layer."""
    if shape.mixed:
        return shape.kv_widths[layer]
    heads = ceil_div(shape.kv_heads, config.tensor_parallel)
    return heads * (shape.head_dim + shape.value_dim)


def offload_units(shape: ModelShape, config: EngineConfig, groups: Sequence[LayerGroup]) -> int:
    """Units that each accelerator has in host memory."""
    space = int(config.cpu_offload_space * GIB)
    return units_of(space, unit_bytes(shape, config, groups), config.tensor_parallel)


def host_terms(
    shape: ModelShape, config: EngineConfig, kind: Literal["cpu", "cuda"]
) -> dict[str, int]:
    """Host memory that the pod takes besides a CPU's weights and cache, in bytes: of the offload
    space the units that fit; the process pins the plans of captured steps, and one of 4-bit weights
    has a compiler while it starts; ``http`` is what more connections and longer bodies take than
    ``process`` reserves. ``bookkeeping`` comes to it once the number of blocks is known.
    """
    process, shared = PROCESS * config.tensor_parallel, int(config.shared_memory * GIB)
    groups = shape.groups
    if may_capture(config, kind) and not shape.states:
        process += plan_bytes(config, len(groups))
    int4 = kind == "cuda" and config.quantization == "int4"
    if int4 and packaged(shape, config.tensor_parallel):
        process += COMPILER
    units = offload_units(shape, config, groups) * config.tensor_parallel
    offload = units * unit_bytes(shape, config, groups)
    grammars = shape.vocab * GRAMMAR_ID_BYTES + GRAMMAR_CHILD
    sizes = (process, offload, shared, grammars, tokenizers(shape, config))
    terms = dict(zip(HOST_TERMS, sizes, strict=True))
    http = Traffic.of(config, max_model_len(shape, config)).http_bytes
    return terms | {"http": http} if http else terms


def tokenizers(shape: ModelShape, config: EngineConfig) -> int:
    """Bytes of the tokenizers of text in all processes of the pod."""
    return shape.vocab * (FRONT_WORD_BYTES + RANK_WORD_BYTES * config.tensor_parallel)


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """Host memory for the ids of tokens and blocks, in bytes: of the ``queue``, of each block of
    the cache, and of ``rows`` sequences that may all be as long as the cache, since they share
    blocks.

    A block counts ``block_size`` tokens in every layer; ``longest`` is a sequence's, in blocks.
    """

    queue: int
    block: int
    row_block: int
    rows: int
    longest: int
    keyless: bool = False  # a block is one version of a state, whatever the length

    @classmethod
    def of(cls, shape: ModelShape, config: EngineConfig, groups: int, queue: int) -> Self:
        size, rows = config.block_size, config.max_rows
        return cls(
            queue=queue,
            block=max(1, groups) * UNIT_BYTES,
            row_block=TOKEN_BYTES * size + DIGEST_BYTES + ENTRY_BYTES * groups,
            rows=rows,
            longest=ceil_div(max_model_len(shape, config), size),
            keyless=not groups,
        )

    def size(self, blocks: int) -> int:
        """Bytes with a cache of ``blocks``."""
        longest = self.longest if self.keyless else min(blocks, self.longest)
        sequences = self.rows * longest * self.row_block
        return self.queue + blocks * self.block + sequences

    def blocks(self, room: int, block_bytes: int) -> int:
        """The most blocks of ``block_bytes`` each that fit into ``room`` bytes with it; at least
        0.
        """
        per_block, room = block_bytes + self.block, room - self.queue
        blocks = room // (per_block + self.rows * self.row_block)
        if blocks > self.longest or self.keyless:
            blocks = (room - self.rows * self.longest * self.row_block) // per_block
        return max(0, blocks)


def max_model_len(shape: ModelShape, config: EngineConfig) -> int:
    return config.max_model_len or shape.max_len


def _attention(
    shape: ModelShape, config: EngineConfig, groups: Sequence[LayerGroup], element: int
) -> int:
    """Scratch memory of torch attention: the longest sequence's gathered keys and values, its masks
    and its explicit scores.
    """
    longest = max_model_len(shape, config)
    chunk = min(config.max_batch_tokens, longest)
    kinds = shape.heads_on(config.tensor_parallel)
    if not kinds:
        return 0
    # Keys and values, each in memory that all layers use, with their slots and positions; those of
    # an fp8 cache as they are, and wide.
    kept = max(h.key_width for h in kinds) + max(h.value_width for h in kinds)
    wide = element + (1 if config.fp8_cache else 0)
    gathered = longest * (kept * wide + 16 * len(groups))
    # A strip's mask beside what it is made of, or beside what attention gives for the strip.
    attended = max(heads.attended_width for heads in kinds)
    strip = min(STRIP, chunk) * (longest * element + max(2 * longest, attended * element))
    masks = len(groups) * min(chunk * longest, KEPT_MASKS) * element + strip
    if not shape.explicit_scores:
        return gathered + masks
    # Scores before and after their cap or sinks, in float32, and keys repeated for each head that
    # shares them.
    heads = max(h.query for h in kinds)
    repeated = longest * max(h.query_width + h.attended_width for h in kinds) * element
    queries = min(scored_strip(heads, longest), chunk)
    return gathered + masks + repeated + 3 * heads * queries * longest * 4


def gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size >= GIB / 10 or size == 0 else f"{size / GIB:.3f}"
