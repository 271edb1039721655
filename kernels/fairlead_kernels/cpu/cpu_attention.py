"""Paged attention in C++ on CPUs, over float32 and bfloat16 caches.

Owns the hand-over of a step's rows and of one layer's tensors to the C functions; csrc/attention.h
says how they work.
"""

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairlead_kernels.cpu import library
from fairlead_kernels.cpu.cpu_arguments import address, check_caches
from fairlead_kernels.interface.attention import Heads, LayerSpec, RaggedRows

TASK_NUMBERS = 7  # int32 of a task


@dataclass(slots=True, eq=False)
class CpuPlan:
    """A step's rows as the C functions take them, the tensors that these point into, and the floats
    of memory that the parts of split rows need.
    """

    rows: library.RowsStruct
    ragged: RaggedRows
    tasks: Tensor
    part_floats: int


class CpuAttention:
    """``AttentionBackend`` in C++. ``fixed``: each query's sums have one order, whatever else is in
    the step and however its row is cut into steps.
    """

    def __init__(self, heads: Heads, functions: library.Library, *, fixed: bool = False) -> None:
        self.heads = heads
        self.library = functions
        self.fixed = fixed
        self.name = functions.instruction_set
        self.struct = library.HeadsStruct(heads.query, heads.kv, heads.dim, heads.value_dim)
        self._part: int = functions.attention_part(ctypes.byref(self.struct))

    def plan(self, ragged: RaggedRows) -> CpuPlan:
        starts, lens, tables = tensors = ragged.query_starts, ragged.kv_lens, ragged.tables
        if not all(t.is_contiguous() for t in tensors):
            starts, lens, tables = (t.contiguous() for t in tensors)
            ragged = replace(ragged, query_starts=starts, kv_lens=lens, tables=tables)
        rows = library.RowsStruct(
            starts=starts.data_ptr(),
            lens=lens.data_ptr(),
            tables=tables.data_ptr(),
            count=lens.shape[0],
            table_width=tables.shape[1],
            block_size=ragged.block_size,
            window=ragged.window or 0,
            fixed=self.fixed,
        )
        arguments = ctypes.byref(self.struct), ctypes.byref(rows), torch.get_num_threads()
        self.library.attention_plan(*arguments, None)
        tasks = torch.empty(rows.task_count + rows.merge_count, TASK_NUMBERS, dtype=torch.int32)
        parts = self.library.attention_plan(*arguments, tasks.data_ptr())
        rows.tasks = tasks.data_ptr()
        return CpuPlan(rows, ragged, tasks, parts * self._part)

    def run(
        self,
        plan: CpuPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        spec: LayerSpec,
    ) -> Tensor:
        spec.check_window(plan.ragged.window)
        h = self.heads
        check_caches(key_cache, value_cache)
        dtype, query = query.dtype, query.float()
        if query.stride()[1:] != (h.dim, 1):
            query = query.contiguous()
        sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
        out = torch.empty(query.shape[0], h.query, h.value_dim)
        parts = torch.empty(plan.part_floats)
        layer = library.AttentionStruct(
            query=query.data_ptr(),
            keys=key_cache.data_ptr(),
            values=value_cache.data_ptr(),
            sinks=address(sinks, "sinks", h.query),
            out=out.data_ptr(),
            parts=parts.data_ptr(),
            q_stride=query.stride(0),
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            half=key_cache.dtype is torch.bfloat16,
            keep_count=-1,
        )
        self.library.attend(
            ctypes.byref(self.struct),
            ctypes.byref(plan.rows),
            ctypes.byref(layer),
            torch.get_num_threads(),
        )
        return out.to(dtype)
