"""Random cases of a layer's operations on GPUs, each compared with the reference: on a CPU, where
Triton's kernels run in its interpreter, and on a GPU.
"""

import importlib
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.formats.int4 import Int4Matrix
from fairlead_kernels.formats.quantize import Format, Quantized, quantize
from fairlead_kernels.gpu.triton_fixed import FixedAttention, FixedOperations
from fairlead_kernels.gpu.triton_operations import TritonOperations
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import Heads
from fairlead_kernels.interface.layer import Activation, LayerOperations, Norm
from fairlead_kernels.plain.torch_operations import TorchOperations

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
# What one rounding leaves of a value: a whole step, as Triton's interpreter cuts bfloat16 off.
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, FP8: 2**-3}
# Tiles so large that the interpreter, which takes milliseconds for each, has few of them.
INTERPRETED_TILE = 1 << 13


def interpreted() -> TritonOperations:
    """The Triton kernels in its interpreter; skips the test where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA build alone")
    kernels: Any = importlib.import_module("fairlead_kernels.gpu.triton_kernels")
    return TritonOperations(kernels, INTERPRETED_TILE, wide=True)


def _fixed_kernels() -> Any:
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA build alone")
    sum_exactly()
    return importlib.import_module("fairlead_kernels.gpu.triton_fixed_kernels")


def sum_exactly() -> None:
    """Let the interpreter sum a product of two tiles in float64. numpy's own sums of a row depend
    on the row's place, which a GPU's instructions do not; how sums are cut into tiles still shows.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")

    def create_dot(_self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        total = product.astype(np.float32) + d.data
        return interpreter.TensorHandle(total, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def fixed_operations() -> FixedOperations:
    """Those whose sums have one order, in the interpreter."""
    kernels: Any = importlib.import_module("fairlead_kernels.gpu.triton_kernels")
    return FixedOperations(kernels, _fixed_kernels(), INTERPRETED_TILE, wide=True)


def fixed_attention(heads: Heads) -> FixedAttention:
    return FixedAttention(heads, torch.device("cpu"), _fixed_kernels(), wide=True)


def operations(name: str) -> LayerOperations:
    """``torch`` or ``triton``, on a CPU."""
    return interpreted() if name == "triton" else TorchOperations()


sizes = st.integers(1, 40)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(DTYPES)
booleans = st.booleans()


def _random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape).to(dtype)


def _norm(width: int, dtype: torch.dtype, *, offset: float, biased: bool, centered: bool) -> Norm:
    bias = _random(dtype, width) if biased else None
    return Norm(_random(dtype, width), 1e-3, offset, bias, centered)


def _close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype is want.dtype
    rounding = ROUNDING[dtype]
    if got.dtype is FP8:
        got, want = got.float(), want.float()
    torch.testing.assert_close(
        got.cpu(), want, rtol=rounding, atol=max(4e-6, rounding / 8), equal_nan=True
    )


@dataclass(frozen=True)
class NormCase:
    tokens: int
    width: int
    dtype: torch.dtype
    offset: float
    biased: bool
    centered: bool
    added: bool
    seed: int

    def check(self, ours: LayerOperations, device: torch.device) -> None:
        torch.manual_seed(self.seed)
        norm = _norm(
            self.width,
            self.dtype,
            offset=self.offset,
            biased=self.biased,
            centered=self.centered,
        )
        # The residual of a layer is float32; what is normed without one may be, too.
        x = _random(self.dtype if self.added else torch.float32, self.tokens, self.width)
        residual = _random(torch.float32, self.tokens, self.width) if self.added else None
        want, total = reference.norm(x, norm, residual)
        kept = None if residual is None else residual.to(device)
        got, sums = ours.norm(x.to(device), _on(norm, device), kept)
        assert kept is None or sums.data_ptr() == kept.data_ptr(), "the sum takes more memory"
        assert torch.equal(sums.cpu(), total)
        spread = float(total.var(1, correction=0).min()) ** 0.5 if self.centered else 1.0
        if spread > 0.05:  # else rounding of the mean decides
            _close(got, want, self.dtype)


def _on(norm: Norm | None, device: torch.device) -> Any:
    if norm is None:
        return None
    bias = None if norm.bias is None else norm.bias.to(device)
    return Norm(norm.weight.to(device), norm.eps, norm.offset, bias, norm.centered)


@dataclass(frozen=True)
class RopeCase:
    tokens: int
    query: int
    kv: int
    half: int
    rotated: int
    normed: tuple[bool, bool]
    offset: float
    biased: bool
    centered: bool
    dtype: torch.dtype
    cached: torch.dtype | None  # None: that of the rest
    seed: int

    def check(self, ours: LayerOperations, device: torch.device) -> None:
        torch.manual_seed(self.seed)
        dim, dtype, cached = 2 * self.half, self.dtype, self.cached or self.dtype
        rotated = min(2 * self.rotated, dim)
        qkv = _random(dtype, self.tokens, (self.query + 2 * self.kv) * dim)
        qkv[0, -1] = torch.inf  # a value's, which must reach no other element
        qkv[0, -dim] *= 500  # too large for fp8, often
        cos, sin = (_random(torch.float32, self.tokens, rotated) for _ in range(2))
        slots = torch.randperm(self.tokens + 9)[: self.tokens]
        norms = [
            _norm(dim, dtype, offset=self.offset, biased=self.biased, centered=self.centered)
            if wanted
            else None
            for wanted in self.normed
        ]
        shape = (-(-(self.tokens + 9) // 4), 4, self.kv, dim)
        keys, values = (torch.full(shape, torch.nan).to(cached) for _ in range(2))
        our_keys, our_values = keys.to(device, copy=True), values.to(device, copy=True)
        want = reference.rope_write(qkv, cos, sin, slots, keys, values, *norms)
        got = ours.rope_write(
            qkv.to(device),
            cos.to(device),
            sin.to(device),
            slots.to(device),
            our_keys,
            our_values,
            *(_on(norm, device) for norm in norms),
        )
        rounded = max(dtype, cached, key=lambda t: ROUNDING[t])
        if self.centered and dim < 8:
            return  # too few elements: rounding of their mean decides
        _close(got.contiguous(), want, dtype)
        _close(our_keys, keys, rounded)
        _close(our_values, values, rounded)


@dataclass(frozen=True)
class ActivationCase:
    tokens: int
    width: int
    activation: Activation
    gated: bool
    spread: float
    dtype: torch.dtype
    seed: int

    def check(self, ours: LayerOperations, device: torch.device) -> None:
        torch.manual_seed(self.seed)
        x = torch.randn(self.tokens, self.width * (2 if self.gated else 1)) * self.spread
        x[0, 0] = torch.nan
        x = x.to(self.dtype)
        made = [
            part.gated(on, self.activation) if self.gated else part.activate(on, self.activation)
            for part, on in ((ours, x.to(device)), (reference, x))
        ]
        largest = float(x.nan_to_num().abs().max()) ** (2 if self.gated else 1)
        rounding = ROUNDING[self.dtype]
        torch.testing.assert_close(
            made[0].cpu(), made[1], rtol=rounding, atol=3e-7 * largest + 1e-7, equal_nan=True
        )


@dataclass(frozen=True)
class ProductCase:
    tokens: int
    rows: tuple[int, ...]
    columns: int
    biased: bool
    factor: float
    dtype: torch.dtype
    quantized: Format | None
    seed: int

    def check(self, ours: LayerOperations, device: torch.device) -> None:
        torch.manual_seed(self.seed)
        x = _random(self.dtype, self.tokens, self.columns)
        weights = [torch.randn(2 * n, self.columns)[::2] for n in self.rows]
        bias = _random(self.dtype, sum(self.rows)) if self.biased else None
        how: dict[str, Any] = {"dtype": self.dtype, "factor": self.factor}
        held: list[Tensor | Quantized] = list(weights)
        if self.quantized is not None:
            held = [quantize(weight, self.quantized) for weight in weights]
        packed = ours.pack([weight.to(device) for weight in held], **how)
        assert (packed.rows, packed.columns) == (sum(self.rows), self.columns)
        each = self.dtype.itemsize if self.quantized is None else 1
        size = sum(self.rows) * self.columns * each
        assert packed.data.untyped_storage().nbytes() == size, "weights are held once"
        want = reference.linear(x.double(), reference.pack(held, **how), bias)
        got = ours.linear(x.to(device), packed, None if bias is None else bias.to(device))
        assert got.dtype is self.dtype
        rounding = ROUNDING[self.dtype] * float(want.abs().max())
        torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=2 * rounding + 1e-5)


@dataclass(frozen=True)
class Int4Case:
    """4-bit weights: ``groups`` of ``group_size`` columns in a row; ``orders``: of each matrix the
    order of its columns, 0 for none.
    """

    tokens: int
    rows: tuple[int, ...]
    orders: tuple[int, ...]
    group_size: int
    groups: int
    biased: bool
    factor: float
    dtype: torch.dtype
    seed: int

    def check(self, ours: LayerOperations, device: torch.device) -> None:
        torch.manual_seed(self.seed)
        columns = self.group_size * self.groups
        x = _random(self.dtype, self.tokens, columns)
        order = torch.randperm(columns).int()
        orders = [None, order, order.flip(0)]
        held: list[Tensor | Quantized] = [
            int4_matrix(n, columns, self.groups, orders[order])
            for n, order in zip(self.rows, self.orders, strict=False)
        ]
        rows = sum(weight.shape[0] for weight in held)
        bias = _random(self.dtype, rows) if self.biased else None
        packed = ours.pack([weight.to(device) for weight in held], factor=self.factor)
        assert (packed.rows, packed.columns) == (rows, columns)
        used = self.orders[: len(held)]
        changes = [b for a, b in zip((None, *used), used, strict=False) if a != b]
        size = rows * columns // 2 + 5 * rows * self.groups + 4 * columns * sum(map(bool, changes))
        assert packed.nbytes == size, "weights are held once, in 4 bits"
        want = reference.linear(x.double(), reference.pack(held, factor=self.factor), bias)
        got = ours.linear(x.to(device), packed, None if bias is None else bias.to(device))
        assert got.dtype is self.dtype
        # Of one result that is nearly 0, or of few, rounded terms say more than the result does.
        weights = torch.cat([weight.dequantize() for weight in held]).double() * self.factor
        spread = (x.double().square() @ weights.square().T).sqrt()
        rounding = ROUNDING[self.dtype] * float(torch.maximum(want.abs(), spread).max())
        torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=2 * rounding + 1e-5)


def int4_matrix(rows: int, columns: int, groups: int, order: Tensor | None = None) -> Int4Matrix:
    """Random integers of 4 bits, with zero points up to 15 and scales that are normal numbers of
    float16, times 0.3 too: a smaller one, which it holds in few bits, moves a row beyond TOLERANCE.
    """
    bits = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.randn(rows, groups)
    scales = scales.abs().clamp(min=2**-10).copysign(scales).half().float()
    zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8)
    return Int4Matrix("int4", bits, scales, zeros, order)


norm_cases = st.builds(
    NormCase,
    tokens=sizes,
    width=st.one_of(sizes, st.integers(120, 140)),
    dtype=dtypes,
    offset=st.sampled_from([0.0, 1.0]),
    biased=booleans,
    centered=booleans,
    added=booleans,
    seed=seeds,
)
rope_cases = st.builds(
    RopeCase,
    tokens=sizes,
    query=st.integers(1, 9),
    kv=st.integers(1, 3),
    half=st.integers(1, 20),
    rotated=st.integers(0, 20),
    normed=st.tuples(booleans, booleans),
    offset=st.sampled_from([0.0, 1.0]),
    biased=booleans,
    centered=booleans,
    dtype=dtypes,
    cached=st.sampled_from([None, None, torch.bfloat16, FP8]),
    seed=seeds,
)
activation_cases = st.builds(
    ActivationCase,
    tokens=sizes,
    width=st.one_of(sizes, st.integers(120, 140)),
    activation=st.sampled_from(get_args(Activation)),
    gated=booleans,
    spread=st.sampled_from([0.1, 3.0, 40.0]),
    dtype=dtypes,
    seed=seeds,
)
product_cases = st.builds(
    ProductCase,
    tokens=sizes,
    rows=st.lists(sizes, min_size=1, max_size=3).map(tuple),
    columns=sizes,
    biased=booleans,
    factor=st.sampled_from([1.0, 1.0, 0.3]),
    dtype=dtypes,
    quantized=st.sampled_from([None, "int8", "fp8"]),
    seed=seeds,
)
# Groups of which there are several have the sizes that are published; a single one has any.
int4_cases = st.builds(
    lambda sizes, **more: Int4Case(group_size=sizes[0], groups=sizes[1], **more),
    tokens=sizes,
    rows=st.lists(sizes, min_size=1, max_size=3).map(tuple),
    orders=st.tuples(*[st.integers(0, 2)] * 3),
    sizes=st.one_of(
        st.tuples(st.sampled_from([32, 64, 128]), st.integers(1, 4)),
        st.tuples(st.integers(1, 150).map(lambda x: 2 * x), st.just(1)),
    ),
    biased=booleans,
    factor=st.sampled_from([1.0, 1.0, 0.3]),
    dtype=dtypes,
    seed=seeds,
)
