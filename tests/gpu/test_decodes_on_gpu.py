"""Steps of decodes on an NVIDIA GPU: state that stays there, one wait a step, and CUDA graphs. Run
with `make gpu`; without a GPU or without flashinfer-python it fails.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_kernels.gpu import triton_cuts
from fairlead_kernels.sampling import sample, sample_rows
from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.device.sampling.sampling_mode import GENERAL, SamplingMode
from fairlead_runtime.device.sampling.sequence_table import SequenceTable
from fairlead_runtime.device.step.decode_steps import DecodeSteps
from fairlead_runtime.device.step.graph_cache import GraphCache
from fairlead_runtime.device.step.model_runner import ModelRunner
from fairlead_runtime.device.step.pending_step import PendingStep
from support import tiny
from support.cut_cases import CutCase
from support.gpu_device import DEVICE, KERNELS

pytestmark = pytest.mark.gpu

# A bad word of several tokens, which never comes here: its rows get masks.
MASKED: dict[str, Any] = {"bad_words": ((1, 1, 1),)}
PROMPTS = [{"prompt_token_ids": list(range(3 + i, 40 + 7 * i))} for i in range(6)]
SETTINGS: dict[str, Any] = {
    "kernels": KERNELS,
    "dtype": "bfloat16",
    "num_blocks": 200,
    "max_model_len": 192,
    "max_requests": 8,
    "max_batch_tokens": 512,
}


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 4, "head_dim": 64}
    model = tiny.build(request.param, **heads).to(torch.bfloat16)
    return tiny.save(model, tmp_path_factory.mktemp(request.param))


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    results = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(r.outputs[0].token_ids) for r in results]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    run = GraphCache.run

    def spy(self: GraphCache, key: Any, step: Any) -> None:
        ran = False

        def run_and_note() -> None:
            nonlocal ran
            ran = True
            step()

        run(self, key, run_and_note)
        if not ran:
            seen.append(key)

    monkeypatch.setattr(GraphCache, "run", spy)
    return seen


def test_graphs_give_the_tokens_of_steps_that_are_not_captured(
    folder: Path, replays: list[Any]
) -> None:
    """Steps of 6 rows run as 8, so products may round otherwise: a text may differ from where two
    tokens lie close, and most do not.
    """
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    texts = []
    for graphs in ("off", "on"):
        with LLM(str(folder), cuda_graphs=graphs, **SETTINGS) as llm:
            texts.append(tokens(llm, params))
    assert len(replays) > 40
    same = sum(one[:8] == other[:8] for one, other in zip(*texts, strict=True))
    assert same >= 5


def sample_generally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step be sampled on the device from now on."""
    choose = SequenceTable._choose

    def general(self: SequenceTable, *rows: Any) -> tuple[SamplingMode, bool]:
        return GENERAL, choose(self, *rows)[1]

    monkeypatch.setattr(SequenceTable, "_choose", general)
    monkeypatch.setattr(SequenceTable, "mode_of", lambda *_: GENERAL)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_ways_to_sample_draw_the_same_from_captured_logits(
    folder: Path, temperature: float, replays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the graph, behind it with masks, and by the general sampler."""
    drawn: dict[str, Any] = {"temperature": temperature, "seed": 7}
    drawn |= {"max_tokens": 32, "ignore_eos": True}
    with LLM(str(folder), cuda_graphs="on", **SETTINGS) as llm:
        on_device = tokens(llm, SamplingParams(**drawn))
        masked = tokens(llm, SamplingParams(**drawn, **MASKED))
        sample_generally(monkeypatch)
        general = tokens(llm, SamplingParams(**drawn))
    assert on_device == masked == general
    assert len(replays) > 60
    assert sum(way is GENERAL for _, way in replays) > 40


def test_a_structured_output_is_launched_ahead_and_is_what_was_asked(
    folder: Path, replays: list[Any]
) -> None:
    """Beside rows without a mask, whose texts are those of steps without masks."""
    free = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    asked = {"regex": "[a-z]{3,9}( [a-z]{3,9}){0,6}"}
    guided = SamplingParams(temperature=1, seed=5, max_tokens=64, structured_outputs=asked)
    with LLM(str(folder), cuda_graphs="on", async_batching="on", **SETTINGS) as llm:
        alone = tokens(llm, free)
        mixed = [guided if i == 2 else free for i in range(len(PROMPTS))]
        results = llm.generate(PROMPTS, mixed, use_tqdm=False)
    assert re.fullmatch(asked["regex"], results[2].outputs[0].text)
    others = [list(r.outputs[0].token_ids) for i, r in enumerate(results) if i != 2]
    del alone[2]
    assert sum(one[:8] == other[:8] for one, other in zip(others, alone, strict=True)) >= 4
    assert sum(way is GENERAL for _, way in replays) > 4


CHANGES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"logit_bias": {5: -3.0, 77: 2.5}, "min_tokens": 9, "logprobs": 20},
    {"allowed_token_ids": tuple(range(40, 90)), "bad_words": ((50,),), "frequency_penalty": 1.0},
)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("changes", CHANGES)
def test_changed_logits_and_log_probabilities_are_those_of_the_general_sampler(
    folder: Path,
    temperature: float,
    changes: dict[str, Any],
    replays: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In captured steps that are launched ahead, from the logits of the same kernels."""
    drawn: dict[str, Any] = {"temperature": temperature, "seed": 7}
    drawn |= {"max_tokens": 32, "ignore_eos": True}
    with LLM(str(folder), cuda_graphs="on", async_batching="on", **SETTINGS) as llm:
        params = SamplingParams(**drawn | changes)
        results = [llm.generate(PROMPTS, params, use_tqdm=False)]
        sample_generally(monkeypatch)
        results.append(llm.generate(PROMPTS, params, use_tqdm=False))
    for mine, wanted in zip(*([r.outputs[0] for r in some] for some in results), strict=True):
        assert mine.token_ids == wanted.token_ids
        for one, other in zip(mine.logprobs or (), wanted.logprobs or (), strict=True):
            values = [[entry.logprob for entry in each.values()] for each in (one, other)]
            assert values[0] == pytest.approx(values[1], abs=1e-6)
    ways = [way for _, way in replays]
    assert sum(way.changes for way in ways) > 20
    assert sum(way is GENERAL for way in ways) > 20


@pytest.mark.parametrize("changes", [0, 1])
def test_a_decode_waits_once(folder: Path, monkeypatch: pytest.MonkeyPatch, changes: int) -> None:
    """All but the fetch of the tokens runs where torch raises for a wait."""
    compute, count = DecodeSteps._compute, 0

    def watched(self: DecodeSteps, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return compute(self, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with LLM(str(folder), cuda_graphs="off", **SETTINGS) as llm:
        params = SamplingParams(
            temperature=0.9, top_p=0.9, max_tokens=24, ignore_eos=True, **CHANGES[changes]
        )
        tokens(llm, params)  # compiles
        monkeypatch.setattr(DecodeSteps, "_compute", watched)
        tokens(llm, params)
    assert count > 15


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_steps_ahead_give_the_tokens_of_steps_that_wait(folder: Path, graphs: str) -> None:
    """Steps without a stop have the same rows on the same kernels. A dead row makes a step larger,
    and products may round otherwise: of the stopped texts most begin alike.
    """
    some: dict[str, Any] = {"max_tokens": 48, "seed": 3}
    asked = (
        SamplingParams(temperature=0, ignore_eos=True, **some),
        SamplingParams(temperature=0.9, top_p=0.9, ignore_eos=True, **some),
        SamplingParams(temperature=1.0, stop_token_ids=tuple(range(5, 256, 20)), **some),
    )
    texts = []
    for switch in ("off", "on"):
        with LLM(str(folder), cuda_graphs=graphs, async_batching=switch, **SETTINGS) as llm:
            texts.append([tokens(llm, params) for params in asked])
    (*equal, stopped), (*wanted, stopped_too) = texts
    assert equal == wanted
    assert sum(one[:8] == other[:8] for one, other in zip(stopped, stopped_too, strict=True)) >= 5


def test_a_launch_waits_for_nothing_and_comes_before_the_last_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of decodes, of prompts in parts beside them, and of rows with masks."""
    launch, collect, order = ModelRunner.launch, PendingStep.collect, list[str]()

    def watched(self: ModelRunner, work: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(self, work)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            order.append("launch")

    def noted(self: PendingStep) -> Any:
        order.append("collect")
        return collect(self)

    some = {**SETTINGS, "max_batch_tokens": 64}
    with LLM(str(folder), cuda_graphs="off", async_batching="on", **some) as llm:
        params = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=24, ignore_eos=True)
        masked = replace(params, **MASKED)
        for each in (params, masked):
            tokens(llm, each)  # compiles
        monkeypatch.setattr(ModelRunner, "launch", watched)
        monkeypatch.setattr(PendingStep, "collect", noted)
        for each in (params, masked):
            tokens(llm, each)
    assert order.count("launch") == order.count("collect") > 40
    assert order[:4] == ["launch", "launch", "collect", "launch"]


def test_what_graphs_take_was_measured(folder: Path) -> None:
    with LLM(str(folder), cuda_graphs="on", **SETTINGS) as llm:
        report = {term.name: term for term in llm.built_engine.memory.terms}["graphs"]
    print(f"planned {report.planned}, measured {report.measured}")
    assert report.measured


@pytest.mark.on_cpu
def test_the_noise_of_a_gpu_is_that_of_a_cpu_within_two_ulp() -> None:
    """Of the same integers, which are equal bit for bit: those of some rows, and the ends."""
    vocabulary, rows = 128_256, 16
    generator = torch.Generator().manual_seed(0)
    halves = torch.randint(-(2**31), 2**31, (2, rows, 1), generator=generator, dtype=torch.int32)
    on_cpu = sample.keyed_hash(sample.hash_tokens(vocabulary, torch.device("cpu")), *halves)
    on_gpu = sample.keyed_hash(sample.hash_tokens(vocabulary, DEVICE), *halves.to(DEVICE))
    assert torch.equal(on_gpu.cpu(), on_cpu)
    ends = torch.tensor([0, 1, 2, 2**30, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    integers = torch.cat([on_cpu.flatten(), ends])
    want = sample.log_exponential(integers)
    got = sample.log_exponential(integers.to(DEVICE)).cpu()
    # 2 ulp of an exponential move its logarithm by up to 2^-22, and that has 2 ulp of its own.
    ulp = torch.nextafter(want.abs(), torch.tensor(torch.inf)) - want.abs()
    assert bool(((got - want).abs() <= 2**-22 + 2 * ulp).all())


@pytest.mark.on_cpu(128_256)
@pytest.mark.parametrize("vocabulary", [500, 128_256])
def test_draws_are_those_of_a_cpu(vocabulary: int) -> None:
    """The same integers, and noise within 2 ulp: only ties may differ, 1 in 1000 at most."""
    rows, generator = 64, torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=generator) * 4
    parameters = sample_rows.RowParameters(
        torch.rand(rows, generator=generator) + 0.5,
        torch.full((rows,), -9.0),
        torch.randint(0, 100, (rows,), generator=generator),
        torch.rand(rows, generator=generator).double(),
        torch.randint(-(2**62), 2**62, (rows,), generator=generator),
    )
    wrong = 0
    for step in range(40):
        keys = sample_rows.mix64(parameters.keys + step)
        on_cpu = parameters._replace(keys=keys)
        on_gpu = sample_rows.RowParameters(*(x.to(DEVICE) for x in on_cpu))
        hashes = sample.hash_tokens(vocabulary, DEVICE)
        assert torch.equal(sample_rows.mix64(on_gpu.keys).cpu(), sample_rows.mix64(keys))
        want = sample_rows.choose(logits, on_cpu, hashes.cpu())
        got = sample_rows.choose(logits.to(DEVICE), on_gpu, hashes)
        wrong += int((got.cpu() != want).sum())
    assert wrong <= 40 * rows // 1000


# More rows than are drawn at once, and fewer for Triton's interpreter.
@pytest.mark.on_cpu(128_256)
@pytest.mark.parametrize(("vocabulary", "rows"), [(500, 12), (128_256, 70)])
@pytest.mark.parametrize("tied", [False, True])
def test_cuts_in_triton_are_those_of_torch(vocabulary: int, rows: int, *, tied: bool) -> None:
    """Bit for bit, on this device; and so is what is drawn."""
    CutCase.make(rows, vocabulary, tied=tied).to(DEVICE).check(triton_cuts.load())


@torch.inference_mode()
def test_a_cuda_graph_holds_cuts_in_triton() -> None:
    """Replayed on other logits and parameters it draws what is drawn without it."""
    case, other = (CutCase.make(12, 5000, seed).to(DEVICE) for seed in (1, 2))
    hashes, ours = sample.hash_tokens(5000, DEVICE), triton_cuts.load()
    sample_rows.choose(*case, hashes, find_cuts=ours)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample_rows.choose(*case, hashes, find_cuts=ours)
    case.logits.copy_(other.logits)
    for mine, theirs in zip(case.rows, other.rows, strict=True):
        mine.copy_(theirs.flip(0))
    graph.replay()
    assert torch.equal(captured, sample_rows.choose(*case, hashes))
