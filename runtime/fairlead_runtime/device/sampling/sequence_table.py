"""What the device keeps of each decoding sequence, so that a step sends only what changed.

Owns a row per sequence in tensors on the device (last token, length, draw key, sampling parameters,
block tables, and the list of what it changes in its logits), and on the host what each row has. A
row is right for its next step or is sent again: nothing is taken back, and whoever changes a
sequence need not tell. Row PADDING belongs to no sequence: rows that only fill a step write to a
block of their own there.

A step may be entered while one is in flight. What it sends goes through other host memory, and its
rows' tokens are the device's alone: a row that is not what that step leaves is refused.
"""

from collections import abc
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels.sampling import sample_rows
from fairlead_kernels.sampling.logit_edits import LogitEdits
from fairlead_kernels.sampling.sample_rows import RowParameters
from fairlead_runtime.device.sampling.logit_edits import ChangeList, ChangeLists
from fairlead_runtime.device.sampling.sampling_mode import GENERAL, SamplingMode, merge
from fairlead_runtime.device.sampling.sequence_row import (
    COLUMNS,
    FLAGS,
    KEY,
    LENGTH,
    PENALTIES,
    SCALE,
    TOKEN,
    TOP_K,
    TOP_P,
    UNTIL,
    Entry,
)
from fairlead_runtime.request.sequence import Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.sizing.groups import LayerGroup

PADDING = 0

Array = np.ndarray[Any, np.dtype[Any]]


class Entered(NamedTuple):
    """A step of B rows: their lengths int32 [B], on the host, how its tokens are chosen, and
    whether some rows count theirs in a list.
    """

    lens: Array
    mode: SamplingMode
    counts: bool


class Inputs(NamedTuple):
    """A step of B decodes: ``ids`` and ``positions`` int64 [B], per layer group ``slots`` int64
    [B].
    """

    ids: Tensor
    positions: Tensor
    slots: tuple[Tensor, ...]


class SequenceTable:
    """Rows for ``sequences`` sequences of at most ``blocks`` blocks in each layer group, with lists
    of at most ``listed`` ids.

    ``padding_unit`` is the unit of the cache that padding rows write to. On the device: ``state``
    int64 [sequences + 1, COLUMNS], ``tables`` int32 [groups, sequences + 1, blocks] and ``lists``.
    One thread owns it.
    """

    def __init__(
        self,
        groups: abc.Sequence[LayerGroup],
        block_size: int,
        *,
        sequences: int,
        blocks: int,
        listed: int,
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
        self.lists = ChangeLists(sequences + 1, listed, device)
        # Of sequences that nobody else has any more none is left, nor are their tokens.
        self._entries = WeakKeyDictionary[Sequence, Entry]()
        self._free = list(range(sequences, PADDING, -1))
        # Host memory that is copied from, the newest step's first; its copy may be under way.
        self._packets = [torch.empty(0, dtype=torch.int64) for _ in range(2)]

    @property
    def sequences(self) -> int:
        return self.state.shape[0] - 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is on the device."""
        return self.state, self.tables, *self.lists.tensors

    def enter(self, rows: abc.Sequence[Row], into: Tensor) -> Entered:
        """Make the device's rows right for a step that computes each sequence's last token, and
        maybe some before it.

        Writes to ``into`` int64 [at least B] the places of their rows, then PADDING to its end.
        The device counts the step as done once ``advance`` has run; ``forget`` rows whose step
        failed. Raises RuntimeError for a row that lacks the token of a step in flight.
        """
        if len(rows) > min(len(into), self.sequences):
            raise ValueError(f"{len(rows)} rows: the step has room for {len(into)}")
        index = np.zeros(len(into), dtype=np.int64)
        lens = np.ones(len(into), dtype=np.int32)
        modes: set[SamplingMode] = set()
        counts = False
        changed: list[tuple[Entry, Sequence]] = []
        grown: list[tuple[Entry, Sequence]] = []
        for place, (sequence, start, count, _) in enumerate(rows):
            length = start + count
            entry = self._entries.get(sequence)
            if entry is None or entry.preemptions != sequence.preemptions:
                entry = self._entries[sequence] = self._new(sequence, entry, rows)
            index[place], lens[place] = entry.row, length
            if entry.length != length:
                if sequence.sampled_in_flight:
                    raise RuntimeError(f"sequence {sequence.id} is in flight, and its row is not")
                changed.append((entry, sequence))
            if entry.blocks < len(sequence.tables[0]):
                grown.append((entry, sequence))
            entry.length = length + 1
            modes.add(self._mode(entry, sequence, length))
            counts |= entry.counts
        self._send(index, changed, grown, into)
        return Entered(lens, merge(modes), counts)

    def mode_of(self, row: Row) -> SamplingMode:
        """How the token after the row's last one is chosen."""
        sequence = row.sequence
        entry = self._entries.get(sequence) or Entry.of(PADDING, sequence)
        return self._mode(entry, sequence, row.start + row.count)

    def _mode(self, entry: Entry, sequence: Sequence, length: int) -> SamplingMode:
        mode = entry.mode if length < entry.min_tokens_until else entry.mode_after
        if not mode.changes or length < entry.edits_full_at:
            return mode
        # Its list was shorter than the tokens are many, if some occur again.
        entry.edits_full_at = self.lists.full(sequence, ChangeList.of(sequence))
        return mode if length < entry.edits_full_at else GENERAL

    def forget(self, rows: abc.Iterable[Row]) -> None:
        """Send these sequences' rows again in full: their step may have run or not."""
        for row in rows:
            entry = self._entries.pop(row.sequence, None)
            if entry is not None:
                self._free.append(entry.row)

    def _new(self, sequence: Sequence, old: Entry | None, rows: abc.Sequence[Row]) -> Entry:
        """A row for a sequence that has none, or whose blocks are others since a preemption."""
        if old is None and not self._free:
            needed = {row.sequence for row in rows}
            for unneeded in [s for s in self._entries if s not in needed]:
                del self._entries[unneeded]
            used_rows = {entry.row for entry in self._entries.values()}
            self._free = [row for row in range(self.sequences, PADDING, -1) if row not in used_rows]
        if old is not None:
            return replace(old, preemptions=sequence.preemptions, length=0, blocks=0)
        return Entry.of(self._free.pop(), sequence)

    def _send(
        self,
        index: Array,
        changed: list[tuple[Entry, Sequence]],
        grown: list[tuple[Entry, Sequence]],
        into: Tensor,
    ) -> None:
        """One copy to the device: the step's rows, whole rows of ``state`` with their lists,
        entries of ``tables`` by their flat places.
        """
        rows = np.array([entry.row for entry, _ in changed], dtype=np.int64)
        states = np.array([entry.state for entry, _ in changed], dtype=np.int64)
        states = states.reshape(-1, COLUMNS)
        states[:, TOKEN] = [sequence.tokens[-1] for _, sequence in changed]
        states[:, LENGTH] = [len(sequence.tokens) for _, sequence in changed]
        lists = self._lists(changed, states)
        places, units = self._growth(grown)
        fields = (index, rows, states.reshape(-1), places, units, *self.lists.sends(lists))
        size = sum(map(len, fields))
        self._packets.reverse()
        if size > len(self._packets[0]):
            self._packets[0] = torch.empty(2 * size, dtype=torch.int64, pin_memory=self._pinned)
        packet = self._packets[0][:size]
        np.concatenate(fields, out=packet.numpy())
        sent = packet.to(self._device, non_blocking=True)
        sizes = [len(field) for field in fields]
        step, rows_, states_, places_, units_, *lists_ = torch.split(sent, sizes)
        into.copy_(step)
        if changed:
            self.state.index_copy_(0, rows_, states_.view(-1, COLUMNS))
        if grown:
            self.tables.view(-1).index_copy_(0, places_, units_.to(torch.int32))
        if lists:
            self.lists.receive(*lists_)

    def _lists(
        self, changed: list[tuple[Entry, Sequence]], states: Array
    ) -> list[tuple[int, ChangeList]]:
        """The lists of rows that are sent, each with its row, where they fit; their flags go to
        ``states``.
        """
        lists: list[tuple[int, ChangeList]] = []
        for state, (entry, sequence) in zip(states, changed, strict=True):
            if not entry.mode.changes:
                continue
            changes = ChangeList.of(sequence)
            entry.edits_full_at = self.lists.full(sequence, changes)
            if entry.edits_full_at:
                state[FLAGS] = changes.flags
                lists.append((entry.row, changes))
        return lists

    def _growth(self, grown: list[tuple[Entry, Sequence]]) -> tuple[Array, Array]:
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
        """Lengths int64 [B] of the rows ``index`` int64 [B] in their next step."""
        return self.state[index, LENGTH]

    def last_tokens(self, index: Tensor) -> Tensor:
        """Last tokens int64 [B] of the rows ``index`` int64 [B]."""
        return self.state[index, TOKEN]

    def inputs(self, index: Tensor) -> Inputs:
        """Inputs of the next step of the rows ``index`` int64 [B]."""
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

    def changes(self, index: Tensor) -> LogitEdits:
        """What each row changes in the logits of the token after its last one."""
        rows = self.state[index]
        penalties = rows.view(torch.float32)[:, 2 * PENALTIES : 2 * PENALTIES + 3]
        early = rows[:, LENGTH] < rows[:, UNTIL]
        return self.lists.of(index, rows[:, FLAGS], penalties, early)

    def advance(self, index: Tensor, tokens: Tensor, *, counts: bool) -> None:
        """Append each row's token, int64 [B]. Padding rows stay what they are. ``counts``: some
        rows count theirs in a list.
        """
        real = index != PADDING
        if counts:
            self.lists.count(index, self.state[index, FLAGS], tokens)
        # A row without a token has failed: nobody sees its sequence's next step, if there is one.
        last = tokens.clamp(min=0).mul_(real)
        self.state[:, TOKEN].index_copy_(0, index, last)
        self.state[:, LENGTH].index_copy_(0, index, self.state[index, LENGTH] + real)
