"""The arithmetic of drawing a token: the hash, the noise, the cuts and the draw, against plain
implementations.
"""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.sampling import sample as ops

CPU = torch.device("cpu")
MASK = 2**32 - 1


def plain_lowbias(x: int, inject: int = 0) -> int:
    x ^= x >> 16
    x = (x * 0x7FEB352D & MASK) ^ inject
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ (x >> 16)


def int32(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


@given(st.integers(0, MASK), st.integers(0, MASK))
def test_the_hash_equals_the_plain_integer_implementation(low: int, high: int) -> None:
    """Bit for bit: a seed must mean the same on every device and in every release."""
    hashes = ops.hash_tokens(300, CPU)
    got = ops.keyed_hash(hashes, torch.tensor(int32(low)), torch.tensor(int32(high))).tolist()
    for token in (0, 1, 7, 255, 299):
        word = plain_lowbias(token + 1)
        assert hashes[token].item() == int32(word)
        assert got[token] == plain_lowbias(word ^ low, high) & (2**31 - 1)


def keys(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randint(-(2**31), 2**31, (2, count), generator=generator).to(torch.int32)
    return pair[0], pair[1]


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Standard deviations of the statistic above its mean (normal approximation, > 30 cells)."""
    statistic = ((counts.double() - expected) ** 2 / expected).sum().item()
    free = counts.numel() - 1
    return (statistic - free) / math.sqrt(2 * free)


def test_hashes_are_uniform_over_tokens_and_over_keys() -> None:
    low, high = keys(64)
    h = ops.keyed_hash(ops.hash_tokens(32768, CPU)[None, :], low[:, None], high[:, None])
    for bits in range(0, 26, 5):
        cells = torch.bincount((h.flatten() >> bits) & 63, minlength=64)
        assert chi_square(cells, torch.full((64,), h.numel() / 64.0).double()) < 5


def test_one_bit_of_a_key_changes_every_bit_of_the_hash_half_of_the_time() -> None:
    hashes = ops.hash_tokens(65536, CPU)
    low, high = (k[:1] for k in keys(1))
    base = ops.keyed_hash(hashes, low, high)
    for bit in range(32):
        changed = base ^ ops.keyed_hash(hashes, low ^ int32(1 << bit), high)
        shares = torch.stack([((changed >> place) & 1).float().mean() for place in range(31)])
        assert (shares - 0.5).abs().max() < 0.03


def test_keys_that_share_a_half_give_unrelated_noise() -> None:
    """Pearson's correlation over 65,536 tokens, for 45 pairs of keys each way: 5 standard
    deviations at most.
    """
    hashes = ops.hash_tokens(65536, CPU)
    low, high = keys(10, seed=1)
    for lows, highs in ((low[:1].expand(10), high), (low, high[:1].expand(10))):
        noise = ops.log_exponential(ops.keyed_hash(hashes[None, :], lows[:, None], highs[:, None]))
        between = torch.corrcoef(noise.double()) - torch.eye(10)
        assert between.abs().max() < 5 / math.sqrt(65536)


def test_noise_is_finite_at_both_ends_and_within_its_bounds() -> None:
    ends = torch.tensor([0, 1, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    noise = -ops.log_exponential(ends)
    assert torch.isfinite(noise).all()
    assert noise.max().item() == pytest.approx(ops.GUMBEL_MAX, abs=1e-4)
    assert noise.min().item() == pytest.approx(ops.GUMBEL_MIN, abs=1e-4)


def test_noise_has_the_gumbel_distribution() -> None:
    """Kolmogorov and Smirnov's distance against exp(-exp(-x)), and its upper tail, from which
    the winners come.
    """
    low, high = keys(16, seed=3)
    h = ops.keyed_hash(ops.hash_tokens(32768, CPU)[None, :], low[:, None], high[:, None])
    noise = (-ops.log_exponential(h)).flatten().double().sort().values
    n = noise.numel()
    distance = ((-(-noise).exp()).exp() - torch.arange(n).double() / n).abs().max().item()
    assert distance < 1.95 / math.sqrt(n)  # 99.9 %
    beyond = (noise > 9).sum().item()
    expected = n * -math.expm1(-math.exp(-9))
    assert abs(beyond - expected) < 5 * math.sqrt(expected)


ScoreRows = list[list[float]]
GRID = st.integers(-64, 0).map(lambda step: step / 8)


@st.composite
def score_rows(draw: st.DrawFn) -> ScoreRows:
    """ScoreRows of scores on a coarse grid, so that ties are common; each has its 0 somewhere."""
    width = draw(st.integers(1, 12))
    rows = draw(st.lists(st.lists(GRID, min_size=width, max_size=width), min_size=1, max_size=4))
    return [[score - max(row) for score in row] for row in rows]


@given(score_rows(), st.data())
def test_the_top_k_cut_keeps_the_k_best_and_what_ties_with_the_last_of_them(
    rows: ScoreRows, data: st.DataObject
) -> None:
    k = [data.draw(st.integers(1, len(row))) for row in rows]
    cut = ops.top_k_cut(torch.tensor(rows), torch.tensor(k), max(k)).tolist()
    assert cut == [sorted(row, reverse=True)[count - 1] for row, count in zip(rows, k, strict=True)]


def plain_nucleus(row: list[float], floor: float, top_p: float) -> tuple[float, float]:
    """The nucleus' smallest score, and the least distance of a cumulated mass from top_p."""
    weights = {score: math.exp(score) * row.count(score) for score in row if score >= floor}
    total = sum(weights.values())
    reached, margin = 0.0, math.inf
    for score in sorted(weights, reverse=True):
        reached += weights[score] / total
        margin = min(margin, abs(reached - top_p))
        if reached >= top_p:
            return score, margin
    return min(weights), margin


@given(score_rows(), st.data())
def test_the_top_p_cut_keeps_the_smallest_set_that_holds_the_mass(
    rows: ScoreRows, data: st.DataObject
) -> None:
    p = [data.draw(st.floats(1e-6, 1 - 1e-6)) for _ in rows]
    floor = [data.draw(st.sampled_from([-math.inf, -8.0, -4.0, -1.0, 0.0])) for _ in rows]
    plain = [plain_nucleus(*each) for each in zip(rows, floor, p, strict=True)]
    assume(all(margin > 1e-6 for _, margin in plain))  # nearer, rounding may decide either way
    cut = ops.top_p_cut(
        torch.tensor(rows), torch.tensor(floor), torch.tensor(p, dtype=torch.float64)
    )
    assert cut.tolist() == [score for score, _ in plain]


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999, 0.9999999])
def test_the_top_p_cut_of_a_large_vocabulary_is_that_of_a_full_sort(
    spread: float, top_p: float
) -> None:
    generator = torch.Generator().manual_seed(int(spread * 10))
    logits = torch.randn(4, 20000, generator=generator) * spread
    scores = logits - logits.amax(dim=-1, keepdim=True)
    cut = ops.top_p_cut(
        scores, torch.full((4,), -math.inf), torch.full((4,), top_p, dtype=torch.float64)
    )
    probabilities = scores.double().softmax(dim=-1)
    kept = scores >= cut[:, None]
    mass = (probabilities * kept).sum(dim=-1)
    last = torch.where(kept, probabilities, 1.0).amin(dim=-1)
    assert (mass >= top_p - 1e-8).all()
    assert (mass - last < top_p + 1e-8).all()


def test_the_largest_top_p_below_one_keeps_all_tokens_with_mass() -> None:
    scores = torch.zeros(1, 200_003)
    scores[0, 5] = -30.0  # less than one unit of mass
    nearly = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert ops.top_p_cut(scores, torch.tensor([-math.inf]), nearly).tolist() == [0.0]


def test_the_mass_of_the_likeliest_token_alone_can_be_the_nucleus() -> None:
    cut = ops.top_p_cut(
        torch.tensor([[0.0, -1.0]]), torch.tensor([-math.inf]), torch.tensor([1e-9]).double()
    )
    assert cut.tolist() == [0.0]


def plain_draw(scores: Tensor, cut: Tensor, low: Tensor, high: Tensor, hashes: Tensor) -> Tensor:
    total = scores - ops.log_exponential(
        ops.keyed_hash(hashes[None, :], low[:, None], high[:, None])
    )
    return total.masked_fill(scores < cut[:, None], -math.inf).argmax(dim=-1)


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("width", [1, 2, 17, 4099])
def test_every_form_of_the_draw_has_the_winner_of_the_plain_one(spread: float, width: int) -> None:
    """Skipping tokens that cannot win, and the layout of the rest, change nothing."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(64, width, generator=generator) * spread
    scores = logits - logits.amax(dim=-1, keepdim=True)
    cut = -torch.rand(64, generator=generator) * 2 * spread
    cut[::3] = -math.inf
    low, high = keys(64, seed=width)
    hashes = ops.hash_tokens(width, CPU)
    expected = plain_draw(scores, cut, low, high, hashes).tolist()
    assert (
        ops.draw_tokens(scores, scores.argmax(dim=-1), cut, low, high, hashes).tolist() == expected
    )
    candidates = scores >= cut[:, None]
    assert ops._draw_dense(scores, cut, low, high, hashes).tolist() == expected
    assert ops._draw_sparse(scores, candidates, low, high, hashes).tolist() == expected


def test_an_exact_tie_goes_to_the_smaller_id() -> None:
    """Two tokens share a hash here, as no vocabulary's tokens do, so that their sums tie."""
    hashes = torch.tensor([5, 9, 9], dtype=torch.int32)
    scores = torch.tensor([[-40.0, 0.0, 0.0]])
    low, high = keys(1)
    candidates = torch.tensor([[False, True, True]])
    assert ops._draw_dense(scores, torch.tensor([-1.0]), low, high, hashes).tolist() == [1]
    assert ops._draw_sparse(scores, candidates, low, high, hashes).tolist() == [1]


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_is_the_first_of_equals_or_a_nan(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    values = torch.randint(0, 5, (rows, 5003), generator=generator).to(dtype)
    top, place = ops.likeliest(values)
    assert place.tolist() == [row.index(4.0) for row in values.tolist()]
    assert set(top.tolist()) == {4.0}
    values[0, 77] = math.nan
    assert math.isnan(ops.likeliest(values)[0][0])


def test_no_two_tokens_of_a_vocabulary_share_a_hash() -> None:
    assert len(set(ops.hash_tokens(262144, CPU).tolist())) == 262144


def test_an_unlikely_token_wins_with_the_largest_noise_of_a_million() -> None:
    """Its score is far below the likeliest one's, which only nearly the largest noise makes up
    for; a bound that skips work must not skip it.
    """
    width = 1 << 20
    hashes = ops.hash_tokens(width, CPU)
    low, high = keys(1, seed=5)
    noise = -ops.log_exponential(ops.keyed_hash(hashes[None, :], low[:, None], high[:, None]))[0]
    noise[0] = -math.inf
    winner = int(noise.argmax())
    lead = float(-ops.log_exponential(ops.keyed_hash(hashes[:1], low, high))[0])
    scores = torch.full((1, width), -60.0)
    scores[0, 0], scores[0, winner] = 0.0, lead + 0.5 - float(noise[winner])
    assert scores[0, winner] < lead - 11
    best = torch.zeros(1, dtype=torch.int64)
    assert ops.draw_tokens(scores, best, None, low, high, hashes).tolist() == [winner]
    assert ops._draw_dense(scores, None, low, high, hashes).tolist() == [winner]
