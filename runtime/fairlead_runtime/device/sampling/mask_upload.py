"""What the rows of a step may take where only the host knows it, once it knows their tokens.

Owns how a sequence's mask follows from its grammar and its parameters, and the packet that the
masks of a step are sent in.
"""

from collections import abc
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fairlead_kernels.sampling.sample_rows import RowMasks
from fairlead_runtime.device.sampling.logits_processors import WORD, notes_of
from fairlead_runtime.device.sampling.sampling_mode import is_masked
from fairlead_runtime.request.sequence import Sequence

Array = np.ndarray[Any, np.dtype[Any]]


class MaskPacket:
    """Sends masks of ``width`` tokens to ``device``. The next ones may be sent when the step of
    those before is done.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self._words = -(-width // WORD)
        self._device = device
        self._packet = torch.empty(0, dtype=torch.int32)

    def send(self, sequences: abc.Sequence[Sequence], words: Mapping[int, Array]) -> RowMasks:
        """The masks of R rows, queued: ``words``, by sequence id, are those of their grammars as in
        ``SamplingBatch.of``; a row without may take what its parameters allow.
        """
        masked = [place for place, sequence in enumerate(sequences) if is_masked(sequence)]
        rows, size = len(sequences), (1 + len(masked)) * self._words
        if rows + size > len(self._packet):
            pinned = self._device.type == "cuda"
            self._packet = torch.empty(2 * (rows + size), dtype=torch.int32, pin_memory=pinned)
        places, masks = torch.split(self._packet[: rows + size], [rows, size])
        table = masks.numpy().reshape(-1, self._words)
        table[0] = -1  # of the rows that may take any token
        places.zero_()
        places.numpy()[masked] = np.arange(1, 1 + len(masked))
        for mask, place in zip(table[1:], masked, strict=True):
            _write(mask, sequences[place], words.get(sequences[place].id))
        sent = self._packet[: rows + size].to(self._device, non_blocking=True)
        return RowMasks(sent[rows:].view(-1, self._words), sent[:rows].long())


def _write(mask: Array, sequence: Sequence, words: Array | None) -> None:
    """Into ``mask`` int32 [words of the vocabulary] what the sequence may take next."""
    mask[:] = -1 if words is None else 0
    if words is not None:
        mask[: len(words)] = words[: len(mask)]
    notes = notes_of(sequence, masked=True)
    if notes is None:
        return
    ids = np.array(notes.forbidden(sequence), dtype=np.int64)
    ids = ids[ids < len(mask) * WORD]
    bits = np.left_shift(np.uint32(1), (ids % WORD).astype(np.uint32))
    np.bitwise_and.at(mask.view(np.uint32), ids // WORD, ~bits)
