"""The load that `make gpu-soak` puts on a GPU for eight minutes, here for seconds: on the whole
engine of a CPU, and on the stand-ins of flashinfer's wrappers and of CUDA graphs with steps
launched ahead.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlead_runtime import LLM
from fairlead_runtime.engine.engine import Bounds, Engine
from fairlead_runtime.request.sequence import Request, SamplingParams
from fairlead_runtime.scheduling.scheduler import Scheduler
from support import soak, tiny
from support.engine_rig import EOS, Setting, rig
from support.fake_engine import Clock
from support.full import LONG_FORM

SECONDS = 60.0 if LONG_FORM else 1.0
ROUND = 64 if LONG_FORM else 14
BOTH = {**soak.PLAIN, **soak.GUIDED}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny.save(tiny.build("gemma2"), tmp_path_factory.mktemp("gemma2"))
    with LLM(str(folder), **settings()) as made:
        yield made


def settings() -> dict[str, Any]:
    """Blocks for a few of the longest sequences."""
    return {
        "num_blocks": 13,
        "max_model_len": 160,
        "max_requests": 8,
        "max_batch_tokens": 64,
        "safety_margin": 0.0,
        "cpu_offload_space": 0.01,
        "max_queue": 64,
    }


def load(llm: LLM) -> soak.Soak:
    make = soak.maker(llm)
    return soak.Soak(llm.built_engine.engine, make, BOTH, tiny.VOCAB, longest=80, output=24)


def test_the_engine_holds_nothing_after_mixed_load(llm: LLM) -> None:
    report = load(llm).run(SECONDS, per_round=ROUND)
    soak.check(report, llm.built_engine.engine, BOTH)
    assert llm.built_engine.engine.snapshot().scheduler.offloads > 0


def test_a_file_that_each_request_leaves_open_is_found(llm: LLM, tmp_path: Path) -> None:
    run, leaked = load(llm), []
    make = run.make

    def leak(prompt: list[int], params: SamplingParams) -> Request:
        leaked.append(os.open(tmp_path, os.O_RDONLY))
        return make(prompt, params)

    run.make = leak
    try:
        report = run.run(0, per_round=ROUND)
        assert "open files" in soak.growth(report.samples)
    finally:
        for number in leaked:
            os.close(number)


def test_captured_steps_launched_ahead_hold_nothing_after_mixed_load() -> None:
    """Structured output is left out: its grammars belong to an engine with a tokenizer."""
    model, names = rig("gemma2", "graphs"), itertools.count()
    setting = Setting(block_size=4, chunk=64, num_blocks=32, offload=True, max_requests=8)
    limits, runner = setting.limits(len(model.groups)), model.runner(setting)
    engine = Engine(
        lambda: Scheduler(limits, model.groups, b"rig"),
        runner,
        Bounds.of(limits, max_queue=64, queue_timeout=3600.0),
        now=Clock(),
        launcher=runner,
    )

    def make(prompt: list[int], params: SamplingParams) -> Request:
        name = next(names)
        most = params.max_tokens or 1
        return Request(str(name), tuple(prompt), params, most, seed=name, eos_ids=EOS)

    run = soak.Soak(engine, make, soak.PLAIN, tiny.VOCAB, longest=40, output=16, concurrency=12)
    report = run.run(SECONDS, per_round=44 if LONG_FORM else 11)
    soak.check(report, engine, soak.PLAIN)
    assert engine.snapshot().scheduler.offloads > 0
