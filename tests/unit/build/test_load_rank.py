"""What a start says of the kernels that it has chosen."""

import re
from typing import Any

import pytest
import torch

from fairlead_kernels.plain.torch_attention import TorchAttention
from fairlead_runtime.build.load_rank import compilers_of, load_rank, price_of_attention
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.models import loading
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.terms import DeviceFacts
from support import flashinfer_standin, triton_standin
from support.engine_rig import rig


def plain(model: PagedModel) -> Any:
    return TorchAttention(model.heads, model.device)


def flashinfer(model: PagedModel) -> Any:
    return flashinfer_standin.attention(model.heads, model.kinds)


def triton(model: PagedModel) -> Any:
    return triton_standin.attention(model.heads)


@pytest.mark.parametrize("backend", [plain, flashinfer, triton])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_what_attention_takes_is_said_for_as_many_rows_as_a_step_has(
    family: str, backend: Any
) -> None:
    model = rig(family).model
    attention, config = backend(model), EngineConfig(max_requests=64, max_batch_tokens=5)
    said = price_of_attention(attention, model, config)
    start = f"attention on {attention.name}: 5 decodes of 1,024 tokens take "
    assert re.fullmatch(re.escape(start) + r"\d+\.\d{3} ms a layer, \d+ GB/s", said), said


@pytest.mark.parametrize(
    ("cpus", "gigabytes", "count"),
    [(16, 128, 16), (16, 16, 5), (2, 128, 2), (8, 3, 1), (8, 1, 1), (1, 64, 1)],
)
def test_compilers_take_a_quarter_of_the_pods_memory_and_one_runs_in_any(
    cpus: int, gigabytes: int, count: int
) -> None:
    assert compilers_of(cpus, gigabytes << 30) == count


def test_a_start_on_a_shared_gpu_says_what_is_free_and_what_to_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = 30 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 80 << 30))
    monkeypatch.setattr(loading, "load", lambda *_, **__: 1 / 0)
    gpu = DeviceFacts("cuda", 80 << 30)
    for share, words in (
        (0.3, ()),
        (0.9, ("50.0 GiB", "30.0 are free", "72.0", "percent 0.37 or")),
    ):
        caplog.clear()
        with pytest.raises(ZeroDivisionError):
            load_rank("nowhere", EngineConfig(max_memory_percent=share), gpu, None)
        assert bool(caplog.messages) == bool(words)
        assert all(word in caplog.text for word in words), caplog.text


def test_products_of_16_bits_round_no_partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is settled before a model is there, and so before any product."""
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = True
    products.allow_fp16_reduced_precision_reduction = True

    def stop(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(loading, "load", stop)
    with pytest.raises(InterruptedError):
        load_rank("nowhere", EngineConfig(), DeviceFacts("cpu", 1 << 30), None)
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction
