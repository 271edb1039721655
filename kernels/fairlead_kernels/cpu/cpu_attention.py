"""Paged attention in C++ on CPUs, over float32 and bfloat16 caches.

Owns the hand-over of a step's rows and of one layer's tensors to the C functions; csrc/attention.h
says how they work.
"""

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairlead_kernels.cpu import library
from fairlead_kernels.cpu.cpu_arguments import address, caches_struct
from fairlead_kernels.interface.attention import Heads, LayerSpec, RaggedRows

TASK_NUMBERS = 7  # int32 of a task


# Of the heads of a layer: query heads, key-value heads, widths of a key and of a value.
Sizes = tuple[int, int, int, int]


def sizes_of(heads: Heads) -> Sizes:
    return heads.query, heads.kv, heads.dim, heads.value_dim


@dataclass(frozen=True, slots=True, eq=False)
class TaskList:
    """A step's rows as the C functions take them, cut into tasks for heads of one size, the tensor
    that these point into, and the floats of memory that the parts of split rows need.
    """

    heads: library.HeadsStruct
    rows: library.RowsStruct
    tasks: Tensor
    part_floats: int


class CpuPlan:
    """A step's rows in the layers of one group, cut for heads of these sizes, and of others when
    the first layer with such heads asks for it.
    """

    def __init__(
        self, ragged: RaggedRows, functions: library.Library, sizes: Sizes, *, fixed: bool
    ) -> None:
        starts, lens, tables = tensors = ragged.query_starts, ragged.kv_lens, ragged.tables
        if not all(t.is_contiguous() for t in tensors):
            starts, lens, tables = (t.contiguous() for t in tensors)
            ragged = replace(ragged, query_starts=starts, kv_lens=lens, tables=tables)
        self.ragged = ragged
        self._library = functions
        self._fixed = fixed
        self._cut = {sizes: self._tasks(library.HeadsStruct(*sizes))}

    def cut(self, sizes: Sizes) -> TaskList:
        """The tasks for heads of these sizes."""
        if sizes not in self._cut:
            self._cut[sizes] = self._tasks(library.HeadsStruct(*sizes))
        return self._cut[sizes]

    def _tasks(self, heads: library.HeadsStruct) -> TaskList:
        ragged = self.ragged
        rows = library.RowsStruct(
            starts=ragged.query_starts.data_ptr(),
            lens=ragged.kv_lens.data_ptr(),
            tables=ragged.tables.data_ptr(),
            count=ragged.kv_lens.shape[0],
            table_width=ragged.tables.shape[1],
            block_size=ragged.block_size,
            window=ragged.window or 0,
            fixed=self._fixed,
        )
        arguments = ctypes.byref(heads), ctypes.byref(rows), torch.get_num_threads()
        self._library.attention_plan(*arguments, None)
        tasks = torch.empty(rows.task_count + rows.merge_count, TASK_NUMBERS, dtype=torch.int32)
        parts = self._library.attention_plan(*arguments, tasks.data_ptr())
        rows.tasks = tasks.data_ptr()
        part: int = self._library.attention_part(ctypes.byref(heads))
        return TaskList(heads, rows, tasks, parts * part)


class CpuAttention:
    """``AttentionBackend`` in C++. ``heads``: of the model's widest layer; ``run`` takes each
    layer's from its tensors, so one object serves layers of several sizes. ``fixed``: each query's
    sums have one order, whatever else is in the step and however its row is cut into steps.
    """

    def __init__(self, heads: Heads, functions: library.Library, *, fixed: bool = False) -> None:
        self.heads = heads
        self.library = functions
        self.fixed = fixed
        self.name = functions.instruction_set

    def plan(self, ragged: RaggedRows) -> CpuPlan:
        return CpuPlan(ragged, self.library, sizes_of(self.heads), fixed=self.fixed)

    def run(
        self,
        plan: CpuPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        spec: LayerSpec,
    ) -> Tensor:
        spec.check_window(plan.ragged.window)
        count, query_heads, dim = query.shape
        kv, value_dim = key_cache.shape[2], value_cache.shape[3]
        caches = caches_struct(key_cache, value_cache)
        tasks = plan.cut((query_heads, kv, dim, value_dim))
        dtype, query = query.dtype, query.float()
        if query.stride()[1:] != (dim, 1):
            query = query.contiguous()
        sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
        out = torch.empty(count, query_heads, value_dim)
        parts = torch.empty(tasks.part_floats)
        layer = library.AttentionStruct(
            query=query.data_ptr(),
            caches=caches,
            sinks=address(sinks, "sinks", query_heads),
            out=out.data_ptr(),
            parts=parts.data_ptr(),
            q_stride=query.stride(0),
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            keep_count=-1,
        )
        self.library.attend(
            ctypes.byref(tasks.heads),
            ctypes.byref(tasks.rows),
            ctypes.byref(layer),
            torch.get_num_threads(),
        )
        return out.to(dtype)
