"""The profiling run: measures the memory of one step beside weights and cache, before the cache is
sized, and how long a step takes without attention.

Owns its dummy work (a full batch of prefills; as many decodes as may run at once; one long row's
attention; the largest batch on the host) and the meters. The names it returns are those of the
memory equation's terms, so a measured term replaces the computed one. Attention is left out of the
steps and measured separately.

What is measured. On CUDA: the allocator's peak. On a CPU: the peak of all tensors alive at once, as
a dispatch mode sees them. It does not see buffers that a kernel (MKL, oneDNN, SDPA) allocates and
frees inside one operator; resident memory would not be a better measure, since freed pages are
reused. A CPU computes at most CPU_TOKENS tokens for this and scales up: every tensor of a step
grows with its tokens, none with their square, since attention is masked in strips. What the C++
kernels hold of one slab of a step does not, so their slabs are as much smaller (``stands_for``);
all fused layers have it in common, so of a step without logits the first one alone runs.
Nor do states, and a mixer fills a row up to whole chunks: it computes some of these, at least
CPU_MIXED_TOKENS.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fairlead_kernels.cpu.cpu_attention import CpuAttention
from fairlead_kernels.interface.attention import AttentionBackend, DecodeAttention, Heads, LayerSpec
from fairlead_kernels.plain.strips import STRIP, scored_strip
from fairlead_kernels.plain.torch_attention import TorchAttention
from fairlead_kernels.sampling import sample_rows
from fairlead_kernels.sampling.sample import hash_tokens
from fairlead_runtime.device.memory.state_units import StateUnits
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.batch import BatchBuilder, StateRows
from fairlead_runtime.device.model.block_tables import HostTables
from fairlead_runtime.device.model.paged_attention import (
    AttentionCall,
    CachedLayer,
    CachedPass,
    PagedPass,
)
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.model.state_layers import StateStep, step_of
from fairlead_runtime.device.sampling.host_sampler import SamplingBatch, sample
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.sizing.groups import LayerGroup
from fairlead_runtime.sizing.terms import (
    ENTRY_BYTES,
    KEPT_MASKS,
    ROW_SAMPLING_BYTES,
    sampler_rows,
)

Result = TypeVar("Result")

CPU_TOKENS = 64
CPU_MIXED_TOKENS = 256
# A longer row's attention is scaled up from this many keys: what it gathers grows with them.
CPU_KEYS = 2048
CUDA_KEYS = 1 << 15
WIDTH = 1024  # block tables with more blocks are scaled up from this many
CPU_ROW = 32
CPU_ROWS = 16
BLOCK_SIZE = 16
# A change of the logits, every filter and log-probabilities: the most that sampling can take.
_PARAMS = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    logprobs=20,
    repetition_penalty=1.1,
    allowed_token_ids=(0,),
)


class Profile(NamedTuple):
    """``measured``: bytes of ``activations``, ``logits``, ``sampling``, ``batch`` and
    ``attention``: what plain torch gathers and masks, the workspaces of GPUs' kernels, none for the
    C++ kernels, which need neither. Times in seconds, with the meters' overhead.
    """

    measured: Mapping[str, int]
    token_seconds: float  # of one token in a large step
    decode_seconds: float  # one step of decodes; scaled up with them, which is more than it takes


@torch.inference_mode()
def profile(
    model: PagedModel,
    backend: AttentionBackend,
    *,
    max_batch_tokens: int,
    max_requests: int,
    max_model_len: int,
    block_size: int = BLOCK_SIZE,
    chunk: int = 1,
    state_units: int = 0,
    state_versions: int = 0,
) -> Profile:
    """The memory of the largest steps that these limits allow, and times.

    Runs one step of max_batch_tokens (on a CPU of CPU_TOKENS) and one of max_requests decodes.
    ``backend`` in plain torch must be unused: the scratch memory that it keeps is part of
    ``attention``. ``chunk``: tokens of which a mixer computes whole multiples; ``state_units``:
    units of a sequence's state, of which it has ``state_versions``.
    """
    on_cpu = model.device.type == "cpu"
    least = _filled(CPU_MIXED_TOKENS, chunk) if model.states else CPU_TOKENS
    tokens = min(max_batch_tokens, least) if on_cpu else max_batch_tokens
    max_rows = min(max_requests, max_batch_tokens)
    # What decodes copy of states does not grow with the rows beyond those of one call.
    rows = min(max_rows, CPU_ROWS) if on_cpu and not model.states else max_rows
    # A layer with a state computes one row after the other, whose memory grows with its tokens.
    longest = min(tokens, max_model_len, CPU_ROW if on_cpu and not model.states else tokens)
    lengths = [min(longest, tokens - at) for at in range(0, tokens, longest)]

    in_c = backend if isinstance(backend, CpuAttention) and not model.states else None
    if in_c is not None:
        prefill = _cpu_step(model, in_c, tokens, max_batch_tokens, samples=False)
        decode = _cpu_step(model, in_c, rows, max_rows, samples=True)
    else:
        prefill = _step(model, lengths, samples=False)
        decode = _step(model, [1] * rows, samples=True)
    began = time.monotonic()
    activations, _ = _peak(model.device, prefill)
    token_seconds = (time.monotonic() - began) / tokens
    began = time.monotonic()
    logits, scores = _peak(model.device, decode)
    row_seconds = (time.monotonic() - began) / rows
    if in_c is not None:  # whose first pass leaves layers out; of more rows each takes less
        token_seconds = row_seconds
    batch = SamplingBatch.of([_sequence(i, 1) for i in range(rows)])
    sampling, _ = _peak(model.device, lambda: sample(scores, batch).outcomes())
    if isinstance(backend, DecodeAttention):
        sampling = max(sampling, _peak(model.device, _dense_draw(scores))[0])
    measured = {
        "activations": activations * _filled(max_batch_tokens, chunk) // _filled(tokens, chunk),
        "logits": logits * max_rows // rows,
        "sampling": _of_all_rows(sampling, rows, max_rows, model),
        "batch": _batch(
            model,
            max_batch_tokens,
            max_rows,
            max_model_len,
            block_size,
            [[0] * state_units for _ in range(state_versions)],
        ),
    }
    if isinstance(backend, TorchAttention):
        measured["attention"] = _attention(model, backend, max_batch_tokens, max_model_len)
    elif isinstance(backend, DecodeAttention):
        measured["attention"] = backend.reserve(max_rows)
    return Profile(measured, token_seconds, row_seconds * max_rows)


def _filled(tokens: int, chunk: int) -> int:
    """Tokens that a mixer computes in the place of these."""
    return -(-tokens // chunk) * chunk


def _of_all_rows(sampling: int, rows: int, max_rows: int, model: PagedModel) -> int:
    """Bytes of sampling ``max_rows``, of which these were measured with ``rows``."""
    together = max(rows, sampler_rows(max_rows, model.vocabulary, model.device.type))
    later = (max_rows - together) * model.vocabulary * ROW_SAMPLING_BYTES
    return sampling * together // rows + later


class _PassWithoutAttention(CachedPass):
    """A forward pass whose attention returns zeros: it takes the memory of everything else."""

    def __init__(
        self,
        keep: torch.Tensor,
        tokens: int,
        heads: tuple[Heads, ...],
        states: StateStep | None = None,
    ) -> None:
        self.keep = keep
        self._heads = heads
        self.states = states
        slots = torch.arange(tokens, device=keep.device)
        self._cached: dict[Heads, CachedLayer] = {}
        for h in {*heads}:
            keys, values = (
                torch.empty(1, tokens, h.kv, dim, dtype=h.cache_dtype, device=keep.device)
                for dim in (h.dim, h.value_dim)
            )
            self._cached[h] = CachedLayer(keys, values, slots)

    def cached(self, layer: int) -> CachedLayer:
        return self._cached[self._heads[layer]]

    def attend_cached(self, layer: int, query: torch.Tensor, _call: AttentionCall) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], self._heads[layer].value_dim)


def _states_of(model: PagedModel, lengths: list[int]) -> StateStep | None:
    """Rows of these lengths, each of which continues from the same state of zeros and leaves
    another one: as in a step that serves, nothing is read where a row writes. What comes out is
    never read, so all rows have these two.
    """
    layout = model.state_layout
    if layout is None:
        return None
    units = torch.zeros(2, layout.nbytes, dtype=torch.uint8, device=model.device)
    source = torch.zeros(len(lengths), 1, dtype=torch.int64)
    generated, continue_ = (0,) * len(lengths), (False,) * len(lengths)
    rows = StateRows(tuple(lengths), generated, continue_, source, source + 1)
    return step_of(rows, StateUnits(units, layout), model.device)


def _dense_draw(scores: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The draw of these logits' rows on the device, with every filter."""
    rows, device = scores.shape[0], scores.device
    hashes = hash_tokens(scores.shape[1], device)
    parameters = sample_rows.RowParameters(
        torch.ones(rows, device=device),
        torch.full((rows,), -1.0, device=device),
        torch.ones(rows, dtype=torch.int64, device=device),
        torch.full((rows,), 0.9, dtype=torch.float64, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
    )
    return lambda: sample_rows.choose(scores, parameters, hashes)


def _attention(
    model: PagedModel, backend: AttentionBackend, max_batch_tokens: int, max_model_len: int
) -> int:
    """Bytes of attention over one row of max_model_len: scratch, masks and explicit scores."""
    on_cpu = model.device.type == "cpu"
    queries, element = min(max_batch_tokens, max_model_len), model.heads.dtype.itemsize
    mask_bytes, scratch = 0, 0
    for group in model.groups:
        visible = (
            max_model_len
            if group.window is None
            else min(max_model_len, group.window - 1 + queries)
        )
        keys = min(visible, CPU_KEYS if on_cpu else CUDA_KEYS)
        # One strip that is not the row's first: it needs a mask, and no strip takes more scratch.
        call = model.calls[group.layers[0]]
        scored = call.softcap is not None or call.sinks is not None
        most = scored_strip(model.heads.query, visible) if scored else STRIP
        strip = max(1, min(queries, most, keys - 1))
        masks = strip * keys * element if strip > 1 else 0
        peak = _attend_one(model, backend, group, keys, strip) - masks
        scratch = max(scratch, max(0, peak) * visible // keys)
        mask_bytes += min(queries * visible, max(KEPT_MASKS, STRIP * visible)) * element
    return scratch + mask_bytes


def _attend_one(
    model: PagedModel, backend: AttentionBackend, group: LayerGroup, keys: int, queries: int
) -> int:
    """Bytes that the last ``queries`` of a row of ``keys`` take in one layer of a group, without
    the output.
    """
    heads, call = model.layer_heads[group.layers[0]], model.calls[group.layers[0]]
    sequence = _sequence(0, keys)
    # Blocks in reverse order: a row of consecutive blocks would be read in place.
    sequence.tables = [list(reversed(range(-(-keys // BLOCK_SIZE))))]
    alone = LayerGroup(0, group.window, (0,))
    units = len(sequence.tables[0])
    cache = CacheStorage([alone], heads, units=units, block_size=BLOCK_SIZE, device=model.device)
    batch = BatchBuilder([alone], BLOCK_SIZE).build(
        [Row(sequence, keys - queries, queries, samples=True)]
    )
    query = torch.zeros(queries, heads.query, heads.dim, dtype=heads.dtype, device=model.device)
    spec = LayerSpec(call.scale, group.window, call.softcap, call.sinks)
    output = query.nbytes // heads.dim * heads.value_dim  # part of the activations

    cached_keys, cached_values, _ = cache.layer(0)

    def run() -> None:
        plan = backend.plan(batch.ragged[0])
        backend.run(plan, query, cached_keys, cached_values, spec)

    return _peak(model.device, run)[0] - output


def _batch(
    model: PagedModel,
    tokens: int,
    rows: int,
    max_model_len: int,
    block_size: int,
    states: list[list[int]],
) -> int:
    """Bytes of the host's buffers after a batch of ``tokens`` in ``rows`` rows of the longest
    length, and of the lists of their units of ``states``.
    """
    groups = model.groups
    tables = HostTables(groups, block_size)
    builder = BatchBuilder(groups, block_size, tables=tables)
    width = -(-max_model_len // block_size)
    columns = min(width, WIDTH)
    end = min(columns * block_size, max_model_len)
    ids, table = [0] * end, [0] * columns
    batch: list[Row] = []
    rest = tokens
    for index in range(rows):
        sequence = _sequence(index, 1)
        sequence.tokens, sequence.tables = ids, [table] * len(groups)
        sequence.states = states if states and states[0] else []
        count = max(1, min(end, rest - (rows - index - 1)))
        rest -= count
        batch.append(Row(sequence, end - count, count, samples=True))
    builder.build(batch)
    listed = rows * sum(map(len, states)) * ENTRY_BYTES
    return listed + builder.nbytes + tables.table_nbytes * (width - columns) // columns


def _sequence(index: int, length: int) -> Sequence:
    request = Request(str(index), (0,) * length, _PARAMS, max_tokens=1, seed=index)
    return Sequence(index, request, 0, [0] * length)


def _step(model: PagedModel, lengths: list[int], *, samples: bool) -> Callable[[], torch.Tensor]:
    """A forward pass, without attention, of rows of these lengths. It has run once, so that memory
    kept between steps is not counted.
    """
    ids = torch.zeros(sum(lengths), dtype=torch.int64, device=model.device)
    positions = torch.cat([torch.arange(length, device=model.device) for length in lengths])
    last_tokens = torch.tensor(lengths, device=model.device).cumsum(0) - 1
    step = _PassWithoutAttention(
        last_tokens if samples else last_tokens[:0],
        len(ids),
        model.layer_heads,
        _states_of(model, lengths),
    )

    def run() -> torch.Tensor:
        return model.run(ids, positions, step)

    run()
    return run


def _cpu_step(
    model: PagedModel, backend: CpuAttention, count: int, tokens: int, *, samples: bool
) -> Callable[[], torch.Tensor]:
    """A forward pass of ``count`` rows of one token each, in the place of ``tokens`` tokens, on a
    cache of its own: layers in C++ contain their attention. They keep no memory between steps, so
    it need not have run before it is measured.
    """
    groups = model.groups
    units, rows = count * len(groups), list[Row]()
    for index in range(count):
        sequence = _sequence(index, 1)
        sequence.tables = [[index * len(groups) + group.index] for group in groups]
        rows.append(Row(sequence, 0, 1, samples=samples))
    cache = CacheStorage(groups, model.cache_heads, units=units, block_size=1, device=model.device)
    batch = BatchBuilder(groups, 1).build(rows)
    step = PagedPass(
        batch, cache, backend, batch.sample_index, stands_for=tokens, measures=not samples
    )

    def run() -> torch.Tensor:
        return model.run(batch.input_ids, batch.positions, step)

    return run


def _peak(device: torch.device, run: Callable[[], Result]) -> tuple[int, Result]:
    """Peak bytes that ``run`` allocates beyond those allocated before, and what it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before, result
    with _meter() as meter:
        result = run()
    return meter.peak, result


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Those of an operation's arguments or results, in lists, tuples and by name."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors([*value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


class _TensorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts the bytes of tensors created inside it: those alive now, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # see above
        self.alive = 0
        self.peak = 0
        self._counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        inputs = {id(x.untyped_storage()) for x in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            if id(tensor.untyped_storage()) not in inputs:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._counted:
            return
        self._counted.add(storage)
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.alive -= size


@contextmanager
def _meter() -> Iterator[_TensorMeter]:
    meter = _TensorMeter()
    with meter:
        yield meter
