"""The changes that requests make to logits before a token is chosen, for a step's rows at once.

Owns which rows change and by what; the arithmetic is in ``fairlead_kernels.sampling.sample``. Rows
without a change are neither copied nor looked at again. What a row needs from step to step (the
counts of its tokens, its mask) is kept with its sequence and follows from its tokens and parameters
alone, so chunks, preemption, offload, prefix hits and reruns change nothing.

The order is vLLM's: the masks (structured output, allowed_token_ids, bad_words, and min_tokens on
end and stop ids), logit_bias, then the repetition, frequency and presence penalties.
"""

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels.sampling import sample as ops
from fairlead_runtime.request.sequence import Sequence

Array = np.ndarray[Any, np.dtype[Any]]

RowEntries = tuple[int, Array, Array]  # a row's place, ids and their values

WORD = 32  # tokens in one word of a mask
_NO_NOTES = False  # the sequence's parameters change no logit


class TokenCounts:
    """How often each token occurs in one sequence's output; 0 where only its prompt has it.

    ``ids`` int32, in ascending order, and ``counts`` float32, of equal length: 8 bytes for each
    token that occurs.
    """

    __slots__ = ("_counted", "counts", "ids")

    def __init__(self, prompt: abc.Sequence[int], *, with_prompt: bool) -> None:
        self.ids: Array = np.unique(np.array(prompt if with_prompt else (), dtype=np.int32))
        self.counts: Array = np.zeros(len(self.ids), dtype=np.float32)
        self._counted = len(prompt)

    def follow(self, tokens: abc.Sequence[int]) -> Array:
        """Count what ``tokens``, prompt and output, has more than at the last call; the ids."""
        if len(tokens) > self._counted:
            more = np.array(tokens[self._counted :], dtype=np.int32)
            values, counts = np.unique(more, return_counts=True)
            places = np.searchsorted(self.ids, values)
            known = places < len(self.ids)
            known[known] = self.ids[places[known]] == values[known]
            self.counts[places[known]] += counts[known]
            self.ids = np.insert(self.ids, places[~known], values[~known])
            self.counts = np.insert(self.counts, places[~known], counts[~known])
            self._counted = len(tokens)
        return self.ids


def bitmask(ids: abc.Iterable[int]) -> Array:
    """The mask that allows these ids: int32 words up to the largest id, see ``LogitChanges``."""
    allowed = np.array(sorted(ids), dtype=np.int64)
    bits = np.zeros((int(allowed[-1]) // WORD + 1) * WORD, dtype=np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view(np.dtype("<i4")).astype(np.int32)


class Notes:
    """What one sequence's changes need from step to step."""

    __slots__ = ("_bad_words", "bad_ids", "bias_ids", "biases", "counts", "stop_ids", "words")

    def __init__(self, sequence: Sequence) -> None:
        params = sequence.request.params
        allowed = params.allowed_token_ids
        self.words = None if allowed is None else bitmask(allowed)
        self.stop_ids = [*sequence.request.eos_ids.union(params.stop_token_ids)]
        biases = dict(params.logit_bias)
        self.bias_ids = np.array([*biases], dtype=np.int64)
        self.biases = np.array([*biases.values()], dtype=np.float32)
        self.counts = None
        if params.penalizes:
            self.counts = TokenCounts(
                sequence.request.prompt, with_prompt=params.repetition_penalty != 1
            )
        # Bad words of one token are always forbidden; longer ones by the token before their end.
        self.bad_ids: list[int] = []
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}
        for word in params.bad_words:
            if isinstance(word, str):
                raise TypeError("bad_words must be token ids in the engine")
            if len(word) == 1:
                self.bad_ids.append(word[0])
            else:
                self._bad_words.setdefault(word[-2], []).append(word)

    def forbidden(self, sequence: Sequence) -> list[int]:
        """The ids that bad_words and min_tokens forbid as the next token, some possibly twice."""
        ids = [*self.bad_ids]
        if self._bad_words and sequence.generated:
            tokens, generated = sequence.tokens, sequence.generated
            for word in self._bad_words.get(tokens[-1], ()):
                before = len(word) - 1
                if before <= generated and tuple(tokens[-before:]) == word[:-1]:
                    ids.append(word[-1])
        # Where a structured output is complete, its end is all that may follow.
        at_end = sequence.guide is not None and sequence.guide.at_end
        if sequence.generated < sequence.request.params.min_tokens and not at_end:
            ids += self.stop_ids
        return ids


@dataclass(frozen=True, slots=True)
class Entries:
    """One value for some (row, token) pairs: ``rows`` and ``ids`` int64, ``values`` float32."""

    rows: Array
    ids: Array
    values: Array

    @classmethod
    def of(cls, entries: abc.Sequence[RowEntries]) -> Self | None:
        """Entries from (row, ids, values) of each row that has any."""
        if not entries:
            return None
        rows = np.repeat([row for row, _, _ in entries], [len(ids) for _, ids, _ in entries])
        ids = np.concatenate([ids for _, ids, _ in entries]).astype(np.int64, copy=False)
        return cls(rows, ids, np.concatenate([values for _, _, values in entries]))

    def on(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The entries on the device of ``logits`` [R, V], without ids beyond V."""
        inside = np.flatnonzero(self.ids < logits.shape[1])
        return (
            _tensor(self.rows[inside], logits),
            _tensor(self.ids[inside], logits),
            _tensor(self.values[inside], logits),
        )


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """The changes of C of a step's rows.

    ``rows`` [C] int64: their places in the batch, ascending. All other fields count places in
    ``rows``. ``words``: (place, mask): an int32 vector in which token i is bit i % 32 of word
    i // 32, lowest bit first, as xgrammar and llguidance lay it out; a token beyond its end is not
    allowed. ``penalties`` [3, C] float32: repetition, frequency, presence.
    """

    rows: Array
    words: list[tuple[int, Array]]
    forbidden: Entries | None
    biases: Entries | None
    counts: Entries | None
    penalties: Array

    @classmethod
    def of(cls, sequences: abc.Sequence[Sequence], masks: Mapping[int, Array]) -> Self | None:
        """The changes of sequences whose next token is sampled in this step; None when nothing
        changes.

        ``masks``: by sequence id, the words of the tokens that structured output allows next.
        """
        rows: list[int] = []
        words: list[tuple[int, Array]] = []
        forbidden: list[RowEntries] = []
        biases: list[RowEntries] = []
        counts: list[RowEntries] = []
        for row, sequence in enumerate(sequences):
            mask = masks.get(sequence.id) if masks else None
            notes = notes_of(sequence, masked=mask is not None)
            if notes is None:
                continue
            place, before = len(rows), len(words) + len(forbidden) + len(biases) + len(counts)
            if (mask := _both(mask, notes.words)) is not None:
                words.append((place, mask))
            if ids := notes.forbidden(sequence):
                forbidden.append((place, np.array(ids), np.zeros(len(ids), dtype=np.float32)))
            if len(notes.biases):
                biases.append((place, notes.bias_ids, notes.biases))
            if notes.counts is not None and len(notes.counts.follow(sequence.tokens)):
                counts.append((place, notes.counts.ids, notes.counts.counts))
            if len(words) + len(forbidden) + len(biases) + len(counts) > before:
                rows.append(row)
        if not rows:
            return None
        params = [sequences[row].request.params for row in rows]
        penalties = [
            (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params
        ]
        return cls(
            np.array(rows),
            words,
            Entries.of(forbidden),
            Entries.of(biases),
            Entries.of(counts),
            np.array(penalties, dtype=np.float32).T,
        )

    def apply(self, logits: Tensor) -> Tensor:
        """The changed rows of ``logits`` [S, V], any float type: a float32 copy [C, V]."""
        changed = logits[_tensor(self.rows, logits)].float()
        self._mask(changed)
        if self.forbidden is not None:
            rows, ids, _ = self.forbidden.on(changed)
            changed[rows, ids] = -torch.inf
        if self.biases is not None:
            rows, ids, values = self.biases.on(changed)
            changed[rows, ids] += values
        if self.counts is not None:
            ops.penalize(changed, *self.counts.on(changed), *_tensor(self.penalties, changed))
        return changed

    def _mask(self, changed: Tensor) -> None:
        """Apply the masks in chunks of rows, so that the bits' temporaries stay small."""
        width, step = -(-changed.shape[1] // WORD), ops.chunk_rows(changed)
        for start in range(0, len(self.words), step):
            chunk = self.words[start : start + step]
            words = np.zeros((len(chunk), width), dtype=np.int32)
            for row, (_, mask) in zip(words, chunk, strict=True):
                row[: len(mask)] = mask[:width]
            places = _tensor(np.array([place for place, _ in chunk]), changed)
            masked = changed[places]
            ops.forbid_unset(masked, _tensor(words, changed))
            changed[places] = masked


def notes_of(sequence: Sequence, *, masked: bool) -> Notes | None:
    """The sequence's notes, made at its first step; None when nothing changes its logits."""
    if sequence.sampler_notes is None:
        p = sequence.request.params
        changes = p.penalizes or p.min_tokens or p.logit_bias or p.bad_words or p.allowed_token_ids
        sequence.sampler_notes = Notes(sequence) if changes else _NO_NOTES
    if masked and sequence.sampler_notes is _NO_NOTES:
        sequence.sampler_notes = Notes(sequence)
    return sequence.sampler_notes or None


def _both(first: Array | None, second: Array | None) -> Array | None:
    """The mask of what both masks allow; None allows everything."""
    if first is None or second is None:
        return second if first is None else first
    width = min(len(first), len(second))
    both: Array = first[:width] & second[:width]
    return both


def _tensor(values: Array, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
