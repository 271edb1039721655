"""The way from logits to tokens: the sampling parameters of a step's rows, and the order they apply
in.

Owns the parameters of a step's sampling rows as vectors (SamplingBatch) and the one function that
turns logits into tokens (``sample``). The arithmetic is in ``fairlead_kernels.sampling.sample``;
nothing here loops over rows, and a filter that no row uses is not computed (a greedy batch is one
argmax).

The order is vLLM V1's: the changes of logits, in the order that ``logit_changes`` states;
temperature; min-p; top-k; top-p over the rest; the draw. Log-probabilities are those of the raw
logits, before any change. Two documented differences: tokens that tie with the last one a filter
keeps are kept as well, and a draw is a pure function of (seed, choice index, position, token), see
``fairlead_kernels.sampling.sample``.

Only rows with NaN, plus infinity or no value above minus infinity are flagged: models use minus
infinity to mask the padded end of their vocabulary.
"""

import functools
import math
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels.sampling import sample as ops
from fairlead_kernels.sampling.sample_rows import NOT_FINITE, NOTHING_LEFT
from fairlead_kernels.sampling.splitmix64 import GOLDEN, MUL1, MUL2
from fairlead_runtime.device.sampling.logits_processors import LogitChanges
from fairlead_runtime.request.logprobs import TokenLogprobs
from fairlead_runtime.request.sequence import NOTHING_ALLOWED, Failure, Sequence

NON_FINITE = Failure("the model's logits for this request are not finite")
# By what stands for the token of a row that has none.
FAILURES = {NOT_FINITE: NON_FINITE, NOTHING_LEFT: NOTHING_ALLOWED}
# A lower temperature counts as 0, as in vLLM: the division would overflow float32.
GREEDY_BELOW = 1e-5

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Draws:
    """Parameters of the rows that draw at random: vectors of length R, on the host.

    ``rows`` int64: their places in the batch; ``temperature`` float32; ``min_cut`` float32:
    log(min_p), -inf where off; ``top_k`` int64, 0 where off; ``top_p`` float64, 1 where off;
    ``keys`` uint64: one per draw.
    """

    rows: Array
    temperature: Array
    min_cut: Array
    top_k: Array
    top_p: Array
    keys: Array


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of one step's rows, in the order of their logits.

    ``changes`` is None when no row changes its logits. ``draws`` are of the rows without changes,
    ``changed_draws`` of those in ``changes``, with places in ``changes.rows``; each is None when
    all its rows are greedy. ``logprob_rows`` are the rows that request log-probabilities,
    ``logprob_counts`` how many.
    """

    size: int
    draws: Draws | None
    changes: LogitChanges | None
    changed_draws: Draws | None
    logprob_rows: list[int]
    logprob_counts: list[int]

    @classmethod
    def of(
        cls, sequences: abc.Sequence[Sequence], masks: Mapping[int, Array] | None = None
    ) -> "SamplingBatch":
        """The batch of sequences whose next token, at position ``len(tokens)``, is sampled in this
        step.

        ``masks``: by sequence id, the tokens that structured output allows next, as int32 words
        [ceil(vocabulary / 32)]: token i is bit i % 32 of word i // 32, lowest bit first, as
        xgrammar and llguidance lay it out. Sequences without an entry may take any token.
        """
        params = [s.request.params for s in sequences]
        changes = LogitChanges.of(sequences, masks or {})
        changed: dict[int, int] = {}
        if changes is not None:
            changed = {row: place for place, row in enumerate(changes.rows.tolist())}
        plain: list[tuple[int, Sequence]] = []
        drawing: list[tuple[int, Sequence]] = []
        for row, p in enumerate(params):
            if p.temperature >= GREEDY_BELOW:
                if row in changed:
                    drawing.append((changed[row], sequences[row]))
                else:
                    plain.append((row, sequences[row]))
        logprob_rows = [i for i, p in enumerate(params) if p.logprobs is not None]
        return cls(
            size=len(params),
            draws=_draws(plain),
            changes=changes,
            changed_draws=_draws(drawing),
            logprob_rows=logprob_rows,
            logprob_counts=[params[i].logprobs or 0 for i in logprob_rows],
        )


def _draws(rows: abc.Sequence[tuple[int, Sequence]]) -> Draws | None:
    """The draws of the sequences that draw, each with its place."""
    if not rows:
        return None
    drawing = [sequence for _, sequence in rows]
    params = [s.request.params for s in drawing]
    with np.errstate(divide="ignore"):  # log(0) = -inf is "off"
        min_cut = np.log(np.array([p.min_p for p in params])).astype(np.float32)
    return Draws(
        rows=np.array([place for place, _ in rows]),
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        min_cut=min_cut,
        top_k=np.array([p.top_k for p in params]),
        top_p=np.array([p.top_p for p in params]),
        keys=draw_keys(
            np.array([s.request.seed for s in drawing], dtype=np.int64),
            np.array([s.choice for s in drawing]),
            np.array([len(s.tokens) for s in drawing]),
        ),
    )


def draw_keys(seeds: Array, choices: Array, positions: Array) -> Array:
    """One uint64 per draw from int64 vectors: splitmix64 over seed, choice index and position in
    turn.
    """
    key = _mix64(seeds.view(np.uint64))
    key = _mix64(key ^ choices.view(np.uint64))
    return _mix64(key ^ positions.view(np.uint64))


def _mix64(words: Array) -> Array:
    """``seeds.mix64`` for uint64 vectors."""
    x: Array = words + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MUL1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MUL2)
    x ^= x >> np.uint64(31)
    return x


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One step's sampled tokens, still on the device.

    ``tokens`` [S] int64, negative where no token could be chosen; ``finite`` [S] bool: one could.
    For the L rows that request log-probabilities: ``chosen`` [L] float32, ``ranks`` [L] int64,
    ``top_ids`` and ``top_logprobs`` [L, k] for the largest k requested.
    """

    batch: SamplingBatch
    tokens: Tensor
    finite: Tensor
    chosen: Tensor | None = None
    ranks: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def outcomes(self) -> list[tuple[int, TokenLogprobs | None, Failure | None]]:
        """Per row (token, logprobs or None, failure or None), as Python values: waits for the
        device once.
        """
        tokens: list[int] = self.tokens.tolist()
        logprobs: dict[int, TokenLogprobs] = self._logprobs(tokens)
        if min(tokens, default=0) >= 0:
            return [(token, logprobs.get(i), None) for i, token in enumerate(tokens)]
        return [
            (token, logprobs.get(i), None) if token >= 0 else (-1, None, FAILURES[token])
            for i, token in enumerate(tokens)
        ]

    def _logprobs(self, tokens: list[int]) -> dict[int, TokenLogprobs]:
        if (
            self.chosen is None
            or self.ranks is None
            or self.top_ids is None
            or self.top_logprobs is None
        ):
            return {}
        columns = zip(
            self.batch.logprob_rows,
            self.batch.logprob_counts,
            self.chosen.tolist(),
            self.ranks.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            strict=True,
        )
        return {
            row: TokenLogprobs(tokens[row], chosen, rank, tuple(ids[:count]), tuple(values[:count]))
            for row, count, chosen, rank, ids, values in columns
        }


@torch.inference_mode()
def sample(logits: Tensor, batch: SamplingBatch) -> SampledTokens:
    """One token for each row of ``logits`` [S, V], any float type; rows are in the order of
    ``batch``.
    """
    if logits.shape[0] != batch.size or not 0 < logits.shape[1] <= ops.MAX_VOCABULARY:
        raise ValueError(f"logits of shape {tuple(logits.shape)} for {batch.size} sampling rows")
    tokens, finite = _choose(logits, batch.draws)
    if batch.changes is not None:
        rows = torch.from_numpy(batch.changes.rows).to(logits.device)
        # The only place where logits change. A copy: the log-probabilities are of the raw ones.
        chosen, has_token = _choose(batch.changes.apply(logits), batch.changed_draws)
        tokens[rows] = chosen.masked_fill(~has_token, NOTHING_LEFT)
    tokens = tokens.masked_fill(~finite, NOT_FINITE)
    if not batch.logprob_rows:
        return SampledTokens(batch, tokens, tokens >= 0)
    values = logprobs_of(
        logits, batch.logprob_rows, tokens[batch.logprob_rows], max(batch.logprob_counts)
    )
    return SampledTokens(batch, tokens, tokens >= 0, *values)


def _choose(logits: Tensor, draws: Draws | None) -> tuple[Tensor, Tensor]:
    """Each row's token [R] int64, and whether its likeliest logit is finite [R]."""
    top, tokens = ops.likeliest(logits)
    finite = torch.isfinite(top)
    return (tokens if draws is None else _draw(logits, top, tokens, draws)), finite


def _draw(logits: Tensor, top: Tensor, best: Tensor, draws: Draws) -> Tensor:
    """``best`` [S], the likeliest tokens, with those of the rows in ``draws`` replaced by a draw.

    Works in chunks of rows, so that temporaries stay small.
    """
    tokens, rows = best.clone(), torch.from_numpy(draws.rows).to(logits.device)
    step = ops.chunk_rows(logits)
    for start in range(0, len(rows), step):
        chunk = slice(start, start + step)
        chosen = rows[chunk]
        tokens[chosen] = _draw_chunk(logits[chosen], top[chosen], best[chosen], draws, chunk)
    return tokens


def _draw_chunk(logits: Tensor, top: Tensor, best: Tensor, draws: Draws, chunk: slice) -> Tensor:
    scores = scores_of(logits, top, draws.temperature[chunk])
    cut = cut_of(scores, draws.min_cut[chunk], draws.top_k[chunk], draws.top_p[chunk])
    halves = torch.from_numpy(draws.keys[chunk].view(np.int32).reshape(-1, 2)).to(logits.device)
    return ops.draw_tokens(
        scores, best, cut, halves[:, 0], halves[:, 1], _token_hashes(logits.shape[1], logits.device)
    )


def scores_of(logits: Tensor, top: Tensor, temperature: Array) -> Tensor:
    """``(logits - row maximum) / temperature``, float32, at most 0: [R, V] from [R, V], [R] and
    [R].
    """
    scores = logits.float() - top.float()[:, None]
    if (temperature != 1).any():
        scores /= torch.from_numpy(temperature).to(logits.device)[:, None]
    return scores


def cut_of(scores: Tensor, min_cut: Array, top_k: Array, top_p: Array) -> Tensor | None:
    """The smallest score that each row's filters keep, [R]: min-p, then top-k, then top-p over the
    rest.

    None when no row has a filter.
    """
    if not (top_k.any() or (top_p < 1).any() or (min_cut > -math.inf).any()):
        return None
    cut = torch.from_numpy(min_cut).to(scores.device)
    cut = _filter_top_k(scores, cut, np.minimum(top_k, scores.shape[1]))
    return _filter_top_p(scores, cut, top_p)


def _filter_top_k(scores: Tensor, cut: Tensor, top_k: Array) -> Tensor:
    filtered = np.flatnonzero(top_k)
    if not len(filtered):
        return cut
    rows = torch.from_numpy(filtered).to(scores.device)
    k = torch.from_numpy(top_k[filtered]).to(scores.device)
    kth = ops.top_k_cut(_take(scores, rows), k, int(top_k.max()))
    return cut.index_copy(0, rows, torch.maximum(cut[rows], kth))


def _filter_top_p(scores: Tensor, cut: Tensor, top_p: Array) -> Tensor:
    filtered = np.flatnonzero(top_p < 1)
    if not len(filtered):
        return cut
    rows = torch.from_numpy(filtered).to(scores.device)
    p = torch.from_numpy(top_p[filtered]).to(scores.device)
    return cut.index_copy(0, rows, ops.top_p_cut(_take(scores, rows), cut[rows], p))


def _take(scores: Tensor, rows: Tensor) -> Tensor:
    return scores if len(rows) == len(scores) else scores[rows]


@functools.lru_cache(maxsize=8)
def _token_hashes(vocabulary: int, device: torch.device) -> Tensor:
    return ops.hash_tokens(vocabulary, device)


def logprobs_of(
    logits: Tensor, rows: list[int], tokens: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute for L ``rows`` of raw ``logits`` [S, V]: the log-probability [L] float32 and rank [L]
    of ``tokens`` [L] int64, and the ids and log-probabilities [L, count] of the likeliest.

    Works in chunks of rows, so that temporaries stay small. A negative token's values mean nothing.
    """
    step = ops.chunk_rows(logits)
    chunks = [
        ops.logprobs(logits[rows[at : at + step]].float(), tokens[at : at + step], count)
        for at in range(0, len(rows), step)
    ]
    chosen, ranks, ids, values = (torch.cat(column) for column in zip(*chunks, strict=True))
    return chosen, ranks, ids, values
