"""The plan of plain-torch attention, made on the host: a step's rows, cut into pieces.

Owns which rows are attended together, where their keys are and what is masked. Never reads the
cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fairlead_kernels.interface.attention import RaggedRows

# A row's masks of at most this many elements are kept for the other layers; larger ones are
# recomputed.
KEPT_MASK_ELEMENTS = 1 << 24

Index = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Keys:
    """Places of the keys of a piece: ``start`` of a consecutive run of slots, or ``slots`` int64
    [n · length].
    """

    length: int
    start: int | None = None
    slots: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Decodes:
    """Rows with one query each and similar lengths. ``tokens`` int64 [n]: their places among the
    packed tokens.

    ``mask`` [n, 1, 1, length]: 0 or -inf, None when all rows have the full length.
    """

    tokens: torch.Tensor
    keys: Keys
    mask: torch.Tensor | None


@dataclass(slots=True, eq=False)
class Prefill:
    """One row with several queries: packed tokens ``begin:end``, the first at ``position``, keys
    from ``first_key``.
    """

    begin: int
    end: int
    position: int
    first_key: int
    keys: Keys
    window: int | None
    masks: dict[tuple[int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @property
    def plain_causal(self) -> bool:
        """Whether the mask is the square lower triangle, which kernels have built in."""
        count = self.end - self.begin
        return self.keys.length == count and (self.window is None or self.window >= count)

    def strips(self, queries: int) -> Iterator["Strip"]:
        """The row in strips of so many queries, each with the keys that any of them sees."""
        for at in range(0, self.end - self.begin, queries):
            stop = min(at + queries, self.end - self.begin)
            low = (
                0 if self.window is None else self.position + at - self.window + 1 - self.first_key
            )
            yield Strip(self, at, stop, max(0, low), self.position + stop - self.first_key)


class Strip(NamedTuple):
    """Queries ``begin:end`` of a row and its gathered keys ``low:high``."""

    row: Prefill
    begin: int
    end: int
    low: int
    high: int

    def mask(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The mask [queries, keys], 0 or -inf; shared by the step's layers unless it is large."""
        row = self.row
        kept_mask = row.masks.get((self.begin, self.end, dtype))
        if kept_mask is not None:
            return kept_mask
        query = torch.arange(row.position + self.begin, row.position + self.end, device=device)[
            :, None
        ]
        key = torch.arange(row.first_key + self.low, row.first_key + self.high, device=device)[
            None, :
        ]
        hidden = key > query
        if row.window is not None:
            hidden |= key <= query - row.window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(
            hidden, -torch.inf
        )
        if (row.end - row.begin) * row.keys.length <= KEPT_MASK_ELEMENTS:
            row.masks[self.begin, self.end, dtype] = mask
        return mask


@dataclass(slots=True, eq=False)
class TorchPlan:
    """The pieces of one step for the layers of one group."""

    window: int | None
    decodes: list[Decodes]
    prefills: list[Prefill]


class _RowArrays(NamedTuple):
    """The rows as arrays of length B: first packed token, first key position, length, blocks."""

    starts: Index
    first: Index
    lens: Index
    tables: npt.NDArray[np.int32]
    block_size: int

    def keys(self, row: int, device: torch.device) -> Keys:
        """The keys that one row sees."""
        first, length, size = int(self.first[row]), int(self.lens[row]), self.block_size
        blocks = self.tables[row, first // size : -(-length // size)].astype(np.int64)
        skip, span = first % size, length - first
        if len(blocks) == 1 or (np.diff(blocks) == 1).all():
            return Keys(span, start=int(blocks[0]) * size + skip)
        slots = (blocks[:, None] * size + np.arange(size)).reshape(-1)[skip : skip + span]
        return Keys(span, slots=torch.from_numpy(slots).to(device, non_blocking=True))


def plan(
    ragged: RaggedRows, device: torch.device, dtype: torch.dtype, gather_tokens: int
) -> TorchPlan:
    """Cut the rows into pieces. One batch of decodes gathers at most ``gather_tokens`` keys,
    padding included.
    """
    starts = ragged.query_starts.numpy().astype(np.int64)
    lens = ragged.kv_lens.numpy().astype(np.int64)
    counts = np.diff(starts)
    position = lens - counts
    first = (
        np.zeros_like(lens)
        if ragged.window is None
        else np.maximum(0, position - ragged.window + 1)
    )
    rows = _RowArrays(starts, first, lens, ragged.tables.numpy(), ragged.block_size)
    single = np.flatnonzero(counts == 1)
    single = single[np.argsort((lens - first)[single], kind="stable")]
    decodes = [
        _decodes(rows, single[members], device, dtype)
        for members in _cut_lengths((lens - first)[single], gather_tokens)
    ]
    prefills = [
        Prefill(
            begin=int(starts[row]),
            end=int(starts[row + 1]),
            position=int(position[row]),
            first_key=int(first[row]),
            keys=rows.keys(int(row), device),
            window=ragged.window,
        )
        for row in np.flatnonzero(counts != 1)
    ]
    return TorchPlan(ragged.window, decodes, prefills)


def _decodes(rows: _RowArrays, chosen: Index, device: torch.device, dtype: torch.dtype) -> Decodes:
    tokens = torch.from_numpy(rows.starts[chosen]).to(device, non_blocking=True)
    if len(chosen) == 1:
        return Decodes(tokens, rows.keys(int(chosen[0]), device), None)
    first, last = rows.first[chosen][:, None], rows.lens[chosen][:, None] - 1
    length = int((last - first).max()) + 1
    positions = first + np.arange(length)
    # Padding repeats the row's own last token: a stale NaN in a block that the row does not fill
    # would survive any mask (0 times NaN) and let one request corrupt another.
    at = np.minimum(positions, last)
    slots = np.take_along_axis(rows.tables[chosen], at // rows.block_size, axis=1).astype(np.int64)
    slots = slots * rows.block_size + at % rows.block_size
    padded = positions > last
    mask = None
    if padded.any():
        mask = torch.zeros(padded.shape, dtype=dtype).masked_fill_(
            torch.from_numpy(padded), -torch.inf
        )
        mask = mask[:, None, None, :].to(device, non_blocking=True)
    places = torch.from_numpy(slots.reshape(-1)).to(device, non_blocking=True)
    return Decodes(tokens, Keys(length, slots=places), mask)


def _cut_lengths(lengths: Index, limit: int) -> list[slice]:
    """Cut ascending ``lengths`` into runs whose padded size is at most ``limit`` tokens and whose
    longest row is at most 64 tokens or twice the first. A run always takes its first row, of any
    length.
    """
    runs: list[slice] = []
    begin = 0
    for i, length in enumerate(lengths.tolist()):
        if i > begin and (
            (i + 1 - begin) * length > limit or length > max(64, 2 * int(lengths[begin]))
        ):
            runs.append(slice(begin, i))
            begin = i
    if begin < len(lengths):
        runs.append(slice(begin, len(lengths)))
    return runs
