"""What each rank keeps of a model, and which models are refused, without any other rank."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairlead_kernels.formats.quantize import quantize
from fairlead_runtime.device.conversion import recognize_layer
from fairlead_runtime.device.model.rank_group import RankGroup
from fairlead_runtime.device.ranks import shards
from fairlead_runtime.models import loading
from fairlead_runtime.models.published import StoredLinear
from fairlead_runtime.models.quantized import QuantizedLinear
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.config_json import family_named
from fairlead_runtime.sizing.family_table import FAMILIES, JUDGED
from fairlead_runtime.sizing.tensor_parallel import reason_against
from fairlead_runtime.sizing.weight_bytes import weights
from support import tiny
from support.published import awq, compressed_tensors, gptq, publish
from support.rank_pair import CPU, shape_of

CONFIG = EngineConfig()


class Alone(RankGroup):
    """A rank whose sums and gathers have nobody else."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, "", lambda: None)

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x


def held(model: Any) -> int:
    """Bytes of its parameters, those that share memory once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("family", sorted({*FAMILIES, *JUDGED}))
def test_the_table_of_families_says_which_have_a_plan(family: str) -> None:
    model = tiny.build(family)
    shape, row = shape_of(model), family_named(family)
    assert row is not None
    assert bool(reason_against(shape, 2)) is not row.shardable
    if shape.shardable:
        assert shards.plan_of(model, shape, 2)
    else:
        with pytest.raises(ConfigError, match=r"cannot be split|differ in their heads"):
            shards.plan_of(model, replace(shape, shardable=True), 2)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "family",
    [name for name in sorted(FAMILIES) if FAMILIES[name].shardable and not FAMILIES[name].experts],
)
def test_a_rank_holds_what_is_planned_with_int8_weights(family: str, ranks: int) -> None:
    model = tiny.build(family)
    shape = shape_of(model)
    shards.shard(model, shape, Alone(ranks - 1, ranks), CPU, "int8")
    assert held(model) == weights(shape, replace(CONFIG, quantization="int8"), ranks, "cpu")


def test_the_parts_of_int8_weights_are_those_of_the_whole_rounded_matrices() -> None:
    whole = tiny.build("llama").model.layers[0]
    for rank in (0, 1):
        model = tiny.build("llama")
        shards.shard(model, shape_of(model), Alone(rank, 2), CPU, "int8")
        part = model.model.layers[0]
        up, down = quantize(whole.mlp.up_proj.weight), quantize(whole.mlp.down_proj.weight)
        assert torch.equal(part.mlp.up_proj.weight.bits, up.bits.chunk(2)[rank])
        assert torch.equal(part.mlp.up_proj.weight.scales, up.scales.chunk(2)[rank])
        assert torch.equal(part.mlp.down_proj.stored.bits, down.bits.chunk(2, dim=1)[rank])
        assert torch.equal(part.mlp.down_proj.stored.scales, down.scales)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "form",
    [compressed_tensors(kind="float"), compressed_tensors(packed=True), awq(), gptq(group=-1)],
)
def test_the_parts_of_stored_weights_are_those_of_the_whole_matrices(
    form: Any, rank: int, tmp_path: Path
) -> None:
    saved = tiny.save(tiny.build("qwen2"), tmp_path / "model")
    quantized, plain = publish(saved, tmp_path, *form)
    loaded = loading.load(quantized, config=EngineConfig(tensor_parallel=2))
    shards.shard(loaded.model, loaded.shape, Alone(rank, 2), CPU)
    whole: Any = loading.load(plain).model
    for part, layer in zip(loaded.model.model.layers, whole.model.layers, strict=True):
        for name in ("k_proj", "v_proj", "q_proj"):
            own, other = getattr(part.self_attn, name), getattr(layer.self_attn, name)
            assert torch.equal(own.weight.dequantize(), other.weight.chunk(2)[rank])
            assert torch.equal(own.bias, other.bias.chunk(2)[rank])
        down = part.mlp.down_proj.stored.dequantize()
        assert torch.equal(down, layer.mlp.down_proj.weight.chunk(2, dim=1)[rank])


def test_stored_weights_stay_in_their_file_until_a_rank_takes_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tiny.save(tiny.build("llama"), tmp_path / "model")
    quantized, _ = publish(saved, tmp_path, *awq())
    loaded = loading.load(quantized, config=EngineConfig(tensor_parallel=2))
    assert sum(isinstance(m, StoredLinear) for m in loaded.model.modules()) == 7 * 3
    before: list[weakref.ref[StoredLinear]] = []
    read = StoredLinear.quantized

    def spy(self: StoredLinear) -> QuantizedLinear:
        assert all(other() is None for other in before), "the one before is still held"
        before.append(weakref.ref(self))
        return read(self)

    monkeypatch.setattr(StoredLinear, "quantized", spy)
    shards.shard(loaded.model, loaded.shape, Alone(0, 2), CPU)
    assert len(before) == 7 * 3


def test_a_whole_stored_layer_is_recognized_by_what_it_computes_with(tmp_path: Path) -> None:
    saved = tiny.save(tiny.build("qwen2"), tmp_path / "model")
    quantized, _ = publish(saved, tmp_path, *awq())
    loaded = loading.load(quantized, config=EngineConfig(tensor_parallel=2))
    stored: Any = loaded.model.model.layers[0].self_attn.q_proj
    assert isinstance(stored, StoredLinear)
    (weight,), bias = recognize_layer._weights_of(stored)
    assert torch.equal(weight.dequantize(), stored.quantized().weight.dequantize())
    assert bias is not None
    assert torch.equal(bias, stored.bias)


def test_a_whole_model_computes_with_rounded_weights_for_a_while() -> None:
    model, ids = tiny.build("llama"), torch.tensor([[3, 9, 27]])
    plan = shards.plan_of(model, shape_of(model), 2)
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        with shards.quantized(model, plan, "int8"):
            rounded = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, before)
        matrices = [name for name, style in plan.items() if style in ("colwise", "rowwise")]
        assert len(matrices) == 7 * len(model.model.layers)
        for name in matrices:
            weight = model.get_submodule(name).weight
            weight.copy_(quantize(weight).dequantize())
        assert torch.equal(model(input_ids=ids).logits, rounded)
    assert not torch.equal(rounded, before)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", [name for name in sorted(FAMILIES) if FAMILIES[name].shardable])
def test_a_rank_holds_what_is_planned(family: str, ranks: int) -> None:
    for rank in (0, ranks - 1):
        model = tiny.build(family)
        shape = shape_of(model)
        shards.shard(model, shape, Alone(rank, ranks), CPU)
        assert held(model) == weights(shape, CONFIG, ranks, "cpu")


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"vocab_size": 307}])
def test_a_head_that_is_the_embedding_or_does_not_divide_takes_what_is_planned(
    changes: dict[str, Any],
) -> None:
    model = tiny.build("llama", **changes)
    shape = shape_of(model)
    shards.shard(model, shape, Alone(1, 2), CPU)
    assert held(model) == weights(shape, CONFIG, 2, "cpu")
    rows = model.get_output_embeddings().weight.shape[0]
    assert rows == (shape.vocab if shape.vocab % 2 else shape.vocab // 2)


def test_ranks_that_share_a_key_value_head_have_the_one_of_their_queries() -> None:
    whole = tiny.build("llama")  # four query heads of 16, two key-value heads
    attention = whole.model.layers[0].self_attn
    for rank in range(4):
        model = tiny.build("llama")
        shards.shard(model, shape_of(model), Alone(rank, 4), CPU)
        part = model.model.layers[0].self_attn
        query, key = (
            slice(16 * rank, 16 * rank + 16),
            slice(16 * (rank // 2), 16 * (rank // 2) + 16),
        )
        assert torch.equal(part.q_proj.weight, attention.q_proj.weight[query])
        assert torch.equal(part.k_proj.weight, attention.k_proj.weight[key])
        assert torch.equal(part.v_proj.weight, attention.v_proj.weight[key])
        assert torch.equal(part.o_proj.weight, attention.o_proj.weight[:, query])


@pytest.mark.parametrize(
    ("changes", "ranks", "problem", "fix"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "6 attention heads", "use 2"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "3 key-value heads", "use 1"),
        ({"intermediate_size": 126}, 4, "inner width of the model's MLP, 126", "use 2"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_number_that_does(
    changes: dict[str, Any], ranks: int, problem: str, fix: str
) -> None:
    model = tiny.build("llama", head_dim=16, hidden_size=96, **changes)
    with pytest.raises(ConfigError, match=problem) as refused:
        shards.shard(model, shape_of(model), Alone(0, ranks), CPU)
    assert (refused.value.field, refused.value.hint) == ("tensor_parallel", fix)


@pytest.mark.parametrize("family", ["granitemoe", "qwen2_moe", "opt", "glm", "olmo3"])
def test_a_judged_family_without_a_plan_for_its_layers_is_refused(family: str) -> None:
    model = tiny.build(family)
    with pytest.raises(ConfigError, match="transformers has no plan to split") as refused:
        shards.shard(model, shape_of(model), Alone(0, 2), CPU)
    assert refused.value.hint == "use 1"


def test_a_model_computes_the_same_while_its_modules_are_lent_to_a_device() -> None:
    model, ids = tiny.build("llama"), torch.tensor([[3, 9, 27]])
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        before = {name: p.data_ptr() for name, p in model.named_parameters()}
        lent = [hook for module in model.modules() for hook in shards._lent(module, CPU)]
        assert torch.equal(model(input_ids=ids).logits, expected)
    assert lent
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
