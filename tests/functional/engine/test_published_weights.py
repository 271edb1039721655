"""Quantized checkpoints from their files to text: transformers' greedy text with the matrices that
the stored tensors stand for, and the plan's bytes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fairlead_operator.decide.children.capacity import PlanError, plan_of
from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.config import ConfigError, EngineConfig
from fairlead_runtime.models import tiny
from fairlead_runtime.sizing.terms import GIB
from functional.engine.test_plan_and_start import Pod
from support.published import compressed_tensors, publish

PROMPTS = ["Paged memory is", "A block holds the keys and values of sixteen tokens, and then"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    return Pod(tmp_path, monkeypatch)


def texts_of_transformers(plain: Path) -> list[list[int]]:
    """Of each prompt alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    tokenizer = tiny.tokenizer()
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=GREEDY.max_tokens, do_sample=False)
        texts.append(out[0, ids.shape[1] :].tolist())
    return texts


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", {}),
        ("llama", {"packed": True}),
        ("gemma2", {"activations": True}),
        ("gpt_neox", {"strategy": "tensor"}),
        ("stablelm", {"packed": True}),  # sized from its files
    ],
)
def test_greedy_text_equals_transformers_on_the_matrices_that_are_stored(
    family: str, form: dict[str, Any], tmp_path: Path
) -> None:
    saved = tiny.save(tiny.build(family), tmp_path / "model")
    settings, store = compressed_tensors(**form)
    if family == "gpt_neox":
        settings["ignore"] = ["embed_out"]
    quantized, plain = publish(saved, tmp_path, settings, store)
    llm = LLM(str(quantized), max_batch_tokens=16, max_requests=4, num_blocks=64)
    found = [list(x.outputs[0].token_ids) for x in llm.generate(PROMPTS, GREEDY)]
    assert found == texts_of_transformers(plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_weights_are_planned_and_measured_alike_and_need_no_room_to_be_rounded(
    dtype: str, tmp_path: Path, pod: Pod, caplog: pytest.LogCaptureFixture
) -> None:
    width = {"hidden_size": 256, "intermediate_size": 768}
    saved = tiny.save(tiny.build("llama", **width), tmp_path / "model")
    quantized, _ = publish(saved, tmp_path, *compressed_tensors())
    scheduler = {"maxBatchTokens": 256, "maxRequests": 16}
    idep = pod.resource("2Gi", scheduler=scheduler, engine={"dtype": dtype})
    config = json.loads((quantized / "config.json").read_text())
    planned = plan_of(config, idep)
    with caplog.at_level("INFO"):
        resolved = pod.start(quantized, idep.engine, 2 * GIB)
    assert "fused 3/3 layers, int8 weights" in caplog.text
    assert resolved.config.quantization == "int8"
    weights = planned.terms["weights"]
    assert abs(resolved.plan.terms["weights"] - weights) <= 0.02 * weights
    assert planned.loading <= planned.used
    rounded = pod.resource(
        "2Gi", scheduler=scheduler, engine={"dtype": dtype, "quantization": "int8"}
    )
    del config["quantization_config"]
    again = plan_of(config, rounded).terms
    if dtype == "bfloat16":
        assert again == planned.terms
    else:  # the head of a plain checkpoint is rounded, too
        vocabulary, hidden = config["vocab_size"], config["hidden_size"]
        rows = -(-vocabulary // 32) * 32
        assert planned.terms["weights"] - again["weights"] == 3 * rows * hidden - 4 * vocabulary


def test_a_setting_that_disagrees_with_the_checkpoint_is_refused_by_plan_and_start(
    tmp_path: Path, pod: Pod
) -> None:
    quantized, _ = publish(
        tiny.save(tiny.build("llama"), tmp_path / "model"), tmp_path, *compressed_tensors()
    )
    config = json.loads((quantized / "config.json").read_text())
    two = EngineConfig(tensor_parallel=2)
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel: 2: its int8 weights cannot be split"
    ):
        pod.start(quantized, two, 2 * GIB)
    idep = pod.resource("2Gi", engine={"dtype": "float16"})
    with pytest.raises(PlanError, match=r"^spec.engine.quantization: int8 is not supported in"):
        plan_of(config, idep)
