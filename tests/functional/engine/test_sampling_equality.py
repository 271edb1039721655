"""Greedy text under penalties, biases and masks equals transformers' ``generate`` with the same
processors, and prompt log-probabilities equal those of one forward pass: whole prompts and chunks,
preemption, offload, prefix hits and several choices.
"""

import functools
import random
from collections import abc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from fairlead_runtime.device.step.model_runner import ModelRunner
from fairlead_runtime.request.sequence import Request, SamplingParams
from support import tiny
from support.engine_rig import EOS, MAX_LEN, Outcome, Rig, Setting, greedy, prompts, rig
from support.full import pairs

FAMILIES = ("llama", "gemma3_text", "qwen3_moe")
TIE = 1e-4
MAX_TOKENS = 24
LENGTHS, SHARED = (17, 41, 26, 53, 34, 30), 24

SETTINGS = {
    "ample": Setting(),
    "chunks": Setting(chunk=8, max_logits=3),
    "chunks beside decodes": Setting(beside=5),
    "no sharing": Setting(block_size=16, sharing=False),
    "preemption": Setting(chunk=16, num_blocks=24),
    "offload": Setting(chunk=16, num_blocks=24, offload=True),
}


class OutputPenalties(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """OpenAI's formula: the count of a token in the output times frequency, and presence once."""

    def __init__(self, prompt_len: int, frequency: float, presence: float) -> None:
        self.prompt_len, self.frequency, self.presence = prompt_len, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self.prompt_len :], minlength=scores.shape[1])
        penalty = self.frequency * counts + self.presence * (counts > 0)
        return scores - penalty.to(scores.dtype)


class OnOutput(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """Another processor that sees the output only: bad words count there."""

    def __init__(self, prompt_len: int, inner: LogitsProcessor) -> None:
        self.prompt_len, self.inner = prompt_len, inner

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # A token that is part of no bad word keeps transformers' processor from an empty output.
        output = input_ids[:, self.prompt_len :]
        guard = torch.full((1, 1), tiny.VOCAB + 1, dtype=input_ids.dtype)
        result: Tensor = self.inner(torch.cat([guard, output], dim=1), scores)
        return result


class Allowed(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    def __init__(self, ids: abc.Sequence[int]) -> None:
        self.ids = list(ids)

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        kept = torch.full_like(scores, -torch.inf)
        kept[:, self.ids] = scores[:, self.ids]
        return kept


class Margins(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """Records how far the best two scores lie apart at each token."""

    def __init__(self) -> None:
        self.margins: list[float] = []

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        top = scores[0].topk(2).values
        self.margins.append(float(top[0] - top[1]))
        return scores


def processors(params: SamplingParams, prompt_len: int) -> list[LogitsProcessor]:
    """transformers' processors of these parameters, in vLLM's order."""
    chain: list[LogitsProcessor] = []
    if params.allowed_token_ids is not None:
        chain.append(Allowed(params.allowed_token_ids))
    if params.bad_words:
        words = [list(word) for word in params.bad_words]
        chain.append(OnOutput(prompt_len, NoBadWordsLogitsProcessor(words, eos_token_id=None)))
    if params.min_tokens:
        ends = sorted(EOS | set(params.stop_token_ids))
        chain.append(MinNewTokensLengthLogitsProcessor(prompt_len, params.min_tokens, ends))
    if params.logit_bias:
        biases = [[[token], bias] for token, bias in dict(params.logit_bias).items()]
        chain.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chain.append(OutputPenalties(prompt_len, params.frequency_penalty, params.presence_penalty))
    return chain


def reference(engine: Rig, request: Request) -> tuple[list[int], list[float]]:
    """transformers' greedy text of this request alone, and its margins."""
    margins = Margins()
    chain = [*processors(request.params, len(request.prompt)), margins]
    ids = torch.tensor([list(request.prompt)])
    with engine.model.plain() as plain, torch.inference_mode():
        generator: Any = plain
        out = generator.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_tokens,
            do_sample=False,
            eos_token_id=sorted(EOS | set(request.params.stop_token_ids)),
            pad_token_id=0,
            logits_processor=LogitsProcessorList(chain),
        )
    return out[0, len(request.prompt) :].tolist(), margins.margins


def fields(rng: random.Random, frequent: abc.Sequence[int]) -> dict[str, Any]:
    """A random choice of parameters. ``frequent``: tokens that the plain text has."""
    every: dict[str, Any] = {
        "repetition_penalty": rng.choice([1.05, 1.3, 0.8]),
        "frequency_penalty": rng.choice([0.4, -0.2]),
        "presence_penalty": rng.choice([0.6, -0.3]),
        "logit_bias": {
            **dict.fromkeys(frequent[:2], -2.0),
            rng.randrange(3, tiny.VOCAB): 1.5,
        },
        "allowed_token_ids": tuple(rng.sample(range(tiny.VOCAB), tiny.VOCAB * 3 // 4)),
        "bad_words": ((frequent[0],), tuple(frequent[1:3]), tuple(frequent[2:5])),
        "min_tokens": rng.choice([4, 12]),
        "stop_token_ids": (rng.choice(frequent),),
    }
    return {name: every[name] for name in rng.sample(sorted(every), rng.randint(1, 4))}


@functools.cache
def cases(family: str) -> tuple[tuple[Request, list[int], list[float]], ...]:
    """Requests with every parameter, each with its reference and margins."""
    engine = rig(family)
    rng = random.Random(family)
    found = []
    for i, prompt in enumerate(prompts(7, LENGTHS, SHARED)):
        plain = engine.reference(prompt, MAX_TOKENS)
        more = fields(rng, [*plain, *range(5, 11)])
        request = greedy(str(i), prompt, MAX_TOKENS, n=1 + i % 2, **more)
        found.append((request, *reference(engine, request)))
    # Otherwise the parameters would prove nothing.
    changed = [want != engine.reference(r.prompt, MAX_TOKENS) for r, want, _ in found]
    assert sum(changed) >= len(found) // 2
    return tuple(found)


def check(outcome: Outcome, asked: abc.Sequence[tuple[Request, list[int], list[float]]]) -> None:
    """Each choice has its reference's text, but for what follows a tie."""
    for request, want, margins in asked:
        for choice in range(request.params.n):
            got = outcome.texts[request.id, choice]
            differ = [i for i, pair in enumerate(zip(got, want, strict=False)) if len({*pair}) > 1]
            if differ and margins[differ[0]] <= TIE:
                continue
            assert got == want, request.params


@pytest.mark.parametrize(("family", "name"), pairs(FAMILIES, tuple(SETTINGS)))
def test_greedy_text_under_all_changes_equals_transformers(family: str, name: str) -> None:
    arrivals = [(i // 2, request) for i, (request, _, _) in enumerate(cases(family))]
    outcome = rig(family).run(SETTINGS[name], arrivals)
    assert outcome.stats is not None
    if SETTINGS[name].num_blocks < 100:
        assert outcome.stats.preemptions
        assert bool(outcome.stats.offloads) == SETTINGS[name].offload
    check(outcome, cases(family))


@pytest.mark.parametrize("name", ["ample", "offload"])
def test_greedy_text_of_changes_on_the_device_equals_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In captured steps, of all requests but those with bad words that the host must look for."""
    asked = [
        case for case in cases("llama") if all(len(word) == 1 for word in case[0].params.bad_words)
    ]
    assert len(asked) > 3
    begin, by_host = ModelRunner._begin, 0

    def spy(*arguments: Any) -> Any:
        nonlocal by_host
        by_host += 1
        return begin(*arguments)

    monkeypatch.setattr(ModelRunner, "_begin", spy)
    arrivals = [(0, request) for request, _, _ in asked]
    outcome = rig("llama", "graphs").run(SETTINGS[name], arrivals)
    assert by_host < outcome.steps // 2  # those with prompts
    assert outcome.stats is not None
    assert bool(outcome.stats.offloads) == SETTINGS[name].offload
    check(outcome, asked)


@pytest.mark.parametrize(("family", "name"), pairs(FAMILIES[::-1], tuple(SETTINGS)))
def test_prompt_logprobs_equal_one_forward_pass_of_transformers(family: str, name: str) -> None:
    """Also of prompts whose blocks are cached already, and once for all choices."""
    engine = rig(family)
    asked = [
        greedy(f"{i}", prompt, 12, n=1 + i % 2, prompt_logprobs=(0, 2, 5)[i % 3])
        for i, prompt in enumerate(prompts(8, LENGTHS, SHARED))
    ]
    cached = [greedy(f"plain {r.id}", tuple(r.prompt), 12) for r in asked]
    again = [greedy(f"again {r.id}", tuple(r.prompt), 12, prompt_logprobs=1) for r in asked]
    arrivals = [
        *((0, request) for request in cached),
        *((1 + i, request) for i, request in enumerate(asked)),
        *((40, request) for request in again),
    ]
    outcome = engine.run(SETTINGS[name], arrivals)
    assert set(outcome.prompts) == {request.id for request in (*asked, *again)}
    for request in (*asked, *again):
        with engine.model.plain() as plain, torch.inference_mode():
            ids = torch.tensor([list(request.prompt)])
            logits = plain(input_ids=ids, use_cache=False).logits[0].float()
        logprobs = logits.log_softmax(dim=-1)
        entries = outcome.prompts[request.id]
        assert [entry.token for entry in entries] == list(request.prompt[1:])
        for row, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(logprobs[row, entry.token].item(), abs=1e-4)
            best = logprobs[row].topk(request.params.prompt_logprobs or 0).values.tolist()
            assert entry.top_logprobs == pytest.approx(best, abs=1e-4)
            better = int((logprobs[row] > logprobs[row, entry.token] + TIE).sum())
            tied = int(((logprobs[row] - logprobs[row, entry.token]).abs() <= TIE).sum())
            assert better < entry.rank <= better + tied
        # The text is that of the plain request.
        want = engine.reference(request.prompt, 12)
        for choice in range(request.params.n):
            assert outcome.texts[request.id, choice] == want


def test_a_prompt_of_one_token_has_no_logprobs_and_a_long_one_spans_passes() -> None:
    engine = rig("llama")
    long = prompts(9, (MAX_LEN - 20,), 0)[0]
    outcome = engine.run(
        Setting(max_logits=5),
        [(0, greedy("one", (5,), 4, prompt_logprobs=1)), (0, greedy("long", long, 4))],
    )
    assert "one" not in outcome.prompts
    scored = engine.run(Setting(max_logits=5), [(0, greedy("long", long, 4, prompt_logprobs=0))])
    assert len(scored.prompts["long"]) == len(long) - 1
    assert scored.texts["long", 0] == outcome.texts["long", 0]
