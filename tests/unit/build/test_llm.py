"""The loop of ``LLM`` on an engine without a model: what it asks of ``build`` and of the engine."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from fairlead_runtime import llm as module
from fairlead_runtime.llm import LLM
from fairlead_runtime.outputs import EngineDead, ModelFacts, Submission
from fairlead_runtime.request.sequence import FinishReason, RequestError, SamplingParams
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


def test_a_prompt_that_is_too_long_ends_with_its_reason_and_the_others_are_generated(
    built: dict[str, Any],
) -> None:
    most = built["engine"].bounds.capacity
    prompts = [{"prompt_token_ids": [5] * count} for count in (3, most, 4)]
    with LLM("demo:") as one:
        params = SamplingParams(temperature=0, max_tokens=4, n=2)
        short, long, other = one.generate(prompts, params, use_tqdm=False)
        for result in (short, other):
            assert [len(choice.token_ids) for choice in result.outputs] == [4, 4]
        for choice in long.outputs:
            assert (choice.finish_reason, choice.token_ids) == ("error", [])
            assert choice.message.startswith(f"max_tokens: prompt {most} + max_tokens 4 = ")
        with pytest.raises(RequestError, match=f"prompt {most}"):
            one.generate(prompts[1], params)
        with pytest.raises(RequestError, match=r"token ids must be from 0 .*\(prompts\[1\]\)"):
            one.generate([prompts[0], {"prompt_token_ids": [-1]}], params)
        assert one.generate(prompts[:1], params, use_tqdm=False)


def test_requests_by_hand_run_step_by_step_join_and_are_aborted(built: dict[str, Any]) -> None:
    text = dict.fromkeys(("first", "second", "third"), "")
    with LLM("demo:") as one:
        assert one.step() == []
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        endless = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        one.add_request(Submission(prompt=(5, 6), params=params, id="first"))
        one.add_request(Submission(prompt=(5, 6), params=endless, id="second"))
        with pytest.raises(RequestError, match="already in use"):
            one.add_request(Submission(prompt=(5,), params=params, id="first"))
        with pytest.raises(RuntimeError, match="unfinished"):
            one.generate("abc")
        steps = 0
        while one.has_unfinished_requests:
            for name, output in one.step():
                text[name] += output.text
            steps += 1
            if steps == 2:  # two run: it waits until the first has ended
                assert (
                    one.add_request(Submission(prompt=(7,), params=params, id="third")) == "third"
                )
            if text["third"]:
                one.abort_request("second")
        one.abort_request("unknown")
        assert (text["first"], text["third"]) == (TEXT[:4], TEXT[:4])
        assert 4 <= len(text["second"]) < 10
        one.add_request(Submission(prompt=(5, 6), params=endless))
        one.add_request(Submission(prompt=(5, 6), params=endless, id="queued"))
        one.abort_request("queued")
        one.step()
        stats = built["engine"].snapshot().scheduler
        assert stats.running + stats.waiting == 1


@pytest.mark.parametrize("stop", [(), TEXT[1]])
def test_an_id_is_free_once_its_request_has_ended(built: dict[str, Any], stop: Any) -> None:
    ends = SamplingParams(temperature=0, max_tokens=100, stop=stop)
    params = SamplingParams(temperature=0, max_tokens=3)
    outputs = []
    with LLM("demo:") as one:
        one.add_request(Submission(prompt=(5, 6), params=ends, id="a"))
        one.step()
        while stop and one.has_unfinished_requests:
            one.step()
        one.abort_request("a")
        assert one.add_request(Submission(prompt=(5, 6), params=params, id="a")) == "a"
        while one.has_unfinished_requests:
            outputs += one.step()
    assert "".join(output.text for _, output in outputs) == TEXT[:3]
    assert {name for name, _ in outputs} == {"a"}
    assert outputs[-1][1].finish_reason == "length"


def test_a_stream_runs_alone(built: dict[str, Any]) -> None:
    with LLM("demo:") as one:
        stream = one.stream([Submission(prompt=(5, 6))])
        next(stream)
        for call in (
            lambda: one.add_request(Submission(prompt=(7,))),
            one.step,
            lambda: one.generate("abc"),
        ):
            with pytest.raises(RuntimeError, match="a stream runs: read it to its end"):
                call()
        stream.close()
        assert one.add_request(Submission(prompt=(7,), id="a")) == "a"


def test_a_dead_engine_ends_requests_by_hand(built: dict[str, Any]) -> None:
    with LLM("demo:") as one:
        one.add_request(Submission(prompt=(5, 6)))
        built["engine"]._give_up("for the test")
        with pytest.raises(EngineDead, match="for the test"):
            one.step()
        assert not one.has_unfinished_requests
