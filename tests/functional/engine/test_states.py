"""Greedy texts of models whose layers keep a state of fixed size are transformers' ``generate``,
whatever happens beside and before them: chunks, prefix hits, choices, preemption both ways, steps
that fail and are repeated.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_runtime.llm import LLM
from fairlead_runtime.request.sequence import SamplingParams
from fairlead_runtime.scheduling.scheduler import Scheduler, SchedulerStats
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
from support.kernel_sets import PRODUCT_SETS

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


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", tiny_states.FAMILIES if LONG_FORM else KINDS)
def test_greedy_text_equals_transformers_under_every_setting(family: str, name: str) -> None:
    engine, setting = rig(family), SETTINGS[name]
    stats = compare(engine, setting, seed=8)
    roomy = not engine.groups or name != "offload"
    assert stats.preemptions > 0 or roomy, "no request was preempted"
    assert (stats.prefix_hits > 0) == setting.sharing


@pytest.mark.parametrize("family", [*tiny_states.WHOLES, "mamba2", "nemotron_h"])
def test_a_checkpoint_is_planned_loaded_and_served(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the C++ kernels are built by them, as the start says."""
    caplog.set_level(logging.INFO)
    whole = family in tiny_states.WHOLES
    model: Any = tiny_states.build_whole(family) if whole else tiny_states.build(family)
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
    assert list(answer.outputs[0].token_ids) == want
    terms = {term["name"]: term for term in report["terms"]}
    assert terms["kv"]["plannedBytes"] == terms["kv"]["measuredBytes"]
    (line,) = (m for m in caplog.messages if m.startswith("kernels: "))
    assert line.startswith(
        f"kernels: {PRODUCT_SETS[0]}, fused " if PRODUCT_SETS else "kernels: torch"
    )
    for name in ("weights", "activations", "logits"):
        assert terms[name]["measuredBytes"] <= terms[name]["plannedBytes"]
