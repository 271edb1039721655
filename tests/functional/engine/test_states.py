"""Greedy texts of models whose layers keep a state of fixed size are transformers' ``generate``,
whatever happens beside and before them: chunks, prefix hits, choices, preemption both ways, steps
that fail and are repeated.
"""

import logging
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from fairlead_runtime.device.conversion.fusion import quantized_elements
from fairlead_runtime.device.conversion.packed_linears import SMALLEST
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.llm import LLM
from fairlead_runtime.models import loading
from fairlead_runtime.recording.record import RecordedScheduler, Recording
from fairlead_runtime.recording.replay import replay
from fairlead_runtime.request.sequence import SamplingParams
from fairlead_runtime.scheduling.scheduler import Scheduler, SchedulerStats
from fairlead_runtime.settings.engine_config import ConfigError
from fairlead_runtime.sizing.arithmetic import PANEL
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.weight_bytes import panel_rows
from support import tiny, tiny_states
from support.bad_steps import BadSteps, Isolating
from support.engine_rig import (
    NEW,
    TIGHT,
    Rig,
    Setting,
    compare_texts,
    greedy,
    greedy_arrivals,
    prompts,
    rig,
    run_to_end,
)
from support.full import LONG_FORM
from support.kernel_sets import PRODUCT_SETS, rows_to_a_panel
from support.published import compressed_tensors, publish

SETTINGS = {
    "offload": Setting(block_size=4, chunk=13, num_blocks=28, offload=True),
    "one token": Setting(block_size=1, chunk=5, num_blocks=76, max_requests=3),
    "whole prompts": Setting(block_size=16, chunk=4096, num_blocks=10),
    "no sharing": Setting(block_size=4, chunk=7, num_blocks=26, sharing=False, offload=True),
}
# One of each kind of layer; the others have the same code.
KINDS = ("qwen3_5_text", "falcon_h1", "mamba2", "jamba", "lfm3")


def compare(engine: Rig, setting: Setting, seed: int, *, bad: bool = False) -> SchedulerStats:
    """Run five prompts, some with two choices, and compare each text; what happened is returned."""
    arrivals = greedy_arrivals(seed)
    runner = engine.runner(setting)
    device = BadSteps(runner)
    scheduler = Scheduler(engine.limits(setting), engine.groups, b"rig")
    outcome = run_to_end(scheduler, Isolating(device) if bad else runner, arrivals)
    assert not bad or device.failed > 3
    return compare_texts(engine, arrivals, outcome)


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("torch", marks=pytest.mark.full)])
@pytest.mark.parametrize("family", tiny_states.FAMILIES)
def test_greedy_text_equals_transformers_in_too_little_memory(family: str, kernels: str) -> None:
    """In C++ as a CPU serves them by default; the settings below are those of plain torch."""
    engine = rig(family, kernels)
    stats = compare(engine, TIGHT, seed=7, bad=True)
    # States alone do not grow.
    assert stats.preemptions > 0 or not engine.groups, "no request was preempted"
    assert stats.prefix_hits > 0, "no prompt began with a snapshot"


@pytest.mark.parametrize(
    "family", ["nemotron_h", pytest.param("qwen3_5_text", marks=pytest.mark.full)]
)
def test_a_record_of_steps_of_states_that_fail_replays(family: str, tmp_path: Path) -> None:
    """In C++, in too little memory; of what bounds time steps in prompts alone, too."""
    engine, path = rig(family, "cpu"), tmp_path / "run.jsonl"
    setting = SETTINGS["offload"]
    scheduler = RecordedScheduler(engine.limits(setting), engine.groups, b"rig", path=path)
    device = BadSteps(engine.runner(setting))
    outcome = run_to_end(scheduler, Isolating(device), greedy_arrivals(7))
    scheduler.close()
    assert device.failed > 3
    assert compare_texts(engine, greedy_arrivals(7), outcome).preemptions > 0
    replayed = replay(Recording(path))
    assert replayed.difference is None
    assert replayed.steps == outcome.steps


def test_a_prompt_that_is_scored_in_several_passes_of_one_step_keeps_its_state() -> None:
    engine, (prompt,) = rig("qwen3_5_text"), prompts(3, (40,), 0)
    request = greedy("scored", prompt, NEW, prompt_logprobs=0)
    whole, cut = (
        engine.run(Setting(block_size=4, chunk=40, max_logits=most), [(0, request)])
        for most in (256, 7)
    )
    assert cut.texts["scored", 0] == engine.reference(prompt, NEW)
    scores = [[token.logprob for token in run.prompts["scored"]] for run in (whole, cut)]
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)


def test_time_steps_of_generated_tokens_have_no_bounds_though_they_are_computed_again() -> None:
    engine = rig("nemotron_h", time_step_min=0.6)
    assert compare(engine, TIGHT, seed=9).preemptions > 0, "no request was preempted"


def test_an_answer_without_bounds_is_computed_again_in_a_prompt_which_has_them() -> None:
    """A conversation that goes on finds no state of the answer before, but of the prompt before."""
    engine = rig("mamba2", "cpu", time_step_limit=(0.12, 0.2))
    for seed in range(4):
        (prompt,) = prompts(seed, (13,), 0)
        later = (*prompt, *engine.reference(prompt, NEW)[:17], 9)
        arrivals = [(0, greedy("a", prompt, NEW)), (60, greedy("b", later, NEW))]
        stats = compare_texts(engine, arrivals, engine.run(Setting(chunk=16), arrivals))
        assert stats.prefix_hits == 12


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", tiny_states.FAMILIES if LONG_FORM else KINDS)
def test_greedy_text_equals_transformers_under_every_setting(family: str, name: str) -> None:
    # Mixers run once a step where they can, or row by row as transformers has them.
    at_once = name in ("offload", "one token")
    engine, setting = rig(family, "cpu" if at_once else "torch"), SETTINGS[name]
    stats = compare(engine, setting, seed=8)
    roomy = not engine.groups or name != "offload"
    assert stats.preemptions > 0 or roomy, "no request was preempted"
    assert (stats.prefix_hits > 0) == setting.sharing


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"] + ["nemotron_h", "lfm3"] * LONG_FORM)
def test_keys_in_8_bits_beside_states_give_the_text_of_rounded_keys(family: str) -> None:
    """States stay in their own types. Units have half the keys' bytes, or a quarter."""
    engine, whole = rig(family, "fp8 cache torch"), rig(family)
    assert compare(engine, SETTINGS["offload"], seed=7).preemptions > 0
    states, units = engine.model.state_layout, []
    assert states == whole.model.state_layout
    for model in (engine.model, whole.model):
        units.append(CacheStorage.unit_bytes(model.groups, model.cache_heads, 16, states))
    assert 4 * units[0] == units[1]


@pytest.mark.parametrize("family", ["qwen3_5_text", "minimax"])
def test_an_engine_starts_with_keys_in_8_bits_beside_states(family: str, tmp_path: Path) -> None:
    """Its self-test compares with a cache of the class that the model's code takes."""
    path = str(tiny.save(tiny_states.build(family), tmp_path))
    sizes = {"num_blocks": 100, "block_size": 8, "max_batch_tokens": 256, "max_requests": 4}
    with LLM(path, cache_dtype="fp8", **sizes) as llm:
        (answer,) = llm.generate("17 4 9", SamplingParams(temperature=0.0, max_tokens=4))
        report = llm.built_engine.memory.as_dict()
    assert len(answer.outputs[0].token_ids) > 0
    terms = {term["name"]: term for term in report["terms"]}
    assert terms["kv"]["plannedBytes"] == terms["kv"]["measuredBytes"]
    assert "fp8" in str(terms["kv"])


@pytest.mark.parametrize("kernels", ["int8", pytest.param("rounded", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "lfm2"] + ["mamba2", "bamba", "olmo_hybrid"] * LONG_FORM
)
def test_rounded_weights_of_mixers_give_the_text_of_rounded_weights(
    family: str, kernels: str
) -> None:
    """Packed, or widened by torch in each pass: the second is what the first is compared with."""
    engine, widened, whole = rig(family, kernels), rig(family, "rounded"), rig(family)
    stats = compare(engine, SETTINGS["offload"], seed=7)
    assert stats.preemptions > 0 or not engine.groups
    arguments = engine.model.model.config.to_dict() | {"dtype": "float32"}
    matrices = ModelShape.from_config(arguments).layer_matrices
    assert quantized_elements(widened.model) == matrices
    assert whole.model.weight_bytes - widened.model.weight_bytes > 2.8 * matrices
    if kernels == "int8" and PRODUCT_SETS:
        assert quantized_elements(engine.model) < matrices / 100, "small ones that are not packed"


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("qwen3_5_text", torch.float32, "int8"),
        ("mamba2", torch.bfloat16, "int8"),
        ("nemotron_h", torch.bfloat16, "none"),
        ("nemotron_h", torch.float32, "int8"),
        *[("qwen3_5_text", torch.bfloat16, "none")] * LONG_FORM,
    ],
)
def test_an_engine_serves_packed_products_of_mixers_as_planned(
    family: str,
    dtype: torch.dtype,
    quantization: Literal["none", "int8"],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With rows to whole panels, of which the plan counts those of all matrices in the widest
    ones.
    """
    caplog.set_level(logging.INFO)
    int8, more = quantization == "int8", dict[str, Any]()
    if int8 and family == "nemotron_h":  # experts would stay whole
        kinds = ["linear_attention", "mlp", "full_attention", "linear_attention"]
        more = {"layers_block_type": kinds, "num_hidden_layers": len(kinds)}
    model: Any = tiny_states.build(family, vocab_size=288, **more).to(dtype)
    head = model.get_output_embeddings()
    linears = [x.weight for x in model.modules() if type(x) is nn.Linear and x is not head]
    packed = [x for x in linears if x.numel() >= SMALLEST and (int8 or len(x) >= PANEL)]
    element = 1 if int8 else dtype.itemsize
    padding = element * sum(rows_to_a_panel(len(x)) * x.shape[1] for x in packed)
    name = str(dtype).removeprefix("torch.")
    shape = ModelShape.from_config(model.config.to_dict() | {"dtype": name})
    planned = element * panel_rows(shape) + shape.narrow_padding * int8
    assert 0 <= padding <= planned
    counted = [x for x in linears if int8 or len(x) >= PANEL]
    assert planned == element * sum(-len(x) % PANEL * x.shape[1] for x in counted)
    path = str(tiny.save(model, tmp_path))
    sizes = {"num_blocks": 100, "block_size": 8, "max_batch_tokens": 256, "max_requests": 4}
    with LLM(path, quantization=quantization, **sizes) as llm:
        (answer,) = llm.generate("17 4 9", SamplingParams(temperature=0.0, max_tokens=4))
        report = llm.built_engine.memory.as_dict()
    assert len(answer.outputs[0].token_ids) > 0
    if not PRODUCT_SETS:
        return  # they are torch's
    terms = {term["name"]: term for term in report["terms"]}
    measured = terms["weights"]["plannedBytes"] - planned + padding
    assert terms["weights"]["measuredBytes"] == measured
    assert f", {len(packed)} other matrices packed" in caplog.text
    assert f", {name} head" in caplog.text
    assert not int8 or "int8" in str(terms["weights"])
    for name in ("activations", "logits"):
        assert terms[name]["measuredBytes"] <= terms[name]["plannedBytes"]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_text",
        *(pytest.param(x, marks=pytest.mark.full) for x in ("lfm2", "mamba2", "falcon_h1")),
    ],
)
def test_a_quantized_checkpoint_gives_the_text_of_the_matrices_that_are_stored(
    family: str, tmp_path: Path
) -> None:
    model: Any = tiny_states.build(family, vocab_size=288)
    form = compressed_tensors(packed=family < "m")
    quantized, plain = publish(tiny.save(model, tmp_path / "model"), tmp_path, *form)
    prompt = [3 + token % 280 for token in prompts(4, (40,), 0)[0]]  # its text has no near tie
    with torch.inference_mode():
        loaded: Any = loading.load(plain).model
        settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
        out = loaded.generate(torch.tensor([prompt]), **settings)
    want = out[0, len(prompt) :].tolist()
    sizes = {"num_blocks": 100, "block_size": 8, "max_batch_tokens": 32, "max_requests": 4}
    with LLM(str(quantized), **sizes) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NEW)
        (answer,) = llm.generate([{"prompt_token_ids": list(prompt)}], params)
        report = llm.built_engine.memory.as_dict()
    assert list(answer.outputs[0].token_ids) == want
    (weights,) = (term for term in report["terms"] if term["name"] == "weights")
    assert weights["measuredBytes"] <= weights["plannedBytes"] < loaded.get_memory_footprint()


def test_a_quantized_checkpoint_of_which_a_matrix_is_plain_is_refused(tmp_path: Path) -> None:
    """Its size would be another than the plan's."""
    saved = tiny.save(tiny_states.build("qwen3_5_text"), tmp_path / "model")
    quantized, _ = publish(saved, tmp_path, *compressed_tensors(), beside="in_proj_z")
    loaded = loading.load(quantized)
    with pytest.raises(ConfigError, match="weights in matrices of 'qwen3_5_text' are in") as error:
        selftest.prepare_and_test(loaded)
    assert error.value.field == "quantization"
    assert error.value.hint == "use the unquantized checkpoint"


def test_a_mixer_that_reads_its_weights_itself_is_not_quantized(tmp_path: Path) -> None:
    """Even where a plan does not know: that refuses it before."""
    loaded = loading.load(tiny.save(tiny_states.build("falcon_mamba"), tmp_path))
    with pytest.raises(ConfigError, match="'falcon_mamba' reads weights itself") as refused:
        selftest.prepare_and_test(loaded, quantization="int8")
    assert refused.value.field == "quantization"


@pytest.mark.parametrize("family", [*tiny_states.WHOLES, "mamba2", "mamba2 gelu", "nemotron_h"])
def test_a_checkpoint_is_planned_loaded_and_served(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the C++ kernels are built by them, as the start says."""
    caplog.set_level(logging.INFO)
    family, _, activation = family.partition(" ")  # behind a convolution: one that no kernel has
    if family in tiny_states.WHOLES:
        model: Any = tiny_states.build_whole(family)
    else:
        extra: dict[str, Any] = {"hidden_act": activation} if activation else {}
        model = tiny_states.build(family, **extra)
    (prompt,) = prompts(3, (40,), 0)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    want = out[0, len(prompt) :].tolist()
    sizes = {"num_blocks": 100, "block_size": 8, "max_batch_tokens": 256, "max_requests": 4}
    with LLM(str(tiny.save(model, tmp_path)), **sizes) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NEW)
        (answer,) = llm.generate([{"prompt_token_ids": list(prompt)}], params)
        report = llm.built_engine.memory.as_dict()
        # Nemotron-H has bounds of time steps, which hold in prompts alone.
        limits = llm.built_engine.engine._scheduler.limits
        assert limits.shares_answers == (family != "nemotron_h")
    assert list(answer.outputs[0].token_ids) == want
    terms = {term["name"]: term for term in report["terms"]}
    assert terms["kv"]["plannedBytes"] == terms["kv"]["measuredBytes"]
    (line,) = (m for m in caplog.messages if m.startswith("kernels: "))
    assert line.startswith(
        f"kernels: {PRODUCT_SETS[0]}, fused " if PRODUCT_SETS else "kernels: torch"
    )
    if activation and PRODUCT_SETS:
        assert f"(layer 0: activation: {activation!r} behind a convolution)" in line
    assert terms["weights"]["measuredBytes"] <= terms["weights"]["plannedBytes"]
    for name in ("activations", "logits"):
        assert terms[name]["measuredBytes"] <= terms[name]["plannedBytes"]
