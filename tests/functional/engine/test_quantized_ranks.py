"""Quantized checkpoints, and fp8 weights, on two gloo processes: the text is that of transformers
with the matrices that the stored tensors stand for.
"""

import json
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fairlead_operator.decide.children.capacity import PlanError, plan_of
from fairlead_runtime.device.model.rank_group import RankGroup
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.device.ranks import shards
from fairlead_runtime.device.step.model_runner import ModelRunner
from fairlead_runtime.models import loading
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.checkpoint_formats import as_stored
from fairlead_runtime.sizing.weight_bytes import held_weights
from functional.engine.test_plan_and_start import Pod
from support import humming_standin, rank_pair, tiny
from support.engine_rig import Setting, cache_of, greedy, prompts, run_to_end
from support.published import awq, compressed_int4, compressed_tensors, gptq, publish

SETTING = Setting(chunk=16, num_blocks=60)
ON_GPU: dict[str, Any] = {}


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    return Pod(tmp_path, monkeypatch)


def texts_of(served: selftest.ServedModel) -> dict[str, list[int]]:
    """Of three prompts that share a beginning, on both ranks."""
    groups, pair = served.model.groups, rank_pair.pair()
    limits = SETTING.limits(len(groups))
    amounts = {"units": limits.num_blocks * len(groups), "block_size": 4, "host_units": 0}
    pair.allocate(**amounts)
    cache = cache_of(served.model, **amounts)
    runner = ModelRunner(served.model, cache, served.choice.attention, followers=pair)
    asked = [greedy(str(i), p, 16) for i, p in enumerate(prompts(3, (23, 41, 30), 16))]
    arrivals = [(2 * i, request) for i, request in enumerate(asked)]
    outcome = run_to_end(Scheduler(limits, groups, b"rig"), runner, arrivals)
    return {one.id: outcome.texts[one.id, 0] for one in asked}


def texts_of_transformers(plain: Path) -> dict[str, list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    texts = {}
    for i, prompt in enumerate(prompts(3, (23, 41, 30), 16)):
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=[2, 140])
        texts[str(i)] = out[0, len(prompt) :].tolist()
    return texts


# Ranks share the one head of keys and values; GPT-NeoX has one matrix of queries, keys and values,
# and biases; a scale per channel is that of the whole row, those of groups are each rank's own.
@pytest.mark.parametrize(
    ("family", "changes", "form", "on_gpu"),
    [
        ("llama", {}, compressed_tensors(), None),
        ("llama", {}, compressed_tensors(packed=True), None),
        ("gpt_neox", {}, compressed_tensors(strategy="tensor"), None),
        ("llama", {}, compressed_tensors(packed=True), ON_GPU),
        ("qwen2", {}, compressed_tensors(kind="float"), ON_GPU),
        ("llama", {"num_key_value_heads": 1}, gptq(), ON_GPU),
        ("gemma2", {}, gptq(group=-1, symmetric=False), ON_GPU),
        ("gpt_neox", {}, awq(), ON_GPU),
        ("granite", {}, compressed_int4(symmetric=False), ON_GPU),
    ],
)
def test_two_ranks_give_the_text_of_transformers_on_the_matrices_that_are_stored(
    family: str,
    changes: dict[str, Any],
    form: Any,
    on_gpu: dict[str, Any] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, store = form
    if family == "gpt_neox" and "ignore" in settings:
        settings["ignore"] = ["embed_out"]
    saved = tiny.save(tiny.build(family, **changes), tmp_path / "model")
    quantized, plain = publish(saved, tmp_path, settings, store)
    pair = rank_pair.pair()
    pair.prepare(quantized, on_gpu=on_gpu)
    if on_gpu is not None:
        monkeypatch.setattr(selftest, "_pick", partial(rank_pair.pick_on_gpu, **on_gpu))
    loaded = rank_pair.load(quantized)
    served, result = selftest.prepare_rank(loaded, pair.rank_group, rank_pair.CPU)
    count = served.fusion.layers
    stored = loaded.shape.quantized
    assert str(served.fusion) == f"fused {count}/{count} layers, {stored} weights"
    assert result is not None
    assert result.rounding is None, "what it cost to publish them is not known"
    planned = held_weights(loaded.shape, as_stored(EngineConfig(), stored), 2, "cuda")
    for measured in (served.model.weight_bytes, pair.weight_bytes()):
        assert measured == planned
    assert texts_of(served) == texts_of_transformers(plain)


@pytest.mark.parametrize("rounds", [True, False])
def test_fp8_weights_are_judged_with_and_without_rounded_activations_on_both_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, rounds: bool
) -> None:
    """As on one rank. The ranks meet in each pass, so that each must make as many."""
    folder, pair = tiny.save(tiny.build("llama").bfloat16(), tmp_path), rank_pair.pair()
    pair.prepare(folder, "fp8", on_gpu={"fp8": rounds})
    monkeypatch.setattr(selftest, "_pick", partial(rank_pair.pick_on_gpu, fp8=rounds))
    loaded = rank_pair.load(folder, "fp8")
    served, result = selftest.prepare_rank(
        loaded, pair.rank_group, rank_pair.CPU, quantization="fp8"
    )
    assert str(served.fusion) == "fused 3/3 layers, fp8 weights"
    assert result is not None
    assert result.delta < selftest.TOLERANCE[torch.bfloat16] / 2
    _, one = selftest.prepare_and_test(loading.load(folder), "auto", "fp8")
    assert result.rounding is not None
    assert one.rounding is not None
    assert result.rounding.moved == pytest.approx(one.rounding.moved, rel=1e-3)
    assert (result.activations is not None) == rounds
    if result.activations is not None:
        assert result.delta < result.activations < selftest.ROUNDING["fp8"]
        assert result.activations == pytest.approx(one.activations, rel=0.5)
    assert served.choice.operations is not None
    assert served.choice.operations.rounds == rounds
    texts_of(served)  # both go on


# Granite's large factors magnify what GPUs' layers round in 16 bits, sums of ranks, too; with its
# own factor of residuals a scale for all rows would leave its rounded logits no room.
@pytest.mark.parametrize(
    ("family", "changes", "form", "on_gpu"),
    [
        ("llama", {}, compressed_tensors(), None),
        ("granite", {}, compressed_tensors(), None),
        ("granite", {"residual_multiplier": 0.3}, compressed_tensors(strategy="tensor"), None),
        ("llama", {}, compressed_tensors(kind="float", strategy="tensor"), ON_GPU),
        ("llama", {}, awq(), ON_GPU),
    ],
)
def test_stored_weights_in_16_bits_are_judged_by_layers_in_float32(
    family: str,
    changes: dict[str, Any],
    form: Any,
    on_gpu: dict[str, Any] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on one rank: transformers' own rounding would use the tolerance up."""
    saved = tiny.save(tiny.build(family, **changes).bfloat16(), tmp_path / "model")
    quantized, _ = publish(saved, tmp_path, *form)
    pair = rank_pair.pair()
    pair.prepare(quantized, on_gpu=on_gpu)
    if on_gpu is not None:
        monkeypatch.setattr(selftest, "_pick", partial(rank_pair.pick_on_gpu, **on_gpu))
    served, result = selftest.prepare_rank(
        rank_pair.load(quantized), pair.rank_group, rank_pair.CPU
    )
    assert result is not None
    assert result.delta < result.tolerance / 2, "no further than transformers' own bfloat16"
    texts_of(served)


def test_a_packages_products_of_four_bits_are_judged_and_held_by_two_ranks_as_they_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    model = tiny.build("llama", **sizes, num_key_value_heads=4, head_dim=16)
    saved = tiny.save(model.bfloat16(), tmp_path / "model")
    quantized, _ = publish(saved, tmp_path, *awq())
    pair = rank_pair.pair()
    pair.prepare(quantized, on_gpu={"package": True})
    monkeypatch.setattr(selftest, "_pick", rank_pair.pick_on_gpu)
    monkeypatch.setattr(selftest, "int4_products", humming_standin.int4_products)
    loaded = rank_pair.load(quantized)
    served, result = selftest.prepare_rank(loaded, pair.rank_group, rank_pair.CPU)
    assert str(served.fusion) == "fused 3/3 layers, int4 weights"
    assert served.choice.reason.endswith("; 4-bit products by humming stand-in")
    assert result is not None
    _, one = selftest.prepare_and_test(loading.load(quantized), "auto")
    assert result.delta < 1.5 * one.delta
    planned = held_weights(loaded.shape, EngineConfig(quantization="int4"), 2, "cuda")
    for measured in (served.model.weight_bytes, pair.weight_bytes()):
        assert measured == planned
    texts_of(served)


def test_an_order_that_only_the_index_of_a_matrix_tells_is_refused_by_name(
    tmp_path: Path,
) -> None:
    settings, store = gptq(sorts=True)
    saved = tiny.save(tiny.build("llama").half(), tmp_path / "model")
    quantized, _ = publish(saved, tmp_path, settings | {"desc_act": False}, store)
    loaded = rank_pair.load(quantized)
    with pytest.raises(ConfigError, match=r"tensor-parallel: .*in an order of their own"):
        shards.shard(loaded.model, loaded.shape, RankGroup(1, 2, "", lambda: None), rank_pair.CPU)


def test_a_published_fp8_checkpoint_in_16_bits_is_served_by_two_ranks_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tiny.save(tiny.build("llama").bfloat16(), tmp_path / "model")
    quantized, _ = publish(saved, tmp_path, *compressed_tensors(kind="float"))
    pair = rank_pair.pair()
    pair.prepare(quantized, on_gpu={"fp8": True})
    monkeypatch.setattr(selftest, "_pick", partial(rank_pair.pick_on_gpu, fp8=True))
    loaded = rank_pair.load(quantized)
    served, result = selftest.prepare_rank(loaded, pair.rank_group, rank_pair.CPU)
    assert str(served.fusion) == "fused 3/3 layers, fp8 weights"
    assert result is not None
    assert result.delta < selftest.TOLERANCE[torch.bfloat16] / 2
    assert result.activations is not None
    texts_of(served)  # which the rounding of activations may change


@pytest.mark.parametrize(
    ("form", "ranks", "words"),
    [
        (gptq(sorts=True), 2, "in an order of their own"),
        (
            awq(group=64),
            2,
            "its int4 weights are held 64 columns at a time, and a rank would have 32 of",
        ),
    ],
)
def test_groups_that_a_rank_would_have_in_part_are_refused_by_plan_and_start(
    form: Any, ranks: int, words: str, tmp_path: Path, pod: Pod
) -> None:
    saved = tiny.save(tiny.build("llama").half(), tmp_path / "model")
    quantized, _ = publish(saved, tmp_path, *form)
    config = json.loads((quantized / "config.json").read_text())
    resources = {"accelerator": {"count": ranks, "memory": "2Gi"}, "memory": "4Gi"}
    idep = pod.resource("4Gi", resources=resources, engine={"tensorParallel": ranks})
    with pytest.raises(PlanError, match=f"^spec.engine.tensorParallel: {ranks}: .*{words}.*use 1"):
        plan_of(config, idep)
    loaded = rank_pair.load(quantized)
    with pytest.raises(ConfigError, match=f"--tensor-parallel: {ranks}: .*{words}"):
        shards.plan_of(loaded.model, loaded.shape, ranks)


@pytest.mark.parametrize("form", [compressed_tensors(kind="float"), awq(), gptq(group=-1)])
def test_the_plan_of_an_accelerator_counts_its_part(form: Any, tmp_path: Path, pod: Pod) -> None:
    saved = tiny.save(tiny.build("llama").half(), tmp_path / "model")
    quantized, _ = publish(saved, tmp_path, *form)
    config = json.loads((quantized / "config.json").read_text())
    found = []
    for ranks in (1, 2):
        resources = {"accelerator": {"count": ranks, "memory": "2Gi"}, "memory": "4Gi"}
        idep = pod.resource("4Gi", resources=resources, engine={"tensorParallel": ranks})
        found.append(plan_of(config, idep).terms["weights"])
    loaded = rank_pair.load(quantized)
    shards.shard(loaded.model, loaded.shape, RankGroup(1, 2, "", lambda: None), rank_pair.CPU)
    tensors = chain(loaded.model.parameters(), loaded.model.buffers())
    held = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    assert found[1] == sum(storage.nbytes() for storage in held.values())
    assert found[1] < found[0]
