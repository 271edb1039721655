"""Families that the self-test judges: sized by their files as by the table, equal to transformers'
text.

tiny.SIZED are in the table, but not in the full matrix of
tests/functional/engine/test_token_equality.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fairlead_kernels.choice.backend import pick
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.llm import LLM
from fairlead_runtime.models import architecture, loading, unlisted
from fairlead_runtime.models.headers import read_header
from fairlead_runtime.models.model_error import ModelError, SelfTestError
from fairlead_runtime.request.sequence import SamplingParams
from fairlead_runtime.sizing.families.judged import SIZED
from fairlead_runtime.sizing.families.refusals import REFUSED
from fairlead_runtime.sizing.family_table import FAMILIES, JUDGED
from fairlead_runtime.sizing.shape import ModelShape
from support import tiny
from support.engine_rig import check_greedy_texts, prompts, rig
from support.kernel_sets import rows_beyond_the_plan

# The place of a family is the seed of its prompts.
EVERY = (*tiny.SIZED[:6], *tiny.UNLISTED, *tiny.SIZED[6:])
# Their layers have the forms of families in the table.
LIKE_THE_LISTED = ("ernie4_5", "glm", "helium", "ministral", "olmo3", "seed_oss", "smollm3")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.full] * (family in LIKE_THE_LISTED))
        for family in EVERY
    ],
)
def test_greedy_text_equals_transformers_and_the_self_test_passes(family: str) -> None:
    engine = rig(family)
    check_greedy_texts(engine, EVERY.index(family))
    model = engine.model
    assert (
        selftest.run(
            model,
            pick(model.heads, model.kinds, model.device, "torch").attention,
            512,
        ).delta
        < 1e-4
    )


BESIDE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}


@pytest.mark.parametrize(
    "settings",
    [
        {**BESIDE, "moe_intermediate_size": 64},
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        {"attention_k_eq_v": False, "num_kv_shared_layers": 4},
        {"use_bidirectional_attention": "vision", "num_global_key_value_heads": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_form_of_gemma_4_gives_transformers_text(settings: dict[str, Any]) -> None:
    check_greedy_texts(rig("gemma4_text", **settings), 3)


@pytest.mark.parametrize(
    "kernels", ["flashinfer", "resident", "graphs", "triton", "triton flashinfer", "ranks ahead"]
)
def test_kernels_that_the_product_refuses_for_mixed_heads_are_refused_to_tests(
    kernels: str,
) -> None:
    with pytest.raises(NotAvailableError, match="differ in their heads"):
        rig("mimo_v2_flash", kernels)


@pytest.mark.parametrize("family", tiny.UNLISTED)
def test_an_unlisted_family_is_sized_as_transformers_builds_it(family: str, tmp_path: Path) -> None:
    model = tiny.build(family)
    tiny.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] in SIZED
    shape = unlisted.shape_of(
        config, {"model.safetensors": read_header(tmp_path / "model.safetensors")}
    )
    heads = rig(family).model.heads
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (heads.query, heads.kv, heads.dim)
    assert shape.windows == rig(family).model.windows
    assert shape.parameters == sum(stored.numel() for stored in model.state_dict().values())
    assert 0 < shape.layer_matrices < shape.parameters
    assert shape.max_len == tiny.CONTEXT
    assert shape.mlp_width >= 5 * 64
    # The plan, without the files, says the same.
    planned = ModelShape.from_config(config)
    same = ("windows", "heads", "kv_heads", "head_dim", "hidden", "vocab", "max_len", "tied")
    assert [getattr(planned, key) for key in same] == [getattr(shape, key) for key in same]
    assert planned.parameters == sum(p.numel() for p in model.parameters())


def test_an_unlisted_family_is_served_from_its_files(tmp_path: Path) -> None:
    built = tiny.build("smollm3")
    tiny.save(built, tmp_path)
    with LLM(str(tmp_path), num_blocks=64) as llm:
        prompt = prompts(0, (30,), 0)[0]
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        [result] = llm.generate([{"prompt_token_ids": list(prompt)}], params)
        assert list(result.outputs[0].token_ids)[:4] == rig("smollm3").reference(prompt, 16)[:4]
        report = llm.built_engine.memory.as_dict()
    weights = next(term for term in report["terms"] if term["name"] == "weights")
    padding = rows_beyond_the_plan(built.config.vocab_size) * built.config.hidden_size * 4
    assert weights["measuredBytes"] == weights["plannedBytes"] - padding


def test_the_families_that_may_be_the_text_of_a_larger_model_are_those_tested_here() -> None:
    assert sorted(JUDGED) == sorted(tiny.UNLISTED)


def test_the_documentation_names_the_families_tested_here() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text("utf-8")
    listed = text.split("as tiny random models:")[1].split("So do these")[0]
    assert sorted(listed.replace("`", "").split()) == sorted(tiny.UNLISTED)
    others = text.split("So do these")[1].split(":\n\n")[1].split("\n\n")[0]
    assert sorted(others.replace("`", "").split()) == sorted(SIZED.keys() - JUDGED)
    rows = {
        family
        for row in text.splitlines()
        if "table of families" in row
        for family in row.split("`")[1::2]
    }
    assert rows == set(FAMILIES) == {*tiny.FAMILIES, *tiny.SIZED}


def load_random(family: str, path: Path, **settings: Any) -> loading.LoadedModel:
    config = AutoConfig.for_model(family, **{**tiny._COMMON, **settings})
    factory: Any = AutoModelForCausalLM
    tiny.save(factory.from_config(config, dtype=torch.float32, attn_implementation="eager"), path)
    return loading.load(path)


def test_an_unsupported_kind_of_attention_fails_the_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differential attention is not a sum over one set of scores."""
    monkeypatch.delitem(REFUSED, "diffllama")
    with pytest.raises(SelfTestError, match="diffllama"):
        selftest.prepare_and_test(load_random("diffllama", tmp_path, num_key_value_heads=2))


def test_an_attention_that_does_not_run_packed_fails_the_self_test_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """doge makes its own mask for every layer."""
    monkeypatch.delitem(REFUSED, "doge")
    with pytest.raises(selftest.NotPackedError, match=r"'doge' does not run packed .*mask"):
        selftest.prepare_and_test(load_random("doge", tmp_path, num_key_value_heads=2))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "evil"}, "no architecture of that name"),
        ({"model_type": "bloom"}, "attention interface"),
        ({"model_type": "falcon"}, "attention interface"),
        ({"model_type": "bert"}, "bidirectional"),
        ({"model_type": "got_ocr2"}, "attention interface"),
        ({"model_type": "zaya"}, "recurrent state"),
        ({"model_type": "glm4_moe_lite"}, "latent attention"),
        ({"model_type": "hrm_text"}, "several times"),
        ({"model_type": "git"}, "attention interface"),
        ({"model_type": "jetmoe", "hidden_size": -1}, "hidden_size"),
        ({"model_type": "qwen3_moee"}, "nearest name that is served is 'qwen3_moe'"),
        ({"model_type": "smollm3", "hidden_size": "x"}, "hidden_size"),
        ({"model_type": "smollm3", "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_type": "stablelm", "num_attention_heads": 0}, "num_attention_heads"),
        ({"model_type": "stablelm", "num_experts": 10**9}, "num_experts"),
        ({"model_type": "aria"}, "aria_text"),
    ],
)
def test_models_that_cannot_be_tried_are_refused_before_their_weights_load(
    config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        architecture.check(config)
    assert caught.value.code == "UnsupportedModel"
    assert len(str(caught.value)) < 1500
