"""Runs a step's work on the device and returns its tokens.

Owns the path batch → forward pass → logits → sampling, and the cache's copies. Decides nothing.
"""

import math
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fairlead_kernels.interface.attention import AttentionBackend
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.batch import Batch, BatchBuilder
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.sampling.device_sampler import RowSampler, WaitForMasks
from fairlead_runtime.device.sampling.host_sampler import (
    NON_FINITE,
    SampledTokens,
    SamplingBatch,
    logprobs_of,
    sample,
)
from fairlead_runtime.device.sampling.sampling_mode import GREEDY, mode_of
from fairlead_runtime.device.step.decode_steps import DecodeSteps, is_decode
from fairlead_runtime.device.step.follower_ranks import Followers
from fairlead_runtime.device.step.lost_device import lost_device
from fairlead_runtime.device.step.mixed_steps import MixedSteps
from fairlead_runtime.device.step.pending_step import PendingStep
from fairlead_runtime.grammar.guides import NO_MASKS, Guides, Masks
from fairlead_runtime.request.logprobs import TokenLogprobs
from fairlead_runtime.request.sequence import Failure, Sequence
from fairlead_runtime.scheduling.plan import Result, Row, Work

Sampler = Callable[[Tensor, SamplingBatch], SampledTokens]


MAX_LOGITS = 256
_NOTHING = Result(-1)


class ModelRunner:
    """Executes steps of one model on one cache, on the given attention. ``guides`` makes the masks
    of sequences with structured output; ``followers`` hold the other shards of a model that is
    split. ``decodes`` runs the steps of decodes alone, if not the way of all others. Steps that
    ``row_sampler`` takes can be launched, by default that of ``decodes``.

    One step at a time but for these, from one thread at a time. ``max_logits``: positions whose
    logits one forward pass may return; memory is planned for as many.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: CacheStorage,
        attention: AttentionBackend,
        sampler: Sampler = sample,
        *,
        max_logits: int = MAX_LOGITS,
        guides: Guides | None = None,
        followers: Followers | None = None,
        decodes: DecodeSteps | None = None,
        row_sampler: RowSampler | None = None,
    ) -> None:
        self._attention = attention
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._max_logits = max_logits
        self._guides = guides
        self._followers = followers
        self._decodes = decodes
        self._greedy_batch: Batch | None = None
        self._greedy = False  # whether every row of that batch takes its likeliest token
        if row_sampler is None and decodes is not None:
            row_sampler = decodes.sampler
        self._row_sampler = row_sampler
        self._mixed: MixedSteps | None = None
        self._newest: PendingStep | None = None
        # Of the steps that are not launched: they run while none is in flight.
        self._batches = self._builder()
        if row_sampler is not None:
            # What the device gets of a batch may not have been copied when the next one is built.
            batches = self._batches, self._builder()
            self._mixed = MixedSteps(model, cache, attention, row_sampler, batches, followers)

    @property
    def shares_answers(self) -> bool:
        """``PagedModel.shares_answers``."""
        return self._model.shares_answers

    def _builder(self) -> BatchBuilder:
        """A builder whose block tables are the sequence table's, where attention reads those."""
        groups, size = self._cache.groups, self._cache.block_size
        pinned = self._model.device.type == "cuda"
        table = None if self._row_sampler is None else self._row_sampler.table
        tables = None if table is None else table.tables_for(self._attention)
        if table is None or tables is None:
            # Followers are told what comes to the tables with each batch.
            return BatchBuilder(groups, size, pinned=pinned, follows=self._followers is None)
        return BatchBuilder(groups, size, pinned=pinned, tables=tables, rows=table.rows)

    def copy(self, work: Work) -> None:
        """The step's offload, restore and copy-on-write copies: once, before ``execute``, however
        often that runs.
        """
        with lost_device(self._model.device):
            if self._followers is not None and (work.offload or work.restore or work.copies):
                self._followers.copy(work)
            self._cache.copy(work)

    @torch.inference_mode()
    def execute(self, work: Work) -> Mapping[int, Result]:
        """The forward pass of ``work.rows``; by sequence id, a Result per row that samples or
        scores its prompt.

        Writes the same keys and values to the same slots when called again with the same rows, or
        with some of them. A row whose logits are not finite gets a Result with ``error``; the
        others are unaffected. Raises DeviceLostError when the device computes nothing any more.
        """
        if not work.rows:
            return {}
        with (
            lost_device(self._model.device),
            self._cache.step(work.rows),
            self._masks(work) as masks,
        ):
            return self._execute(work, masks)

    def launches(self, rows: abc.Sequence[Row]) -> bool:
        """Whether ``launch`` can take these rows."""
        return bool(rows) and self._row_sampler is not None and self._row_sampler.takes(rows)

    def launch(self, work: Work) -> Callable[[], Mapping[int, Result]]:
        """Queue the step and return what waits for its tokens. One may be in flight before it, of
        which the tokens before are known: so are its masks. Both raise what ``execute`` raises.
        """
        if self._mixed is None:
            raise ValueError("rows: this device launches no steps")
        newest, self._newest = self._newest, None
        launch = self._mixed.launch
        if self._decodes is not None and all(map(is_decode, work.rows)):
            launch = self._decodes.launch
        with lost_device(self._model.device):
            if newest is not None:
                newest.sample()
            self._newest = step = launch(work.rows, lambda: self._living_masks(work))
        return lambda: self._collect(step)

    def _collect(self, step: PendingStep) -> Mapping[int, Result]:
        with lost_device(self._model.device):
            return step.collect()

    def _living_masks(self, work: Work) -> Masks:
        """The masks of a launched step, for the sequences that have not ended since."""
        with self._masks(work.living()) as masks:
            return masks()

    @contextmanager
    def _masks(self, work: Work) -> Iterator[WaitForMasks]:
        """The masks of the step's rows, made by other threads inside the ``with`` block."""
        guided = [r.sequence for r in work.rows if r.samples and r.sequence.guide is not None]
        if self._guides is None or not guided:
            yield lambda: NO_MASKS
            return
        with self._guides.masks(guided) as masks:
            yield masks.result

    def _execute(self, work: Work, masks: WaitForMasks) -> Mapping[int, Result]:
        if not any(row.sequence.scores_prompt for row in work.rows):
            return self._run(work.rows, masks)
        results: dict[int, Result] = {}
        computed: set[int] = set()  # sequences of which a pass has computed tokens
        for rows in _passes(work.rows, self._max_logits):
            scored = self._score(rows, masks, frozenset(computed))
            computed |= {row.sequence.id for row in rows}
            for number, result in scored.items():
                before = results.get(number, _NOTHING)
                results[number] = result._replace(
                    failure=before.failure or result.failure, prompt=before.prompt + result.prompt
                )
        return results

    def _run(self, rows: list[Row], masks: WaitForMasks) -> Mapping[int, Result]:
        """One forward pass of rows of which none scores its prompt."""
        if self._decodes is not None and all(map(is_decode, rows)):
            sequences = [row.sequence for row in rows]
            return self._decodes.run(
                rows, lambda logits: self._begin(logits, sequences, masks), masks
            )
        with self._batches.forgetting(rows):
            batch = self._batches.build(rows)
            if self._chooses(batch):
                chosen = self._model.likeliest(batch, self._cache, self._attention)
                return _chosen(batch.sampling, *(x.tolist() for x in chosen))
            logits = self._forward(batch)
            return self._sample(logits, batch.sampling, masks)

    def _chooses(self, batch: Batch) -> bool:
        """Whether the model can choose the batch's tokens without giving their logits."""
        full_pass = self._model.full_pass
        if (
            full_pass is None
            or not full_pass.chooses
            or self._sampler is not sample
            or not batch.sampling
        ):
            return False
        if self._greedy_batch is not batch:  # a batch is of the same sequences for ever
            self._greedy_batch = batch
            self._greedy = all(mode_of(s, 0) == GREEDY for s in batch.sampling)
        return self._greedy

    def _forward(self, batch: Batch, keep: Tensor | None = None) -> Tensor:
        if self._followers is None:
            return self._model.forward(batch, self._cache, self._attention, keep)
        self._followers.forward(batch, keep)
        try:
            return self._model.forward(batch, self._cache, self._attention, keep)
        except Exception as error:
            raise self._followers.failure(error) from error

    def _sample(
        self, logits: Tensor, sequences: abc.Sequence[Sequence], masks: WaitForMasks
    ) -> dict[int, Result]:
        """A token for each of the sequences, in the order of their logits."""
        if not sequences:
            if self._model.device.type == "cuda":
                # The next build writes the host buffers that this step may still be reading;
                # sampling waits anyway.
                torch.cuda.current_stream(self._model.device).synchronize()
            return {}
        return self._begin(logits, sequences, masks)[1]()

    def _begin(
        self, logits: Tensor, sequences: abc.Sequence[Sequence], masks: WaitForMasks
    ) -> tuple[SampledTokens, Callable[[], dict[int, Result]]]:
        """The tokens on the device, and a function that waits for them."""
        words, failed = masks()
        sampled = self._sampler(logits, SamplingBatch.of(sequences, words))

        return sampled, lambda: _results(sequences, sampled, failed)

    def _score(
        self, rows: list[Row], masks: WaitForMasks, computed: frozenset[int]
    ) -> Mapping[int, Result]:
        """One forward pass that also returns the logits of all tokens of the rows that score.
        ``computed``: the sequences of which a pass before it has computed tokens.
        """
        scored_tokens: list[int] = []  # packed tokens whose logits are needed
        samples: list[int] = []  # places in ``scored_tokens``
        targets: list[tuple[Row, int]] = []  # the rows that score, with their first place
        end = 0
        for row in rows:
            end += row.count
            if row.sequence.scores_prompt:
                targets.append((row, len(scored_tokens)))
                scored_tokens += range(end - row.count, end)
            elif row.samples:
                scored_tokens.append(end - 1)
            if row.samples:
                samples.append(len(scored_tokens) - 1)
        keep = torch.tensor(scored_tokens, dtype=torch.int64)
        with self._batches.forgetting(rows):
            batch = self._batches.build(rows, continues=computed)
            logits = self._forward(batch, keep)
        results = self._sample(logits[samples], batch.sampling, masks)
        for row, first in targets:
            scored = _prompt_result(logits, row, first)
            sampled = results.get(row.sequence.id, scored)
            results[row.sequence.id] = sampled._replace(
                failure=scored.failure or sampled.failure, prompt=scored.prompt
            )
        return results


def _results(
    sequences: abc.Sequence[Sequence], sampled: SampledTokens, failed: Mapping[int, Failure]
) -> dict[int, Result]:
    """Results by sequence id; ``failed`` says why some could get no token."""
    outcomes = sampled.outcomes()
    return {
        sequence.id: Result(token, logprobs, failed.get(sequence.id, failure))
        for sequence, (token, logprobs, failure) in zip(sequences, outcomes, strict=True)
    }


def _chosen(
    sequences: abc.Sequence[Sequence], values: abc.Sequence[float], tokens: abc.Sequence[int]
) -> dict[int, Result]:
    """Results by sequence id, from each row's largest logit and its token."""
    return {
        sequence.id: Result(token) if math.isfinite(value) else Result(-1, failure=NON_FINITE)
        for sequence, value, token in zip(sequences, values, tokens, strict=True)
    }


def _passes(rows: abc.Sequence[Row], max_logits: int) -> Iterator[list[Row]]:
    """The rows in chunks of which none needs the logits of more than ``max_logits`` tokens. A row
    that scores its prompt may be spread over several, in order.
    """
    chunk = [row for row in rows if not row.sequence.scores_prompt]
    room = max(1, max_logits - sum(row.samples for row in chunk))
    for row in rows:
        if not row.sequence.scores_prompt:
            continue
        at, end = row.start, row.start + row.count
        while at < end:
            if not room:
                yield chunk
                chunk, room = [], max_logits
            size = min(end - at, room)
            chunk.append(Row(row.sequence, at, size, row.samples and at + size == end))
            at, room = at + size, room - size
    yield chunk


def _prompt_result(logits: Tensor, row: Row, first: int) -> Result:
    """The log-probabilities of the prompt's tokens that ``row`` predicts, but for those that are
    scored already. Its logits are those from place ``first`` on.
    """
    sequence = row.sequence
    count = sequence.request.params.prompt_logprobs or 0
    begin = max(row.start, sequence.scored)
    end = min(row.start + row.count, sequence.prompt_len - 1)
    if begin >= end:
        return _NOTHING
    places = [first + at - row.start for at in range(begin, end)]
    tokens = sequence.tokens[begin + 1 : end + 1]
    values = logprobs_of(logits, places, torch.tensor(tokens, device=logits.device), count)
    chosen, ranks, ids, likeliest = (column.tolist() for column in values)
    # NaN anywhere in a row's logits makes all its log-probabilities NaN.
    if any(math.isnan(value) for value in chosen):
        return Result(-1, failure=NON_FINITE)
    columns = zip(tokens, chosen, ranks, ids, likeliest, strict=True)
    return Result(
        -1,
        prompt=tuple(
            TokenLogprobs(token, value, rank, tuple(top_ids), tuple(top))
            for token, value, rank, top_ids, top in columns
        ),
    )
