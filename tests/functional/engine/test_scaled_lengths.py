"""A model whose rotary embedding is scaled reads as far as its factor says, and its text there is
that of transformers, which has no limit of its own.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.models.rope import pin
from support import tiny

ORIGINAL, FACTOR, NEW = 64, 4, 6
LONGEST = ORIGINAL * FACTOR


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "scaling",
    [
        # As the model cards of Qwen 2.5 write it, and as transformers 5 saves it.
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
    ],
    ids=["card", "yarn", "dynamic"],
)
def test_the_text_beyond_the_original_length_is_that_of_transformers(
    family: str, scaling: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny.save(tiny.build(family, max_position_embeddings=ORIGINAL), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_parameters", {}).get("rope_theta", 10000.0)
    (folder / "config.json").write_text(
        json.dumps({**config, "rope_theta": theta, "rope_scaling": scaling})
    )
    prompt = [10 + 7 * place % 80 for place in range(LONGEST - NEW)]
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    with LLM(str(folder), num_blocks=64) as llm:
        (answer,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    reference: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    pin(reference, LONGEST)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            logits = reference(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    assert list(answer.outputs[0].token_ids) == ids[len(prompt) :]
