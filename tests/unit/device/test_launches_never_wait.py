"""Launching a step waits for nothing that the device computes, whatever the step's rows ask for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fairlead_kernels.choice.experts import torch_product
from fairlead_kernels.gpu.triton_experts import TritonExperts
from fairlead_runtime.device.sampling.device_sampler import RowSampler
from fairlead_runtime.device.sampling.sequence_table import SequenceTable
from fairlead_runtime.request.sequence import Request, SamplingParams
from fairlead_runtime.scheduling.plan import Token, Work
from support.engine_rig import EOS, Rig, Setting, rig
from support.full import LONG_FORM
from support.in_flight import Collect, InFlight
from support.tiny import FAMILIES, SIZED, UNLISTED, VARIANTS
from support.waits import Device, watched

SETTING = Setting(block_size=4, chunk=24, num_blocks=200, max_requests=8)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logit_bias": {5: -3.0}, "min_tokens": 3, "logprobs": 3},
    {"temperature": 0.9, "bad_words": tuple((i, 9) for i in range(3, 103))},
)
KERNELS = ("resident", "graphs", "triton resident", "triton graphs")


def requests() -> list[Request]:
    """Prompts of which some take several steps, beside others that decode."""
    return [
        Request(
            str(i),
            tuple(range(7 + i, 19 + 11 * i)),
            SamplingParams(**{"max_tokens": 8, "ignore_eos": True} | params),
            8,
            seed=i,
            eos_ids=EOS,
        )
        for i, params in enumerate(PARAMS)
    ]


def device_of(engine: Rig, runner: Any) -> Device:
    model, steps, cache = engine.model, runner._decodes, runner._cache
    own = [x for x in vars(steps).values() if isinstance(x, torch.Tensor)] if steps else []
    weights = [*model.model.parameters(), *model.model.buffers(), *model.packed]
    return Device([*weights, *cache.tensors, *runner._row_sampler.tensors, *own])


def launches(kernels: str, family: str = "llama") -> dict[str, list[int]]:
    """Launch all steps of the requests, two in flight, each watched: the tokens of each request."""
    engine = rig(family, kernels)
    steps = InFlight(engine, SETTING, *requests())
    device = device_of(engine, steps.runner)
    launch = steps.runner.launch

    def watching(work: Work) -> Collect:
        with watched(device):
            return launch(work)

    steps.runner.launch = watching  # type: ignore[method-assign]
    texts: dict[str, list[int]] = {}
    for event in steps.finish():
        assert isinstance(event, Token)
        texts.setdefault(event.sequence.request.id, []).append(event.token)
    assert device.operations > 1000
    return texts


@pytest.mark.parametrize("kernels", KERNELS)
def test_no_launch_waits_for_the_device(kernels: str) -> None:
    texts = launches(kernels)
    alone = rig("llama", "flashinfer").run(replace(SETTING, chunk=64), [(0, r) for r in requests()])
    assert texts == {name: tokens for (name, _), tokens in alone.texts.items()}


# Those whose own code waited once; a mixture; a window and a cap; sinks; one head of keys.
OFTEN = ("gpt2", "phimoe", "mixtral", "gemma2", "gpt_oss", "gpt_bigcode")


# Why no step of these is launched: their own code waits, or no GPU serves layers of such heads yet.
NEVER = {
    "gemma3n_text": "numbers that go to the device are waited for",
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text", "mimo_v2_flash"), "differ in their heads"
    ),
}


@pytest.mark.parametrize("family", sorted(NEVER) if LONG_FORM else ["gemma3n_text"])
def test_a_family_whose_steps_are_never_launched_still_has_its_reason(family: str) -> None:
    with pytest.raises(RuntimeError, match=NEVER[family]):
        launches("resident", family)


@pytest.mark.parametrize(
    "family",
    sorted({*FAMILIES, *VARIANTS, *SIZED, *UNLISTED} - {*NEVER}) if LONG_FORM else OFTEN,
)
def test_no_familys_own_code_waits_for_the_device(family: str) -> None:
    """Layers and what is around them, which transformers' code computes here; experts are ours."""
    launches("resident", family)


@pytest.mark.parametrize("family", ["qwen3_5_text"] + ["lfm2", "jamba"] * LONG_FORM)
def test_no_mixer_waits_for_the_device(family: str) -> None:
    launches("ahead", family)


def test_torchs_product_of_experts_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonExperts, "__call__", lambda _self, *given: torch_product(*given))
    with pytest.raises(RuntimeError, match="_grouped_mm waits"):
        launches("resident", "mixtral")


def plant(owner: type, name: str, extra: Callable[..., object]) -> Callable[..., Any]:
    whole = getattr(owner, name)

    def planted(*args: Any, **kwargs: Any) -> Any:
        out = whole(*args, **kwargs)
        extra(*args)
        return out

    return planted


@pytest.mark.parametrize(
    ("owner", "name", "extra", "message"),
    [
        (SequenceTable, "enter", lambda table, *_: table.state[0].tolist(), "tolist waits"),
        (SequenceTable, "enter", lambda table, *_: bool(table.state[0, 0] > 0), "waits"),
        (SequenceTable, "enter", lambda table, *_: table.state.nonzero(), "nonzero waits"),
        (SequenceTable, "enter", lambda table, *_: table.state[table.state > 0], "index waits"),
        (RowSampler, "sample", lambda _self, logits, *_: logits.argmax().item(), "item waits"),
        (RowSampler, "sample", lambda _self, logits, *_: logits.cpu(), "cpu waits"),
        (
            RowSampler,
            "sample",
            lambda _self, logits, *_: torch.empty_like(logits[0]).copy_(
                torch.ones(logits.shape[1])
            ),
            "a copy to the device is waited for",
        ),
        (
            RowSampler,
            "sample",
            lambda _self, logits, *_: torch.empty(logits.shape).copy_(logits),
            "a copy from the device is waited for",
        ),
        (
            SequenceTable,
            "enter",
            lambda table, *_: torch.ones(3).to(table.state.device),
            "goes to the device is waited for",
        ),
        (
            RowSampler,
            "fetch",
            lambda sampler, *_: sampler._readbacks[0]._tokens.tolist(),
            "tolist waits",
        ),
    ],
)
def test_each_kind_of_wait_would_be_seen(
    owner: type,
    name: str,
    extra: Callable[..., object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, plant(owner, name, extra))
    with pytest.raises(RuntimeError, match=message):
        launches("resident")
