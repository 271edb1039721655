"""Eight minutes of mixed load on an NVIDIA GPU, after which nothing has grown and no block is held.
Run with `make gpu-soak`; without a GPU or without flashinfer-python it fails. The same load runs on
CPUs in tests/functional/engine/test_soak.py.
"""

import os
from pathlib import Path

import pytest
import torch

from fairlead_runtime import LLM
from fairlead_runtime.build.host import process_age
from support import soak, tiny

USUAL = 480.0
SECONDS = float(os.environ.get("FAIRLEAD_SOAK_SECONDS", USUAL))
FEWEST = SECONDS - 10
SPARE = 60.0  # for the last round and the end
pytestmark = [pytest.mark.gpu, pytest.mark.soak]


def seconds_left() -> float:
    """For the load, of a run's minutes: what compiled for the first time has taken some."""
    left = float(os.environ.get("FAIRLEAD_MINUTES", "10")) * 60 - SPARE - process_age()
    if left < FEWEST:
        pytest.fail(f"{left:.0f} s are left for the load: run it again, which compiles nothing")
    return min(SECONDS, left)


def test_minutes_of_mixed_load_leave_nothing_behind(tmp_path: Path) -> None:
    """Two groups of layers, graphs, steps launched ahead, preemption to host memory."""
    heads = {"num_attention_heads": 4, "head_dim": 64}
    folder = tiny.save(tiny.build("gemma2", **heads).to(torch.bfloat16), tmp_path)
    kinds = {**soak.PLAIN, **soak.GUIDED}
    with LLM(
        str(folder),
        kernels="flashinfer",
        cuda_graphs="on",
        async_batching="on",
        dtype="bfloat16",
        num_blocks=120,
        max_model_len=640,
        max_requests=32,
        max_batch_tokens=512,
        safety_margin=0.0,
        cpu_offload_space=0.05,
    ) as llm:
        run = soak.Soak(
            llm.built_engine.engine,
            soak.maker(llm),
            kinds,
            tiny.VOCAB,
            longest=400,
            output=160,
            concurrency=64,
        )
        report = run.run(seconds_left(), per_round=256 if SECONDS >= USUAL else 64, least=9)
        soak.check(report, llm.built_engine.engine, kinds)
        assert llm.built_engine.engine.snapshot().scheduler.offloads > 0
