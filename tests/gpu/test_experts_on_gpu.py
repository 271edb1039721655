"""The product of a mixture's experts on an NVIDIA GPU, and models on it: captured, without a wait.
Run with `make gpu`; without a GPU it fails.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_kernels.choice import experts
from fairlead_kernels.choice.experts import Matrices
from fairlead_kernels.gpu import triton_experts
from fairlead_kernels.gpu.triton_experts import TritonExperts
from fairlead_kernels.interface import reference
from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.device.step.decode_steps import DecodeSteps
from support import tiny
from support.gpu_device import DEVICE
from support.operation_cases import ROUNDING

pytestmark = pytest.mark.gpu

PROMPTS = [{"prompt_token_ids": list(range(3 + i, 40 + 7 * i))} for i in range(6)]
SETTINGS: dict[str, Any] = {
    "num_blocks": 200,
    "max_model_len": 192,
    "max_requests": 8,
    "max_batch_tokens": 512,
}
ENDS = [2, 2, 150, 215, 215, 220]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_the_references_and_a_tokens_the_same_bits_beside_any_others(
    dtype: torch.dtype, inputs_first: bool, biased: bool
) -> None:
    torch.manual_seed(0)
    ours, count, columns, rows = triton_experts.load(), len(ENDS), 200, 330
    shape = (count, columns, rows) if inputs_first else (count, rows, columns)
    weights = torch.randn(shape, device=DEVICE).to(dtype)
    weights = weights if inputs_first else weights.transpose(1, 2)
    x = torch.randn(ENDS[-1], columns, device=DEVICE).to(dtype)
    bias = torch.randn(count, rows, device=DEVICE).to(dtype) if biased else None
    expert_ends = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE)
    got = ours(x, weights, expert_ends, bias)
    want = reference.expert_product(x, weights, expert_ends, bias)
    limit = 2 * ROUNDING[dtype] * float(want.abs().max()) + 1e-5
    torch.testing.assert_close(got, want, rtol=0, atol=limit)
    part = torch.tensor([0, 0, 3, 9, 9, 10], dtype=torch.int32, device=DEVICE)
    some = torch.tensor([2, 77, 149, 150, 160, 199, 200, 201, 214, 219], device=DEVICE)
    assert torch.equal(ours(x[some], weights, part, bias), got[some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_that_does_not_wait_is_chosen(dtype: torch.dtype) -> None:
    sample = Matrices(torch.randn(4, 128, 64, device=DEVICE).to(dtype).transpose(1, 2), None)
    product, said = experts.choose([sample], DEVICE)
    print(f"{dtype}: {said}")
    assert product is not None or said == "experts in torch"


def fails(*_: Any) -> Any:
    raise RuntimeError("not asked")


@pytest.fixture(params=["ours", "chosen"])
def whose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Triton's product wherever this runs, or the one that is chosen here."""
    if request.param == "ours":
        monkeypatch.setattr(experts, "torch_product", fails)
    return str(request.param)


@pytest.fixture(params=["mixtral", "gpt_oss"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_captured_steps_give_the_tokens_of_others_and_none_waits(
    family: str, dtype: str, whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 6 rows are captured as 8, so the products around the experts may round otherwise: a
    text may differ from where two tokens lie close, and most do not.
    """
    launched, compute = 0, DecodeSteps._compute
    multiply = TritonExperts.__call__

    def counted(self: TritonExperts, *given: Any) -> Any:
        nonlocal launched
        launched += 1
        return multiply(self, *given)

    def watched(self: DecodeSteps, *arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return compute(self, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TritonExperts, "__call__", counted)
    model = tiny.build(family, num_attention_heads=4, head_dim=64)
    folder = tiny.save(model.to(getattr(torch, dtype)), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    texts = []
    for graphs in ("off", "on"):  # `on` raises where no step can be captured
        with LLM(str(folder), dtype=dtype, cuda_graphs=graphs, **SETTINGS) as llm:
            if graphs == "off":
                llm.generate(PROMPTS, params, use_tqdm=False)  # compiles
                monkeypatch.setattr(DecodeSteps, "_compute", watched)
            results = llm.generate(PROMPTS, params, use_tqdm=False)
            monkeypatch.setattr(DecodeSteps, "_compute", compute)
            texts.append([list(result.outputs[0].token_ids) for result in results])
    assert launched > 0 or whose == "chosen"
    same = sum(one[:8] == other[:8] for one, other in zip(*texts, strict=True))
    assert same >= 5
