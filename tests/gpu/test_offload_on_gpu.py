"""Offload through a stream of its own on an NVIDIA GPU. Run with `make gpu`; without a GPU it
fails.

Either stream is made late by a kernel that only takes time, so that a wait which is missing shows.
"""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_kernels.interface.attention import Heads
from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.device.memory.host_memory import CudaPinning, HostMemory
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.memory.streams import CudaLane
from fairlead_runtime.scheduling.plan import Work
from fairlead_runtime.sizing.groups import group_layers
from support import tiny
from support.device_cases import is_text_of, texts
from support.gpu_device import DEVICE, KERNELS

pytestmark = pytest.mark.gpu

HEADS = Heads(4, 2, 64, 64, torch.bfloat16)
UNITS, HOST = 12, 8
CYCLES = 20_000_000  # about 10 ms
OUTPUT = 64
PROMPTS = [[i, i + 1, i + 2] for i in range(10, 18)] + [[7] * 40, list(range(1, 120))]
PREEMPTING: dict[str, Any] = {
    "num_blocks": 12,
    "max_batch_tokens": 256,
    "max_model_len": 192,
    "safety_margin": 0.0,
    "dtype": "float32",
    "cpu_offload_space": 0.01,
}


def storage(monkeypatch: pytest.MonkeyPatch, piece_units: int = 1) -> CacheStorage:
    groups = group_layers([None, 8, None])
    unit = CacheStorage.unit_bytes(groups, HEADS, 16)
    monkeypatch.setattr("fairlead_runtime.sizing.offload_space.PIECE_BYTES", piece_units * unit)
    cache = CacheStorage(groups, HEADS, device=DEVICE, units=UNITS, host_units=HOST, block_size=16)
    for part in cache.tensors:
        raw = part.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, device=DEVICE))
    return cache


@pytest.fixture(params=["side", "steps", "either"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes a stream late before each piece of work."""
    plain, rng = CudaLane.run, random.Random(0)

    def run(self: CudaLane, work: Callable[[], object]) -> None:
        name = "steps" if self._stream is None else "side"
        if request.param == name or (request.param == "either" and rng.random() < 0.5):
            plain(self, lambda: torch.cuda._sleep(CYCLES))  # type: ignore[no-untyped-call]
        plain(self, work)

    monkeypatch.setattr(CudaLane, "run", run)
    return str(request.param)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("piece_units", [1, 3])
def test_every_byte_comes_back_however_late_a_stream_is(
    piece_units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, rng = storage(monkeypatch, piece_units), random.Random(piece_units)
    device = [bytes_of(cache, unit) for unit in range(UNITS)]
    host: dict[int, bytes] = {}
    for number in range(30):
        free = [unit for unit in range(HOST) if unit not in host]
        gone = rng.sample(range(UNITS), rng.randint(0, len(free)))
        back = rng.sample(sorted(host), rng.randint(0, len(host)))
        offload = list(zip(gone, rng.sample(free, len(gone)), strict=True))
        restore = list(zip(back, rng.sample(range(UNITS), len(back)), strict=True))
        copies = [(rng.randrange(UNITS), rng.randrange(UNITS))]
        cache.copy(Work(number, offload=offload, restore=restore, copies=copies))
        for unit in gone:  # a step writes there at once
            cache.tensors[0][:, unit] = number
        host |= {to: device[unit] for unit, to in offload}
        for of, unit in restore:
            device[unit] = host.pop(of)
        device[copies[0][1]] = device[copies[0][0]]
        for unit in gone:
            device[unit] = bytes_of(cache, unit)
        if number % 5 == 4:
            assert [bytes_of(cache, unit) for unit in range(UNITS)] == device


def bytes_of(cache: CacheStorage, unit: int) -> bytes:
    parts = (cache.tensors[0][:, unit], cache.tensors[1][:, unit])
    raw: list[Any] = [part.contiguous().view(torch.uint8).cpu().numpy() for part in parts]
    return b"".join(part.tobytes() for part in raw)


def test_neither_the_host_nor_a_step_waits_for_what_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = storage(monkeypatch, piece_units=2)
    assert cache._streams is not None
    steps, side = cache._streams
    cache.copy(Work(0, offload=[(0, 0)]))  # what is loaded and compiled at the first call
    torch.cuda.synchronize()
    side.run(lambda: torch.cuda._sleep(20 * CYCLES))  # type: ignore[no-untyped-call]
    cache.copy(Work(1, offload=[(unit, unit) for unit in range(1, 5)], copies=[(5, 6)]))
    transferred, computed = side.record(), steps.record()
    assert not transferred.query(), "the host waited"
    computed.synchronize()
    assert not transferred.query(), "the step waited"
    transferred.synchronize()


def test_host_memory_is_pinned_in_its_exact_size_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    cache = storage(monkeypatch)
    assert cache.not_pinned == ""
    assert cache.host_nbytes == HOST * cache.unit_bytes(cache.groups, HEADS, 16)
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) - before < 4096
    memory = cache._offload
    data: torch.Tensor = memory._memory.data  # type: ignore[union-attr]
    assert data.is_pinned()
    cache.copy(Work(0, offload=[(unit, unit) for unit in range(HOST)]))
    del cache, memory
    assert not data.is_pinned()


def test_a_registration_that_fails_leaves_no_error_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """CUDA refuses to register what is registered."""
    pinning = CudaPinning(DEVICE)
    memory = HostMemory(1 << 20, pinning)
    assert memory.refused == ""
    assert pinning.register(memory.data.data_ptr(), 4096)
    assert float(torch.ones(3, device=DEVICE).add_(1).sum()) == 6
    torch.cuda.synchronize()

    class Refusing(CudaPinning):
        def register(self, address: int, size: int) -> str:
            assert CudaPinning.register(self, address, size) == ""
            return CudaPinning.register(self, address, size)

    assert HostMemory(1 << 20, Refusing(DEVICE)).refused
    assert "cannot be pinned" in caplog.text


@pytest.fixture(params=["pinned", "pageable"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pageable":
        monkeypatch.setattr(CudaPinning, "register", lambda *_: "refused by the test")
    return str(request.param)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_greedy_output_equals_transformers_with_late_streams(
    family: str, memory: str, late: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.build(family)
    folder = tiny.save(model, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    with caplog.at_level(logging.INFO), LLM(str(folder), **PREEMPTING) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        results = llm.generate(prompts, params, use_tqdm=False)
        statistics = llm.built_engine.engine.snapshot().scheduler
        report = llm.built_engine.memory
    on_gpu = model.to(DEVICE)
    others = sum(
        not is_text_of(on_gpu, prompt, text)
        for prompt, text in zip(PROMPTS, texts(results), strict=True)
    )
    assert others <= 1, late
    assert statistics.offloads > 0
    terms = {term.name: term for term in (*report.terms, *report.host_terms)}
    for name in ("staging", "offload"):
        assert terms[name].planned == terms[name].measured
    pinned = memory == "pinned"
    assert terms["offload"].note == ("" if pinned else "not pinned: refused by the test")
    assert ("of host memory pinned in" in caplog.text) is pinned
    assert ("cannot be pinned" in caplog.text) is not pinned


def test_steps_in_flight_and_graphs_give_the_same_text_with_and_without_offload(
    tmp_path: Path,
) -> None:
    pytest.importorskip("flashinfer")
    heads = {"num_attention_heads": 4, "head_dim": 64}
    folder = tiny.save(tiny.build("llama", **heads).to(torch.bfloat16), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    settings = {**PREEMPTING, "dtype": "bfloat16", "kernels": KERNELS, "max_requests": 4}
    texts = []
    for changes in ({"num_blocks": 200}, {}):
        with LLM(
            str(folder), **settings | {"cuda_graphs": "on", "async_batching": "on"} | changes
        ) as llm:
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            results = llm.generate(prompts, params, use_tqdm=False)
            offloads = llm.built_engine.engine.snapshot().scheduler.offloads
        texts.append([result.outputs[0].token_ids for result in results])
    assert offloads > 0
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= len(PROMPTS) - 2, "steps of other sizes may round otherwise, in bfloat16"
