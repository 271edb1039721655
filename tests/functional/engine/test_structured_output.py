"""Structured output through the real scheduler and runner: the tokens of a plain reference, and an
output that is what was asked for, however it was scheduled.
"""

import json
import re
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it has no stubs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlead_runtime.grammar.compile import TokenizerFacts, compile_matcher
from fairlead_runtime.recording.record import RecordedScheduler, Recording
from fairlead_runtime.recording.replay import replay
from fairlead_runtime.request.sequence import FinishReason, Request, SamplingParams, Sequence
from fairlead_runtime.request.structured import StructuredOutputs
from fairlead_runtime.scheduling.scheduler import Scheduler
from support import tiny
from support.engine_rig import Outcome, Rig, Setting, rig, run_to_end
from support.full import LONG_FORM
from support.grammars import schemas
from support.tiny_guides import ASKED, EOS, FACTS, GUIDES, TOKENIZER


class Guided:
    """Gives the sequences of a scheduler their guides, as the engine does."""

    def add(self, request: Request, hashes: bytearray | None = None) -> tuple[Sequence, ...]:
        sequences: tuple[Sequence, ...] = super().add(request, hashes)  # type: ignore[misc]
        if request.params.guided is not None:
            for sequence in sequences:
                sequence.guide = GUIDES.compile(request.params.guided).fork()
        return sequences


class GuidedScheduler(Guided, Scheduler):
    pass


class GuidedRecorder(Guided, RecordedScheduler):
    pass


def request(name: str, prompt: str, value: dict[str, Any] | None, **params: Any) -> Request:
    chosen = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 120, **params}, structured_outputs=value
    )
    ids = tuple(TOKENIZER.encode(prompt))
    return Request(name, ids, chosen, chosen.max_tokens or 1, seed=chosen.seed or 0, eos_ids=EOS)


def served(model: Rig, requests: Items[Request], setting: Setting | None = None) -> Outcome:
    setting = setting or Setting()
    scheduler = GuidedScheduler(setting.limits(len(model.groups)), model.groups, b"rig")
    return run_to_end(
        scheduler, model.runner(setting, GUIDES), [(number, r) for number, r in enumerate(requests)]
    )


def text(tokens: Items[int]) -> str:
    return str(TOKENIZER.decode([token for token in tokens if token not in EOS]))


def reference(model: Rig, of: Request) -> list[int]:
    """transformers, one token at a time: the likeliest that the library allows."""
    assert of.params.guided is not None
    matcher = compile_matcher(FACTS.build(), of.params.guided)
    tokens: list[int] = []
    with model.model.plain() as plain, torch.inference_mode():
        while len(tokens) < of.max_tokens:
            words = matcher.compute_bitmask()
            ids = [i for i in range(tiny.VOCAB) if words[i // 8] >> (i % 8) & 1]
            logits = plain(input_ids=torch.tensor([[*of.prompt, *tokens]])).logits[0, -1].float()
            best = max(ids, key=lambda token: float(logits[token]))
            tokens.append(best)
            if best in EOS:
                break
            assert matcher.consume_token(best)
    return tokens


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text"] if not LONG_FORM else sorted(tiny.FAMILIES)
)
@pytest.mark.parametrize("kind", ASKED)
def test_greedy_tokens_are_those_of_a_masked_reference(family: str, kind: str) -> None:
    model, asked = rig(family), request("r", "Once upon a time", ASKED[kind])
    assert served(model, [asked]).texts["r", 0] == reference(model, asked)


def mixture() -> list[Request]:
    """Guided and free requests, greedy and drawn, with common prefixes and several choices."""
    requests = []
    for number in range(12):
        value = [*ASKED.values(), None][number % 5]
        prompt = "The same beginning of a story, " + "and more " * (number % 4)
        params = {"temperature": 0.0 if number % 3 == 0 else 1.0, "n": 1 + number % 3}
        requests.append(request(f"r{number}", prompt, value, seed=number, **params, max_tokens=60))
    return requests


def test_scheduling_changes_no_token() -> None:
    """Chunks, forced preemption with and without offload, prefix hits and choices."""
    model, requests = rig("llama"), mixture()
    expected = served(model, requests).texts
    for setting in (
        Setting(chunk=7, max_requests=3),
        Setting(num_blocks=40, offload=False),
        Setting(num_blocks=40, offload=True),
        Setting(sharing=False, block_size=16),
    ):
        outcome = served(model, requests, setting)
        assert outcome.texts == expected
        assert outcome.stats is not None
        if setting.num_blocks == 40:
            assert outcome.stats.preemptions > 0
            assert bool(outcome.stats.offloads) == setting.offload
    for one in requests:
        alone = served(model, [one]).texts
        assert all(alone[key] == expected[key] for key in alone)


def test_a_record_of_guided_requests_replays(tmp_path: Path) -> None:
    model, setting, path = rig("llama"), Setting(num_blocks=40), tmp_path / "run.jsonl"
    limits = setting.limits(len(model.groups))
    scheduler = GuidedRecorder(limits, model.groups, b"rig", path=path)
    run_to_end(scheduler, model.runner(setting, GUIDES), [(0, one) for one in mixture()])
    scheduler.close()
    replayed = replay(Recording(path))
    assert replayed.difference is None
    assert replayed.steps > 0


@settings(
    max_examples=400 if LONG_FORM else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(schema=schemas(), seed=st.integers(0, 2**31))
def test_what_ends_is_valid_for_its_schema(schema: dict[str, Any], seed: int) -> None:
    asked = request("r", "{", {"json": schema}, temperature=1.0, seed=seed, max_tokens=400, n=2)
    outcome = served(rig("llama"), [asked])
    for key, tokens in outcome.texts.items():
        if outcome.finishes[key] is FinishReason.STOP:
            jsonschema.validate(json.loads(text(tokens)), schema)
        else:
            assert len(tokens) == 400


def test_drawn_outputs_match_what_was_asked() -> None:
    model = rig("llama")
    requests = [
        request(f"{kind}{seed}", "Say: ", ASKED[kind], temperature=1.0, seed=seed)
        for kind in ("regex", "choice")
        for seed in range(8)
    ]
    outcome = served(model, requests)
    assert {*outcome.finishes.values()} == {FinishReason.STOP}
    words = {key: text(tokens) for key, tokens in outcome.texts.items()}
    assert all(words[f"choice{seed}", 0] in ASKED["choice"]["choice"] for seed in range(8))
    assert all(re.fullmatch(ASKED["regex"]["regex"], words[f"regex{seed}", 0]) for seed in range(8))


@pytest.mark.parametrize(
    ("params", "expected", "reason"),
    [
        ({}, "ab", FinishReason.STOP),
        ({"ignore_eos": True}, "ab", FinishReason.STOP),
        ({"min_tokens": 50}, "ab", FinishReason.STOP),
        ({"min_tokens": 50, "ignore_eos": True}, "ab", FinishReason.STOP),
        ({"max_tokens": 1}, "a", FinishReason.LENGTH),
        ({"stop_token_ids": [TOKENIZER.convert_tokens_to_ids("a")]}, "a", FinishReason.STOP),
    ],
)
def test_the_end_of_the_output(params: dict[str, Any], expected: str, reason: FinishReason) -> None:
    outcome = served(rig("llama"), [request("r", "x", {"regex": "ab"}, **params)])
    assert text(outcome.texts["r", 0]) == expected
    assert outcome.finishes["r", 0] is reason
    ends = [token in EOS for token in outcome.texts["r", 0]]
    assert sum(ends) == (expected == "ab"), "one end, and only of the whole output"


def test_min_tokens_keeps_an_output_that_may_go_on() -> None:
    asked = request("r", "x", {"regex": "a+"}, min_tokens=20, max_tokens=40, temperature=1.0)
    outcome = served(rig("llama"), [asked])
    assert len(outcome.texts["r", 0]) >= 20
    assert set(text(outcome.texts["r", 0])) == {"a"}


def test_log_probabilities_are_those_of_the_free_model() -> None:
    """The first token of an output that leaves no choice has the model's own, low probability."""
    model = rig("llama")
    scheduler = GuidedScheduler(Setting().limits(len(model.groups)), model.groups, b"rig")
    asked = request("r", "x", {"choice": ["zzz"]}, logprobs=1)
    scheduler.add(asked)
    runner = model.runner(Setting(), GUIDES)
    work = scheduler.commit(scheduler.plan())
    (result,) = runner.execute(work).values()
    again = runner.execute(work)  # a step that runs again
    assert [*again.values()] == [result]
    with model.model.plain() as plain, torch.inference_mode():
        logits = plain(input_ids=torch.tensor([asked.prompt])).logits[0, -1].float()
    assert text([result.token]).startswith("z")
    assert result.logprobs.logprob == pytest.approx(
        float(logits.log_softmax(-1)[result.token]), abs=1e-4
    )
    assert result.logprobs.rank > 1


def test_a_model_without_end_of_sequence_gets_no_facts() -> None:
    assert TokenizerFacts.of(TOKENIZER, tiny.VOCAB, frozenset()) is None


def test_structured_outputs_are_the_same_value_after_a_record() -> None:
    value = StructuredOutputs.of(ASKED["json"])
    assert SamplingParams(structured_outputs=ASKED["json"]).guided == value
