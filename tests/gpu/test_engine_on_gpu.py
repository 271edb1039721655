"""The engine on an NVIDIA GPU, against transformers on the same GPU. Run with `make gpu`; without a
GPU it fails.
"""

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.llm import RequestOutput
from support import tiny
from support.device_cases import PROMPTS, Case, check_equal, texts
from support.fp8_reference import greedy_text
from support.gpu_device import DEVICE

pytestmark = pytest.mark.gpu

OUTPUT = 64
PREEMPTING: dict[str, Any] = {
    "num_blocks": 12,
    "max_batch_tokens": 256,
    "max_model_len": 192,
    "safety_margin": 0.0,
    "dtype": "float32",
}


def check_texts(folder: Path, results: list[RequestOutput]) -> None:
    """Of transformers' generate, one prompt alone, in float32 on the GPU, up to a tie."""
    check_equal(Case(folder, DEVICE, OUTPUT), texts(results))


@pytest.mark.on_cpu
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("offload", [0.0, 0.01])
def test_greedy_output_equals_transformers_under_preemption(
    family: str, offload: float, tmp_path: Path
) -> None:
    """12 blocks of 16 tokens hold the short prompts, which start together, and then not their
    outputs, not even with windows.
    """
    folder = tiny.save(tiny.build(family), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    with LLM(str(folder), **PREEMPTING, cpu_offload_space=offload) as llm:
        results = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        statistics = llm.built_engine.engine.snapshot().scheduler
    check_texts(folder, results)
    assert statistics.preemptions > 0
    assert (statistics.offloads > 0) is (offload > 0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_an_fp8_cache_gives_the_text_of_transformers_with_rounded_keys_and_values(
    family: str, tmp_path: Path
) -> None:
    """But for keys in the middle of two numbers, which a GPU's other order of sums decides: such a
    text differs from some token on.
    """
    model = tiny.build(family)
    folder = tiny.save(model, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    with LLM(str(folder), **PREEMPTING, cache_dtype="fp8", cpu_offload_space=0.01) as llm:
        results = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        statistics = llm.built_engine.engine.snapshot().scheduler
    on_gpu = model.to(DEVICE)
    wanted = [greedy_text(on_gpu, prompt, OUTPUT) for prompt in PROMPTS]
    others = [r for r, want in zip(results, wanted, strict=True) if r.outputs[0].token_ids != want]
    assert len(others) <= 1
    assert statistics.offloads > 0


def test_a_seeded_draw_does_not_depend_on_its_batch() -> None:
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=OUTPUT, ignore_eos=True)
        for i in range(8)
    ]
    with LLM("demo:", num_blocks=256) as llm:
        together = llm.generate(["A block holds"] * 8, params, use_tqdm=False)
        alone = [llm.generate(["A block holds"], one, use_tqdm=False)[0] for one in params]
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def fused(log: pytest.LogCaptureFixture) -> bool:
    """Whether the log says that all layers are fused."""
    (found,) = re.findall(r"kernels: .*fused (\d+)/(\d+) layers", log.text)
    return bool(found[0] == found[1])


@two_gpus
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "granite", "gpt_neox", "starcoder2", "mixtral"]
)
def test_two_gpus_give_the_text_of_transformers(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All but the experts' in fused layers."""
    caplog.set_level("INFO")
    folder = tiny.save(tiny.build(family), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    with LLM(str(folder), **PREEMPTING, tensor_parallel=2) as llm:
        results = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    check_texts(folder, results)
    assert fused(caplog) is (family != "mixtral")


@two_gpus
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_gpus_with_fused_layers_in_half_precision_pass_the_self_test(
    dtype: torch.dtype,
    quantization: Literal["none", "int8"],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Which compares with the whole model's layers in float32."""
    caplog.set_level("INFO")
    # At its own multiplier of 1 rounding alone comes near the limit; checkpoints have 0.22.
    folder = tiny.save(tiny.build("granite", residual_multiplier=0.3).to(dtype), tmp_path)
    with LLM(str(folder), num_blocks=256, tensor_parallel=2, quantization=quantization) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (result,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 8
    assert fused(caplog)
