"""Quantized checkpoints of models of several parts: their text is the greedy one of transformers'
whole model, which has read the matrices that the stored tensors stand for, and they take the bytes
of the plan.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fairlead_operator.decide.children.capacity import PlanError, plan_of
from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.models import loading
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.models.quantized import QuantizedLinear
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.weight_bytes import held_weights
from functional.engine.test_models_of_parts import whole_text
from functional.engine.test_plan_and_start import Pod
from functional.engine.test_published_weights import on_a_gpu
from support import tiny_parts
from support.engine_rig import NEW, prompts
from support.published import (
    awq,
    compressed_int4,
    compressed_tensors,
    gptq,
    publish,
    publish_mxfp4,
)

HEAD = "lm_head"
# What the lists of published checkpoints name, each by its family's names.
LISTS: dict[str, list[str]] = {
    "gemma3": ["re:.*vision_tower.*", "re:.*multi_modal_projector.*", "language_model.lm_head"],
    "mistral3": ["vision_tower.transformer.layers.0.attention.k_proj", "language_model.lm_head"],
    "qwen2_vl": ["visual", HEAD],
    "qwen2_5_vl": ["visual.blocks.0.attn.qkv", "visual.merger.mlp.0", HEAD],
    "qwen3_vl": ["re:.*lm_head", "re:visual.*", "re:model.visual.*"],
    "glm4v": ["model.visual.merger.gate_proj", "re:.*(visual|lm_head).*", HEAD],
    "internvl": ["vision_tower", "multi_modal_projector", "language_model.lm_head"],
    "smolvlm": ["model.vision_model", "model.connector.modality_projection.proj", HEAD],
    "idefics3": [r"re:^model\.(vision_model|connector)\..*$", HEAD],
    "aya_vision": ["re:.*vision.*", "re:multi_modal_projector.+", HEAD],
    "cohere2_vision": ["re:.*vision_tower.*", "re:.*multi_modal_projector.*", HEAD],
}


def listed(form: Any, family: str) -> Any:
    """The form with the family's list of what is not quantized."""
    settings, store = form
    key = "ignore" if "ignore" in settings else "modules_to_not_convert"
    return {**settings, key: LISTS[family]}, store


def stored(family: str, folder: Path, form: Any, **how: Any) -> tuple[Path, Path]:
    return publish(tiny_parts.save(family, folder / "model"), folder, *form, beside="vis", **how)


def text_of(path: Path, prompt: tuple[int, ...]) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with LLM(str(path), max_batch_tokens=16, max_requests=4, num_blocks=64) as llm:
        [result] = llm.generate([{"prompt_token_ids": list(prompt)}], params)
    return list(result.outputs[0].token_ids)


@pytest.mark.parametrize("family", LISTS)
def test_greedy_text_of_stored_integers_is_the_wholes(family: str, tmp_path: Path) -> None:
    form = compressed_tensors(packed=family < "h", strategy="channel" if family > "d" else "tensor")
    quantized, plain = stored(family, tmp_path, listed(form, family), inside=family == "internvl")
    prompt = prompts(60, (41,), 0)[0]
    want = whole_text(plain, prompt)
    assert text_of(quantized, prompt)[: len(want)] == want
    assert len(set(want)) > 2


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen2_vl", gptq()),
        ("qwen2_5_vl", listed(awq(), "qwen2_vl")),
        ("gemma3", listed(compressed_int4(symmetric=False), "gemma3")),
        ("mistral3", gptq(sorts=True, symmetric=False)),
        ("glm4v", listed(awq(group=64), "glm4v")),
    ],
)
def test_greedy_text_of_four_bits_is_the_wholes(
    family: str, form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, plain = stored(family, tmp_path, form)
    on_a_gpu(monkeypatch, "torch")
    prompt = prompts(61, (41,), 0)[0]
    want = whole_text(plain, prompt)
    assert text_of(quantized, prompt)[: len(want)] == want


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3"])
def test_stored_weights_of_a_text_are_held_as_they_are_planned(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = listed(awq(), family)
    path, _ = stored(family, tmp_path, form)
    on_a_gpu(monkeypatch, "torch")
    loaded = loading.load(path)
    shape = ModelShape.from_config(json.loads((path / "config.json").read_text()))
    assert shape == loaded.shape
    served, result = selftest.prepare_and_test(loaded, "auto")
    assert str(served.fusion) == "fused 3/3 layers, int4 weights"
    assert result.rounding is None
    planned = held_weights(shape, EngineConfig(quantization="int4"), 1, "cuda")
    assert served.model.weight_bytes == planned


@pytest.mark.parametrize("family", ["gemma3", "internvl", "qwen3_vl"])
def test_every_matrix_of_a_text_is_the_one_that_is_stored_and_no_other_part_is_read(
    family: str, tmp_path: Path
) -> None:
    """Other parts may be quantized, too."""
    settings, store = compressed_tensors()
    model = tiny_parts.save(family, tmp_path / "model")
    quantized, plain = publish(model, tmp_path, settings, store)
    file = quantized / "model.safetensors"
    scale = torch.ones(4, 1)
    save_file(load_file(file) | {"model.visual.blocks.0.attn.qkv.weight_scale": scale}, file)
    loaded, expected = loading.load(quantized).model, loading.load(plain).model
    layers = {n: x for n, x in loaded.named_modules() if isinstance(x, QuantizedLinear)}
    assert len(layers) == 7 * 3
    for name, layer in layers.items():
        assert torch.equal(layer.weight.dequantize(), expected.get_submodule(name).weight)
    assert not hasattr(loaded.config, "quantization_config")


def test_a_stored_matrix_that_the_text_does_not_have_is_refused(tmp_path: Path) -> None:
    quantized, _ = stored("gemma3", tmp_path, listed(compressed_tensors(), "gemma3"))
    file = quantized / "model.safetensors"
    other = "language_model.model.layers.0.mlp.other"
    save_file(load_file(file) | {f"{other}.weight_scale": torch.ones(1)}, file)
    with pytest.raises(ModelError, match=f"{other}.*is no linear layer of the model"):
        loading.load(quantized)


def test_a_bias_that_a_text_does_not_add_is_refused_unless_it_is_zeros(tmp_path: Path) -> None:
    quantized, _ = stored("qwen2_5_vl", tmp_path, gptq())
    file = quantized / "model.safetensors"
    tensors, bias = load_file(file), "model.layers.1.mlp.up_proj.bias"
    rows = tensors["model.layers.1.mlp.up_proj.scales"].shape[1]
    save_file(tensors | {bias: torch.zeros(rows)}, file)
    loading.load(quantized)
    save_file(tensors | {bias: torch.ones(rows)}, file)
    with pytest.raises(ModelError, match=f"{bias}: a bias that the architecture does not have"):
        loading.load(quantized)


def test_experts_of_a_text_are_widened_from_mxfp4(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    saved = tiny_parts.save("internvl", tmp_path / "model", model_type="gpt_oss", **sizes)
    quantized, plain = publish_mxfp4(saved, tmp_path, torch.float32)
    prompt = prompts(62, (41,), 0)[0]
    want = whole_text(plain, prompt)
    config = json.loads((quantized / "config.json").read_text()) | {"dtype": "float32"}
    (quantized / "config.json").write_text(json.dumps(config))
    assert text_of(quantized, prompt)[: len(want)] == want


def test_a_list_that_names_layers_of_the_text_is_refused_by_plan_and_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, store = listed(compressed_tensors(), "gemma3")
    settings["ignore"] = [*settings["ignore"], "language_model.model.layers.1.mlp.up_proj"]
    quantized, _ = stored("gemma3", tmp_path, (settings, store))
    words = "ignore 'language_model.model.layers.1.mlp.up_proj' is not supported"
    with pytest.raises(ModelError, match=words):
        loading.inspect(quantized)
    config = json.loads((quantized / "config.json").read_text())
    with pytest.raises(PlanError, match=words):
        plan_of(config, Pod(tmp_path, monkeypatch).resource("2Gi"))
