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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels.interface.attention import AttentionBackend, DecodeAttention
from fairlead_kernels.sampling import sample_rows
from fairlead_kernels.sampling.logit_edits import LogitEdits
from fairlead_kernels.sampling.sample_rows import RowParameters
from fairlead_runtime.device.model.block_tables import DeviceTables
from fairlead_runtime.device.model.host_buffer import Array
from fairlead_runtime.device.model.table_rows import Growth, TableRows
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


class Entered(NamedTuple):
    """A step of B rows that sample: their lengths int32 [B], on the host, how its tokens are
    chosen, whether some rows count theirs in a list, and what came to the block tables, of all
    its rows.
    """

    lens: Array
    mode: SamplingMode
    counts: bool
    growth: Growth


class _Change(NamedTuple):
    """A row of ``state`` that is sent."""

    row: int
    entry: Entry
    sequence: Sequence


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
        self._groups = tuple(groups)
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
        self.rows = TableRows(len(groups), sequences + 1, first=PADDING + 1)
        # Of each row, while it is not fresh: what follows from its sequence; how its tokens are
        # chosen, by numbers of ``_modes``, below a length and from there on; the length that the
        # device has; and that from which on its list may lack room.
        self._entries: list[Entry | None] = [None] * (sequences + 1)
        self._modes: list[SamplingMode] = []
        self._mode, self._mode_after, self._until, self._length, self._full_at = (
            np.zeros(sequences + 1, dtype=np.int64) for _ in range(5)
        )
        # Host memory that is copied from, the newest step's first; its copy may be under way.
        self._packets = [torch.empty(0, dtype=torch.int64) for _ in range(2)]

    @property
    def sequences(self) -> int:
        return self.rows.sequences

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is on the device."""
        return self.state, self.tables, *self.lists.tensors

    def tables_for(self, attention: AttentionBackend) -> DeviceTables | None:
        """Its block tables for steps of this attention; None where that reads them on the host."""
        if not isinstance(attention, DecodeAttention):
            return None
        return DeviceTables(self._groups, self._block_size, self.tables)

    def enter(self, rows: abc.Sequence[Row], into: Tensor) -> Entered:
        """Make the device's rows right for a step: the block tables of all, and what else those
        have that sample the token after their sequence's last.

        Writes to ``into`` int64 [at least B] the places of the B rows that sample, then PADDING to
        its end. The device counts the step as done once ``advance`` has run; ``forget`` rows whose
        step failed. Raises RuntimeError for a row that lacks the token of a step in flight.
        """
        growth = self.rows.enter([row.sequence for row in rows])
        sampling = [row for row in rows if row.samples]
        places = growth.rows
        if len(sampling) < len(rows):
            places = places[[row.samples for row in rows]]
        if len(sampling) > len(into):
            raise ValueError(f"{len(sampling)} rows: the step has room for {len(into)}")
        index = np.zeros(len(into), dtype=np.int64)
        lens = np.ones(len(into), dtype=np.int32)
        index[: len(places)] = places
        lens[: len(places)] = lengths = np.array(
            [row.start + row.count for row in sampling], dtype=np.int64
        )
        for at in self.rows.fresh[places].nonzero()[0]:
            self._start(places[at], sampling[at].sequence)
        changed: list[_Change] = []
        for at in (self._length[places] != lengths).nonzero()[0]:
            sequence, entry = sampling[at].sequence, self._entries[places[at]]
            if sequence.sampled_in_flight or entry is None:
                raise RuntimeError(f"sequence {sequence.id} is in flight, and its row is not")
            changed.append(_Change(places[at], entry, sequence))
        self._length[places] = lengths + 1
        mode, counts = self._choose(places, lengths, sampling)
        self._send(index, changed, growth, into)
        return Entered(lens, mode, counts, growth)

    def _start(self, row: int, sequence: Sequence) -> None:
        """Let a row be that of a sequence, of which the device has nothing yet."""
        entry = self._entries[row] = Entry.of(sequence)
        self.rows.fresh[row] = False
        self._length[row] = self._full_at[row] = 0
        self._until[row] = entry.min_tokens_until
        self._mode[row] = self._number(entry.mode)
        self._mode_after[row] = self._number(entry.mode_after)

    def _number(self, mode: SamplingMode) -> int:
        if mode not in self._modes:
            self._modes.append(mode)
        return self._modes.index(mode)

    def _choose(
        self, places: Array, lengths: Array, rows: abc.Sequence[Row]
    ) -> tuple[SamplingMode, bool]:
        """How the tokens of these ``rows`` are chosen, and whether some count theirs."""
        early = lengths < self._until[places]
        numbers = np.where(early, self._mode[places], self._mode_after[places])
        modes = [self._modes[number] for number in np.unique(numbers)]
        if not any(mode.changes for mode in modes):
            return merge(modes), False
        entries = [self._entries[row] for row in places.tolist()]
        counts = any(entry is not None and entry.counts for entry in entries)
        full = (lengths >= self._full_at[places]).nonzero()[0].tolist()
        return merge((*modes, *(self.mode_of(rows[at]) for at in full))), counts

    def mode_of(self, row: Row) -> SamplingMode:
        """How the token after the row's last one is chosen."""
        sequence, length = row.sequence, row.start + row.count
        place = self.rows.row(sequence)
        entry = None if place is None or self.rows.fresh[place] else self._entries[place]
        if place is None or entry is None:
            place, entry = PADDING, Entry.of(sequence)
        mode = entry.mode if length < entry.min_tokens_until else entry.mode_after
        if not mode.changes or length < self._full_at[place]:
            return mode
        # Its list was shorter than the tokens are many, if some occur again.
        full_at = self.lists.full(sequence, ChangeList.of(sequence))
        if place != PADDING:
            self._full_at[place] = full_at
        return mode if length < full_at else GENERAL

    def forget(self, rows: abc.Iterable[Row]) -> None:
        """Send these sequences' rows again in full: their step may have run or not."""
        self.rows.forget(row.sequence for row in rows)

    def _send(
        self,
        index: Array,
        changed: list[_Change],
        growth: Growth,
        into: Tensor,
    ) -> None:
        """One copy to the device: the step's rows, whole rows of ``state`` with their lists,
        entries of ``tables`` by their flat places.
        """
        rows = np.array([change.row for change in changed], dtype=np.int64)
        states = np.array([change.entry.state for change in changed], dtype=np.int64)
        states = states.reshape(-1, COLUMNS)
        states[:, TOKEN] = [change.sequence.tokens[-1] for change in changed]
        states[:, LENGTH] = [len(change.sequence.tokens) for change in changed]
        lists = self._lists(changed, states)
        places, units = growth.places(self.tables.shape), growth.units.reshape(-1)
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
        if len(places):
            self.tables.view(-1).index_copy_(0, places_, units_.to(torch.int32))
        if lists:
            self.lists.receive(*lists_)

    def _lists(self, changed: list[_Change], states: Array) -> list[tuple[int, ChangeList]]:
        """The lists of rows that are sent, each with its row, where they fit; their flags go to
        ``states``.
        """
        lists: list[tuple[int, ChangeList]] = []
        for state, (row, entry, sequence) in zip(states, changed, strict=True):
            if not entry.mode.changes:
                continue
            changes = ChangeList.of(sequence)
            self._full_at[row] = self.lists.full(sequence, changes)
            if self._full_at[row]:
                state[FLAGS] = changes.flags
                lists.append((row, changes))
        return lists

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
