"""The loop of ``LLM`` on an engine without a model: what it asks of ``build`` and of the engine."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fairlead_runtime import llm as module
from fairlead_runtime.llm import LLM
from fairlead_runtime.outputs import EngineDead, ModelFacts, Output, Submission
from fairlead_runtime.request.logprobs import Logprob
from fairlead_runtime.request.sequence import FinishReason, RequestError, SamplingParams
from fairlead_runtime.scheduling.plan import DeviceLostError
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


def test_unread_outputs_of_an_ended_request_are_dropped_by_its_abort(built: dict[str, Any]) -> None:
    def ask(tokens: int) -> Submission:
        params = SamplingParams(temperature=0, max_tokens=tokens)
        return Submission(prompt=(5, 6), params=params, id="a")

    with LLM("demo:") as one:
        one.add_request(ask(2))
        list(one.stream([replace(ask(6), id="stream")]))
        unread = one.has_unfinished_requests
        assert unread, "it has ended"
        with pytest.raises(RequestError, match="already in use"):
            one.add_request(ask(3))
        one.abort_request("a")
        assert one.step() == []
        one.add_request(ask(3))
        outputs = []
        while one.has_unfinished_requests:
            outputs += one.step()
        assert "".join(output.text for _, output in outputs) == TEXT[:3]


def test_a_stream_yields_nothing_more_of_an_aborted_request(built: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    both = [Submission(prompt=(5, 6), params=params, id=name) for name in "ab"]
    with LLM("demo:") as one:
        stream = one.stream(both)
        assert next(stream)[0] == 0
        one.abort_request("b")
        assert [number for number, _ in stream] == [0, 0, 0]


def test_streams_that_are_left_end_with_the_shutdown(built: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=100)
    one = LLM("demo:")
    streams = [one.stream([Submission(prompt=(5, 6), params=params)]) for _ in range(2)]
    for stream in streams:
        next(stream)
    one.shutdown()
    assert not one.has_unfinished_requests
    streams[0].close()
    with pytest.raises(RuntimeError, match="shut down"):
        list(streams[1])


def test_streams_and_requests_by_hand_are_read_in_turns_and_all_end(built: dict[str, Any]) -> None:
    def ask(tokens: int) -> list[Submission]:
        params = SamplingParams(temperature=0, max_tokens=tokens)
        return [Submission(prompt=(5, 6), params=params)]

    with LLM("demo:") as one:
        outer, text = [], ""
        one.add_request(*ask(3))
        for _, output in one.stream(ask(6)):
            outer.append(output)
            if len(outer) == 2:
                inner = [output.text for _, output in one.stream(ask(20))]
        assert "".join(output.text for output in outer) == TEXT[:6]
        assert outer[-1].finish_reason is FinishReason.LENGTH
        assert "".join(inner) == (TEXT * 3)[:20]
        while one.has_unfinished_requests:
            text += "".join(output.text for _, output in one.step())
        assert text == TEXT[:3], "the steps of the streams have made it"


def test_closing_a_stream_ends_its_own_requests_only(built: dict[str, Any]) -> None:
    endless = SamplingParams(temperature=0, max_tokens=100)
    with LLM("demo:") as one:
        first, second = (one.stream([Submission(prompt=(5, 6), params=endless)]) for _ in range(2))
        next(first)
        next(second)
        first.close()
        assert len(list(second)) == 99
        last = one.stream([Submission(prompt=(5, 6), params=endless)])
        next(last)
        last.close()
        assert built["engine"].idle, "nobody else steps"


def test_what_a_stream_has_computed_of_an_aborted_request_is_dropped(built: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    with LLM("demo:") as one:
        one.add_request(Submission(prompt=(5, 6), params=replace(params, max_tokens=100), id="a"))
        list(one.stream([Submission(prompt=(5, 6), params=params)]))
        one.abort_request("a")
        unfinished = one.has_unfinished_requests
        assert not unfinished
        one.add_request(Submission(prompt=(5, 6), params=params, id="a"))
        outputs: list[tuple[str, Output]] = []
        while one.has_unfinished_requests:
            outputs += one.step()
        assert "".join(output.text for _, output in outputs) == TEXT[:3]


def test_a_dead_engine_ends_every_stream(built: dict[str, Any]) -> None:
    with LLM("demo:") as one:
        first, second = (one.stream([Submission(prompt=(5, 6))]) for _ in range(2))
        next(first)
        next(second)
        built["engine"]._give_up("for the test")
        for stream in (first, second):
            with pytest.raises(EngineDead, match="for the test"):
                list(stream)


def test_an_engine_that_gives_up_in_the_last_step_raises(
    built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its one request ends in that very step: no later one is asked for."""

    def lose(_: float) -> None:
        raise DeviceLostError("for the test")

    with LLM("demo:") as one:
        stream = one.stream([Submission(prompt=(5, 6))])
        next(stream)
        monkeypatch.setattr(built["engine"], "_advance", lose)
        with pytest.raises(EngineDead, match="for the test"):
            next(stream)
        with pytest.raises(EngineDead, match="for the test"):
            one.generate({"prompt_token_ids": [5, 6]}, use_tqdm=False)


def test_the_parts_of_a_choice_are_not_copied_at_each_token() -> None:
    """A copy of all that came before at every token takes the square of an answer's length."""
    result, text = module.CompletionOutput(0), list[str]()
    logprobs: Any = None
    for token in range(3):
        output = Output(0, (token,), "a", ({token: Logprob(-1.0)},))
        text.append(output.text)
        module._append(result, output, text)
        assert logprobs is None or result.logprobs is logprobs
        logprobs = result.logprobs
    module._append(result, Output(0, (), "", (), FinishReason.LENGTH), text)
    assert (result.text, result.token_ids) == ("aaa", [0, 1, 2])
    assert [*map(list, result.logprobs or [])] == [[0], [1], [2]]


def test_a_dead_engine_ends_requests_by_hand(built: dict[str, Any]) -> None:
    with LLM("demo:") as one:
        one.add_request(Submission(prompt=(5, 6)))
        built["engine"]._give_up("for the test")
        with pytest.raises(EngineDead, match="for the test"):
            one.step()
        assert not one.has_unfinished_requests
