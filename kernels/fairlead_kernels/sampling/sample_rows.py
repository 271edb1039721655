"""Sampling a step's rows in one pass whose parameters, shapes and results stay on the device.

Owns the dense form of what ``sample`` computes: no value is read on the host and no shape depends
on data, so the host never waits and a CUDA graph can hold it. Rows that filter nothing, and greedy
ones, take the same way as the others. Given the same logits it draws the tokens that ``sample``
draws: cuts are found in the same integers, keys and noise are made of the same ones.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fairlead_kernels.sampling import logit_edits, splitmix64
from fairlead_kernels.sampling import sample as ops

# Logits that one pass works on: its temporaries take up to 48 bytes for each.
CHUNK = 1 << 23
# What stands for the token of a row whose logits are not finite, and of one whose changes leave
# none.
NOT_FINITE, NOTHING_LEFT = -1, -2
# The digits of a float32's 31 bits without its sign: (bits below the digit, bits of the digit).
_DIGITS = ((20, 11), (10, 10), (0, 10))
_GOLDEN, _MUL1, _MUL2 = (
    word - (1 << 64) if word >= 1 << 63 else word
    for word in (splitmix64.GOLDEN, splitmix64.MUL1, splitmix64.MUL2)
)


class RowLogprobs(NamedTuple):
    """Log-probabilities under R rows' raw logits: ``values`` float32 [R, 1 + k], of the row's token
    and of the k likeliest, best first; ``numbers`` int64 [R, 1 + k]: the token's rank, the k ids.
    """

    values: Tensor
    numbers: Tensor


class RowParameters(NamedTuple):
    """Parameters of the sampling of R rows, all on the device of their logits.

    ``temperature`` float32, 0 for a greedy row; ``min_cut`` float32: log(min_p), -inf where off;
    ``top_k`` int64, 0 where off; ``top_p`` float64, 1 where off; ``keys`` int64, one per draw.
    """

    temperature: Tensor
    min_cut: Tensor
    top_k: Tensor
    top_p: Tensor
    keys: Tensor


class FindCuts(Protocol):
    """A form of ``cut_of``, all of which find the same cuts on one device."""

    def __call__(self, scores: Tensor, rows: RowParameters) -> Tensor:
        """The smallest score that each row's filters keep, [R], of scores [R, V]."""
        ...


class RowMasks(NamedTuple):
    """Masks of the tokens that R rows may take: row i those whose bits are set in
    ``words[places[i]]``, which are as ``sample.forbid_unset`` reads them. ``words`` int32
    [M, ceil(V / 32)], ``places`` int64 [R].
    """

    words: Tensor
    places: Tensor


def mix64(words: Tensor) -> Tensor:
    """One step of splitmix64 of int64 words, whose sums and products wrap (Steele, Lea and Flood,
    OOPSLA 2014).
    """
    x = words + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MUL1
    x = (x ^ _shifted(x, 27)) * _MUL2
    return x ^ _shifted(x, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """``words >>> bits``: torch shifts int64 arithmetically."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def cut_of(scores: Tensor, rows: RowParameters) -> Tensor:
    """The smallest score that each row's filters keep, [R]: min-p, then top-k, then top-p over the
    rest. Scores [R, V] float32 as in ``sample``.
    """
    bits = scores.abs().view(torch.int32)
    top_k = rows.top_k.clamp(max=scores.shape[1])
    kth = _reached(bits, torch.ones_like(bits, dtype=torch.int64), lambda _: top_k)
    cut = torch.maximum(rows.min_cut, torch.where(top_k > 0, kth, -math.inf))
    mass = scores.exp().mul_(2.0**ops.MASS_BITS).long()
    mass.masked_fill_(scores < cut[:, None], 0)
    nucleus = _reached(bits, mass, lambda total: _share(total, rows.top_p))
    return torch.where(rows.top_p < 1, nucleus, cut)


def choose(
    logits: Tensor,
    rows: RowParameters | None,
    hashes: Tensor,
    *,
    find_cuts: FindCuts | None = cut_of,
    changes: logit_edits.LogitEdits | None = None,
    masks: RowMasks | None = None,
) -> Tensor:
    """One token for each row of ``logits`` [R, V], any float type: int64 [R], NOT_FINITE where the
    row's largest logit is not finite, NOTHING_LEFT where ``changes`` and ``masks`` leave no finite
    one.

    ``rows`` None: all are greedy; ``find_cuts`` None: they filter nothing. ``hashes`` [V] int32
    from ``sample.hash_tokens``. Works in chunks of rows, so that temporaries stay small.
    """
    top, best = ops.likeliest(logits)
    tokens = best
    if rows is not None or changes is not None or masks is not None:
        choices = []
        for span in _chunks(logits):
            span_rows = None if rows is None else RowParameters(*(column[span] for column in rows))
            if changes is None and masks is None:
                choices.append(
                    _chosen(logits[span], top[span], best[span], span_rows, hashes, find_cuts)
                )
            else:
                changed = _changed(logits, changes, masks, span)
                highest, likeliest = ops.likeliest(changed)
                chosen = _chosen(changed, highest, likeliest, span_rows, hashes, find_cuts)
                choices.append(chosen.masked_fill(~torch.isfinite(highest), NOTHING_LEFT))
        tokens = choices[0] if len(choices) == 1 else torch.cat(choices)
    return tokens.masked_fill(~torch.isfinite(top), NOT_FINITE)


def _changed(
    logits: Tensor, changes: logit_edits.LogitEdits | None, masks: RowMasks | None, span: slice
) -> Tensor:
    """A float32 copy of the rows ``span`` [R, V] without what they must not take. A mask may come
    last: no change gives a forbidden token a finite logit.
    """
    if changes is None:
        changed = logit_edits.copy(logits[span])[:, : logits.shape[1]]
    else:
        changed = logit_edits.change(logits[span], changes.rows(span))
    if masks is not None:
        ops.forbid_unset(changed, masks.words[masks.places[span]])
    return changed


def _chunks(logits: Tensor) -> list[slice]:
    step = min(ops.chunk_rows(logits), max(1, CHUNK // logits.shape[1]))
    return [slice(at, at + step) for at in range(0, logits.shape[0], step)]


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> RowLogprobs:
    """Log-probabilities of ``tokens`` int64 [R] and of the ``count`` likeliest, or of as many as
    there are, under raw ``logits`` [R, V], any float type. A negative token's own mean nothing.
    Works in chunks of rows.
    """
    values, numbers = list[Tensor](), list[Tensor]()
    for span in _chunks(logits):
        chosen, rank, ids, top = ops.logprobs(logits[span].float(), tokens[span], count)
        values.append(torch.cat([chosen[:, None], top], dim=1))
        numbers.append(torch.cat([rank[:, None], ids], dim=1))
    return RowLogprobs(torch.cat(values), torch.cat(numbers))


def _chosen(
    logits: Tensor,
    top: Tensor,
    best: Tensor,
    rows: RowParameters | None,
    hashes: Tensor,
    find_cuts: FindCuts | None,
) -> Tensor:
    if rows is None:
        return best
    drawn = _draw(logits, top, rows, hashes, find_cuts)
    return torch.where(rows.temperature > 0, drawn, best)


def _draw(
    logits: Tensor, top: Tensor, rows: RowParameters, hashes: Tensor, find_cuts: FindCuts | None
) -> Tensor:
    divisor = torch.where(rows.temperature > 0, rows.temperature, 1.0)
    scores = (logits.float() - top.float()[:, None]).div_(divisor[:, None])
    # Before the noise: it takes most memory.
    cut = None if find_cuts is None else find_cuts(scores, rows)
    halves = rows.keys.view(torch.int32).view(-1, 2)
    noise = ops.log_exponential(ops.keyed_hash(hashes[None], halves[:, :1], halves[:, 1:]))
    total = scores - noise
    if cut is not None:
        total.masked_fill_(scores < cut[:, None], -math.inf)
    return ops.likeliest(total)[1]


def _share(total: Tensor, top_p: Tensor) -> Tensor:
    # float64 may round up beyond the total.
    return torch.minimum((total.double() * top_p).ceil_().long(), total)


def _reached(bits: Tensor, weights: Tensor, target_of: Callable[[Tensor], Tensor]) -> Tensor:
    """The score, from the largest on, at which the sum of weights reaches what is wanted of their
    total: [R] float32.

    ``bits`` [R, V] int32: the scores' absolute values, whose order they have; ``weights`` [R, V]
    int64. Digit by digit, as ``sample.top_p_cut``, over all scores in place of those left.
    """
    cut = torch.zeros_like(bits[:, 0])
    target: Tensor | None = None
    for shift, width in _DIGITS:
        digit = (bits >> shift).bitwise_and_((1 << width) - 1).long()
        sums = weights.new_zeros(bits.shape[0], 1 << width)
        sums = sums.scatter_add_(1, digit, weights).cumsum_(dim=-1)
        if target is None:
            target = target_of(sums[:, -1])
        place = (sums < target[:, None]).sum(dim=-1, keepdim=True).clamp_(max=sums.shape[1] - 1)
        before = torch.where(place > 0, sums.gather(1, (place - 1).clamp_(min=0)), 0)
        target = target - before[:, 0]
        cut = (cut << width) + place[:, 0].int()
        weights = torch.where(digit == place, weights, 0)
    return cut.view(torch.float32).neg()
