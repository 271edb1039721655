"""Whole models on an NVIDIA GPU against transformers there. Run with `make gpu`; without a GPU it
fails. The same checks run on CPUs in tests/functional/engine/test_device_cases.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from support import device_cases, tiny
from support.device_cases import Case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # it compiles

CUDA = torch.device("cuda")
HEADS: dict[str, Any] = {"num_attention_heads": 4, "head_dim": 64}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_text_in_float32_equals_transformers(family: str, tmp_path: Path) -> None:
    """Few blocks: requests are preempted."""
    case = Case(tiny.save(tiny.build(family), tmp_path), CUDA)
    device_cases.check_equal(case, device_cases.texts(case.results(dtype="float32")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_log_probabilities_in_16_bits_are_close_to_float32(
    family: str, kernels: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With ``auto`` on flashinfer's attention, where decodes are captured and launched ahead."""
    folder = tiny.save(tiny.build(family, **HEADS), tmp_path)
    device_cases.check_close(Case(folder, CUDA), dtype, kernels=kernels)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("ahead", ["off", "on"])
def test_log_probabilities_do_not_depend_on_how_steps_are_run(
    graphs: str, ahead: str, tmp_path: Path
) -> None:
    folder = tiny.save(tiny.build("llama", **HEADS), tmp_path)
    how = {"kernels": "flashinfer", "cuda_graphs": graphs, "async_batching": ahead}
    device_cases.check_close(Case(folder, CUDA), torch.bfloat16, **how)


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_published_checkpoint_gives_what_its_matrices_give(
    family: str, kind: str, tmp_path: Path
) -> None:
    device_cases.check_published(family, CUDA, tmp_path, kind)
