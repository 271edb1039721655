"""What requests change in their logits, against transformers' processors and plain formulas."""

import random
from collections import abc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from fairlead_runtime.device.sampling import logits_processors
from fairlead_runtime.device.sampling.host_sampler import SamplingBatch, sample
from fairlead_runtime.device.sampling.logits_processors import LogitChanges, bitmask
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence

WIDTH = 70  # not a multiple of a mask's word
EOS = 7


def a_sequence(
    prompt: abc.Sequence[int], output: abc.Sequence[int], number: int = 0, **params: Any
) -> Sequence:
    request = Request(
        str(number),
        tuple(prompt),
        SamplingParams(**{"temperature": 0.0, **params}),
        64,
        eos_ids=frozenset({EOS}),
    )
    return Sequence(number, request, 0, [*prompt, *output])


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * 3


def changed(logits: Tensor, *sequences: Sequence, masks: Any = None) -> Tensor:
    """The logits of all rows after the changes."""
    result = logits.clone().float()
    changes = LogitChanges.of(sequences, masks or {})
    if changes is not None:
        result[torch.from_numpy(changes.rows)] = changes.apply(logits)
    return result


def by_transformers(
    logits: Tensor, tokens: abc.Sequence[int], processor: LogitsProcessor
) -> Tensor:
    # int64 also where there are no tokens yet
    ids = torch.tensor([tokens], dtype=torch.int64)
    result: Tensor = processor(ids, logits[None].clone())[0]
    return result


def random_tokens(rng: random.Random, most: int = 30) -> list[int]:
    return [rng.randrange(WIDTH) for _ in range(rng.randrange(1, most))]


@pytest.mark.parametrize("seed", range(20))
def test_the_repetition_penalty_is_transformers_over_prompt_and_output(seed: int) -> None:
    rng = random.Random(seed)
    prompt, output = random_tokens(rng), random_tokens(rng)
    penalty = rng.choice([0.5, 1.1, 1.3, 2.0, 10.0])
    logits = random_logits(1, seed)
    logits[0, prompt[0]] = 0.0
    sequence = a_sequence(prompt, output, repetition_penalty=penalty)
    expected = by_transformers(
        logits[0], [*prompt, *output], RepetitionPenaltyLogitsProcessor(penalty)
    )
    assert torch.equal(changed(logits, sequence)[0], expected)


@pytest.mark.parametrize("seed", range(20))
def test_frequency_and_presence_penalties_count_the_output_only(seed: int) -> None:
    rng = random.Random(seed)
    prompt, output = random_tokens(rng), random_tokens(rng)
    frequency, presence = rng.choice([-2.0, 0.0, 0.7]), rng.choice([-0.3, 0.0, 1.5])
    logits = random_logits(1, seed)
    expected = [
        value - frequency * output.count(token) - presence * (token in output)
        for token, value in enumerate(logits[0].tolist())
    ]
    sequence = a_sequence(prompt, output, frequency_penalty=frequency, presence_penalty=presence)
    assert changed(logits, sequence)[0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_bad_words_are_transformers_over_the_output(seed: int) -> None:
    rng = random.Random(seed)
    prompt = random_tokens(rng)
    output = [rng.randrange(4) for _ in range(rng.randrange(6))]
    words = {tuple(rng.randrange(4) for _ in range(rng.randint(1, 4))) for _ in range(6)}
    logits = random_logits(1, seed)
    processor = NoBadWordsLogitsProcessor([[*word] for word in words], eos_token_id=None)
    expected = by_transformers(logits[0], output, processor) if output else logits[0].clone()
    if not output:  # transformers' processor needs a token
        expected[[word[0] for word in words if len(word) == 1]] = -torch.inf
    sequence = a_sequence(prompt, output, bad_words=tuple(words))
    assert torch.equal(changed(logits, sequence)[0], expected)


def test_a_bad_word_that_begins_in_the_prompt_is_not_one() -> None:
    logits = random_logits(1)
    sequence = a_sequence([1, 2], [], bad_words=((1, 2, 3), (2, 3)))
    assert torch.equal(changed(logits, sequence), logits)
    begun = a_sequence([1], [2], bad_words=((1, 2, 3), (2, 4)))
    assert changed(logits, begun)[0].isinf().nonzero().flatten().tolist() == [4]


def test_a_logit_bias_is_transformers_sequence_bias() -> None:
    biases = {3: -100.0, 69: 2.5, 12: 0.125}
    logits = random_logits(1)
    processor = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])
    expected = by_transformers(logits[0], [1], processor)
    assert torch.equal(changed(logits, a_sequence([1], [2], logit_bias=biases))[0], expected)


@pytest.mark.parametrize("generated", [0, 4, 5, 6])
def test_min_tokens_is_transformers_with_the_stop_ids(generated: int) -> None:
    sequence = a_sequence([1, 2], [3] * generated, min_tokens=5, stop_token_ids=(9, 600))
    logits = random_logits(1)
    processor = MinNewTokensLengthLogitsProcessor(2, 5, [EOS, 9])
    expected = by_transformers(logits[0], sequence.tokens, processor)
    assert torch.equal(changed(logits, sequence)[0], expected)


@pytest.mark.parametrize("ids", [(0,), (31, 32, 69), tuple(range(0, WIDTH, 3)), (5, 5000)])
def test_only_the_allowed_ids_are_left(ids: tuple[int, ...]) -> None:
    logits = random_logits(1)
    left = changed(logits, a_sequence([1], [], allowed_token_ids=ids))[0]
    assert left.isfinite().nonzero().flatten().tolist() == [i for i in sorted(ids) if i < WIDTH]
    assert torch.equal(left[left.isfinite()], logits[0, left.isfinite()])


def test_a_mask_of_structured_output_and_the_allowed_ids_leave_what_both_allow() -> None:
    masks = {0: bitmask([3, 40, 69]), 2: bitmask([1])}
    sequences = [
        a_sequence([1], [], 0, allowed_token_ids=(2, 3, 40)),
        a_sequence([1], [], 1),
        a_sequence([1], [], 2),
    ]
    left = changed(random_logits(3), *sequences, masks=masks)
    allowed = [row.isfinite().nonzero().flatten().tolist() for row in left]
    assert allowed == [[3, 40], [*range(WIDTH)], [1]]


def test_a_mask_has_token_i_in_bit_i_modulo_32_of_word_i_over_32() -> None:
    words = bitmask([0, 5, 31, 33])
    assert words.dtype == np.int32
    assert words.tolist() == [1 | 1 << 5 | -(1 << 31), 2]


def test_the_changes_apply_in_vllms_order() -> None:
    """The bias before the penalties, which do not revive a masked token."""
    sequence = a_sequence(
        [1],
        [2, 2, 3],
        logit_bias={2: 4.0, 3: 50.0, 9: 50.0},
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        bad_words=((3,),),
        allowed_token_ids=(1, 2, 3),
    )
    logits = torch.zeros(1, WIDTH)
    logits[0, 1], logits[0, 2] = -1.0, 2.0
    left = changed(logits, sequence)[0]
    assert left[1:3].tolist() == [-2.0, (2.0 + 4.0) / 2 - 2 * 0.5 - 0.25]
    assert left.isfinite().sum() == 2


def test_logprobs_stay_those_of_the_raw_logits() -> None:
    logits = random_logits(2)
    params = {"logit_bias": {4: 50.0}, "logprobs": 3, "repetition_penalty": 1.5}
    ((token, entry, _), (_, plain, _)) = sample(
        logits,
        SamplingBatch.of([a_sequence([1], [2], 0, **params), a_sequence([1], [], 1, logprobs=3)]),
    ).outcomes()
    assert token == 4
    assert entry is not None
    assert plain is not None
    expected = logits.log_softmax(dim=-1)
    assert entry.logprob == pytest.approx(expected[0, 4].item(), abs=1e-5)
    assert entry.top_ids == tuple(expected[0].topk(3).indices.tolist())
    assert plain.rank == 1


def random_params(rng: random.Random) -> dict[str, Any]:
    every: dict[str, Any] = {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.6,
        "presence_penalty": -0.4,
        "logit_bias": {rng.randrange(WIDTH): rng.uniform(-5, 5) for _ in range(4)},
        "allowed_token_ids": tuple(rng.sample(range(WIDTH), 40)),
        "bad_words": ((rng.randrange(WIDTH),), (1, 2)),
        "min_tokens": 16,
    }
    return {name: every[name] for name in rng.sample(sorted(every), rng.randrange(4))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    count = 60

    def sequences() -> list[Sequence]:
        rng.seed(4)
        return [
            a_sequence(
                random_tokens(rng),
                random_tokens(rng),
                number,
                temperature=rng.choice([0.0, 1.0]),
                top_k=rng.choice([0, 5]),
                **random_params(rng),
            )
            for number in range(count)
        ]

    logits = random_logits(count).to(dtype)
    alone = [
        sample(logits[i : i + 1], SamplingBatch.of([s])).tokens.item()
        for i, s in enumerate(sequences())
    ]
    together = sequences()
    assert sample(logits, SamplingBatch.of(together)).tokens.tolist() == alone
    # What is kept from step to step does not change the result of a rerun.
    assert sample(logits, SamplingBatch.of(together)).tokens.tolist() == alone


def test_counts_that_follow_the_output_are_those_of_a_fresh_start() -> None:
    rng = random.Random(5)
    params: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.1,
    }
    prompt = random_tokens(rng)
    followed = a_sequence(prompt, [], **params)
    logits = random_logits(1)
    for _ in range(300):
        fresh = a_sequence(prompt, followed.tokens[len(prompt) :], **params)
        assert torch.equal(changed(logits, followed), changed(logits, fresh))
        followed.tokens.append(rng.randrange(WIDTH))


def test_rows_without_a_change_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neutral values, and min_tokens that are reached, are no change."""
    neutral = a_sequence(
        [1], [2], repetition_penalty=1.0, logit_bias={}, bad_words=(), presence_penalty=0.0
    )
    reached = a_sequence([1], [2, 3], 1, min_tokens=2)
    unpenalized = a_sequence([1], [], 2, presence_penalty=1.0)
    batch = SamplingBatch.of([neutral, reached, unpenalized])
    assert batch.changes is None
    logits = random_logits(3)
    raw = logits.clone()
    changing = SamplingBatch.of([neutral, a_sequence([1], [2], 3, min_tokens=2), reached])
    assert changing.changes is not None
    assert changing.changes.rows.tolist() == [1]
    applied: list[tuple[int, ...]] = []
    apply = logits_processors.LogitChanges.apply

    def counted(self: LogitChanges, values: Tensor) -> Tensor:
        result = apply(self, values)
        applied.append(tuple(result.shape))
        return result

    monkeypatch.setattr(logits_processors.LogitChanges, "apply", counted)
    sample(logits, changing)
    assert applied == [(1, WIDTH)]
    assert torch.equal(logits, raw)
