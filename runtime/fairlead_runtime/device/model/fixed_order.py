"""Torch's part of a model, computed so that no token's bits depend on what else is in a step.

Owns which of torch's operations on CPUs are so by themselves, and what takes the place of others,
for ``deterministic`` where a model's own code runs between products and operations in C++
(docs/design/0014-determinism.md). An operation that is neither is refused by its name.

    moved, chosen, or rounded once     as it is
    a function of single elements      in whole vectors: the end of a tensor that fills none has
                                       another code, and other threads end elsewhere
    a sum over the last dimension      in contiguous rows, each of which torch sums by itself
    a product with a weight            one row after the other
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Elements of a piece that one thread computes in whole vectors: torch cuts no smaller work.
PIECE = 2048
# Elements from which torch cuts the sum of a single row over its threads.
CUT_SUM = 32768

_ATEN = torch.ops.aten
# Of single elements, of which IEEE 754 says the bits.
_EXACT = frozenset(
    {
        *("abs", "add", "ceil", "clamp", "clamp_max", "clamp_min", "copysign", "div", "floor"),
        *("maximum", "minimum", "mul", "neg", "reciprocal", "relu", "round", "rsub", "sign"),
        *("square", "sub", "threshold", "trunc", "where", "masked_fill", "floor_divide"),
        *("eq", "ge", "gt", "le", "lt", "ne", "isfinite", "isinf", "isnan", "bitwise_and"),
        *("bitwise_not", "bitwise_or", "logical_and", "logical_not", "logical_or"),
    }
)
_MOVES = frozenset(
    {
        *("_to_copy", "_unsafe_view", "arange", "cat", "clone", "constant_pad_nd", "copy", "copy_"),
        *("embedding", "empty", "empty_like", "empty_strided", "eye", "fill_", "flip", "full"),
        *("full_like", "gather", "index", "index_copy_", "index_put_"),
        *("index_select", "lift_fresh", "new_empty", "new_empty_strided", "new_full", "new_ones"),
        *("new_zeros", "ones", "ones_like", "repeat", "roll", "scalar_tensor"),
        *("slice_scatter", "stack", "tril", "triu", "zero_", "zeros", "zeros_like"),
        *("_local_scalar_dense", "_reshape_alias", "all", "any", "equal", "is_nonzero", "item"),
        *("argmax", "max", "amax", "min", "amin", "set_", "resize_"),
    }
)
_SUMS = frozenset({"mean", "sum", "_softmax"})


class OtherOrderError(RuntimeError):
    """An operation of torch whose sums have an order that depends on the number of rows."""


class FixedOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """What torch computes in the ``with`` block has the same bits of each token, whatever others
    there are. ``weights``: those that its products may be with. Raises OtherOrderError for an
    operation of which that is not known.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # see above
        self._weights = frozenset(x.untyped_storage().data_ptr() for x in weights)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        name = func.overloadpacket.__name__
        base = name.removesuffix("_") if name not in _MOVES else name
        if func.namespace != "aten":
            raise OtherOrderError(f"{func.namespace}::{name}")
        if name == "index_put_" and (named.get("accumulate") or args[3:] == (True,)):
            raise OtherOrderError("aten::index_put_ that adds up")
        if func.is_view or base in _MOVES:
            return func(*args, **named)
        exact = base in _EXACT or (name == "pow" and isinstance(args[1], int) and args[1] == 2)
        if exact and named.get("alpha", 1) == 1:
            return func(*args, **named)
        if base in ("linear", "matmul", "mm", "bmm"):
            return self._product(base, *args, **named)
        if base in _SUMS:
            return _sum(func, name, args, named)
        if base == "native_layer_norm":
            return func(args[0].contiguous(), *args[1:], **named)
        bits = name.startswith("__")  # of integers and truths: and, or, shifts
        if torch.Tag.pointwise in func.tags and not bits:
            return _in_vectors(func, name, args, named)
        if _without_floats(args, named):
            return func(*args, **named)
        decomposed = self._decomposed(func, args, named)
        if decomposed is NotImplemented:
            raise OtherOrderError(f"{func.namespace}::{name}")
        return decomposed

    def _decomposed(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What a composed operation gives, of which each part comes here."""
        with self:
            return func.decompose(*args, **named)

    def _product(self, name: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """A product of one term, or of rows and a weight."""
        if name == "linear":
            return self._by_rows(a, b, bias)
        if a.dim() > 1 and b.dim() > 1 and a.shape[-1] == 1:
            return a * b  # [..., M, 1] and [..., 1, N]
        if self._is_weight(b) and b.dim() == 2:
            return self._by_rows(a, b.T, None)
        if self._is_weight(a) and a.dim() == 2 and b.dim() > 1:
            return self._by_rows(b.mT, a, None).mT
        raise OtherOrderError(f"aten::{name} of two tensors that both depend on the step")

    def _by_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """X [..., K] times weight [N, K], by as many products of one row, which lies at the
        beginning of memory of its own.
        """
        if not self._is_weight(weight):
            raise OtherOrderError("aten::linear with a weight that depends on the step")
        rows = x.reshape(-1, x.shape[-1])
        outs = [torch.nn.functional.linear(row.clone()[None], weight, bias) for row in rows]
        out = torch.cat(outs) if outs else x.new_empty(0, weight.shape[0])
        return out.view(*x.shape[:-1], weight.shape[0])

    def _is_weight(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._weights


def _without_floats(args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Whether no tensor of floats goes in: integers and truths have no rounding."""
    tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
    return bool(tensors) and not any(x.is_floating_point() or x.is_complex() for x in tensors)


def _sum(func: Any, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """A sum over the last dimension of a tensor."""
    x, *rest = args
    dims = rest[0] if rest else named.get("dim")
    over = [dims] if isinstance(dims, int) else dims
    if not over or [d % x.dim() for d in over] != [x.dim() - 1]:
        raise OtherOrderError(f"aten::{name} over another dimension than the last")
    if x.shape[-1] >= CUT_SUM and x.numel() == x.shape[-1]:
        raise OtherOrderError(f"aten::{name} of {x.shape[-1]} elements")
    out: Tensor = func(x.contiguous(), *rest, **named)
    return out


def _in_vectors(func: Any, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """A function of single elements, a piece of whole vectors after the other."""
    tensors_at = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
    # A tensor without dimensions does not widen the type of others: it stays one.
    places = [i for i in tensors_at if args[i].dim()] or tensors_at
    if any(isinstance(x, Tensor) for x in named.values()):
        raise OtherOrderError(f"aten::{name} of several tensors by name")
    tensors = (args[i] for i in places)
    spread = torch.broadcast_tensors(*tensors)  # type: ignore[no-untyped-call]  # torch's is none
    shape, flat = spread[0].shape, [x.reshape(-1) for x in spread]
    count = flat[0].numel()
    if name.endswith("_"):
        functional = getattr(_ATEN, name[:-1])
        args[0].copy_(_in_vectors(functional, name[:-1], args, named))
        changed: Tensor = args[0]
        return changed
    out: Tensor | None = None
    for begin in range(0, count, PIECE):
        pieces = [_piece(x, begin) for x in flat]
        filled = [*args]
        for i, piece in zip(places, pieces, strict=True):
            filled[i] = piece
        computed = func(*filled, **named)
        if out is None:
            out = computed.new_empty(count)
        out[begin : begin + PIECE] = computed[: count - begin]
    if out is None:
        empty: Tensor = func(*args, **named)
        return empty
    return out.view(shape)


def _piece(x: Tensor, begin: int) -> Tensor:
    """PIECE elements in memory of their own, those behind the end of x [N] zeros."""
    part = x[begin : begin + PIECE]
    if len(part) == PIECE:
        return part.clone()
    piece = x.new_zeros(PIECE)
    piece[: len(part)] = part
    return piece
