"""Drawing one token per row of logits: cuts, counter-based noise, and the Gumbel-max draw.

Owns the arithmetic of sampling on tensors. Knows no request and keeps no random state: a row's draw
is a function of its own logits, its own parameters and its 64-bit key, so neither its place in the
batch nor its batch mates matter. Three choices make that exact rather than likely:

- Noise is a hash of (key, token). The hash uses 32-bit integers only, so its bits are the same on
  every device.
- Every filter is a *cut*, the smallest score that stays. Tokens that tie with it stay too: a sort
  does not define which of two equal scores comes first.
- Probability mass is summed in fixed point. Integer sums do not depend on their order, float sums
  do (and a reduction is ordered differently for one row than for many).

Scores here are ``(logits - row maximum) / temperature``: at most 0, and 0 for the likeliest token.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

UNIFORM_BITS = 31
# The extremes of `gumbel`: the smallest and largest uniform it takes are 2^-32 and 1 - 2^-24.
GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-32)))
GUMBEL_MIN = -math.log(-math.log1p(-(1 - 2.0**-24)))
# One unit of probability mass is 2^-40 of the likeliest token's; rows up to 2^22 tokens sum without
# overflow.
MASS_BITS = 40
MAX_VOCABULARY = 2**22
# Slack on bounds that only skip work, larger than any rounding error in them.
SLACK = 1e-2
# A gathered candidate costs as much as eight in place, so only few candidates are gathered.
SPARSE = 8
SMALL = 1 << 14
# Elements that one pass works on: on the CPU its few temporaries then stay in the cache.
CPU_CHUNK = 1 << 17
DEVICE_CHUNK = 1 << 26
ALIGNED = 8  # elements: where a row begins, since torch's kernels read 16 bytes at a time


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


# lowbias32 of Chris Wellons' hash-prospector: the least biased known hash of two multiplications.
_MUL1 = 0x7FEB352D
_MUL2 = _signed(0x846CA68B)


def _xor_shift(x: Tensor, bits: int) -> Tensor:
    """``x ^ (x >>> bits)`` in place; torch shifts int32 arithmetically, hence the mask."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def hash_tokens(vocabulary: int, device: torch.device) -> Tensor:
    """One int32 hash per token id, [vocabulary], which ``keyed_hash`` combines with a row's key."""
    x = torch.arange(1, vocabulary + 1, dtype=torch.int32, device=device)
    x = _xor_shift(x, 16).mul_(_MUL1)
    x = _xor_shift(x, 15).mul_(_MUL2)
    return _xor_shift(x, 16)


def keyed_hash(hashes: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Uniform integers in [0, 2^31) from token hashes and the halves of row keys, all int32,
    broadcast together.

    lowbias32 with the key's low half mixed in before it and the high half between its rounds.
    """
    x = hashes ^ low
    x = _xor_shift(x, 16).mul_(_MUL1).bitwise_xor_(high)
    x = _xor_shift(x, 15).mul_(_MUL2)
    return _xor_shift(x, 16).bitwise_and_((1 << UNIFORM_BITS) - 1)


def log_exponential(integers: Tensor) -> Tensor:
    """The logarithm of standard exponential noise, float32, from integers in [0, 2^31); its
    negative is Gumbel noise.

    ``log(-log1p(-u))`` with u = (integer + 1/2) / 2^31: tokens that win have a small u, where
    float32 is finest. u is kept below 1, so the noise is always finite.
    """
    minus_u = (
        integers.to(torch.float32).add_(0.5).mul_(-(2.0**-UNIFORM_BITS)).clamp_(min=2.0**-24 - 1)
    )
    return minus_u.log1p_().neg_().log_()


def likeliest(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest value [R] and its first index [R] int64, from [R, V]; a NaN is larger than
    all.

    In one pass: torch's argmax alone takes six times as long on a CPU.
    """
    best = values.max(dim=-1)
    return best.values, best.indices


def top_k_cut(scores: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """The top_k-th largest score of each row.

    ``scores`` [R, V] float32, ``top_k`` [R] int64 in 1..V, ``largest`` the largest of them. Returns
    [R].
    """
    best = torch.topk(scores, largest, dim=-1, sorted=True).values
    return best.gather(1, top_k[:, None] - 1)[:, 0]


def top_p_cut(scores: Tensor, floor: Tensor, top_p: Tensor) -> Tensor:
    """The smallest score of each row's nucleus: the likeliest tokens that together hold ``top_p``
    of the mass.

    ``scores`` [R, V] float32, ``floor`` [R] float32 (scores below it have no mass), ``top_p`` [R]
    float64 in (0, 1). Returns [R] float32. (Holtzman et al., "The Curious Case of Neural Text
    Degeneration", 2020.)

    Instead of sorting, the cut is found digit by digit: scores are at most 0, so the bits of their
    absolute values order them, and the mass of each digit shows in which one the wanted mass is
    reached.
    """
    row, score = _at_or_above(scores, floor)
    mass = score.exp().mul_(2.0**MASS_BITS).long()
    bits = score.abs().view(torch.int32)
    count = scores.shape[0]
    target, cut = None, torch.zeros(count, dtype=torch.int32, device=scores.device)
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        digit = (bits >> shift).bitwise_and_((1 << width) - 1)
        key = row * (1 << width) + digit
        sums = (
            mass.new_zeros(count << width)
            .scatter_add_(0, key, mass)
            .view(count, -1)
            .cumsum_(dim=-1)
        )
        if target is None:
            total = sums[:, -1]
            # float64 may round up beyond the total.
            target = torch.minimum((total.double() * top_p).ceil_().long(), total)
        place = (sums < target[:, None]).sum(dim=-1, keepdim=True).clamp_(max=sums.shape[1] - 1)
        target = target - torch.where(place > 0, sums.gather(1, place - 1 + (place == 0)), 0)[:, 0]
        cut = (cut << width) + place[:, 0].to(torch.int32)
        bucket = (digit == place[:, 0][row]).nonzero()[:, 0]
        row, bits, mass = row[bucket], bits[bucket], mass[bucket]
    return cut.view(torch.float32).neg_()


def _at_or_above(scores: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Row [N] int64 and score [N] of everything at or above the row's floor."""
    width = scores.shape[1]
    above = scores >= floor[:, None]
    if int(above.sum()) == above.numel():
        rows = torch.arange(scores.shape[0], device=scores.device)
        return rows[:, None].expand(-1, width).reshape(-1), scores.reshape(-1)
    places = above.view(-1).nonzero()[:, 0]
    return places // width, scores.reshape(-1)[places]


def draw_tokens(
    scores: Tensor,
    best: Tensor,
    cut: Tensor | None,
    low: Tensor,
    high: Tensor,
    hashes: Tensor,
) -> Tensor:
    """The token with the largest ``score + noise`` among those at or above the cut: one draw from
    their softmax.

    ``scores`` [R, V] float32, ``best`` [R] int64 the place of each row's 0, ``cut`` [R] float32 at
    most 0 or None where nothing is cut, ``low`` and ``high`` [R] int32, ``hashes`` [V] int32
    from ``hash_tokens``. Returns [R] int64. Equal sums go to the smallest id. (The Gumbel-max
    trick: Gumbel 1954.)
    """
    # On a device a count would make the host wait; there, and for few scores, the dense form costs
    # less.
    if scores.device.type != "cpu" or scores.numel() <= SMALL:
        return _draw_dense(scores, cut, low, high, hashes)
    # A token that cannot reach the likeliest token's sum even with the largest noise is not a
    # candidate.
    lead = log_exponential(keyed_hash(hashes[best], low, high)).neg_()
    bound = lead - (GUMBEL_MAX + SLACK)
    candidates = scores >= (bound if cut is None else torch.maximum(cut, bound))[:, None]
    if int(candidates.sum()) * SPARSE > candidates.numel():
        return _draw_dense(scores, cut, low, high, hashes)
    return _draw_sparse(scores, candidates, low, high, hashes)


def _draw_dense(
    scores: Tensor, cut: Tensor | None, low: Tensor, high: Tensor, hashes: Tensor
) -> Tensor:
    total = scores - log_exponential(keyed_hash(hashes[None, :], low[:, None], high[:, None]))
    if cut is not None:
        total.masked_fill_(scores < cut[:, None], -math.inf)
    return likeliest(total)[1]


def _draw_sparse(
    scores: Tensor, candidates: Tensor, low: Tensor, high: Tensor, hashes: Tensor
) -> Tensor:
    rows, tokens = candidates.nonzero(as_tuple=True)
    total = scores[rows, tokens] - log_exponential(
        keyed_hash(hashes[tokens], low[rows], high[rows])
    )
    best = total.new_full((scores.shape[0],), -math.inf).scatter_reduce_(0, rows, total, "amax")
    won = total == best[rows]
    first = tokens.new_full((scores.shape[0],), scores.shape[1])
    return first.scatter_reduce_(0, rows[won], tokens[won], "amin")


def forbid_unset(logits: Tensor, words: Tensor) -> None:
    """Set the tokens whose bit is not set to minus infinity, in place.

    ``logits`` [R, V] of a float type, ``words`` [R, ceil(V / 32)] int32: token i is bit i % 32 of
    word i // 32, the lowest bit first (the layout of xgrammar and llguidance).
    """
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words[:, :, None] >> shifts).bitwise_and_(1).view(words.shape[0], -1)
    logits.masked_fill_(bits[:, : logits.shape[1]] == 0, -math.inf)


def penalize(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Change the logits of N distinct (row, token) pairs that occurred before, in place.

    ``logits`` [R, V] float32; ``rows`` and ``ids`` [N] int64; ``counts`` [N] float32, how often the
    row's output holds the token, 0 where only its prompt does; the penalties [R] float32.
    Repetition divides positive logits and multiplies the others (Keskar et al., "CTRL", 2019), then
    frequency is subtracted as often as the token occurs, and presence once (OpenAI's formula).
    """
    values = logits[rows, ids]
    factor = repetition[rows]
    values = torch.where(values > 0, values / factor, values * factor)
    values -= frequency[rows] * counts
    values -= presence[rows] * (counts > 0)
    logits[rows, ids] = values


def logprobs(raw: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability [L] float32 and rank [L] int64 of ``tokens`` [L] int64, and the ids [L, k]
    int64 and log-probabilities [L, k] of the k = min(count, V) likeliest, best first, of raw
    float32 logits [L, V]. A negative token's values mean nothing.
    """
    # On a GPU torch begins each row's sum where that row is aligned: with another width the order
    # would depend on its place in the batch.
    width = raw.shape[1]
    missing = -width % ALIGNED
    rows = F.pad(raw, (0, missing), value=-math.inf) if missing else raw
    values = rows.log_softmax(dim=-1)[:, :width]
    at = tokens.clamp(min=0)[:, None]
    ranks = (raw > raw.gather(1, at)).sum(dim=-1) + 1
    top = values.topk(min(count, width), dim=-1)
    return values.gather(1, at)[:, 0], ranks, top.indices, top.values


def chunk_rows(logits: Tensor) -> int:
    """The number of rows of [S, V] logits to work on at once, at least 1."""
    elements = CPU_CHUNK if logits.device.type == "cpu" else DEVICE_CHUNK
    return max(1, elements // logits.shape[1])
