"""Whole models on an NVIDIA GPU against transformers there. Run with `make gpu`; without a GPU it
fails. The same checks run on CPUs in tests/functional/engine/test_device_cases.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_kernels.interface.not_available import name_of
from support import device_cases, tiny
from support.device_cases import Case
from support.gpu_device import DEVICE, KERNELS

pytestmark = pytest.mark.gpu

HEADS: dict[str, Any] = {"num_attention_heads": 4, "head_dim": 64}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_text_in_float32_equals_transformers(family: str, tmp_path: Path) -> None:
    """Few blocks: requests are preempted."""
    case = Case(tiny.save(tiny.build(family), tmp_path), DEVICE)
    device_cases.check_equal(case, device_cases.texts(case.results(dtype="float32")))


# In float32 attention is Triton's, since flashinfer has none.
WAYS: dict[str, dict[str, Any]] = {
    "torch": {"kernels": "torch"},
    "eager": {"cuda_graphs": "off", "async_batching": "off"},
    "graphs": {"cuda_graphs": "on", "async_batching": "off"},
    "graphs-ahead": {"cuda_graphs": "on", "async_batching": "on"},
}


@pytest.mark.on_cpu("torch", "graphs", "graphs-ahead")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_greedy_text_in_float32_is_transformers_however_steps_are_run(
    family: str, way: str, tmp_path: Path
) -> None:
    case = Case(tiny.save(tiny.build(family), tmp_path), DEVICE)
    device_cases.check_equal(case, device_cases.texts(case.results(dtype="float32", **WAYS[way])))


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_log_probabilities_in_16_bits_are_close_to_float32(
    family: str, kernels: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With ``auto`` on flashinfer's attention, where decodes are captured and launched ahead."""
    folder = tiny.save(tiny.build(family, **HEADS), tmp_path)
    device_cases.check_close(Case(folder, DEVICE), dtype, kernels=kernels)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("ahead", ["off", "on"])
def test_log_probabilities_do_not_depend_on_how_steps_are_run(
    graphs: str, ahead: str, tmp_path: Path
) -> None:
    folder = tiny.save(tiny.build("llama", **HEADS), tmp_path)
    how = {"kernels": KERNELS, "cuda_graphs": graphs, "async_batching": ahead}
    device_cases.check_close(Case(folder, DEVICE), torch.bfloat16, **how)


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_published_checkpoint_gives_what_its_matrices_give(
    family: str, kind: str, tmp_path: Path
) -> None:
    device_cases.check_published(family, DEVICE, tmp_path, kind)
