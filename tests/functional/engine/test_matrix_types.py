"""Matrices of a checkpoint in bfloat16 that is served in float32: held as they are stored, with the
results of float32 to the bit.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fairlead_kernels.choice.backend import pick
from fairlead_runtime.device.conversion import recognize_ends
from fairlead_runtime.device.conversion.fusion import _ScratchPass, fuse
from fairlead_runtime.device.conversion.pack_states import pack_states
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.llm import LLM
from fairlead_runtime.models import families, rope
from fairlead_runtime.request.sequence import SamplingParams
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.arithmetic import PANEL
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.weight_bytes import held_weights
from support import tiny, tiny_states
from support.engine_rig import MAX_LEN
from support.full import LONG_FORM
from support.kernel_sets import PRODUCT_SETS, rows_to_a_panel

needs_kernels = pytest.mark.skipif(not PRODUCT_SETS, reason="the C++ kernels are not built")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# Fused layers, with a multiple of their results; a model's own code; states beside a fused layer.
FORMS = ("granite", "olmo2", "lfm2")
MORE = ("llama", "gpt2", "gemma2", "cohere", "qwen3_5_text", "mamba2", "olmo_hybrid", "falcon_h1")


def built(family: str, **settings: Any) -> Any:
    """A tiny model in float32 whose numbers bfloat16 has."""
    build = tiny_states.build if family in tiny_states.FAMILIES else tiny.build
    model = build(family, **settings)
    return model.to(BFLOAT16).to(FLOAT32)


def served(family: str, matrix_dtype: torch.dtype) -> tuple[PagedModel, torch.Tensor, str]:
    """A model whose matrices are packed in this type, logits of it, and what the log says."""
    model = built(family)
    paged = PagedModel(model, families.check(model.config))
    rope.pin(model, MAX_LEN)
    paged.matrix_dtype = matrix_dtype
    choice = pick(paged.heads, paged.kinds, paged.device, "cpu")
    pack_states(paged, choice.states)
    fused = fuse(paged, choice.operations, every_product=True)
    ids, positions = recognize_ends.random_tokens(paged, seed=7)
    step = _ScratchPass(paged)
    with torch.inference_mode():
        run = paged.run if paged.full_pass is None else paged.full_pass.logits
        return paged, run(ids, positions, step), str(fused)


@needs_kernels
@pytest.mark.parametrize("family", FORMS + MORE * LONG_FORM)
def test_matrices_in_bfloat16_give_the_bits_of_the_same_numbers_in_float32(family: str) -> None:
    whole, want, _ = served(family, FLOAT32)
    halved, got, said = served(family, BFLOAT16)
    assert torch.equal(got, want)
    assert said.endswith("bfloat16 head")
    config = json.loads(whole.model.config.to_json_string()) | {"dtype": "bfloat16"}
    shape = ModelShape.from_config(config)
    planned = held_weights(shape, EngineConfig(dtype="float32"), 1, "cpu")
    assert planned >= halved.weight_bytes
    assert halved.weight_bytes < 0.7 * whole.weight_bytes
    if rows_to_a_panel(1) == PANEL - 1:  # the widest, as planned
        assert planned == halved.weight_bytes


@needs_kernels
@pytest.mark.parametrize("family", ["qwen3_5_text", *["llama", "lfm2"] * LONG_FORM])
def test_a_checkpoint_in_bfloat16_served_in_float32_gives_the_text_of_generate(
    family: str, tmp_path: Path
) -> None:
    model = built(family, vocab_size=288)
    path = str(tiny.save(model.to(BFLOAT16), tmp_path))
    wide = AutoModelForCausalLM.from_pretrained(path, dtype=FLOAT32, attn_implementation="eager")
    prompt = [17, 4, 9, 200, 31, 8, 99, 54, 12, 7, 120]
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    want = wide.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=2, **settings)
    sizes = {"num_blocks": 100, "block_size": 8, "max_batch_tokens": 256, "max_requests": 4}
    with LLM(path, dtype="float32", **sizes) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params)
        report = llm.built_engine.memory.as_dict()
    assert list(answer.outputs[0].token_ids) == want[0, len(prompt) :].tolist()
    terms = {term["name"]: term for term in report["terms"]}
    assert terms["weights"]["measuredBytes"] <= terms["weights"]["plannedBytes"]
    stored = sum(x.nbytes for x in wide.parameters()) // 2
    assert terms["weights"]["measuredBytes"] < 1.3 * stored


def test_matrices_that_are_stored_wider_than_config_json_says_are_held_in_float32(
    tmp_path: Path,
) -> None:
    model = tiny.build("llama", vocab_size=288)
    path = tiny.save(model, tmp_path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    prompt = [17, 4, 9, 200, 31, 8, 99, 54, 12, 7, 120]
    ids = torch.tensor([prompt])
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=2, **settings)
    sizes = {"num_blocks": 100, "block_size": 8, "max_batch_tokens": 256, "max_requests": 4}
    with LLM(str(path), dtype="float32", **sizes) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params)
        report = llm.built_engine.memory.as_dict()
    assert list(answer.outputs[0].token_ids) == want[0, len(prompt) :].tolist()
    (weights,) = (term for term in report["terms"] if term["name"] == "weights")
    assert sum(x.nbytes for x in model.parameters()) <= weights["measuredBytes"]
    assert weights["measuredBytes"] <= weights["plannedBytes"]
