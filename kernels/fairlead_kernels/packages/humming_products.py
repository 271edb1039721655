"""Products with 4-bit weights by the package humming-kernels, on NVIDIA GPUs, in 16-bit types.

Owns the layout in which the package takes a matrix, which kernels it compiles for one, and the
proof of each. A matrix that it does not take stays as it is (``torch_int4``), for a kernel of
ours.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fairlead_kernels.formats.int4 import paired, widened
from fairlead_kernels.interface.layer import Int4Groups, Packed
from fairlead_kernels.interface.not_available import (
    FaultError,
    NotAvailableError,
    brief,
    fall_back,
    name_of,
)
from fairlead_kernels.packages.humming_memory import UNPACKAGED, takes
from fairlead_kernels.packages.humming_package import HummingPackage, compilers
from fairlead_kernels.proofs.comparison import prove

log = logging.getLogger(__name__)

# A kernel is compiled for steps of at most so many tokens, one for each, and one for larger steps,
# tuned for LARGE.
BOUNDS, LARGE, UNBOUNDED = (16, 64, 256), 2048, 1 << 30
# Its kernels whose programs have whole sums, in float32. By default up to ten programs share one,
# and add their sums in 16 bits, in any order: two equal steps would differ.
WHOLE_SUMS = json.dumps({"use_batch_invariant": True})
# The most by which a scale may be rounded, in units of itself or of a sixteenth of the largest.
SCALE = {torch.bfloat16: 2**-8, torch.float16: 2**-10}
ROWS_AT_A_TIME = 1024  # of a matrix that is widened to be compared with


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows of a matrix that multiply the same columns of x in the same ``order``, None for as they
    are: the package's ``config`` and tensors, and its kernels by the number of tokens, as JSON.
    """

    config: Any
    kernels: str
    weight: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class HummingPacked(Packed):
    """A matrix in the package's layout, which only ``multiply`` can read."""

    segments: tuple[Segment, ...] = ()
    products: "HummingProducts | None" = field(default=None, repr=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        tensors = (y for x in self.segments for y in (x.weight, x.scales, x.zeros, x.order))
        return tuple(tensor for tensor in tensors if tensor is not None)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``Packed.multiply``, for ``x`` in the type for which it was made. Raises
        ValueError for another.
        """
        if self.products is None or x.dtype is not self.products.dtype:
            raise ValueError(f"x: {x.dtype}, for which its weights were not packed")
        if x.shape[1:] != (self.columns,):
            raise ValueError(f"x: {tuple(x.shape)} for weights of {self.columns} columns")
        if not len(x):
            return x.new_empty(0, self.rows)
        products = [self.products.multiply(x, segment) for segment in self.segments]
        out = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return out if bias is None else out.add_(bias)


class HummingProducts:
    """The products of one model in ``dtype`` on ``device``, whose kernels ``workers`` compilers
    make at a time.
    """

    def __init__(
        self, package: HummingPackage, dtype: torch.dtype, device: torch.device, workers: int = 1
    ) -> None:
        self.dtype = dtype
        self._package = package
        self._device = device
        self._workers = workers
        self._packed_count = 0
        self._refusals: Counter[str] = Counter()
        self._known: dict[object, str] = {}  # why it does not take such a matrix, "" where it does

    def __str__(self) -> str:
        """The package, if it took a matrix, and how many it did not take, by reason."""
        refusals = "; ".join(f"{count} not: {text}" for text, count in self._refusals.items())
        products = (
            f"4-bit products by humming {self._package.version}" if self._packed_count else ""
        )
        if not refusals:
            return products
        return f"{products}, {refusals}" if products else f"4-bit products of ours: {refusals}"

    def repack(self, weight: Packed) -> Packed:
        """A matrix as ``torch_int4.pack`` gives it, in the package's layout, in memory of its
        own; as it is where that is not possible, or it is none of 4 bits.

        The first of its shape compiles kernels, which takes seconds for each, and is compared with
        what it stands for, for steps of all sizes.
        """
        if weight.int4_groups is None or weight.scales is None:
            return weight
        try:
            packed = self._repacked(weight, weight.scales, weight.int4_groups)
        except NotAvailableError as error:
            self._refusals[fall_back(error)] += 1
            return weight
        self._packed_count += 1
        return packed

    def multiply(self, x: Tensor, segment: Segment) -> Tensor:
        """Multiply: x [T, columns] times the segment's rows → [T, rows]."""
        result: Tensor = self._package.forward(
            segment.config,
            inputs=x if segment.order is None else x.index_select(1, segment.order),
            weight=segment.weight,
            weight_scale=segment.scales,
            zero_point=segment.zeros,
            compute_config=WHOLE_SUMS,
            tuning_config=segment.kernels,
        )
        return result

    def _repacked(self, weight: Packed, scales: Tensor, int4_groups: Int4Groups) -> HummingPacked:
        runs = tuple((rows, order is None) for rows, order in int4_groups.orders)
        key = runs, weight.columns, len(scales)
        if reason := self._known.get(key):
            raise NotAvailableError(reason)
        self._check(weight, scales, int4_groups)
        try:
            segments = [
                self._segment(weight.data[span], scales[:, span], int4_groups.zeros[:, span], order)
                for span, order in _runs(int4_groups)
            ]
            packed = HummingPacked(
                segments[0].weight.view(torch.uint8),
                weight.rows,
                weight.columns,
                segments=tuple(segments),
                products=self,
            )
            if key not in self._known:
                self._prove(packed, weight.data, scales, int4_groups)
        except Exception as error:  # of its compiler, its launcher or CUDA
            shape = f"[{weight.rows}, {weight.columns}]"
            reason = str(error) if isinstance(error, NotAvailableError) else brief(error)
            self._known[key] = f"humming's product with {shape}: {reason}"
            raise FaultError(self._known[key]) from error
        self._known[key] = ""
        return packed

    def _check(self, weight: Packed, scales: Tensor, int4_groups: Int4Groups) -> None:
        if not takes((rows for rows, _ in int4_groups.orders), (weight.columns,)):
            raise NotAvailableError(UNPACKAGED)
        if int(int4_groups.zeros.max()) > 15:
            raise NotAvailableError("a zero point is above 15")
        errors, sizes = (scales.to(self.dtype).float() - scales).abs(), scales.abs()
        limits = SCALE[self.dtype] * torch.maximum(sizes, sizes.max() / 16)
        if not bool((errors <= limits).all()):
            raise NotAvailableError(f"{name_of(self.dtype)} does not hold all of its scales")

    def _segment(
        self, data: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None
    ) -> Segment:
        """The segment of ``data`` uint8 [rows, columns / 2], ``scales`` and ``zeros`` [G, rows]."""
        rows, columns = len(data), 2 * data.shape[1]
        schema = self._package.schema(
            b_dtype="uint4",
            bs_dtype=name_of(self.dtype),
            weight_scale_group_size=columns // len(scales) if len(scales) > 1 else 0,
            has_zero_point=True,
        )
        words = paired(zeros).flatten().view(torch.int32).view(len(zeros), -1)
        # An int32 has eight integers, the first in the lowest bits: neighbours of a row, and zero
        # points of rows below each other.
        config, tensors = self._package.transform(
            {
                "weight": data.view(torch.int32),
                "weight_scale": scales.T.to(self.dtype).contiguous(),
                "zero_point": words.T.contiguous(),
            },
            rows,
            columns,
            schema,
            torch_dtype=self.dtype,
            device=self._device,
        )
        return Segment(
            config,
            json.dumps(self._kernels(config)),
            tensors["weight"],
            tensors["weight_scale"],
            tensors["zero_point"],
            order,
        )

    def _kernels(self, config: Any) -> list[tuple[int, int, Any]]:
        """One entry per kernel: (min tokens, exclusive; max tokens; tuning)."""
        kernels = []
        for above, upto in zip((0, *BOUNDS), (*BOUNDS, UNBOUNDED), strict=True):
            tokens = min(upto, LARGE)
            tuned = self._package.heuristics(
                config, shape_m=tokens, use_batch_invariant=True, device=self._device
            )
            kernels.append((above, upto, tuned))
        return kernels

    def _prove(
        self, packed: HummingPacked, data: Tensor, scales: Tensor, int4_groups: Int4Groups
    ) -> None:
        """Compile the matrix's kernels, and compare each with what it stands for. Raises
        NotAvailableError where one computes something else.
        """
        log.info("compile humming's kernels for weights [%d, %d]", packed.rows, packed.columns)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(BOUNDS[-1] + 1, packed.columns, generator=generator)
        x = x.to(self._device, self.dtype)
        with compilers(self._workers):
            results = [packed.multiply(x[:tokens]) for tokens in (1, *BOUNDS, len(x))]
        for span, order in _runs(int4_groups):
            inputs = (x if order is None else x[:, order]).float()
            for begin in range(span.start, span.stop, ROWS_AT_A_TIME):
                rows = slice(begin, min(begin + ROWS_AT_A_TIME, span.stop))
                int4_tensors = data[rows], scales[:, rows].T, int4_groups.zeros[:, rows].T
                expected = inputs @ widened(*int4_tensors, torch.float32).T
                largest = expected.abs().amax(0)
                for y in results:
                    compute = partial(y.narrow, 1, begin, len(largest))
                    prove("it", compute, expected[: len(y)], self.dtype, "int4", largest)


def _runs(int4_groups: Int4Groups) -> Iterator[tuple[slice, Tensor | None]]:
    """The rows that multiply the columns of x in one order, and this."""
    first = 0
    for rows, order in int4_groups.orders:
        yield slice(first, first + rows), order
        first += rows
