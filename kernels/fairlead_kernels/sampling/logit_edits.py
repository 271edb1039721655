"""Changes of logits that a device keeps in lists, one list for each row.

Owns what an entry of a list means, and the arithmetic on lists: changing logits by them, and
counting a new token in them. No value is read on the host and no shape depends on data, as in
``sample_rows``. Given the same logits, the results are those of ``sample.penalize`` and of the
masks and biases before it, bit for bit: the same operations in the same order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fairlead_kernels.sampling.sample import ALIGNED

EMPTY = -1  # the id of an entry that is not used yet: those behind it are not used either
# An entry's word: how often the output holds its id, and what else is said of that id.
COUNT = (1 << 24) - 1
PENALIZED = 1 << 24  # the repetition penalty applies: it was in the prompt or in the output
FORBIDDEN = 1 << 25
END = 1 << 26  # forbidden as long as stop ids are held back
ALLOWED = 1 << 27  # one of those that a row with ``only`` may take


class LogitEdits(NamedTuple):
    """Edits of the logits of R rows, at most K each: ``ids`` int32 [R, K], distinct, then EMPTY;
    ``words`` int32 [R, K]; ``biases`` float32 [R, K].

    ``penalties`` float32 [R, 3]: repetition, frequency, presence. ``only`` bool [R]: an id without
    ALLOWED is forbidden, listed or not; ``early`` bool [R]: stop ids are held back.
    """

    ids: Tensor
    words: Tensor
    biases: Tensor
    penalties: Tensor
    only: Tensor
    early: Tensor

    def rows(self, span: slice) -> "LogitEdits":
        return LogitEdits(*(column[span] for column in self))


def change(logits: Tensor, edits: LogitEdits) -> Tensor:
    """A changed float32 copy of ``logits`` [R, V], any float type; its rows lie apart. The masks
    come first, then the biases, then the penalties. Ids beyond V change nothing.
    """
    width = logits.shape[1]
    changed = copy(logits)
    # Unused entries, and ids that no logit belongs to, change a place behind the row's end.
    outside = (edits.ids < 0) | (edits.ids >= width)
    places = edits.ids.long().masked_fill_(outside, width)
    values = _changed(changed.gather(1, places), edits)
    changed.masked_fill_(edits.only[:, None], -torch.inf)
    return changed.scatter_(1, places, values)[:, :width]


def copy(logits: Tensor) -> Tensor:
    """A copy of ``logits`` [R, V], any float type, in float32 [R, more than V], filled with 0."""
    count, width = logits.shape
    room = (width // ALIGNED + 1) * ALIGNED
    copied = torch.zeros(count, room, dtype=torch.float32, device=logits.device)
    copied[:, :width] = logits
    return copied


def _changed(values: Tensor, edits: LogitEdits) -> Tensor:
    """The entries' logits [R, K], changed."""
    words, only, early = edits.words, edits.only[:, None], edits.early[:, None]
    forbidden = _has(words, FORBIDDEN) | (_has(words, END) & early)
    forbidden |= ~_has(words, ALLOWED) & only
    values = values.masked_fill_(forbidden, -torch.inf).add_(edits.biases)
    repetition, frequency, presence = (column[:, None] for column in edits.penalties.unbind(1))
    factor = torch.where(_has(words, PENALIZED), repetition, 1.0)
    values = torch.where(values > 0, values / factor, values * factor)
    counts = words.bitwise_and(COUNT).float()
    return values.sub_(frequency * counts).sub_(presence * (counts > 0))


def _has(words: Tensor, bit: int) -> Tensor:
    return words.bitwise_and(bit) != 0


def count(ids: Tensor, words: Tensor, rows: Tensor, tokens: Tensor, counting: Tensor) -> None:
    """Count each row's new token in its list, in place: in the entry that has it, else in the first
    unused one.

    ``ids`` and ``words`` int32 [lists, K]; ``rows`` int64 [R]: the list of each row; ``tokens``
    int64 [R]; ``counting`` bool [R]: other rows' lists stay as they are, and so does a list that
    has no place. Rows that share a list must not count.
    """
    room = ids.shape[1]
    lists = ids[rows]
    # What is not used lies behind all that is used, so the first of both is the right one.
    fits = (lists == tokens[:, None]) | (lists == EMPTY)
    places = torch.arange(room, device=ids.device)
    first = torch.where(fits, places, room).amin(1)
    counting = counting & (first < room)
    at = rows * room + first.clamp(max=room - 1)
    for list_, counted in (
        (words.view(-1), words.view(-1)[at].bitwise_or(PENALIZED) + 1),
        (ids.view(-1), tokens.int()),
    ):
        list_.index_copy_(0, at, torch.where(counting, counted, list_[at]))
