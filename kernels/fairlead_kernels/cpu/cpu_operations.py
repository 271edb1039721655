"""A decoder layer's operations in C++ on CPUs, in float32.

Owns the hand-over of tensors to the C functions and its checks. The functions, with the sources of
their algorithms, are in ``csrc``; what they compute is in ``layer`` and ``reference``.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from fairlead_kernels.cpu import library
from fairlead_kernels.cpu.cpu_arguments import (
    ACTIVATIONS,
    TYPES,
    caches_struct,
    dense,
    digits_bytes,
    norm_struct,
    weight_struct,
)
from fairlead_kernels.cpu.cpu_attention import CpuAttention
from fairlead_kernels.cpu.cpu_layers import LayerChain
from fairlead_kernels.cpu.cpu_products import BiasedWeight, CpuProducts
from fairlead_kernels.formats.quantize import Quantized, as_quantized
from fairlead_kernels.formats.row_chunks import row_chunks
from fairlead_kernels.interface.attention import Heads, LayerSpec
from fairlead_kernels.interface.layer import Activation, Layer, Norm, Packed


def load(instruction_set: str | None = None) -> "CpuOperations":
    """The operations on an instruction set of this machine; None: on the fastest.

    Raises NotAvailableError, a RuntimeError, where the library is not built or the machine lacks
    the instruction set.
    """
    return CpuOperations(library.load(instruction_set))


# By the type of the packed weight.
_PACK = {torch.float32: "pack", torch.bfloat16: "pack_bfloat16", torch.int8: "pack_int8"}
# A sum of so many products of a digit, -128 to 127, and a weight as small as -128 fits in 32 bits.
MOST_COLUMNS = (1 << 17) - 1
# Half a step of x in two digits, in units of its row's largest element.
DIGITS_ROUNDING = 0.5 / (127 * 256 + 127)


class CpuOperations:
    """``LayerOperations`` in C++. All tensors are float32 on the CPU, caches also bfloat16, packed
    weights bfloat16 or int8; what products and norms alone take and give may be bfloat16.

    Runs on torch's threads, as many as ``torch.get_num_threads()`` says. Stateless: any thread may
    call any method.
    """

    in_float32 = fixed_order = True
    rounds = False

    def __init__(self, functions: library.Library) -> None:
        self.library = functions
        self.name = functions.instruction_set
        self.int8_rounding = DIGITS_ROUNDING if functions.vnni else 0.0
        self._panel: int = functions.panel_width()
        self._candidate_floats: int = functions.likeliest_part()

    @property
    def model_operations(self) -> Self:
        return self

    def pack(
        self,
        weights: Sequence[Tensor | Quantized],
        *,
        dtype: torch.dtype = torch.float32,
        factor: float = 1.0,
        releases: bool = False,
        pairs: bool = False,
    ) -> Packed:
        """``LayerOperations.pack``. Rows are padded with zeros to a multiple of 8, 16 or 32.
        ``pairs``: in bfloat16, where the processor multiplies that, for an x that is bfloat16, too:
        another is rounded to it.

        ``releases``: the weights are given back (``give_back``) a chunk of their rows after the
        other as they are packed, so that little is held twice; ``unpack`` has them still.
        """
        quantized = as_quantized(weights)
        matrices = [x.numbers if isinstance(x, Quantized) else x for x in weights]
        source = torch.float32
        if quantized is not None:
            dtype = source = matrices[0].dtype
        columns = matrices[0].shape[1]
        counts = [matrix.shape[0] for matrix in matrices]
        rows = sum(counts)
        for matrix in matrices:
            if dtype not in _PACK or matrix.dtype is not source or matrix.shape[1:] != (columns,):
                raise ValueError(
                    f"weights: {tuple(matrix.shape)} of {matrix.dtype}; matrices of {columns} "
                    "columns in float32 or int8 are needed"
                )
        panels, pack = -(-rows // self._panel), _PACK[dtype]
        for_vnni = quantized is not None and self.library.vnni and columns <= MOST_COLUMNS
        shape = [panels, columns, self._panel]
        if for_vnni:
            outputs = [2, self._panel // 2] if self.library.amx else [self._panel]
            shape, pack = [panels, -(-columns // 4), *outputs, 4], "pack_int8_fours"
        if pairs and dtype is torch.bfloat16 and self.library.bfloat16:
            shape, pack = [panels, -(-columns // 2), self._panel, 2], "pack_bfloat16_pairs"
        data = torch.empty(shape, dtype=dtype)
        pack_rows = getattr(self.library, pack)
        self.library.use_large_pages(data.data_ptr(), data.nbytes)
        if rows % self._panel:
            data[-1].zero_()
        first = 0
        for matrix in matrices:
            for chunk in row_chunks(matrix.shape[0], columns, self._panel):
                chunk_rows = matrix[chunk]
                dense_rows = chunk_rows if chunk_rows.stride(1) == 1 else chunk_rows.contiguous()
                pack_rows(
                    data.data_ptr(),
                    dense_rows.data_ptr(),
                    chunk_rows.shape[0],
                    columns,
                    dense_rows.stride(0),
                    first,
                    torch.get_num_threads(),
                )
                first += chunk_rows.shape[0]
                if releases:
                    self.give_back(chunk_rows)
        scales = None
        if quantized is not None:
            scales = torch.cat([x.scales for x in quantized]).mul_(factor)
        elif factor != 1:
            scales = torch.full((rows,), factor)
        return Packed(data, rows, columns, scales, rounding=self.int8_rounding if for_vnni else 0.0)

    def unpack(self, weight: Packed, first: int, count: int) -> Tensor:
        """Rows ``first`` … of what was packed, without scales and factor: float32 [count,
        columns], the same values.
        """
        return self.embed(torch.arange(first, first + count), replace(weight, scales=None))

    def give_back(self, tensor: Tensor) -> None:
        """Let the system have the memory of a tensor that nobody reads any more, where it is in
        one piece, while the tensor itself, or what else is in its storage, has to stay. Its
        elements are undefined afterwards: zeros, or what the file has that they are mapped from.
        """
        if tensor.is_contiguous():
            self.library.give_back(tensor.data_ptr(), tensor.nbytes)

    def linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        """``LayerOperations.linear``, of x [..., columns], in bfloat16, too."""
        return CpuProducts(self.library, [BiasedWeight(weight, bias)])(x)[0]

    def _digits(self, x: Tensor, weight: Packed) -> Tensor:
        """Memory for the digits of x, if the weight is multiplied by them."""
        return torch.empty(x.shape[0], digits_bytes(self.library, weight), dtype=torch.int8)

    def likeliest(
        self, x: Tensor, weight: Packed, bias: Tensor | None = None, norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        """The largest of each row of ``linear``, float32 [T], NaN where one is, and its column,
        int64 [T], the first of equal ones: ``max`` of a product that is not stored. With ``norm``
        of the norm of x, which is written into x, if that is dense.
        """
        x = dense(x, "x", weight.columns)
        count, threads = x.shape[0], torch.get_num_threads()
        values, columns = torch.empty(count), torch.empty(count, dtype=torch.int64)
        candidates = torch.empty(threads * count * self._candidate_floats)
        digits = self._digits(x, weight)
        self.library.likeliest(
            x.data_ptr(),
            count,
            None if norm is None else ctypes.byref(norm_struct(norm, "norm", weight.columns)),
            digits.data_ptr(),
            ctypes.byref(weight_struct(weight, bias, "bias")),
            values.data_ptr(),
            columns.data_ptr(),
            candidates.data_ptr(),
            threads,
        )
        return values, columns

    def embed(
        self,
        ids: Tensor,
        weight: Packed,
        factor: float = 1.0,
        positions: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Rows ``ids`` int64 [T] of a packed weight, times ``factor``: float32 [T, columns].

        ``positions``, a table float32 [N, columns] and int64 [T], are its rows to add. Raises
        IndexError for a row that is not there.
        """
        ids, count = ids.contiguous(), ids.shape[0]
        out = torch.empty(count, weight.columns)
        table, at = positions or (None, ids)
        table = None if table is None else dense(table, "positions", weight.columns)
        at = at.contiguous()
        in_range = self.library.embed(
            ids.data_ptr(),
            count,
            ctypes.byref(weight_struct(weight, None, "bias")),
            factor,
            None if table is None else table.data_ptr(),
            at.data_ptr(),
            0 if table is None else table.shape[0],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if not in_range:
            raise IndexError(f"ids: not all below {weight.rows}, or a position beyond the table")
        return out

    def angles(
        self, positions: Tensor, frequencies: Tensor, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines float32 [T, R] for ``rope_write``, of positions int64 [T] times
        frequencies float32 [R / 2], and times ``scale``.
        """
        positions, frequencies = positions.contiguous(), frequencies.contiguous()
        count, half = positions.shape[0], frequencies.shape[0]
        cos, sin = torch.empty(count, 2 * half), torch.empty(count, 2 * half)
        self.library.angles(
            positions.data_ptr(),
            count,
            frequencies.data_ptr(),
            half,
            scale,
            cos.data_ptr(),
            sin.data_ptr(),
            torch.get_num_threads(),
        )
        return cos, sin

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``LayerOperations.norm``, of bfloat16 by vectors in that, too. The sum is written into
        ``residual``, if it is dense.
        """
        width = x.shape[1]
        x = dense(x, "x", width, TYPES)
        total = x if residual is None else dense(residual, "residual", width, (x.dtype,))
        out = torch.empty_like(x)
        self.library.norm(
            x.data_ptr(),
            None if residual is None else total.data_ptr(),
            ctypes.byref(norm_struct(norm, "norm", width, x.dtype)),
            x.shape[0],
            width,
            total.data_ptr(),
            out.data_ptr(),
            x.dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
        return out, total

    def rope_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> Tensor:
        """``LayerOperations.rope_write``. Changes ``qkv``; the result is a view of it."""
        kv, dim = key_cache.shape[2:]
        query = qkv.shape[1] // dim - 2 * kv
        caches = caches_struct(key_cache, value_cache)
        if value_cache.shape[3] != dim:
            raise ValueError(f"value_cache: heads of {value_cache.shape[3]}, keys have {dim}")
        qkv = dense(qkv, "qkv", (query + 2 * kv) * dim)
        rotated = cos.shape[1]
        cos, sin = dense(cos, "cos", rotated), dense(sin, "sin", rotated)
        if rotated % 2 or rotated > dim or not cos.shape[0] == sin.shape[0] == qkv.shape[0]:
            raise ValueError(
                f"cos: {tuple(cos.shape)} for {qkv.shape[0]} tokens and heads of {dim}"
            )
        self.library.rope_write(
            qkv.data_ptr(),
            qkv.shape[0],
            query,
            kv,
            dim,
            cos.data_ptr(),
            sin.data_ptr(),
            rotated,
            ctypes.byref(norm_struct(q_norm, "q_norm", dim)),
            ctypes.byref(norm_struct(k_norm, "k_norm", dim)),
            slots.contiguous().data_ptr(),
            ctypes.byref(caches),
            torch.get_num_threads(),
        )
        return qkv.view(qkv.shape[0], -1, dim)[:, :query]

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """``LayerOperations.gated``."""
        width = gate_up.shape[1] // 2
        gate_up = dense(gate_up, "gate_up", 2 * width)
        out = torch.empty(gate_up.shape[0], width)
        self.library.gated(
            gate_up.data_ptr(),
            gate_up.shape[0],
            width,
            ACTIVATIONS[activation],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """``LayerOperations.activate``."""
        x = dense(x, "x", x.shape[1])
        out = torch.empty_like(x)
        self.library.activate(
            x.data_ptr(),
            x.shape[0],
            x.shape[1],
            ACTIVATIONS[activation],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def attention(self, heads: Heads, *, fixed: bool = False) -> CpuAttention:
        """The attention backend of the same library."""
        return CpuAttention(heads, self.library, fixed=fixed)

    def chain(
        self, heads: Heads, layers: Sequence[Layer], specs: Sequence[LayerSpec]
    ) -> LayerChain:
        """Layers that run in one call."""
        return LayerChain(self.library, heads, layers, specs)
