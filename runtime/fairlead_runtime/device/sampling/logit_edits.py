"""What a device keeps of the changes that sequences make to their logits: a short list for each row
of the sequence table.

Owns how a list follows from a sequence's parameters and tokens, and the lists on the device, where
each new token of a row with penalties is counted. An entry is an id with all that is said of it, so
a list is as long as the ids that occur are many, whatever the vocabulary. A sequence whose ids do
not fit is sampled in the general mode.
"""

from collections import abc
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels.sampling import logit_edits
from fairlead_kernels.sampling.logit_edits import (
    ALLOWED,
    EMPTY,
    END,
    FORBIDDEN,
    PENALIZED,
    LogitEdits,
)
from fairlead_runtime.device.sampling.logits_processors import Notes, notes_of
from fairlead_runtime.request.sequence import Sequence

# Of a row: it has a list, whose entries its new tokens are counted in, which names all it may take.
LISTED, COUNTS, ONLY = 1, 2, 4
ALWAYS = 1 << 62  # a length that no sequence has

Array = np.ndarray[Any, np.dtype[Any]]


class ChangeList(NamedTuple):
    """One sequence's entries, as ``fairlead_kernels.sampling.logit_edits`` reads them: ``ids``
    int32, distinct, ``words`` int32, ``biases`` float32. ``flags`` of its row.
    """

    ids: Array
    words: Array
    biases: Array
    flags: int

    @classmethod
    def of(cls, sequence: Sequence) -> Self:
        """The list as its tokens are now."""
        notes, params = notes_of(sequence, masked=False), sequence.request.params
        if notes is None:
            nothing = np.empty(0, dtype=np.int32)
            return cls(nothing, nothing, nothing.astype(np.float32), 0)
        flags = LISTED | COUNTS * params.penalizes | ONLY * (params.allowed_token_ids is not None)
        edits = _edits_of(sequence, notes)
        if notes.counts is not None and len(edits) == 1 and not len(notes.biases):
            ((ids, words),) = edits  # the usual case: they are distinct
            return cls(ids, words, np.zeros(len(ids), dtype=np.float32), flags)
        empty = np.empty(0, dtype=np.int32)
        all_ids = np.concatenate([empty, *(ids for ids, _ in edits), notes.bias_ids])
        ids, places = np.unique(all_ids, return_inverse=True)
        words, biases = np.zeros(len(ids), np.int32), np.zeros(len(ids), np.float32)
        entry_words = [np.broadcast_to(word, len(ids)) for ids, word in edits]
        of_words, of_biases = np.split(places, [len(places) - len(notes.bias_ids)])
        np.bitwise_or.at(words, of_words, np.concatenate([empty, *entry_words]))
        biases[of_biases] = notes.biases
        return cls(ids.astype(np.int32), words, biases, flags)


def _edits_of(sequence: Sequence, notes: Notes) -> list[tuple[Array, Any]]:
    """Ids and what is said of them: a word for each, or one for all."""
    params = sequence.request.params
    edits: list[tuple[Array, Any]] = []
    if notes.counts is not None:
        ids = notes.counts.follow(sequence.tokens)
        edits.append((ids, notes.counts.counts.astype(np.int32) | PENALIZED))
    held_back = notes.stop_ids if params.min_tokens else []
    for word, chosen_ids in (
        (END, held_back),
        (FORBIDDEN, notes.bad_ids),
        (ALLOWED, params.allowed_token_ids or ()),
    ):
        if chosen_ids:
            edits.append((np.array(chosen_ids, dtype=np.int32), np.int32(word)))
    return edits


class ChangeLists:
    """A list of at most ``room`` entries for each of ``rows`` rows. On the device: ``ids`` and
    ``words`` int32 and ``biases`` float32, all [rows, room].
    """

    def __init__(self, rows: int, room: int, device: torch.device) -> None:
        self.room = room
        self.ids = torch.full((rows, room), EMPTY, dtype=torch.int32, device=device)
        self.words = torch.zeros_like(self.ids)
        self.biases = torch.zeros(rows, room, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.ids, self.words, self.biases

    def full(self, sequence: Sequence, changes: ChangeList) -> int:
        """The length from which on the list, as it is now, may lack the room for what the next
        token adds; 0 where it has none now.
        """
        room = self.room - len(changes.ids)
        if room < 0:
            return 0
        return len(sequence.tokens) + room if changes.flags & COUNTS else ALWAYS

    def sends(self, lists: abc.Sequence[tuple[int, ChangeList]]) -> tuple[Array, ...]:
        """What ``receive`` takes, int64, for these rows and their new lists."""
        if not lists:
            return (np.empty(0, dtype=np.int64),) * 4
        rows = np.array([row for row, _ in lists])
        counts = np.array([len(changes.ids) for _, changes in lists])
        inside = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        places = np.repeat(rows * self.room, counts) + inside
        ids, words, biases, _ = zip(*(changes for _, changes in lists), strict=True)
        entries = np.zeros((2, len(places), 2), dtype=np.int32)
        entries[0, :, 0], entries[0, :, 1] = np.concatenate(ids), np.concatenate(words)
        entries[1, :, 0] = np.concatenate(biases).view(np.int32)
        return rows, places, *entries.view(np.int64)[..., 0]

    # -- on the device alone

    def receive(self, rows: Tensor, places: Tensor, entries: Tensor, biases: Tensor) -> None:
        """Give ``rows`` the lists that ``sends`` packed: flat places, their ids and words, their
        biases.
        """
        pairs = entries.view(torch.int32).view(-1, 2)
        # An entry that is not used yet says nothing, either.
        for target, nothing, sent in (
            (self.ids, EMPTY, pairs[:, 0]),
            (self.words, 0, pairs[:, 1]),
            (self.biases, 0, biases.view(torch.float32).view(-1, 2)[:, 0]),
        ):
            target.index_fill_(0, rows, nothing)
            target.view(-1).index_copy_(0, places, sent)

    def of(self, index: Tensor, flags: Tensor, penalties: Tensor, early: Tensor) -> LogitEdits:
        """The edits of the rows ``index`` int64 [R], with ``flags`` int64 [R]; the rest as in
        LogitEdits.
        """
        # A row without a list may have that of who had the row before.
        has = (flags & LISTED) != 0
        return LogitEdits(
            self.ids[index].masked_fill_(~has[:, None], EMPTY),
            self.words[index],
            self.biases[index],
            penalties,
            (flags & ONLY) != 0,
            early,
        )

    def count(self, index: Tensor, flags: Tensor, tokens: Tensor) -> None:
        """Count the rows' new ``tokens`` int64 [R]."""
        counting = ((flags & COUNTS) != 0) & (tokens >= 0)
        logit_edits.count(self.ids, self.words, index, tokens, counting)
