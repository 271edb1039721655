"""Sampling the rows of a step on the device, and the way of their tokens to the host.

Owns the sequence table and all that sampling by its rows writes: tokens, log-probabilities, and the
host memory they arrive in. Steps of decodes and steps with prompts share one, so that a sequence's
row goes on from one kind to the other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from fairlead_kernels.sampling import sample, sample_rows
from fairlead_kernels.sampling.sample_rows import FindCuts, RowLogprobs, RowMasks
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.sampling.mask_upload import MaskPacket
from fairlead_runtime.device.sampling.sampling_mode import GENERAL, DrawKind, SamplingMode
from fairlead_runtime.device.sampling.sequence_table import SequenceTable
from fairlead_runtime.device.sampling.token_readback import SampledStep, TokenReadback
from fairlead_runtime.grammar.guides import Masks
from fairlead_runtime.request.sequence import MAX_LOGPROBS, Failure
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.sizing.terms import list_room

WaitForMasks = Callable[[], Masks]


class RowSampler:
    """The sampler of steps of at most ``max_rows`` rows, padding included, of ``table``'s
    sequences. The model's logits have ``width`` columns; ``padding_bytes``: of the unit that
    padding writes to.

    ``nbytes``: on the device, as ``sizing.terms.decode_state`` plans them. ``find_cuts``: what
    finds the cuts of a step's filters; a graph keeps what found them when it was captured.
    """

    def __init__(
        self,
        table: SequenceTable,
        max_rows: int,
        width: int,
        device: torch.device,
        padding_bytes: int,
    ) -> None:
        self.table = table
        self.find_cuts: FindCuts = sample_rows.cut_of  # docs/design/0017-cuts-on-gpus.md
        self._padding_bytes = padding_bytes
        # The table's row of each row of the step, and their tokens.
        self.index = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._tokens = torch.zeros_like(self.index)
        # The likeliest tokens whose log-probabilities a step gives: what requests may ask for.
        self._likeliest = min(MAX_LOGPROBS, width)
        self._values = torch.zeros(max_rows, 1 + self._likeliest, device=device)
        self._numbers = torch.zeros_like(self._values, dtype=torch.int64)
        # The newest step's first; nobody may have looked at the other's tokens yet.
        self._readbacks = [TokenReadback(max_rows, self._likeliest, device) for _ in range(2)]
        self._hashes = sample.hash_tokens(width, device)
        self._masks = MaskPacket(width, device)

    @classmethod
    def of(
        cls,
        model: PagedModel,
        cache: CacheStorage,
        *,
        sequences: int,
        max_model_len: int,
        listed: int | None = None,
        max_rows: int = 0,
    ) -> Self:
        """A sampler for at most ``sequences`` sequences of at most ``max_model_len`` tokens, in
        steps of at most ``max_rows`` rows where these are more. The last unit of ``cache`` is for
        padding. A row's changes of logits are at most ``listed`` ids, by default as many as
        planned.
        """
        width, device = model.logits_width, model.device
        table = SequenceTable(
            cache.groups,
            cache.block_size,
            sequences=sequences,
            blocks=-(-max_model_len // cache.block_size),
            listed=list_room(width) if listed is None else listed,
            padding_unit=cache.units - 1,
            device=device,
        )
        return cls(table, max(sequences, max_rows), width, device, cache.unit_nbytes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is on the device."""
        step = self.index, self._tokens, self._values, self._numbers
        return *step, self._hashes, *self.table.tensors

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether all that these rows sample is sampled on the device, and they ask for no more."""
        return not any(
            row.sequence.scores_prompt or (row.samples and self.table.mode_of(row) is GENERAL)
            for row in rows
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors) + self._padding_bytes

    @contextmanager
    def forgetting(self, rows: Sequence[Row]) -> Iterator[None]:
        """A step of these rows that raises may have run or not."""
        try:
            yield
        except BaseException:
            self.table.forget(rows)
            raise

    def sample(
        self, logits: Tensor, index: Tensor, mode: SamplingMode, masks: RowMasks | None = None
    ) -> None:
        """Queue the choice of a token for each of the table's rows ``index`` int64 [B] from its
        ``logits`` [B, width], and append it there. ``masks`` are those of a mode that needs some.
        """
        size, table = len(index), self.table
        tokens = sample_rows.choose(
            logits,
            None if mode.draw is DrawKind.GREEDY else table.parameters(index),
            self._hashes,
            find_cuts=self.find_cuts if mode.draw is DrawKind.FILTERED else None,
            changes=table.changes(index) if mode.changes else None,
            masks=masks,
        )
        if mode.logprobs:
            values, numbers = sample_rows.logprobs(logits, tokens, self._likeliest)
            self._values[:size].copy_(values)
            self._numbers[:size].copy_(numbers)
        self._tokens[:size].copy_(tokens)
        table.advance(index, tokens, counts=mode.changes)

    def draw(
        self, rows: Sequence[Row], logits: Tensor, mode: SamplingMode, masks: WaitForMasks
    ) -> SampledStep:
        """Draw for the rows of the newest step, entered in the table, with what ``masks`` gives
        where ``mode`` needs some; and queue the copy of their tokens.
        """
        sent: RowMasks | None = None
        failed: Mapping[int, Failure] = {}
        if mode.masked:
            words, failed = masks()
            sent = self._masks.send([row.sequence for row in rows], words)
        if rows:
            self.sample(logits, self.index[: len(rows)], mode, sent)
        return SampledStep(self.fetch(len(rows), mode), failed)

    def fetch(self, count: int, mode: SamplingMode) -> TokenReadback:
        """Queue the copy of what the newest step sampled to the host; it is there until the next
        step but one is fetched.
        """
        self._readbacks.reverse()
        tokens, logprobs = self.newest(count)
        self._readbacks[0].fetch(tokens, logprobs if mode.logprobs else None)
        return self._readbacks[0]

    def newest(self, count: int) -> tuple[Tensor, RowLogprobs]:
        """Tokens that the newest step has sampled, on the device; it is there until the next."""
        logprobs = RowLogprobs(self._values[:count], self._numbers[:count])
        return self._tokens[:count], logprobs
