"""Models of several parts: their text equals that of transformers' whole model, which has read the
same files, token for token; the other parts are neither loaded nor counted.

The engine's runs are on ``support.engine_rig``, whose model has the weights that are loaded here.
"""

import functools
import itertools
import json
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from fairlead_runtime.llm import LLM
from fairlead_runtime.models import architecture, loading, text_model
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.request.sequence import SamplingParams
from fairlead_runtime.sizing.config_json import ShapeError
from fairlead_runtime.sizing.families.with_states import WITH_STATES
from fairlead_runtime.sizing.family_table import PARTS
from fairlead_runtime.sizing.shape import ModelShape
from support import tiny, tiny_parts
from support.engine_rig import EOS, NEW, check_greedy_texts, prompts, rig
from support.kernel_sets import rows_beyond_the_plan

# Those whose texts keep states are tested with them: test_states.py.
KEYED = frozenset(family for family, parts in PARTS.items() if parts.text not in WITH_STATES)

# Their text is that of a family of its own, whose layers other tests run.
LIKE_THE_LISTED = ("mistral3", "internvl", "smolvlm", "idefics3", "aya_vision", "qwen2_vl", "llava")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By family its checkpoint, stored once."""

    @functools.cache
    def save(family: str, **text: Any) -> Path:
        return tiny_parts.save(family, tmp_path_factory.mktemp(family), **text)

    return save


def whole_text(path: Path, prompt: tuple[int, ...]) -> list[int]:
    """The greedy ``generate`` of transformers' whole model."""
    factory: Any = AutoModelForImageTextToText
    whole = factory.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = whole.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
            eos_token_id=sorted(EOS), pad_token_id=0,
        )  # fmt: skip
    text: list[int] = out[0, len(prompt) :].tolist()
    return text


def seed_of(family: str) -> int:
    return 40 + tiny_parts.FAMILIES.index(family)


@pytest.mark.parametrize("family", tiny_parts.FAMILIES)
def test_the_text_of_published_files_is_the_whole_models(family: str, folder: Any) -> None:
    path = folder(family)
    prompt, other = prompts(seed_of(family), (41, 41), 0)
    ours = rig(family)
    want = whole_text(path, prompt)
    assert ours.reference(prompt, NEW) == want
    assert len(set(want)) > 2
    changed = (*other[:20], *prompt[20:])
    assert ours.reference(changed, NEW) != want

    loaded = loading.load(path)
    stored = ours.model.model.state_dict() if ours.fusion.fused == 0 else {}
    assert stored
    held = loaded.model.state_dict()
    assert held.keys() == stored.keys()
    assert all(torch.equal(held[name], stored[name]) for name in held)
    parameters = sum(x.numel() for x in loaded.model.parameters())
    assert loaded.shape.parameters == parameters
    assert loaded.shape.model_type == family


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.full] * (family in LIKE_THE_LISTED))
        for family in tiny_parts.FAMILIES
    ],
)
def test_greedy_text_equals_that_of_the_whole_model(family: str) -> None:
    """Of ``rig``'s reference, which the test above compares with the whole model."""
    engine = rig(family, "cpu")
    unfused = family in ("qwen3_vl_moe", "gemma3n", "gemma4", "gemma4_unified")
    assert engine.fusion.fused == (0 if unfused else engine.fusion.layers)
    check_greedy_texts(engine, seed_of(family))


def test_flat_settings_of_an_older_checkpoint_are_the_same_model(
    folder: Any, tmp_path: Path
) -> None:
    nested = loading.inspect(folder("qwen2_5_vl"))
    flat = tiny_parts.save("qwen2_5_vl", tmp_path)
    tiny_parts.flatten(flat)
    assert "text_config" not in json.loads((flat / "config.json").read_text())
    assert loading.inspect(flat).shape == nested.shape
    prompt = prompts(seed_of("qwen2_5_vl"), (41,), 0)[0]
    assert whole_text(flat, prompt) == rig("qwen2_5_vl").reference(prompt, NEW)
    loading.load(flat)


def test_the_head_of_a_text_that_is_loaded_alone_is_the_wholes(tmp_path: Path) -> None:
    path = tiny_parts.save("gemma3n", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    for whole in (True, None):
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": whole}))
        model: Any = loading.load(path).model
        assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_text_that_is_loaded_alone_ends_where_the_whole_does(tmp_path: Path) -> None:
    path = tiny_parts.save("gemma3n", tmp_path)
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": [5, 77]}))
    assert loading.load(path).eos_ids >= {5, 77}


@pytest.mark.parametrize("family", ["gemma3", "gemma3n", "llava"])
def test_a_model_of_parts_is_served_from_its_files_within_its_plan(
    family: str, folder: Any
) -> None:
    path = folder(family)
    prompt = prompts(seed_of(family), (41,), 0)[0]
    with LLM(str(path), num_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        [result] = llm.generate([{"prompt_token_ids": list(prompt)}], params)
        report = llm.built_engine.memory.as_dict()
    want = rig(family).reference(prompt, NEW)
    assert list(result.outputs[0].token_ids)[: len(want)] == want
    weights = next(term for term in report["terms"] if term["name"] == "weights")
    # The tables of the rotary embeddings are not in the files.
    padding = rows_beyond_the_plan(tiny.VOCAB) * tiny.HIDDEN * 4
    assert 0 <= weights["measuredBytes"] - (weights["plannedBytes"] - padding) < 1024


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_a_model_whose_layers_differ_in_their_heads_is_served_from_its_files_within_its_plan(
    family: str, folder: Any
) -> None:
    path = folder(family)
    prompt = prompts(seed_of(family), (41,), 0)[0]
    with LLM(str(path), num_blocks=64, cpu_offload_space=0.01) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        [result] = llm.generate([{"prompt_token_ids": list(prompt)}], params)
        report = llm.built_engine.memory.as_dict()
    want = rig(family).reference(prompt, NEW)
    assert list(result.outputs[0].token_ids)[: len(want)] == want
    terms = {term["name"]: term for term in report["terms"]}
    for name in ("kv", "offload"):
        assert terms[name]["measuredBytes"] == terms[name]["plannedBytes"] > 0
    # Rows that fill panels are planned for all matrices.
    weights = terms["weights"]
    assert -0.03 < weights["measuredBytes"] / weights["plannedBytes"] - 1 <= 0
    loaded = loading.load(path)
    assert report["kvBytesPerToken"] == 4 * sum(
        loaded.shape.kv_widths[layer] for layer in {*loaded.shape.sources}
    )


@pytest.mark.parametrize("stored", [False, True], ids=["no head stored", "a head stored"])
@pytest.mark.parametrize(
    ("outer", "own"), [*itertools.product((None, True, False), repeat=2)], ids=str
)
@pytest.mark.parametrize(
    "family",
    [
        "mistral3",
        *(pytest.param(family, marks=pytest.mark.full) for family in sorted(KEYED - {"mistral3"})),
    ],
)
def test_the_head_that_the_files_have_is_planned_and_held(
    family: str, outer: bool | None, own: bool | None, stored: bool, folder: Any, tmp_path: Path
) -> None:
    path = shutil.copytree(folder(family, tie_word_embeddings=not stored), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    for part, tied in ((config, outer), (config["text_config"], own)):
        part["tie_word_embeddings"] = tied
        if tied is None:
            del part["tie_word_embeddings"]
    (path / "config.json").write_text(json.dumps(config))
    planned, shape = ModelShape.from_config(config), loading.inspect(path).shape
    assert shape.tied is not stored
    if not stored and transformers_unties(path, config):
        with pytest.raises(ModelError, match="lm_head"):
            loading.load(path)
        return
    assert shape.parameters == sum(x.numel() for x in loading.load(path).model.parameters())
    # Without the files the plan is right, or it counts a head that none has.
    assert planned.parameters >= shape.parameters or (stored and planned.tied)


def transformers_unties(path: Path, config: dict[str, Any]) -> bool:
    loaded = text_model.config_to_load(path, config)
    with torch.device("meta"):
        return not text_model.class_to_load(loaded)(loaded).all_tied_weights_keys


def test_no_byte_of_another_part_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tower of 3 GiB, which the file has as a hole."""
    path = tiny_parts.save("internvl", tmp_path) / "model.safetensors"
    content, tower = path.read_bytes(), 3 << 30
    end = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:end]), content[end:]
    offsets = [len(data), len(data) + tower]
    header["vision_tower.large"] = {"dtype": "U8", "shape": [tower], "data_offsets": offsets}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw + data)
        file.truncate(8 + len(raw) + offsets[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with caplog.at_level("INFO"):
        loading.load(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert re.search(r"loading \d\.\d MiB of weights as float32", caplog.text)


def test_the_families_of_the_table_are_the_ones_tested_here() -> None:
    assert {*KEYED, "llava"} == {*tiny_parts.FAMILIES}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        (family, {"model_type": family, "text_config": {"model_type": text}})
        for family, text in [
            *(("qwen3_5", "qwen3_next"), ("lfm2_vl", "bamba"), ("llava", "qwen3_5_text")),
            *(("llama4", "llama4_text"), ("kimi_k25", "deepseek_v3")),
            *(("nemotron_h_omni", "nemotron_h"), ("paligemma", "gemma"), ("voxtral", "llama")),
        ]
    ],
)
def test_a_model_whose_text_is_not_served_is_refused_in_the_words_of_the_plan(
    family: str, config: dict[str, Any]
) -> None:
    with pytest.raises(ModelError) as refused:
        architecture.check(config)
    assert refused.value.code == "UnsupportedModel"
    with pytest.raises(ShapeError) as planned:
        ModelShape.from_config(config)
    assert refused.value.message == str(planned.value)
    assert family in str(refused.value) or config["text_config"]["model_type"] in str(refused.value)
