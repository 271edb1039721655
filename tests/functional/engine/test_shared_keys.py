"""Layers that read another layer's keys and keep none: what the cache holds of them, and that the
text is transformers' under chunks, prefix hits, forks and preemption.

Which layers these are is read in the configuration, for the plan, and seen in what their code does.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from fairlead_runtime.device.conversion.fusion import fuse
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.paged_model import prepare, sources_of
from fairlead_runtime.llm import LLM
from fairlead_runtime.models import loading
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.groups import NO_KEYS
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.stored import QuantizedError
from fairlead_runtime.sizing.tensor_parallel import refuse
from fairlead_runtime.sizing.terms import GIB, DeviceFacts
from fairlead_runtime.sizing.verdict import plan_memory
from fairlead_runtime.sizing.weight_bytes import weights
from support import tiny
from support.engine_rig import NEW, Rig, check_greedy_texts, operations_of, paged, prompts, rig
from support.kernel_sets import rows_beyond_the_plan

FAMILY = "gemma3n_text"


def shape_of(model: Any) -> ModelShape:
    return ModelShape.from_config(json.loads(model.config.to_json_string()))


def test_the_cache_holds_the_layers_that_keep_keys_to_the_byte(tmp_path: Any) -> None:
    model = tiny.build(FAMILY)
    path, shape = tiny.save(model, tmp_path), shape_of(model)
    # Seven layers, four of which keep two heads of 16 in float32: keys and values.
    assert (shape.layers, len({*shape.sources})) == (7, 4)
    settings = EngineConfig(num_blocks=40, block_size=16)
    plan = plan_memory(shape, settings, DeviceFacts("cpu", 8 * GIB))
    assert plan.kv_bytes_per_token == 4 * 2 * (2 * 16) * 4
    assert plan.block_bytes == 16 * plan.kv_bytes_per_token
    with LLM(str(path), num_blocks=40, block_size=16) as llm:
        report = llm.built_engine.memory.as_dict()
    (kv,) = [term for term in report["terms"] if term["name"] == "kv"]
    assert kv["plannedBytes"] == kv["measuredBytes"] == 40 * plan.block_bytes
    assert report["kvBytesPerToken"] == plan.kv_bytes_per_token


def test_each_layer_reads_the_last_one_of_its_kind_that_keeps_keys() -> None:
    model = rig(FAMILY).model
    assert model.sources == shape_of(model.model).sources == (0, 1, 2, 3, 2, 3, 2)
    cache = CacheStorage(model.groups, model.heads, units=3, block_size=4, device=model.device)
    assert cache.tensors[0].shape[0] == 2  # of two windowed and two full layers
    for layer, source in enumerate(model.sources):
        assert cache.keeps(layer) == (layer == source)
        (keys, values, group), own = cache.layer(layer), cache.layer(source)
        assert (keys.data_ptr(), values.data_ptr()) == (own[0].data_ptr(), own[1].data_ptr())
        assert group == own[2]
        assert model.groups[group].window == model.windows[layer]


@pytest.mark.parametrize("sources", [(0, 1, 2, 3, 0, 3, 2), (0, 1, 2, 3, 2, 1, 2)])
def test_the_keys_of_another_layer_give_another_text(
    sources: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig(FAMILY)
    right = engine.groups
    monkeypatch.setattr(engine.model, "sources", sources)
    monkeypatch.setattr(engine, "groups", engine.model.groups)
    assert engine.groups != right
    with pytest.raises(AssertionError):
        check_greedy_texts(engine, 7)


@pytest.mark.parametrize("kernels", ["torch", "cpu", "flashinfer", "resident", "graphs"])
def test_greedy_text_equals_transformers_on_all_kernels(kernels: str) -> None:
    engine = rig(FAMILY, kernels)
    assert engine.fusion.fused == 0
    check_greedy_texts(engine, 7)


def test_small_matrices_are_not_padded_beyond_the_plan() -> None:
    """A router of three rows, a product of rank eight: packed they would be mostly padding."""
    engine = Rig(FAMILY, "cpu", hidden_size=256)
    planned = weights(shape_of(engine.model.model), EngineConfig(), 1, "cpu")
    if engine.fusion.head:
        padding = rows_beyond_the_plan(tiny.VOCAB) * 256 * 4
        assert 0 <= engine.model.weight_bytes - (planned - padding) < 1024


def test_the_first_half_of_a_prompt_matters() -> None:
    engine = rig(FAMILY)
    prompt, other = prompts(8, (41, 41), 0)
    assert engine.reference(prompt, NEW) != engine.reference((*other[:20], *prompt[20:]), NEW)


def test_a_model_whose_code_shares_other_keys_than_its_configuration_says_is_refused(
    tmp_path: Any,
) -> None:
    loaded = loading.load(tiny.save(tiny.build(FAMILY), tmp_path))
    sources = (0, 1, 2, 3, 0, 3, 2)
    with pytest.raises(ModelError, match="other layers than"):
        prepare(replace(loaded, shape=replace(loaded.shape, sources=sources)))
    assert prepare(loaded).sources == loaded.shape.sources


def test_keys_are_shared_where_both_keys_and_values_are_the_very_same() -> None:
    first, second, values = (torch.zeros(2, 1, 4) for _ in range(3))
    keys = {0: (first, values), 1: (second, values), 2: (first.view(2, 1, 4), values)}
    assert sources_of(keys, 4) == (0, 1, 0, NO_KEYS)


def test_layers_that_share_keys_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused layer would keep its keys from the code of the others."""
    model = paged("llama")
    monkeypatch.setattr(model, "sources", (0, 1, 1))
    fusion = fuse(model, operations_of(model, "cpu"))
    assert fusion.fused == 1
    assert "layer 1: it reads the keys of another layer" in str(fusion)


def test_quantized_weights_and_ranks_are_refused_by_plan_and_pod(tmp_path: Any) -> None:
    model = tiny.build(FAMILY)
    path, shape = tiny.save(model, tmp_path), shape_of(model)
    with pytest.raises(ConfigError, match="no plan to split 'gemma3n_text'"):
        refuse(shape, 2)
    with pytest.raises(ConfigError, match="int8 weights of layers with inputs of their own"):
        LLM(str(path), quantization="int8")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    with pytest.raises(QuantizedError, match="quantized layers with inputs of their own"):
        ModelShape.from_config(config)
