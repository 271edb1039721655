"""An engine with an fp8 cache gives the text of transformers with rounded keys and values, whatever
the chunks are that a prompt is computed in. test_token_equality.py has more settings.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairlead_runtime import LLM, SamplingParams
from support import tiny
from support.engine_rig import FP8_CACHE, Rig, Setting, greedy, prompts, rig
from support.fp8_reference import Fp8Cache, greedy_text

PROMPTS = prompts(7, (61, 40, 23, 9), shared=20)


def scores(engine: Rig, tokens: tuple[int, ...], cache: dict[str, Any]) -> torch.Tensor:
    """Of each token but the first, by transformers: its log-probability."""
    with engine.model.plain() as plain, torch.inference_mode():
        ids = torch.tensor([tokens])
        logits: torch.Tensor = plain(input_ids=ids, use_cache=bool(cache), **cache).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


def scored(engine: Rig, setting: Setting) -> dict[str, torch.Tensor]:
    """The same by our engine, of all prompts together."""
    arrivals = [
        (i, greedy(str(i), prompt, 2, prompt_logprobs=0)) for i, prompt in enumerate(PROMPTS)
    ]
    outcome = engine.run(setting, arrivals)
    return {
        name: torch.tensor([token.logprob for token in tokens])
        for name, tokens in outcome.prompts.items()
    }


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_token_of_a_chunk_attends_to_rounded_keys(family: str) -> None:
    """Its own and those of the same chunk too: else the chunks would be seen in the result. What
    differs is noise, magnified where it makes the other one of two numbers of a key.
    """
    engine = rig(family, FP8_CACHE + "torch")
    asked = {str(i): prompt for i, prompt in enumerate(PROMPTS)}
    want = {i: scores(engine, p, {"past_key_values": Fp8Cache()}) for i, p in asked.items()}
    plain = {i: scores(engine, p, {}) for i, p in asked.items()}
    rounding = min(float((want[i] - plain[i]).abs().max()) for i in want)
    for chunk in (1, 7, 64, 4096):
        got = scored(engine, Setting(chunk=chunk, block_size=16))
        assert got.keys() == want.keys()
        differences = [float((got[i] - want[i]).abs().max()) for i in want]
        print(f"chunk {chunk}: {max(differences):.2g}, rounding {rounding:.2g}")
        assert 5 * max(differences) < rounding


@pytest.mark.parametrize("offload", [0.0, 0.01])
def test_the_whole_engine_serves_an_fp8_cache_on_a_cpu_under_preemption(
    offload: float, tmp_path: Path
) -> None:
    """Blocks for the prompts, which start together, and not for their outputs."""
    model = tiny.build("llama")
    folder = tiny.save(model, tmp_path)
    generator = np.random.default_rng(3)
    asked = [generator.integers(3, tiny.VOCAB, n).tolist() for n in (5, 9, 14, 30, 17, 3)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(
        str(folder),
        cache_dtype="fp8",
        cpu_offload_space=offload,
        num_blocks=9,
        max_batch_tokens=24,
        max_requests=8,
        max_model_len=96,
        safety_margin=0.0,
    ) as llm:
        results = llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)
        statistics = llm.built_engine.engine.snapshot().scheduler
        memory = {term.name: term for term in llm.built_engine.memory.terms}
        assert llm.built_engine.resolved.cache_dtype == "float8_e4m3fn"
    assert [r.outputs[0].token_ids for r in results] == [greedy_text(model, p, 40) for p in asked]
    assert statistics.preemptions > 0
    assert (statistics.offloads > 0) is (offload > 0)
    assert memory["kv"].measured == memory["kv"].planned == 9 * 16 * 3 * 2 * 2 * 16
