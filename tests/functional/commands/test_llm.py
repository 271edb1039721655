"""The Python API on tiny real models: one result per prompt, and the same text in any batch."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, not listed

import fairlead_runtime
from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.commands import trace
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.warmup.decode_plan import DecodePlan
from fairlead_runtime.grammar import guides
from fairlead_runtime.grammar.compile import compile_matcher
from fairlead_runtime.llm import RequestOutput
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.outputs import EngineDead, Submission
from fairlead_runtime.recording.record import Recording
from fairlead_runtime.recording.trace import steps
from fairlead_runtime.request.sequence import FinishReason, RequestError
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from support import rank_pair, tiny
from support.full import LONG_FORM

SMALL: dict[str, Any] = {"num_blocks": 256, "block_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tiny.build("llama", seed=1), tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, **SMALL) as instance:
        yield instance


def prompts(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    draw = random.Random(seed)
    shared = [draw.randrange(256) for _ in range(12)]
    result = []
    for i in range(count):
        own = [draw.randrange(256) for _ in range(draw.randint(1, 20))]
        result.append({"prompt_token_ids": (shared if i % 3 == 0 else []) + own})
    return result


def tokens_of(results: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[tuple(choice.token_ids) for choice in result.outputs] for result in results]


def generate(llm: LLM, *args: Any) -> list[RequestOutput]:
    return llm.generate(*args, use_tqdm=False)


def test_every_prompt_gets_its_result_in_order(llm: LLM) -> None:
    prompt_list = ["hello", {"prompt_token_ids": [5, 6, 7]}, "world"]
    results = generate(
        llm, prompt_list, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    )
    assert [result.prompt for result in results] == ["hello", None, "world"]
    assert results[1].prompt_token_ids == [5, 6, 7]
    for result in results:
        (choice,) = result.outputs
        assert len(choice.token_ids) == 5
        assert choice.finish_reason is FinishReason.LENGTH
        assert str(choice.finish_reason) == "length"
        assert choice.logprobs is None
        assert choice.text == llm.built_engine.tokenizer.decode(
            choice.token_ids, skip_special_tokens=True
        )


def test_a_long_prompt_beside_a_decode_is_computed_in_parts_with_the_same_text(
    llm: LLM, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    short, long = ({"prompt_token_ids": [7] * count} for count in (3, 450))
    record = tmp_path / "run.jsonl"
    with LLM(model, **SMALL, max_batch_tokens=256, record=str(record), device="cpu") as recorded:
        together = generate(recorded, [short, long], params)
    assert tokens_of(together) == tokens_of(generate(llm, [short, long], params))
    parts = [row.count for view in steps(Recording(record)) for row in view.rows if row.start < 450]
    # The first step has no decode and takes all it can; the others have one.
    assert [count for count in parts if count > 3] == [253, 96, 96, 5]
    assert trace.main([str(record), "--tokenizer", model]) == 0
    text = together[0].outputs[0].text
    assert f"ends with 4 tokens: {text!r}" in capsys.readouterr().out


def test_a_single_prompt_needs_no_list_and_no_parameters(llm: LLM) -> None:
    (result,) = generate(llm, "hello")
    assert len(result.outputs[0].token_ids) <= 16


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_gives_the_same_tokens_as_one_prompt_at_a_time(
    llm: LLM, temperature: float
) -> None:
    prompt_list = prompts(24)
    params = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=3 + i % 9, n=1 + i % 3, ignore_eos=True
        )
        for i in range(len(prompt_list))
    ]
    together = tokens_of(generate(llm, prompt_list, params))
    alone = [
        tokens_of(generate(llm, one, own))[0] for one, own in zip(prompt_list, params, strict=True)
    ]
    assert together == alone


def test_greedy_tokens_equal_those_of_transformers(llm: LLM, model: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    prompt_list = prompts(6, seed=4)
    results = generate(
        llm, prompt_list, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    )
    for prompt, result in zip(prompt_list, results, strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"]])
        expected = plain.generate(
            ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert result.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()


def test_the_same_request_gives_the_same_text_alone_in_any_batch_and_after_preemption(
    llm: LLM, model: str
) -> None:
    """Sampled, with a seed, in random batches; then with so few blocks that most are preempted."""
    count = 2000 if LONG_FORM else 100
    prompt_list = prompts(count, seed=7)
    params = [
        SamplingParams(
            temperature=0.9 + 0.1 * (i % 3),
            top_k=(0, 20)[i % 2],
            top_p=(1.0, 0.9)[i % 2],
            seed=i,
            max_tokens=8,
            ignore_eos=True,
        )
        for i in range(count)
    ]
    alone = [
        tokens_of(generate(llm, one, own))[0] for one, own in zip(prompt_list, params, strict=True)
    ]
    draw = random.Random(11)
    order = draw.sample(range(count), count)
    at = 0
    while at < count:
        batch = order[at : at + draw.randint(1, 32)]
        at += len(batch)
        batch_tokens = tokens_of(
            generate(llm, [prompt_list[i] for i in batch], [params[i] for i in batch])
        )
        assert batch_tokens == [alone[i] for i in batch]
    for settings in ({"cpu_offload_space": 0.001}, {}):
        with LLM(
            model, num_blocks=24, block_size=4, safety_margin=0.0, max_batch_tokens=16, **settings
        ) as scarce:
            assert tokens_of(generate(scarce, prompt_list, params)) == alone
            stats = scarce.built_engine.engine.snapshot().scheduler
            assert stats.preemptions > count // 20
            assert (stats.offloads > 0) == bool(settings)
            assert stats.used == 0


def test_more_prompts_than_the_queue_holds_are_submitted_as_it_drains(model: str) -> None:
    with LLM(model, max_queue=3, max_requests=2, **SMALL) as small:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        results = generate(small, prompts(40), params)
        assert all(len(result.outputs[0].token_ids) == 2 for result in results)


def test_logprobs_come_in_vllms_shape(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
    (result,) = generate(llm, "hello", params)
    choice = result.outputs[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 4
    for token, entries in zip(choice.token_ids, choice.logprobs, strict=True):
        assert len(entries) == 3
        assert entries[token].rank == 1
        assert max(entry.logprob for entry in entries.values()) == entries[token].logprob < 0
        assert entries[token].decoded_token == llm.built_engine.tokenizer.decode([token])


def test_stop_ids_end_a_choice(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (plain,) = generate(llm, "hello", params)
    stop = plain.outputs[0].token_ids[3]
    first = plain.outputs[0].token_ids.index(stop)
    (stopped,) = generate(
        llm, "hello", SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(stop,))
    )
    assert stopped.outputs[0].token_ids == plain.outputs[0].token_ids[: first + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)


def test_bad_prompts_and_parameters_are_refused_before_anything_runs(llm: LLM) -> None:
    steps = llm.built_engine.engine.counters.steps
    for prompt, message in (
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [10**6]}, "token ids must be from 0"),
        ({"prompt_token_ids": [-1]}, "token ids must be from 0"),
        ({"prompt_token_ids": "abc"}, "must be a text or"),
        ({"tokens": [1]}, "must be a text or"),
    ):
        with pytest.raises(RequestError, match=message):
            generate(llm, ["fine", prompt])
    with pytest.raises(RequestError, match="2 for 1 prompts"):
        generate(llm, ["one"], [SamplingParams(), SamplingParams()])
    with pytest.raises(RequestError, match=r"max_tokens.*2000"):
        generate(llm, "hello", SamplingParams(max_tokens=2000))
    assert llm.built_engine.engine.counters.steps == steps


def test_leaving_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True, n=2)
    for _ in llm.stream([Submission(prompt=(1, 2, 3), params=params)]):
        break
    assert generate(llm, "hello", SamplingParams(max_tokens=1))
    assert llm.built_engine.engine.snapshot().scheduler.used == 0


def test_leaving_a_stream_when_one_of_two_choices_has_ended_frees_the_other(llm: LLM) -> None:
    pair = SamplingParams(max_tokens=3, ignore_eos=True, n=2, seed=3)
    first, second = (choice.token_ids for choice in generate(llm, "hello", pair)[0].outputs)
    assert first[0] not in second
    stopping = SamplingParams(
        max_tokens=100, ignore_eos=True, n=2, seed=3, stop_token_ids=(first[0],)
    )
    for _, output in llm.stream(
        [Submission(prompt=tuple(llm.built_engine.tokenizer.encode("hello")), params=stopping)]
    ):
        if output.finish_reason is not None:
            break
    assert generate(llm, "hello", SamplingParams(max_tokens=1))
    assert llm.built_engine.engine.snapshot().scheduler.used == 0


def test_settings_have_the_names_of_flags_and_an_unknown_one_names_the_nearest(model: str) -> None:
    with pytest.raises(ConfigError, match="did you mean max_requests"):
        LLM(model, max_request=3)
    for settings in ({"max_model_len": 10**6}, {"tensor_parallel": 3}, {"block_size": 5}):
        with pytest.raises(ConfigError) as error:
            LLM(model, **settings)
        assert error.value.field == next(iter(settings))


def test_a_model_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        LLM(str(tmp_path / "nothing"))


def test_generate_after_shutdown_raises(model: str) -> None:
    llm = LLM(model, **SMALL)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate("hello")


def test_a_progress_bar_counts_prompts(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], SamplingParams(max_tokens=1))
    assert "2/2" in capfd.readouterr().err


def test_the_package_exports_llm_and_no_unknown_name() -> None:
    assert fairlead_runtime.LLM is LLM
    with pytest.raises(AttributeError):
        fairlead_runtime.Nothing  # noqa: B018 - the access is the test


def test_the_memory_report_says_what_int8_weights_cost_a_text(model: str) -> None:
    with LLM(model, **SMALL, quantization="int8") as rounded:
        terms = {term["name"]: term for term in rounded.built_engine.memory.as_dict()["terms"]}
    assert re.match(
        r"int8 weights move logits by 0\.\d+ of 0\.7 allowed, .*"
        r"; perplexity of a text \S+ before and \S+ after$",
        terms["weights"]["note"],
    )
    assert terms["weights"]["measuredBytes"]
    assert terms["kv"]["note"] == ""


def test_a_request_alone_waits_for_its_grammar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_slowly(*arguments: Any) -> Any:
        time.sleep(0.3)  # the engine has nothing to do meanwhile
        return compile_matcher(*arguments)

    monkeypatch.setattr(guides.__name__ + ".compile_matcher", compile_slowly)
    params = SamplingParams(structured_outputs={"choice": ["up", "down"]}, seed=1)
    (result,) = generate(llm, "hello", params)
    assert result.outputs[0].text in {"up", "down"}


def test_structured_outputs_shape_what_is_generated(llm: LLM) -> None:
    schema = {"enum": ["alpha", "beta", 3]}
    params = [
        SamplingParams(structured_outputs={"json": schema}, seed=1, max_tokens=40),
        SamplingParams(structured_outputs={"choice": ["left", "right"]}, n=3, seed=2),
        SamplingParams(seed=3),
    ]
    results = generate(llm, prompts(3), params)
    assert json.loads(results[0].outputs[0].text) in schema["enum"]
    assert {choice.text for choice in results[1].outputs} <= {"left", "right"}
    assert {choice.finish_reason for choice in results[1].outputs} == {FinishReason.STOP}
    with pytest.raises(RequestError, match="uniqueItems") as refused:
        generate(
            llm,
            prompts(1),
            SamplingParams(structured_outputs={"json": {"type": "array", "uniqueItems": True}}),
        )
    assert refused.value.param == "structured_outputs.json"
    with pytest.raises(RequestError) as refused:
        SamplingParams(structured_outputs={"regex": ""})
    assert refused.value.param == "structured_outputs.regex"


@pytest.mark.full
def test_two_ranks_answer_as_one_again_after_a_shutdown_and_end_with_a_reason(model: str) -> None:
    rank_pair.part()
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(model, **SMALL) as one:
        expected = generate(one, "hello", greedy)
    for _ in range(2):
        with LLM(model, **SMALL, tensor_parallel=2) as two:
            assert tokens_of(generate(two, "hello", greedy)) == tokens_of(expected)
            (rank,) = (
                int(child)
                for file in Path("/proc/self/task").glob("*/children")
                for child in file.read_text().split()
                if b"rank_process" in Path(f"/proc/{child}/cmdline").read_bytes()
            )
            os.kill(rank, signal.SIGKILL)
            with pytest.raises(EngineDead, match="rank 1 of 2 was ended by SIGKILL"):
                generate(two, "hello", greedy)


def test_steps_launched_ahead_on_two_ranks_give_the_text_of_one(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs: the other rank gets every id in the pass, those in flight, too."""

    rank_pair.part()

    def choose(config: EngineConfig, served: PagedModel, *_: Any, **__: Any) -> DecodePlan:
        return DecodePlan(
            config, served, None, "no graphs on a CPU", sync_because="", state_on_device=True
        )

    greedy = SamplingParams(temperature=0, max_tokens=16)
    texts = ["hello", "a longer text, of which parts are computed beside the other's tokens"]
    found = []
    for ranks in (1, 2):
        if ranks == 2:
            monkeypatch.setattr(DecodePlan, "choose", choose)
        with LLM(model, **SMALL, max_batch_tokens=16, tensor_parallel=ranks) as llm:
            found.append(tokens_of(generate(llm, texts, greedy)))
            launched = llm.built_engine.engine.counters.steps_launched
        assert (launched > 10) == (ranks == 2)
    assert found[0] == found[1]


def test_a_process_group_of_the_process_is_named_and_left_alone(model: str) -> None:
    rank_pair.part()
    store = FileStore(f"/proc/self/fd/{os.memfd_create('own')}", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="has a process group already") as caught:
            LLM(model, **SMALL, tensor_parallel=2)
        assert caught.value.field == "tensor_parallel"
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
