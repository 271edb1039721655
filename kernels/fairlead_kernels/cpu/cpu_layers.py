"""All decoder layers of a step in one call of the C++ library.

Owns the description of the layers that the C function reads, made once, and the buffers of a step.
What a layer computes is in ``layer.Layer``; csrc/layers.cpp runs it.
"""

import ctypes
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fairlead_kernels.cpu import library
from fairlead_kernels.cpu.cpu_arguments import (
    ACTIVATIONS,
    address,
    caches_struct,
    dense,
    norm_struct,
    stored_as,
    weight_struct,
)
from fairlead_kernels.cpu.cpu_attention import CpuPlan, TaskList, sizes_of
from fairlead_kernels.cpu.slabs import SLAB
from fairlead_kernels.interface.attention import Heads, LayerSpec
from fairlead_kernels.interface.layer import Layer, Packed


class LayerChain:
    """Decoder layers that run one after the other. Serves one step at a time.

    Keeps the layers' tensors alive. All layers have the same sizes, and values are as wide as keys.
    Raises ValueError where a tensor is not float32 on the CPU or a size does not fit.
    """

    def __init__(
        self,
        functions: library.Library,
        heads: Heads,
        layers: Sequence[Layer],
        specs: Sequence[LayerSpec],
    ) -> None:
        self.layers = tuple(layers)
        self.specs = tuple(specs)
        self._heads = heads
        self._library = functions
        self._width = self.layers[0].qkv.columns
        self._inner = self.layers[0].down.columns
        self._stored = {stored_as(x) for layer in self.layers for x in layer.matrices}
        qkv, attended = (heads.query + 2 * heads.kv) * heads.dim, heads.query * heads.dim
        gate_up = 2 * self._inner if self.layers[0].gated else 0
        # The digits of attention's results take the place of queries, keys and values, those of
        # the gated ones that of gate_up.
        self._qkv = max(qkv, self._digits(attended))
        self._gate_up = max(gate_up, self._digits(self._inner))
        # Attention's results are no longer needed when the MLP's are made: they share memory.
        shared = max(self._qkv + attended, self._gate_up + self._inner)
        # Floats of a token: what norms return, its digits, what attention and the MLP share.
        self._floats = (self._width, self._digits(self._width), shared)
        self._sinks = [
            None if spec.sinks is None else spec.sinks.float().contiguous() for spec in specs
        ]
        self._structs = (library.LayerStruct * len(layers))(
            *map(self._struct, self.layers, self.specs, self._sinks)
        )
        self._caches: list[tuple[Tensor, Tensor]] = []
        self._windows: dict[int, int | None] = {}  # by layer group, of those that have some here
        self._places: list[int] = []  # of each layer's cosines among the step's

    def _struct(self, layer: Layer, spec: LayerSpec, sinks: Tensor | None) -> library.LayerStruct:
        h, width, inner = self._heads, self._width, self._inner
        qkv, attended = (h.query + 2 * h.kv) * h.dim, h.query * h.dim
        gate_up = 2 * inner if self.layers[0].gated else inner
        if layer.parallel and layer.after_attention is not None:
            raise ValueError("after_attention: a parallel layer has none")
        return library.LayerStruct(
            input_norm=norm_struct(layer.input_norm, "input_norm", width),
            q_norm=norm_struct(layer.q_norm, "q_norm", h.dim),
            k_norm=norm_struct(layer.k_norm, "k_norm", h.dim),
            after_attention=norm_struct(layer.after_attention, "after_attention", width),
            mlp_norm=norm_struct(layer.mlp_norm, "mlp_norm", width),
            after_mlp=norm_struct(layer.after_mlp, "after_mlp", width),
            qkv=_weight(layer.qkv, layer.qkv_bias, "qkv", qkv, width),
            out=_weight(layer.out, layer.out_bias, "out", width, attended),
            gate_up=_weight(layer.gate_up, layer.gate_up_bias, "gate_up", gate_up, width),
            down=_weight(layer.down, layer.down_bias, "down", width, inner),
            sinks=address(sinks, "sinks", h.query),
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            activation=ACTIVATIONS[layer.activation],
            parallel=layer.parallel,
        )

    def bind(self, caches: Sequence[tuple[Tensor, Tensor]], groups: Sequence[int]) -> None:
        """Give each layer these keys and values [blocks, block_size, kv heads, dim] and this layer
        group, for all steps from now on. Their slots may be any distance apart. Keeps the tensors
        alive.
        """
        self._caches = []  # until all of them are checked
        self._windows = {}
        for struct, spec, (keys, values), group in zip(
            self._structs, self.specs, caches, groups, strict=True
        ):
            self._check(keys, values)
            struct.caches = caches_struct(keys, values)
            if self._windows.setdefault(group, spec.window) != spec.window:
                raise ValueError(f"window: the layers of group {group} differ in theirs")
            struct.group = list(self._windows).index(group)
        self._caches = list(caches)

    def run(
        self,
        x: Tensor,
        plans: Sequence[CpuPlan],
        slots: Sequence[Tensor],
        ropes: Sequence[tuple[Tensor, Tensor]],
        slab: int = SLAB,
        keep: Tensor | None = None,
        layers: int | None = None,
    ) -> Tensor:
        """Embeddings [T, width] → what the last layer returns [S, width], of all tokens or of those
        that ``keep`` lists, int64 [S], ascending. Changes ``x`` if it is dense. After ``bind``.

        Per layer group: the plan of attention, and the slots int64 [T] of the step's tokens. Per
        layer its ``ropes``, cosines and sines [T, R] as in ``LayerOperations.rope_write``. A layer
        takes at most ``slab`` tokens at a time, or those of one task of attention. No
        result depends on it. For tokens that are not kept the last layer computes little more than
        the keys and values that it writes. ``layers``: only the first so many run; all of them have
        the same buffers.
        """
        if not self._caches:
            raise RuntimeError("run: bind the layers' caches first")
        count = x.shape[0]
        x = dense(x, "x", self._width)
        for group, window in self._windows.items():
            if window != plans[group].ragged.window:
                raise ValueError(
                    f"window: the layer has {window}, its plan {plans[group].ragged.window}"
                )
        angles = self._rotate(ropes)
        tasks = [plans[group].cut(sizes_of(self._heads)) for group in self._windows]
        slots = [slots[group].contiguous() for group in self._windows]
        if any(tensor.shape[0] != count for tensor in (*(cos for cos, _ in angles), *slots)):
            raise ValueError(f"ropes and slots: not for the {count} tokens of x")
        rope_structs = (library.RopeStruct * len(angles))(
            *(library.RopeStruct(c.data_ptr(), s.data_ptr(), c.shape[1]) for c, s in angles)
        )
        group_structs = (library.GroupStruct * len(tasks))(
            *(
                library.GroupStruct(part.rows, slot.data_ptr())
                for part, slot in zip(tasks, slots, strict=True)
            )
        )
        boundaries = slab_ends(self._library, tasks, count, slab)
        largest = max(end - begin for begin, end in itertools.pairwise([0, *boundaries]))
        normed, normed_digits, shared = (torch.empty(largest * n) for n in self._floats)
        parts = torch.empty(max(part.part_floats for part in tasks))
        begin = shared.data_ptr()
        end_numbers = (library.Int * len(boundaries))(*boundaries)
        kept_tokens = None if keep is None else _ascending(keep, count)
        step = library.StepStruct(
            count,
            self._width,
            tasks[0].heads,
            torch.get_num_threads(),
            ctypes.addressof(rope_structs),
            ctypes.addressof(group_structs),
            x.data_ptr(),
            normed.data_ptr(),
            begin,
            begin + 4 * largest * self._qkv,
            begin,
            begin + 4 * largest * self._gate_up,
            parts.data_ptr(),
            normed_digits.data_ptr(),
            begin,
            ctypes.addressof(end_numbers),
            len(boundaries),
            None if kept_tokens is None else kept_tokens.data_ptr(),
            -1 if kept_tokens is None else len(kept_tokens),
        )
        self._library.layers(self._structs, layers or len(self.layers), ctypes.byref(step))
        return x if kept_tokens is None else x[: len(kept_tokens)]

    def _digits(self, columns: int) -> int:
        """Floats that a row's digits take, if a weight is multiplied by them."""
        sizes: list[int] = [self._library.digits_bytes(columns, x, False) for x in self._stored]
        return max(sizes) // 4

    def _rotate(self, ropes: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """The different cosines and sines, each layer pointing to its own."""
        different = {id(cos): (cos, sin) for cos, sin in ropes}
        place = {key: index for index, key in enumerate(different)}
        places = [place[id(cos)] for cos, _ in ropes]
        if places != self._places:
            for struct, index in zip(self._structs, places, strict=True):
                struct.rope = index
            self._places = places
        return [
            (dense(cos, "cos", cos.shape[1]), dense(sin, "sin", sin.shape[1]))
            for cos, sin in different.values()
        ]

    def _check(self, keys: Tensor, values: Tensor) -> None:
        h = self._heads
        if keys.shape[2:] != (h.kv, h.dim) or values.shape[2:] != (h.kv, h.dim):
            raise ValueError(f"keys: heads of {tuple(keys.shape[2:])}, not {(h.kv, h.dim)}")


def slab_ends(
    functions: library.Library, groups: Sequence[TaskList], count: int, slab: int
) -> list[int]:
    """The ends of a step's slabs, of ``count`` tokens, which no layer group's tasks cross: those
    for heads of one size.
    """
    if count <= slab:
        return [count]
    boundaries = (library.Int * count)()
    rows = (ctypes.POINTER(library.RowsStruct) * len(groups))(
        *(ctypes.pointer(tasks.rows) for tasks in groups)
    )
    heads = ctypes.byref(groups[0].heads)
    slab_count = functions.slabs(heads, rows, len(groups), slab, boundaries)
    return boundaries[:slab_count]


def _ascending(keep: Tensor, count: int) -> Tensor:
    """``keep`` as C++ reads it; ValueError where it does not list tokens of ``count`` in order."""
    tokens = keep.contiguous()
    inside = not len(tokens) or bool(tokens[0] >= 0 and tokens[-1] < count)
    if tokens.dtype is not torch.int64 or not inside or bool((tokens.diff() <= 0).any()):
        raise ValueError(f"keep: not places among {count} tokens, int64 and ascending")
    return tokens


def _weight(
    weight: Packed, bias: Tensor | None, name: str, rows: int, columns: int
) -> library.WeightStruct:
    if (weight.rows, weight.columns) != (rows, columns):
        raise ValueError(f"{name}: {weight.rows} x {weight.columns}, not {rows} x {columns}")
    return weight_struct(weight, bias, f"{name}_bias")
