"""Sampling by request: filters, distribution, independence of batch mates, log-probabilities,
faults.
"""

import functools
import math
import random
from collections import abc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.sampling import sample as ops
from fairlead_runtime.device.sampling import host_sampler
from fairlead_runtime.device.sampling.host_sampler import SamplingBatch, draw_keys, sample
from fairlead_runtime.request.logprobs import TokenLogprobs
from fairlead_runtime.request.seeds import mix64, resolve_seed
from fairlead_runtime.request.sequence import NOTHING_ALLOWED, Request, SamplingParams, Sequence
from support.full import LONG_FORM

EOS = 0


def a_sequence(
    *, seed: int = 0, choice: int = 0, generated: int = 0, prompt: int = 3, **params: Any
) -> Sequence:
    request = Request(
        "r", (1,) * prompt, SamplingParams(**params), 16, seed=seed, eos_ids=frozenset({EOS})
    )
    return Sequence(0, request, choice, [1] * (prompt + generated))


def tokens_of(logits: Tensor, sequences: abc.Sequence[Sequence]) -> list[int]:
    tokens: list[int] = sample(logits.clone(), SamplingBatch.of(sequences)).tokens.tolist()
    return tokens


def random_logits(rows: int, width: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * spread


# -- what the filters keep

LOGITS = st.lists(st.integers(-40, 40).map(lambda step: step / 8), min_size=1, max_size=16)


def ids_kept_by_a_plain_sampler(logits: list[float], p: SamplingParams) -> tuple[set[int], float]:
    """The ids that the filters keep in vLLM's order, ties with a cut included, in plain Python; and
    the least distance to a cut.
    """
    weights = {i: math.exp((x - max(logits)) / p.temperature) for i, x in enumerate(logits)}
    margin = min(abs(w - p.min_p) for w in weights.values())
    kept = {i for i, w in weights.items() if w >= p.min_p}
    if p.top_k:
        border = sorted((logits[i] for i in kept), reverse=True)[: p.top_k][-1]
        kept = {i for i in kept if logits[i] >= border}
    if p.top_p == 1:
        return kept, margin
    total, reached = sum(weights[i] for i in kept), 0.0
    nucleus: set[int] = set()
    for value in sorted({logits[i] for i in kept}, reverse=True):
        level = {i for i in kept if logits[i] == value}
        nucleus |= level
        reached += sum(weights[i] for i in level) / total
        margin = min(margin, abs(reached - p.top_p))
        if reached >= p.top_p:
            break
    return nucleus, margin


@given(
    LOGITS,
    st.floats(0.2, 3),
    st.integers(0, 20),
    st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    st.one_of(st.just(0.0), st.floats(0.001, 0.999)),
)
def test_temperature_min_p_top_k_and_top_p_keep_what_a_plain_sampler_keeps(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    p = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected, margin = ids_kept_by_a_plain_sampler(logits, p)
    assume(margin > 1e-5)  # nearer, rounding may decide either way
    draws = SamplingBatch.of(
        [a_sequence(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)]
    ).draws
    assert draws is not None
    scores = host_sampler.scores_of(
        torch.tensor([logits]), torch.tensor([max(logits)]), draws.temperature
    )
    cut = host_sampler.cut_of(scores, draws.min_cut, draws.top_k, draws.top_p)
    kept = scores[0] >= (-math.inf if cut is None else cut)
    assert set(kept.nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize(
    "params", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.9}]
)
def test_no_draw_leaves_what_the_filters_keep(params: dict[str, Any]) -> None:
    logits = random_logits(1, 50)
    kept, _ = ids_kept_by_a_plain_sampler(logits[0].tolist(), SamplingParams(**params))
    drawn = set(
        tokens_of(logits.expand(3000, 50), [a_sequence(seed=s, **params) for s in range(3000)])
    )
    assert drawn == kept


def test_top_k_one_and_a_tiny_top_p_are_greedy() -> None:
    logits = random_logits(20, 300)
    best = logits.argmax(dim=-1).tolist()
    for params in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}):
        assert tokens_of(logits, [a_sequence(seed=s, **params) for s in range(20)]) == best


def test_a_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    logits = random_logits(50, 20)
    plain = tokens_of(logits, [a_sequence(seed=s) for s in range(50)])
    assert tokens_of(logits, [a_sequence(seed=s, top_k=10**6) for s in range(50)]) == plain


# -- greedy


def test_temperature_zero_is_the_argmax_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 5.0], [-1.0, -3.0, -1.0]])
    assert tokens_of(logits, [a_sequence(temperature=0.0)] * 3) == [1, 0, 0]


def test_a_greedy_batch_costs_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("drew for a greedy batch")

    for name in ("draw_tokens", "top_k_cut", "top_p_cut", "keyed_hash"):
        monkeypatch.setattr(ops, name, refuse)
    assert (
        len(tokens_of(random_logits(4, 9), [a_sequence(temperature=0.0, top_k=3, top_p=0.5)] * 4))
        == 4
    )
    with pytest.raises(RuntimeError, match="drew"):
        tokens_of(random_logits(1, 9), [a_sequence()])


# -- the distribution

PROBABILITIES = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64)
COUNT = 400_000 if LONG_FORM else 40_000


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Standard deviations of the statistic above its mean."""
    statistic = ((counts.double() - expected) ** 2 / expected).sum().item()
    free = counts.numel() - 1
    return (statistic - free) / math.sqrt(2 * free)


@functools.cache
def draws_by(varying: str, **params: Any) -> Tensor:
    count = COUNT if varying != "generated" else 4_000  # building long sequences takes time
    sequences = [a_sequence(**{varying: number}, **params) for number in range(count)]
    rows = PROBABILITIES.log().float()[None, :].expand(count, -1)
    return torch.tensor(tokens_of(rows, sequences))


@pytest.mark.parametrize("varying", ["seed", "choice", "generated"])
def test_draws_follow_the_softmax_over_seeds_choices_and_positions(varying: str) -> None:
    draws = draws_by(varying)
    counts = torch.bincount(draws, minlength=8)
    assert chi_square(counts, PROBABILITIES * len(draws)) < 5


def test_draws_follow_the_softmax_at_another_temperature() -> None:
    sharper = PROBABILITIES.log().div(0.7).softmax(dim=-1)
    counts = torch.bincount(draws_by("seed", temperature=0.7), minlength=8)
    assert chi_square(counts, sharper * COUNT) < 5


@pytest.mark.parametrize("varying", ["seed", "choice", "generated"])
@pytest.mark.parametrize("apart", [1, 2, 64])
def test_neighbouring_draws_are_independent(varying: str, apart: int) -> None:
    tokens = draws_by(varying).clamp(max=3)  # four cells: {0}, {1}, {2}, the rest
    pairs = torch.bincount(tokens[:-apart] * 4 + tokens[apart:], minlength=16)
    each = torch.cat([PROBABILITIES[:3], PROBABILITIES[3:].sum()[None]])
    expected = (each[:, None] * each[None, :]).flatten() * (len(tokens) - apart)
    assert chi_square(pairs, expected) < 5


def test_draws_over_a_large_vocabulary_reach_all_of_it_evenly() -> None:
    width, count = 50_257, 1_024
    tokens = torch.tensor(
        tokens_of(torch.zeros(count, width), [a_sequence(seed=s) for s in range(count)])
    )
    cells = torch.bincount(tokens * 32 // width, minlength=32)
    assert chi_square(cells, torch.full((32,), count / 32.0).double()) < 5


# -- what a draw depends on


def a_random_request(rng: random.Random) -> Sequence:
    return a_sequence(
        seed=rng.choice([0, 1, -5, 2**63 - 1, -(2**63), rng.getrandbits(60)]),
        choice=rng.randrange(3),
        generated=rng.randrange(40),
        prompt=rng.randrange(1, 9),
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 50]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        min_tokens=rng.choice([0, 10]),
        logprobs=rng.choice([None, None, 2]),
    )


@pytest.mark.parametrize("width", [8, 1009, 33_001])
def test_a_request_gets_the_same_token_alone_and_in_any_batch(width: int) -> None:
    """Any row, any batch mates, in batches of 1 to 32 and all at once."""
    rng = random.Random(width)
    count = (2000 if LONG_FORM else 200) if width < 10_000 else 80
    sequences = [a_random_request(rng) for _ in range(count)]
    logits = random_logits(count, width, seed=width, spread=2.0)
    logits[::2] = logits[::2].bfloat16().float()  # coarse values tie
    alone = [tokens_of(logits[i : i + 1], [s])[0] for i, s in enumerate(sequences)]
    assert tokens_of(logits, sequences) == alone
    left = list(range(count))
    rng.shuffle(left)
    while left:
        batch, left = left[: (size := rng.randint(1, 32))], left[size:]
        assert tokens_of(logits[batch], [sequences[i] for i in batch]) == [alone[i] for i in batch]


def test_a_preempted_request_draws_the_same_token() -> None:
    logits, untouched = random_logits(1, 1000), a_sequence(seed=4, generated=7)
    preempted = a_sequence(seed=4, generated=7)
    preempted.preemptions, preempted.computed, preempted.id = 3, 0, 99
    assert tokens_of(logits, [untouched]) == tokens_of(logits, [preempted])


def test_seed_choice_and_position_each_change_the_draws() -> None:
    logits = torch.zeros(64, 1000)
    base = tokens_of(logits, [a_sequence(seed=s) for s in range(64)])
    for other in ({"choice": 1}, {"generated": 1}, {"prompt": 4}):
        changed = tokens_of(logits, [a_sequence(seed=s, **other) for s in range(64)])
        assert sum(a == b for a, b in zip(base, changed, strict=True)) < 4
    assert len(set(base)) > 50


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 7), st.integers(0, 2**31))
def test_the_key_of_a_draw_is_the_plain_mix_of_seed_choice_and_position(
    seed: int, choice: int, position: int
) -> None:
    got = draw_keys(np.array([seed]), np.array([choice]), np.array([position]))
    assert int(got[0]) == mix64(mix64(mix64(seed % 2**64) ^ choice) ^ position)


def test_fixed_seeds_draw_fixed_tokens() -> None:
    """A client's seed keeps its meaning across releases and devices."""
    logits = torch.linspace(-2, 2, 1000)[None, :].expand(8, -1)
    # Computed in plain Python, with math.log and integers.
    expected = [462, 748, 982, 660, 997, 792, 868, 836]
    assert tokens_of(logits, [a_sequence(seed=s) for s in range(8)]) == expected


def test_unseeded_requests_have_distinct_seeds_that_a_second_run_repeats() -> None:
    seeds = [
        resolve_seed(None, engine_seed, arrival)
        for engine_seed in (0, 1, 7)
        for arrival in range(1000)
    ]
    assert len(set(seeds)) == 3000
    assert seeds == [resolve_seed(None, e, a) for e in (0, 1, 7) for a in range(1000)]
    assert all(0 <= s < 2**63 for s in seeds)
    assert resolve_seed(-5, 0, 3) == -5


# -- min_tokens


def test_no_end_or_stop_token_comes_before_min_tokens() -> None:
    logits = torch.zeros(4, 6)
    logits[:, EOS], logits[:, 3], logits[:, 5] = 9.0, 8.0, 7.0
    early = a_sequence(temperature=0.0, min_tokens=2, generated=1, stop_token_ids=(3, 600))
    due = a_sequence(temperature=0.0, min_tokens=2, generated=2, stop_token_ids=(3, 600))
    drawing = a_sequence(temperature=0.01, min_tokens=2, generated=0, stop_token_ids=(3,))
    free = a_sequence(temperature=0.0, stop_token_ids=(3,))
    assert tokens_of(logits, [early, due, drawing, free]) == [5, EOS, 5, EOS]


def test_min_tokens_over_a_vocabulary_of_stop_tokens_fails_that_request_alone() -> None:
    stops = a_sequence(temperature=0.0, min_tokens=2, stop_token_ids=(1, 2))
    outcomes = sample(
        torch.zeros(2, 3), SamplingBatch.of([stops, a_sequence(temperature=0.0)])
    ).outcomes()
    assert outcomes == [(-1, None, NOTHING_ALLOWED), (0, None, None)]


# -- non-finite logits


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}]
)
@pytest.mark.parametrize("bad", ["nan", "inf", "nothing left"])
def test_a_non_finite_row_fails_alone(params: dict[str, Any], bad: str) -> None:
    logits = random_logits(5, 40)
    sequences = [a_sequence(seed=s, logprobs=2, **params) for s in range(5)]
    expected = sample(logits.clone(), SamplingBatch.of(sequences)).outcomes()
    broken = logits.clone()
    if bad == "nothing left":
        broken[2] = -math.inf
    else:
        broken[2, 7] = float(bad)
    sampled = sample(broken, SamplingBatch.of(sequences))
    assert sampled.finite.tolist() == [True, True, False, True, True]
    outcomes = sampled.outcomes()
    assert outcomes[2] == (-1, None, host_sampler.NON_FINITE)
    assert outcomes[:2] + outcomes[3:] == expected[:2] + expected[3:]


def test_a_nan_that_min_tokens_would_hide_is_still_flagged() -> None:
    logits = torch.zeros(1, 4)
    logits[0, EOS] = math.nan
    assert not sample(logits, SamplingBatch.of([a_sequence(min_tokens=3)])).finite.item()


def test_a_model_may_mask_the_padded_end_of_its_vocabulary() -> None:
    logits = random_logits(50, 40)
    logits[:, 30:] = -math.inf
    sampled = sample(
        logits, SamplingBatch.of([a_sequence(seed=s, temperature=5.0) for s in range(50)])
    )
    assert sampled.finite.all()
    assert max(sampled.tokens.tolist()) < 30


# -- log-probabilities


def test_logprobs_are_those_of_the_raw_logits_with_the_chosen_token_and_its_rank() -> None:
    logits = random_logits(4, 100)
    sequences = [
        a_sequence(logprobs=3, temperature=0.3, top_k=2, min_tokens=5),
        a_sequence(),
        a_sequence(logprobs=0, temperature=0.0),
        a_sequence(logprobs=5, temperature=3.0, seed=2),
    ]
    reference = logits.double().log_softmax(dim=-1)
    outcomes = sample(logits.clone(), SamplingBatch.of(sequences)).outcomes()
    assert outcomes[1][1] is None
    for row, count in ((0, 3), (2, 0), (3, 5)):
        token, entry, error = outcomes[row]
        order = reference[row].argsort(descending=True).tolist()
        assert error is None
        assert entry is not None
        assert (entry.token, entry.rank, entry.top_ids) == (
            token,
            order.index(token) + 1,
            tuple(order[:count]),
        )
        assert entry.logprob == pytest.approx(reference[row, token].item(), abs=1e-5)
        assert entry.top_logprobs == pytest.approx(reference[row, order[:count]].tolist(), abs=1e-5)
    assert outcomes[2][1] is not None
    assert outcomes[2][1].rank == 1


def test_logprobs_in_vllms_shape_hold_the_chosen_token_first_and_once() -> None:
    inside = TokenLogprobs(7, -1.0, 2, (3, 7), (-0.5, -1.0)).as_dict(lambda token: f"<{token}>")
    assert list(inside) == [7, 3]
    assert (inside[7].logprob, inside[7].rank, inside[7].decoded_token) == (-1.0, 2, "<7>")
    outside = TokenLogprobs(9, -8.0, 40, (3, 7), (-0.5, -1.0)).as_dict()
    assert [(token, entry.rank) for token, entry in outside.items()] == [(9, 40), (3, 1), (7, 2)]


@pytest.mark.parametrize("width", [1, 64, 1001])
def test_each_rows_logprobs_begin_where_memory_is_aligned(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the order of a sum depends on that."""
    torch.manual_seed(0)
    logits, tokens = torch.randn(3, width), torch.tensor([0, width - 1, width // 2])
    want = logits.log_softmax(dim=-1)
    widths: list[int] = []
    whole = torch.Tensor.log_softmax

    def spy(x: torch.Tensor, dim: int) -> torch.Tensor:
        widths.append(x.stride(0))
        return whole(x, dim=dim)

    monkeypatch.setattr(torch.Tensor, "log_softmax", spy)
    own, ranks, ids, top = ops.logprobs(logits, tokens, 5)
    assert [one % 8 for one in widths] == [0]
    torch.testing.assert_close(own, want.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(top, want.topk(min(5, width), dim=-1).values)
    assert int(ids.max()) < width
    assert bool((ranks <= width).all())


def test_more_logprobs_than_tokens_give_those_of_all_tokens() -> None:
    (_, entry, _), *_ = sample(
        torch.zeros(1, 3), SamplingBatch.of([a_sequence(logprobs=20)])
    ).outcomes()
    assert entry is not None
    assert sorted(entry.top_ids) == [0, 1, 2]


# -- shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_as_their_float32_values(dtype: torch.dtype) -> None:
    logits = random_logits(30, 500).to(dtype)
    sequences = [a_sequence(seed=s, temperature=(s % 3) / 2, logprobs=1) for s in range(30)]
    half = sample(logits.clone(), SamplingBatch.of(sequences)).outcomes()
    assert half == sample(logits.float(), SamplingBatch.of(sequences)).outcomes()


def test_a_vocabulary_of_one_token_gives_that_token() -> None:
    assert tokens_of(
        torch.zeros(2, 1), [a_sequence(top_k=5, top_p=0.5), a_sequence(temperature=0.0)]
    ) == [
        0,
        0,
    ]


@pytest.mark.parametrize("shape", [(2, 5), (1, 0), (1, ops.MAX_VOCABULARY + 1)])
def test_logits_that_do_not_match_the_batch_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="1 sampling rows"):
        sample(torch.zeros(shape), SamplingBatch.of([a_sequence()]))


def test_an_empty_batch_samples_nothing() -> None:
    assert sample(torch.zeros(0, 9), SamplingBatch.of([])).outcomes() == []
