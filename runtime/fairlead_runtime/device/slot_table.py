"""What the device keeps of each decoding sequence, so that a step sends only what changed.

Owns a row per sequence in tensors on the device (last token, length, draw key, sampling parameters,
block tables), and on the host what each row has. A row is right for its next step or is sent again:
nothing is taken back, and whoever changes a sequence need not tell. Row PADDING belongs to no
sequence: rows that only fill a step write to a block of their own there.

A step may be entered while one is in flight. What it sends goes through other host memory, and its
rows' tokens are the device's alone: a row that is not what that step leaves is refused.
"""

import enum
from collections import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels import sample_rows
from fairlead_kernels.sample_rows import RowParameters
from fairlead_runtime.device.sampling import GREEDY_BELOW
from fairlead_runtime.request import Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.seeds import MASK64, mix64
from fairlead_runtime.sizing.groups import LayerGroup

PADDING = 0
# The columns of a row, int64 each: TOP_P holds the bits of a float64, SCALE those of two float32,
# temperature and min_cut.
TOKEN, LENGTH, KEY, TOP_K, TOP_P, SCALE = range(6)
COLUMNS = 6

Array = np.ndarray[Any, np.dtype[Any]]


class Draw(enum.IntEnum):
    """How a step's tokens are chosen: each form includes those before it."""

    GREEDY = 0
    PLAIN = 1  # some rows draw, none filters
    FILTERED = 2
    GENERAL = 3  # not by the table: some rows change their logits or want log-probabilities


class Entered(NamedTuple):
    """A step of B rows: their lengths int32 [B], on the host, and how its tokens are chosen."""

    lens: Array
    draw: Draw


@dataclass(slots=True)
class _Entry:
    """What a row on the device has of its sequence: ``length`` that of its next step, ``blocks``
    per group. ``state`` is the row, but for token and length.
    """

    row: int
    preemptions: int
    state: Array
    draw: Draw
    length: int = 0
    blocks: int = 0


class Inputs(NamedTuple):
    """A step of B decodes: ``ids`` and ``positions`` int64 [B], per layer group ``slots`` int64
    [B].
    """

    ids: Tensor
    positions: Tensor
    slots: tuple[Tensor, ...]


class SlotTable:
    """Rows for ``sequences`` sequences of at most ``blocks`` blocks in each layer group.

    ``padding_unit`` is the unit of the cache that padding rows write to. On the device: ``state``
    int64 [sequences + 1, COLUMNS] and ``tables`` int32 [groups, sequences + 1, blocks]. One thread
    owns it.
    """

    def __init__(
        self,
        groups: abc.Sequence[LayerGroup],
        block_size: int,
        *,
        sequences: int,
        blocks: int,
        padding_unit: int,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._pinned = device.type == "cuda"
        shape = len(groups), sequences + 1, blocks
        self.tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self.tables[:, PADDING] = padding_unit
        self.state = torch.zeros(sequences + 1, COLUMNS, dtype=torch.int64, device=device)
        self.state[PADDING, LENGTH] = 1
        self.state.view(torch.float64)[:, TOP_P] = 1
        self._entries: dict[Sequence, _Entry] = {}
        self._free = list(range(sequences, PADDING, -1))
        # Host memory that is copied from, the newest step's first; its copy may be under way.
        self._packets = [torch.empty(0, dtype=torch.int64) for _ in range(2)]

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return self.state.nbytes + self.tables.nbytes

    def enter(self, rows: abc.Sequence[Row], into: Tensor) -> Entered:
        """Make the device's rows right for a step that computes each sequence's last token.

        Writes to ``into`` int64 [at least B] the places of their rows, then PADDING to its end.
        The device counts the step as done once ``advance`` has run; ``forget`` rows whose step
        failed. Raises RuntimeError for a sequence in flight whose row is not that step's.
        """
        if len(rows) > min(len(into), self.state.shape[0] - 1):
            raise ValueError(f"{len(rows)} decodes: the step has room for {len(into)}")
        index = np.zeros(len(into), dtype=np.int64)
        lens = np.ones(len(into), dtype=np.int32)
        draw = Draw.GREEDY
        changed: list[tuple[_Entry, Sequence]] = []
        grown: list[tuple[_Entry, Sequence]] = []
        for place, (sequence, start, _, _) in enumerate(rows):
            entry = self._entries.get(sequence)
            if entry is None or entry.preemptions != sequence.preemptions:
                entry = self._entries[sequence] = self._new(sequence, entry, rows)
            index[place], lens[place] = entry.row, start + 1
            draw = max(draw, entry.draw)
            if entry.length != start + 1:
                if sequence.flying:
                    raise RuntimeError(f"sequence {sequence.id} is in flight, and its row is not")
                changed.append((entry, sequence))
            if entry.blocks < len(sequence.tables[0]):
                grown.append((entry, sequence))
            entry.length = start + 2
        self._send(index, changed, grown, into)
        return Entered(lens, draw)

    def draw_of(self, sequence: Sequence) -> Draw:
        """How its tokens are chosen."""
        entry = self._entries.get(sequence)
        return draw_of(sequence) if entry is None else entry.draw

    def forget(self, rows: abc.Iterable[Row]) -> None:
        """Send these sequences' rows again in full: their step may have run or not."""
        for row in rows:
            entry = self._entries.pop(row.sequence, None)
            if entry is not None:
                self._free.append(entry.row)

    def _new(self, sequence: Sequence, old: _Entry | None, rows: abc.Sequence[Row]) -> _Entry:
        """A row for a sequence that has none, or whose blocks are others since a preemption."""
        if old is None and not self._free:
            needed = {row.sequence for row in rows}
            for other in [s for s in self._entries if s not in needed]:
                self._free.append(self._entries.pop(other).row)
        if old is not None:
            return _Entry(old.row, sequence.preemptions, old.state, old.draw)
        row, state = self._free.pop(), _state(sequence)
        return _Entry(row, sequence.preemptions, state, draw_of(sequence))

    def _send(
        self,
        index: Array,
        changed: list[tuple[_Entry, Sequence]],
        grown: list[tuple[_Entry, Sequence]],
        into: Tensor,
    ) -> None:
        """One copy to the device: the step's rows, whole rows of ``state``, entries of ``tables``
        by their flat places.
        """
        rows = np.array([entry.row for entry, _ in changed], dtype=np.int64)
        states = np.array([entry.state for entry, _ in changed], dtype=np.int64)
        states = states.reshape(-1, COLUMNS)
        states[:, TOKEN] = [sequence.tokens[-1] for _, sequence in changed]
        states[:, LENGTH] = [len(sequence.tokens) for _, sequence in changed]
        places, units = self._growth(grown)
        parts = (index, rows, states.reshape(-1), places, units)
        size = sum(map(len, parts))
        self._packets.reverse()
        if size > len(self._packets[0]):
            self._packets[0] = torch.empty(2 * size, dtype=torch.int64, pin_memory=self._pinned)
        packet = self._packets[0][:size]
        np.concatenate(parts, out=packet.numpy())
        sent = packet.to(self._device, non_blocking=True)
        sizes = [len(part) for part in parts]
        step, rows_, states_, places_, units_ = torch.split(sent, sizes)
        into.copy_(step)
        if changed:
            self.state.index_copy_(0, rows_, states_.view(-1, COLUMNS))
        if grown:
            self.tables.view(-1).index_copy_(0, places_, units_.to(torch.int32))

    def _growth(self, grown: list[tuple[_Entry, Sequence]]) -> tuple[Array, Array]:
        """The blocks that the device does not have yet: flat places in ``tables``, and units."""
        places: list[Array] = []
        units: list[int] = []
        _, rows, width = self.tables.shape
        for entry, sequence in grown:
            end = len(sequence.tables[0])
            for group, table in enumerate(sequence.tables):
                begin = (group * rows + entry.row) * width
                places.append(np.arange(begin + entry.blocks, begin + end))
                units += table[entry.blocks :]
            entry.blocks = end
        empty = np.empty(0, dtype=np.int64)
        return np.concatenate([empty, *places]), np.array(units, dtype=np.int64)

    # -- on the device alone

    def lens(self, index: Tensor) -> Tensor:
        """Of the rows ``index`` int64 [B], the lengths in their next step, int64 [B]."""
        return self.state[index, LENGTH]

    def inputs(self, index: Tensor) -> Inputs:
        """Of the rows ``index`` int64 [B], what their next step computes."""
        rows = self.state[index]
        positions = rows[:, LENGTH] - 1
        block, offset = positions // self._block_size, positions % self._block_size
        slots = tuple(
            table[index, block].to(torch.int64) * self._block_size + offset for table in self.tables
        )
        return Inputs(rows[:, TOKEN], positions, slots)

    def parameters(self, index: Tensor) -> RowParameters:
        """How the token after the last one of each row is drawn."""
        rows = self.state[index]
        scale = rows.view(torch.float32).view(len(index), COLUMNS, 2)[:, SCALE]
        return RowParameters(
            temperature=scale[:, 0],
            min_cut=scale[:, 1],
            top_k=rows[:, TOP_K],
            top_p=rows.view(torch.float64)[:, TOP_P],
            # The new token's position is the number of tokens before it.
            keys=sample_rows.mix64(rows[:, KEY] ^ rows[:, LENGTH]),
        )

    def advance(self, index: Tensor, tokens: Tensor) -> None:
        """Append each row's token, int64 [B]. Padding rows stay what they are."""
        real = index != PADDING
        # A row without a token has failed: nobody sees its sequence's next step, if there is one.
        last = tokens.clamp(min=0).mul_(real)
        self.state[:, TOKEN].index_copy_(0, index, last)
        self.state[:, LENGTH].index_copy_(0, index, self.state[index, LENGTH] + real)


def _state(sequence: Sequence) -> Array:
    """A row of SlotTable.state for this sequence, int64 [COLUMNS], without token and length."""
    params = sequence.request.params
    state = np.zeros(COLUMNS, dtype=np.int64)
    key = mix64(mix64(sequence.request.seed & MASK64) ^ sequence.choice)
    state[KEY] = key - (1 << 64) if key >= 1 << 63 else key
    state[TOP_K] = params.top_k
    state.view(np.float64)[TOP_P] = params.top_p
    scale = state.view(np.float32).reshape(COLUMNS, 2)[SCALE]
    scale[0] = params.temperature if params.temperature >= GREEDY_BELOW else 0
    with np.errstate(divide="ignore"):  # log(0) = -inf is "off"
        scale[1] = np.log(np.float64(params.min_p))
    return state


def draw_of(sequence: Sequence) -> Draw:
    """How its tokens are chosen, from the first to the last."""
    params = sequence.request.params
    if (
        sequence.guide is not None
        or params.logprobs is not None
        or params.allowed_token_ids is not None
        or params.penalizes
        or params.min_tokens
        or params.logit_bias
        or params.bad_words
    ):
        return Draw.GENERAL
    if params.temperature < GREEDY_BELOW:
        return Draw.GREEDY
    filters = params.top_k or params.top_p < 1 or params.min_p
    return Draw.FILTERED if filters else Draw.PLAIN
