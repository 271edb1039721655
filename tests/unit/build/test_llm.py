"""The loop of ``LLM`` on an engine without a model: what it asks of ``build`` and of the engine."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from fairlead_runtime import llm as module
from fairlead_runtime.llm import LLM
from fairlead_runtime.outputs import ModelFacts, Submission
from fairlead_runtime.request.sequence import FinishReason, SamplingParams
from fairlead_runtime.serving.detokenize import vocabulary_of
from fairlead_runtime.serving.intake import Intake
from support import tiny
from support.fake_engine import FakeRunner, rig

TEXT = "abcdefgh"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of ``build``, which returns an engine whose model writes TEXT for ever."""
    tokenizer = tiny.tokenizer()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    runner = FakeRunner()
    engine = rig(runner, max_requests=2, num_blocks=64)
    made: dict[str, Any] = {"engine": engine, "runner": runner, "ids": ids}

    def execute(work: Any) -> Any:
        runner.attempts += 1
        return {
            row.sequence.id: module_result(ids[row.sequence.generated % len(ids)])
            for row in work.rows
            if row.samples
        }

    monkeypatch.setattr(runner, "execute", execute)

    def build(path: Any, settings: Any, **arguments: Any) -> Any:
        made.update(path=path, settings=settings, **arguments)
        facts = ModelFacts(eos_ids=frozenset(), vocab_size=len(tokenizer), seed=1)
        intake = Intake(engine.bounds.resolve_max_tokens, facts)
        return SimpleNamespace(
            engine=engine,
            intake=intake,
            tokenizer=tokenizer,
            vocabulary=vocabulary_of(tokenizer),
            grammar_facts=None,
            close=lambda: None,
        )

    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(module, "resolve_with_bar", lambda model, _: model)
    return made


def module_result(token: int) -> Any:
    from fairlead_runtime.scheduling.plan import Result

    return Result(token)


def test_requests_of_a_batch_may_wait_for_any_time(built: dict[str, Any]) -> None:
    LLM("demo:", queue_timeout=5.0)
    assert built["queue_timeout"] == math.inf
    assert built["settings"].queue_timeout == 5.0


def test_a_choice_that_a_stop_text_ended_takes_no_further_step(built: dict[str, Any]) -> None:
    with LLM("demo:") as one:
        params = SamplingParams(temperature=0, max_tokens=100, stop="c")
        stops = Submission(prompt=(5, 6), params=params)
        ends = list(one.stream([stops]))
        assert "".join(output.text for _, output in ends) == "ab"
        assert ends[-1][1].finish_reason is FinishReason.STOP
        assert ends[-1][1].stop_reason == "c"
        engine = built["engine"]
        for _ in range(3):
            engine.step()
        assert engine.idle
        assert built["runner"].attempts <= len(built["ids"])


def test_more_prompts_than_the_queue_holds_are_all_answered(built: dict[str, Any]) -> None:
    with LLM("demo:") as one:
        prompts = [{"prompt_token_ids": [5, 6, 7]}] * 30
        results = one.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [4] * 30
    assert all(r.outputs[0].finish_reason is FinishReason.LENGTH for r in results)
