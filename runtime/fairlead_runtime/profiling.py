"""The profiling run: what one step really takes beside weights and cache, before the cache is sized.

Owns two dummy steps (a full batch of prefills; as many decodes as may run at once) and the meters. The names it
returns are those of the sizing equation's terms, so a measured one takes the planned one's place.

What is measured, honestly. On CUDA: the allocator's peak, which is all there is. On a CPU: the peak of all tensors
alive at once, as a dispatch mode sees them; buffers that a kernel (MKL, oneDNN, SDPA) takes and returns inside one
operator are not seen, and resident memory would be no better a measure, as freed pages are reused unseen. A CPU
computes at most CPU_TOKENS tokens for this and scales up: every tensor of a step grows with its tokens, none with
their square, since attention is masked in strips.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairlead_kernels.attention import AttentionBackend
from fairlead_runtime.batch import BatchBuilder
from fairlead_runtime.cache.groups import group_layers
from fairlead_runtime.kv_cache import CacheStorage
from fairlead_runtime.models.attention import PagedModel
from fairlead_runtime.request import Request, SamplingParams, Sequence
from fairlead_runtime.sampling import SamplingBatch, sample
from fairlead_runtime.scheduling.plan import Row

CPU_TOKENS = 256
CPU_ROW = 32
CPU_ROWS = 64
BLOCK_SIZE = 16
# Every filter on and log-probabilities wanted: the most that sampling can take.
_PARAMS = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=20)


@torch.inference_mode()
def profile(
    model: PagedModel,
    backend: AttentionBackend,
    *,
    max_batch_tokens: int,
    max_requests: int,
    max_model_len: int,
) -> Mapping[str, int]:
    """Bytes of ``activations``, ``logits`` and ``sampling`` in the largest steps these limits allow.

    Takes one step of max_batch_tokens (on a CPU of CPU_TOKENS) and one of max_requests decodes.
    """
    on_cpu = model.device.type == "cpu"
    tokens = min(max_batch_tokens, CPU_TOKENS) if on_cpu else max_batch_tokens
    rows = min(max_requests, max_batch_tokens, CPU_ROWS if on_cpu else max_requests)
    longest = min(tokens, max_model_len, CPU_ROW if on_cpu else tokens)
    lengths = [min(longest, tokens - at) for at in range(0, tokens, longest)]

    prefill = _step(model, backend, lengths, samples=False)
    activations = _peak(model.device, prefill)
    decode = _step(model, backend, [1] * rows, samples=True)
    logits = _peak(model.device, decode)
    scores = decode()
    batch = SamplingBatch.of([_sequence(i, 1) for i in range(rows)])
    sampling = _peak(model.device, lambda: sample(scores, batch).outcomes())
    whole = min(max_requests, max_batch_tokens)
    return {
        "activations": activations * max_batch_tokens // tokens,
        "logits": logits * whole // rows,
        "sampling": sampling * whole // rows,
    }


def _sequence(index: int, length: int) -> Sequence:
    request = Request(str(index), (0,) * length, _PARAMS, max_tokens=1, seed=index)
    return Sequence(index, request, 0, [0] * length)


def _step(
    model: PagedModel, backend: AttentionBackend, lengths: list[int], *, samples: bool
) -> Callable[[], torch.Tensor]:
    """A forward pass of rows of these lengths on a cache of their own; run once already, so that what the backend
    keeps between steps is there and not counted.
    """
    groups = group_layers(model.windows)
    widths = [-(-length // BLOCK_SIZE) for length in lengths]
    units = sum(widths) * len(groups)
    cache = CacheStorage(groups, model.heads, units=units, block_size=BLOCK_SIZE, device=model.device)
    free = iter(range(units))
    rows: list[Row] = []
    for index, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        sequence = _sequence(index, length)
        sequence.tables = [[next(free) for _ in range(width)] for _ in groups]
        rows.append(Row(sequence, 0, length, samples=samples))
    builder = BatchBuilder(groups, BLOCK_SIZE)

    def run() -> torch.Tensor:
        return model.forward(builder.build(rows), cache, backend)

    run()
    return run


def _peak(device: torch.device, run: Callable[[], object]) -> int:
    """Bytes that ``run`` holds at its worst moment beyond what is held now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _meter() as meter:
        run()
    return meter.peak


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Bytes of the tensors made inside and alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # see above
        self.alive = 0
        self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in given:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.alive -= size


@contextmanager
def _meter() -> Iterator[_Meter]:
    meter = _Meter()
    with meter:
        yield meter
