"""A stand-in for flashinfer's paged wrappers, in plain torch, which runs on any device.

Written from the documentation of flashinfer-python 0.7.2, with the package's own signatures (a test
compares them with the wheel's source), for its fa2 kernels and the arguments that a backend of ours
may give. What the package takes and the stand-in does not model raises NotImplementedError.

It is stricter than the package, where the package would compute garbage, read foreign memory or
wait for the device:

- shapes, dtypes, contiguity and ranges of every argument of ``plan``, of every tensor of ``run``;
- metadata that is on the device, changed between ``plan`` and ``run``, or that ``run``'s tensors do
  not match;
- a ``plan`` while the last one's copy may still be under way. Copies are under way until an
  ``Event`` that was recorded behind them is waited for (``STREAM``);
- sinks or a cap given to a kernel that ignores them;
- a workspace that the parts of split rows outgrow, under CUDA graphs, where the package reserves
  those of any step that the graph could serve.

It is laxer in one place: float32 works, as token equality needs it. Scores and sums are float32. A
key that is masked has the weight 0 and not none, as on the device: a NaN in its value spreads.
"""

import itertools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairlead_kernels.interface.attention import GroupKinds, Heads
from fairlead_kernels.packages.flashinfer_attention import FlashinferAttention, Supported
from fairlead_kernels.packages.flashinfer_package import FlashinferPackage

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Keys and values may also be of this type, whatever the queries are.
FP8 = torch.float8_e4m3fn
GROUPS_WITHOUT_TENSOR_CORES = (1, 2, 3, 4, 6, 8, 16)
# A small GPU of compute capability 8.0.
GPU = SimpleNamespace(multi_processor_count=6, major=8)
ALIGNMENT = 16


class Stream:
    """The device's queue of work, as far as the order of copies goes: ``queued`` pieces, of which
    the first ``done`` are known to have run.
    """

    def __init__(self) -> None:
        self.queued = 0
        self.done = 0

    def enqueue(self) -> int:
        self.queued += 1
        return self.queued


STREAM = Stream()
# The tape that a step is captured on: graph_standin.Tape, or nothing.
TAPE: list[Any] = []


class Event:
    """torch.cuda.Event on the pretended stream."""

    def __init__(self) -> None:
        self._place = 0

    def record(self) -> None:
        self._place = STREAM.queued

    def synchronize(self) -> None:
        STREAM.done = max(STREAM.done, self._place)


class Planned(NamedTuple):
    """What ``plan`` was given, as the device has it, and the host's tensors beside their copies."""

    query_starts: list[int]
    kv_starts: list[int]
    indices: Tensor
    kv_lens: list[int]
    heads: tuple[int, int]
    dims: tuple[int, int]
    page_size: int
    causal: bool
    scale: float
    window_left: int
    softcap: float
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    sources: tuple[tuple[str, Tensor, Tensor], ...]


class Fixed(NamedTuple):
    """The addresses of a wrapper's metadata under CUDA graphs, on the device."""

    starts: Tensor
    blocks: Tensor
    lasts: Tensor

    @classmethod
    def of(cls, graph: bool, *buffers: Tensor | None) -> "Fixed | None":
        if not graph:
            if any(x is not None for x in buffers):
                raise NotImplementedError("the stand-in takes buffers for CUDA graphs only")
            return None
        given = [x for x in buffers if x is not None]
        if len(given) < len(buffers) or any(x.dtype is not torch.int32 for x in given):
            raise ValueError("under CUDA graphs each buffer must be a tensor of int32")
        *queries, starts, blocks, lasts = given
        if len(starts) != len(lasts) + 1 or any(len(x) != len(starts) for x in queries):
            raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        return cls(starts, blocks, lasts)

    def take(self, planned: "Planned") -> "Planned":
        """Copy a plan here, as the package does; what runs reads it from here."""
        starts, lens, size = planned.kv_starts, planned.kv_lens, planned.page_size
        if len(lens) != len(self.lasts):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if planned.query_starts[-1] != len(lens):
            raise NotImplementedError("the stand-in has graphs of one query a row only")
        if len(planned.indices) > len(self.blocks):
            raise ValueError("indices: more than the allocated buffer holds")
        self.starts.copy_(torch.tensor(starts, dtype=torch.int32))
        self.lasts.copy_(torch.tensor([(n - 1) % size + 1 for n in lens], dtype=torch.int32))
        self.blocks[: len(planned.indices)].copy_(planned.indices)
        return planned

    def read(self, planned: "Planned") -> "Planned":
        """The plan as the addresses have it now."""
        starts, lasts = self.starts.tolist(), self.lasts.tolist()
        lens = [
            (end - begin - 1) * planned.page_size + last
            for begin, end, last in zip(starts, starts[1:], lasts, strict=False)
        ]
        blocks = self.blocks[: starts[-1]]
        return planned._replace(kv_starts=starts, indices=blocks, kv_lens=lens)


class _Wrapper:
    """What the wrappers share."""

    def __init__(
        self, workspace: Tensor, kv_layout: str, *, fixed: Fixed | None, backend: str
    ) -> None:
        if workspace.dtype != torch.uint8 or workspace.dim() != 1:
            raise ValueError("float_workspace_buffer must be a flat uint8 tensor")
        if workspace.data_ptr() % ALIGNMENT:
            raise ValueError(f"float_workspace_buffer must be {ALIGNMENT}-byte aligned")
        if kv_layout not in ("NHD", "HND"):
            raise KeyError(f"Invalid kv_layout {kv_layout}")
        if kv_layout != "NHD" or backend != "fa2":
            raise NotImplementedError("the stand-in has fa2 on NHD pages")
        self.device = workspace.device
        self._workspace_bytes = workspace.nbytes
        self._fixed = fixed
        self._planned: Planned | None = None
        self._copy = 0  # the place in the stream of the newest plan's copy

    def _begin_plan(self) -> None:
        if self._copy > STREAM.done:
            raise RuntimeError(
                "plan: the pinned workspace is overwritten while the copy of the last plan may "
                "still be under way"
            )

    def _end_plan(self, planned: Planned) -> None:
        if self._fixed is not None and (needed := _split_bytes(planned)) > self._workspace_bytes:
            raise RuntimeError(
                "Buffer overflow when allocating memory for batch_prefill_tmp_v: "
                f"{needed} bytes, the workspace has {self._workspace_bytes}"
            )
        self._planned = planned if self._fixed is None else self._fixed.take(planned)
        self._copy = STREAM.enqueue()

    def _compute(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        out: Tensor | None,
        sink: Tensor | None = None,
    ) -> Tensor:
        p = self._planned
        if p is None:
            raise RuntimeError("run: plan was not called")
        if TAPE:
            return self._taped(q, paged_kv_cache, out, sink)
        if self._fixed is not None:
            p = self._fixed.read(p)
        keys, values = self._check_run(p, q, paged_kv_cache)
        shape = (q.shape[0], p.heads[0], p.dims[1])
        if out is None:
            out = torch.zeros(shape, dtype=p.dtypes[2], device=q.device)
        if tuple(out.shape) != shape or out.dtype != p.dtypes[2] or out.device != q.device:
            raise ValueError(f"out must be {shape} in {p.dtypes[2]} on {q.device}")
        STREAM.enqueue()
        for row, length in enumerate(p.kv_lens):
            begin, end = p.query_starts[row : row + 2]
            pages = p.indices[p.kv_starts[row] : p.kv_starts[row + 1]].long()
            k, v = (_pages(x, pages).flatten(0, 1)[:length].float() for x in (keys, values))
            out[begin:end] = _attend(q[begin:end].float(), k, v, p, sink).to(out.dtype)
        return out

    def _taped(self, q: Tensor, cache: Any, out: Tensor | None, sink: Tensor | None) -> Tensor:
        """A run that is captured: replayed, it reads the plan of that time."""
        if self._fixed is None or out is None:
            raise RuntimeError("capture: run without use_cuda_graph reads a plan that is freed")
        tape, given = TAPE[-1], [q, *cache, out, *([] if sink is None else [sink])]

        def kernel() -> None:
            kept = TAPE[:]
            TAPE.clear()
            try:
                self._compute(q, cache, out, sink)
            finally:
                TAPE.extend(kept)

        tape.launch(kernel, given)
        return out

    def _check_run(self, p: Planned, q: Tensor, paged_kv_cache: Any) -> tuple[Tensor, Tensor]:
        for name, source, copy in p.sources:
            if not torch.equal(source, copy):
                raise RuntimeError(f"{name} changed between plan and run")
        if not isinstance(paged_kv_cache, tuple):
            raise NotImplementedError("the stand-in takes keys and values as a tuple")
        keys, values = paged_kv_cache
        for name, x, dtype in (("q", q, 0), ("k", keys, 1), ("v", values, 1)):
            if x.dtype != p.dtypes[dtype]:
                raise ValueError(f"The dtype of {name} {x.dtype} does not match {p.dtypes[dtype]}")
            if x.device != self.device:
                raise ValueError(f"{name} is on {x.device}, the workspace on {self.device}")
            if x.stride(-1) != 1:
                raise ValueError(f"the last dimension of {name} must be contiguous")
        if q.shape != (p.query_starts[-1], p.heads[0], p.dims[0]):
            raise ValueError(
                f"q.shape {tuple(q.shape)} does not match qo_indptr[-1] {p.query_starts[-1]}, "
                f"{p.heads[0]} heads of {p.dims[0]}"
            )
        for x, dim in ((keys, p.dims[0]), (values, p.dims[1])):
            if x.shape[1:] != (p.page_size, p.heads[1], dim):
                raise ValueError(f"pages of shape {tuple(x.shape[1:])} do not match the plan")
        if keys.shape[0] != values.shape[0] or int(p.indices.max()) >= keys.shape[0]:
            raise IndexError(f"paged_kv_indices: the cache has {keys.shape[0]} pages")
        if int(p.indices.min()) < 0:
            raise IndexError("paged_kv_indices holds a negative page")
        return keys, values


def _split_bytes(p: Planned) -> int:
    """scheduler.cuh, PrefillPlan, of rows of one query, with its names."""
    num_qo_heads, num_kv_heads = p.heads
    gqa_group_size, batch_size = num_qo_heads // num_kv_heads, len(p.kv_lens)
    max_qo_len = gqa_group_size  # of total_num_rows - batch_size + 1 queries
    if max_qo_len > 64 and p.dims[1] < 256:
        cta_tile_q = 128
    else:
        cta_tile_q = 64 if max_qo_len > 16 else 16
    max_batch_size_if_split: int = 2 * GPU.multi_processor_count // num_kv_heads
    total_num_tiles_q = math.ceil(batch_size * gqa_group_size / cta_tile_q) + batch_size - 1
    padded_batch_size = max(max_batch_size_if_split, total_num_tiles_q)
    max_partial_rows = math.ceil(padded_batch_size * cta_tile_q / gqa_group_size)
    end = num_qo_heads * max_partial_rows * p.dims[1] * 4  # tmp_v
    return math.ceil(end / 16) * 16 + num_qo_heads * max_partial_rows * 4  # tmp_s


def _pages(cache: Tensor, pages: Tensor) -> Tensor:
    if cache.dtype is FP8:  # torch moves its bytes only
        return cache.view(torch.uint8)[pages].view(FP8)
    return cache[pages]


def _attend(q: Tensor, k: Tensor, v: Tensor, p: Planned, sink: Tensor | None) -> Tensor:
    """One row: q [m, H, D], k [L, Hkv, D], v [L, Hkv, Dv] → [m, H, Dv]."""
    count, length = q.shape[0], k.shape[0]
    group = p.heads[0] // p.heads[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("mhd,lhd->hml", q, k) * p.scale
    if p.softcap:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    queries = torch.arange(count, device=q.device)[:, None]
    at = torch.arange(length, device=q.device)
    seen = torch.ones(count, length, dtype=torch.bool, device=q.device)
    if p.causal:
        seen &= at <= queries + length - count
    if p.window_left >= 0:
        seen &= at + count + p.window_left >= length + queries
    scores = scores.masked_fill(~seen, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(-1, count, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    return torch.einsum("hml,lhd->mhd", weights, v)


def _refuse(**options: Any) -> None:
    given = [name for name, (value, default) in options.items() if value != default]
    if given:
        raise NotImplementedError(f"the stand-in does not model {', '.join(given)}")


def _check_vector(name: str, x: Tensor, size: int | None) -> None:
    if x.dtype != torch.int32 or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"{name} must be a contiguous vector of int32")
    if size is not None and len(x) != size:
        raise ValueError(f"{name} has {len(x)} values, expected {size}")


def _indices(name: str, x: Tensor, size: int | None) -> list[int]:
    """The values of metadata that ``plan`` reads on the host."""
    _check_vector(name, x, size)
    if x.device.type != "cpu":
        raise ValueError(f"{name} is on {x.device}: plan would wait for the device to read it")
    values: list[int] = x.tolist()
    return values


def _starts(name: str, x: Tensor, size: int | None, least: int) -> list[int]:
    values = _indices(name, x, size)
    if len(values) < 2 or values[0] != 0:
        raise ValueError(f"{name} must begin with 0 and have a row at least")
    if any(b - a < least for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name}: each row needs at least {least}")
    return values


def _plan(
    query_starts: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    *,
    causal: bool,
    sm_scale: float | None,
    window_left: int,
    softcap: float | None,
    dtypes: tuple[Any, Any, Any],
) -> Planned:
    if heads[1] < 1 or heads[0] % heads[1]:
        raise ValueError(f"num_qo_heads {heads[0]} should be divisible by {heads[1]}")
    if page_size < 1 or window_left < -1 or (softcap or 0) < 0:
        raise ValueError("page_size, window_left or logits_soft_cap is out of range")
    q, kv, o = (getattr(torch, x) if isinstance(x, str) else x for x in dtypes)
    kv, o = kv or q, o or q
    if not {q, o} <= set(DTYPES) or kv not in (q, FP8):
        raise KeyError(f"no kernel takes queries in {q} and keys in {kv}")
    starts = _starts("qo_indptr", query_starts, None, 1)
    batch = len(starts) - 1
    kv_starts = _starts("paged_kv_indptr", kv_indptr, batch + 1, 1)
    _check_vector("paged_kv_indices", kv_indices, kv_starts[-1])  # the device alone reads them
    last = _indices("paged_kv_last_page_len", last_page_len, batch)
    if not all(1 <= length <= page_size for length in last):
        raise ValueError(f"paged_kv_last_page_len must be 1 to {page_size}")
    lens = [
        (kv_starts[row + 1] - kv_starts[row] - 1) * page_size + last[row] for row in range(batch)
    ]
    if any(lens[row] < starts[row + 1] - starts[row] for row in range(batch)):
        raise ValueError("a row has more queries than keys")
    return Planned(
        query_starts=starts,
        kv_starts=kv_starts,
        indices=kv_indices.clone(),
        kv_lens=lens,
        heads=heads,
        dims=dims,
        page_size=page_size,
        causal=causal,
        scale=dims[0] ** -0.5 if sm_scale is None else sm_scale,
        window_left=window_left,
        softcap=softcap or 0.0,
        dtypes=(q, kv, o),
        sources=tuple(
            (name, x, x.clone())
            for name, x in (
                ("qo_indptr", query_starts),
                ("paged_kv_indptr", kv_indptr),
                ("paged_kv_indices", kv_indices),
                ("paged_kv_last_page_len", last_page_len),
            )
        ),
    )


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        fixed = Fixed.of(
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )
        super().__init__(float_workspace_buffer, kv_layout, fixed=fixed, backend=backend)
        _refuse(
            custom_mask_buf=(custom_mask_buf, None),
            mask_indptr_buf=(mask_indptr_buf, None),
            jit_args=(jit_args, None),
            jit_kwargs=(jit_kwargs, None),
            variant_owns_mask=(variant_owns_mask, False),
        )

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        _refuse(
            custom_mask=(custom_mask, None),
            packed_custom_mask=(packed_custom_mask, None),
            pos_encoding_mode=(pos_encoding_mode, "NONE"),
            use_fp16_qk_reduction=(use_fp16_qk_reduction, False),
            rope_scale=(rope_scale, None),
            rope_theta=(rope_theta, None),
            non_blocking=(non_blocking, True),
            prefix_len_ptr=(prefix_len_ptr, None),
            token_pos_in_items_ptr=(token_pos_in_items_ptr, None),
            token_pos_in_items_len=(token_pos_in_items_len, 0),
            max_item_len_ptr=(max_item_len_ptr, None),
            seq_lens=(seq_lens, None),
            seq_lens_q=(seq_lens_q, None),
            block_tables=(block_tables, None),
            max_token_per_sequence=(max_token_per_sequence, None),
            max_sequence_kv=(max_sequence_kv, None),
            fixed_split_size=(fixed_split_size, None),
            disable_split_kv=(disable_split_kv, False),
            uniform_q_len=(uniform_q_len, None),
        )
        self._begin_plan()
        planned = _plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads),
            (head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo),
            page_size,
            causal=causal,
            sm_scale=sm_scale,
            window_left=window_left,
            softcap=logits_soft_cap,
            dtypes=(q_data_type, kv_data_type, o_data_type),
        )
        self._check_plan(planned)
        self._end_plan(planned)

    def _check_plan(self, planned: Planned) -> None:
        """More conditions of a wrapper whose module is chosen before it is planned."""

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor:
        _refuse(
            q_scale=(q_scale, None),
            k_scale=(k_scale, None),
            v_scale=(v_scale, None),
            lse=(lse, None),
            return_lse=(return_lse, False),
            lse_base=(lse_base, "log2"),
            lse_layout=(lse_layout, "NH"),
            window_left=(window_left, None),
            sinks=(sinks, None),  # fa2 ignores them
            kv_cache_sf=(kv_cache_sf, None),
            skip_softmax_threshold_scale_factor=(skip_softmax_threshold_scale_factor, None),
            use_fp16_softmax=(use_fp16_softmax, None),
            uses_spcompress=(uses_spcompress, None),
        )
        return self._compute(q, paged_kv_cache, out, self._sink(args))

    def _sink(self, args: tuple[Any, ...]) -> Tensor | None:
        if args:
            raise NotImplementedError("only a custom kernel has further arguments")
        return None


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )
        _refuse(
            pos_encoding_mode=(pos_encoding_mode, "NONE"),
            use_fp16_qk_reduction=(use_fp16_qk_reduction, False),
        )
        if kv_data_type is FP8:
            raise ValueError("the package names this module by the type of queries alone")
        self._module = (q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left >= 0)

    def _check_plan(self, planned: Planned) -> None:
        if self._module != (*planned.dtypes[:2], *planned.dims, planned.window_left >= 0):
            raise ValueError("the module was made for other types, sizes or windows than the plan")
        if planned.softcap:
            raise ValueError("this kernel ignores logits_soft_cap")

    def _sink(self, args: tuple[Any, ...]) -> Tensor:
        planned = self._planned
        if planned is None or len(args) != 2:
            raise TypeError("run takes the sinks and the scale after the cache")
        sink: Tensor = args[0]
        scale = args[1]
        if sink.dtype != torch.float32 or sink.shape != (planned.heads[0],):
            raise ValueError(f"the sinks must be {planned.heads[0]} float32")
        if not sink.is_contiguous() or sink.device != self.device:
            raise ValueError("the sinks must be contiguous and on the workspace's device")
        if not isinstance(scale, float):
            raise TypeError("the scale must be a float")
        self._planned = planned._replace(scale=scale)  # the kernel takes it from here
        return sink


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        fixed = Fixed.of(
            use_cuda_graph,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        super().__init__(float_workspace_buffer, kv_layout, fixed=fixed, backend=backend)
        _refuse(jit_args=(jit_args, None))
        self._tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        if deprecated_positional_args:
            raise TypeError("plan: the arguments after page_size are given by their names")
        self._plan_impl(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            **kwargs,
        )

    def _plan_impl(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        _refuse(
            pos_encoding_mode=(pos_encoding_mode, "NONE"),
            window_right=(window_right, 0),
            data_type=(data_type, None),
            rope_scale=(rope_scale, None),
            rope_theta=(rope_theta, None),
            non_blocking=(non_blocking, True),
            block_tables=(block_tables, None),
            seq_lens=(seq_lens, None),
            fixed_split_size=(fixed_split_size, None),
            disable_split_kv=(disable_split_kv, False),
            q_len_per_req=(q_len_per_req, 1),
            is_causal=(is_causal, None),
        )
        group = num_qo_heads // num_kv_heads
        if not self._tensor_cores and group not in GROUPS_WITHOUT_TENSOR_CORES:
            raise RuntimeError(f"Unsupported group_size: {group}")
        self._begin_plan()
        planned = _plan(
            torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            indptr,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads),
            (head_dim, head_dim),
            page_size,
            causal=False,
            sm_scale=sm_scale,
            window_left=window_left,
            softcap=logits_soft_cap,
            dtypes=(q_data_type, kv_data_type, o_data_type),
        )
        self._end_plan(planned)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        _refuse(
            args=(args, ()),
            q_scale=(q_scale, None),
            k_scale=(k_scale, None),
            v_scale=(v_scale, None),
            lse=(lse, None),
            return_lse=(return_lse, False),
            window_left=(window_left, None),
            sinks=(sinks, None),  # fa2 ignores them
            q_len_per_req=(q_len_per_req, None),
            skip_softmax_threshold_scale_factor=(skip_softmax_threshold_scale_factor, None),
            kv_cache_sf=(kv_cache_sf, None),
        )
        return self._compute(q, paged_kv_cache, out)


PACKAGE = FlashinferPackage(
    version="stand-in",
    prefill=BatchPrefillWithPagedKVCacheWrapper,
    decode=BatchDecodeWithPagedKVCacheWrapper,
    sinks=BatchAttentionWithAttentionSinkWrapper,
    event=Event,
    properties=lambda _device: GPU,
)

# Float32 and the heads of tiny models, beside what the package has.
DIMS = frozenset(range(1, 257))
SUPPORTED = Supported(frozenset(DTYPES), dims=DIMS, sinks=DIMS)


def attention(heads: Heads, kinds: GroupKinds) -> FlashinferAttention:
    """The backend on the stand-in, on the CPU."""
    return FlashinferAttention(
        heads, kinds, torch.device("cpu"), PACKAGE, supported=SUPPORTED, workspace_bytes=1024
    )
