"""gpt_oss as it is published, its experts in MXFP4: from its files to transformers' greedy text on
the numbers that the stored tensors stand for, and the plan's bytes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fairlead_operator.decide.children.capacity import PlanError, plan_of
from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.models import loading
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.terms import GIB
from fairlead_runtime.sizing.weight_bytes import weights
from functional.engine.test_plan_and_start import Pod
from support import tiny
from support.published import publish_mxfp4

PROMPTS = ["Paged memory is", "A block holds the keys and values of sixteen tokens, and then"]
# By name: sizes of the model, none of them square, and the engine's settings.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small blocks and chunks": (
        {"hidden_size": 96, "intermediate_size": 160, "num_local_experts": 3},
        {"block_size": 4, "max_batch_tokens": 7, "num_blocks": 200},
    ),
    "preempted": (
        {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 3},
        {"block_size": 16, "max_batch_tokens": 32, "num_blocks": 10, "max_requests": 4},
    ),
    "on torch": (
        {"head_dim": 32, "num_hidden_layers": 2, "layer_types": None},
        {"kernels": "torch", "max_batch_tokens": 64, "num_blocks": 64},
    ),
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, n=2, ignore_eos=True)


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    return Pod(tmp_path, monkeypatch)


def published(tmp_path: Path, **sizes: Any) -> tuple[Path, Path]:
    saved = tiny.save(tiny.build("gpt_oss", **sizes), tmp_path / "model")
    return publish_mxfp4(saved, tmp_path, torch.bfloat16)


def texts_of_transformers(plain: Path) -> list[list[int]]:
    """Of each prompt alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    tokenizer = tiny.tokenizer()
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(
            ids, max_new_tokens=GREEDY.max_tokens, min_new_tokens=GREEDY.max_tokens, do_sample=False
        )
        texts.append(out[0, ids.shape[1] :].tolist())
    return texts


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_equals_transformers_on_the_experts_that_are_stored(
    case: str, tmp_path: Path
) -> None:
    sizes, settings = CASES[case]
    quantized, plain = published(tmp_path, **sizes)
    llm = LLM(str(quantized), dtype="float32", **settings)
    found = [
        [list(choice.token_ids) for choice in result.outputs]
        for result in llm.generate(PROMPTS, GREEDY)
    ]
    assert found == [[text, text] for text in texts_of_transformers(plain)]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_bytes_that_are_held_are_those_that_are_planned(
    dtype: Any, tmp_path: Path, pod: Pod
) -> None:
    quantized, _ = published(tmp_path, num_local_experts=16)
    engine = {"dtype": dtype, "kernels": "torch"}
    config = json.loads((quantized / "config.json").read_text())
    planned = plan_of(config, pod.resource("2Gi", engine={"dtype": dtype}))
    assert "mxfp4 experts are held in" in planned.message
    model = loading.load(quantized, config=EngineConfig(dtype=dtype)).model
    held = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
    shape = ModelShape.from_config(config)
    assert held == weights(shape, EngineConfig(**engine), 1, "cpu")
    resolved = pod.start(quantized, EngineConfig(dtype=dtype), 2 * GIB)
    size = planned.terms["weights"]
    assert abs(resolved.plan.terms["weights"] - size) <= 0.02 * size


def test_what_does_not_serve_it_is_refused_by_plan_and_start_in_the_same_words(
    tmp_path: Path, pod: Pod
) -> None:
    quantized, _ = published(tmp_path)
    config = json.loads((quantized / "config.json").read_text())
    words = "quantization: int8, but the checkpoint's weights are mxfp4 already"
    with pytest.raises(PlanError, match=f"^spec.engine.{words}"):
        plan_of(config, pod.resource("2Gi", engine={"quantization": "int8"}))
    with pytest.raises(ConfigError, match=f"^{words}"):
        pod.start(quantized, EngineConfig(quantization="int8"), 2 * GIB)
    with pytest.raises(ConfigError, match=r"^tensor_parallel: .*no plan to split 'gpt_oss'"):
        pod.start(quantized, EngineConfig(tensor_parallel=2), 2 * GIB)
    with pytest.raises(ConfigError, match=r"^deterministic: "):
        pod.start(quantized, EngineConfig(deterministic=True), 2 * GIB)
    with pytest.raises(ConfigError, match=r"^max_memory_percent: .*experts are held in float32"):
        pod.start(quantized, EngineConfig(dtype="float32"), GIB // 2)
