"""Mixers that run once a step on operations on states: the same logits, or their own way."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairlead_kernels.cpu import library
from fairlead_kernels.cpu.cpu_states import CpuStates
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_kernels.interface.states import StateRows
from fairlead_kernels.plain.torch_attention import TorchAttention
from fairlead_runtime.device.conversion.pack_states import PackedStates, _prove, pack_states
from fairlead_runtime.device.model.state_layers import StateMixer
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.models import loading
from fairlead_runtime.models.model_error import SelfTestError
from functional.engine.test_state_layers import BOUNDED, check_logits
from support import tiny, tiny_states
from support.engine_rig import paged

DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
CONVOLUTIONS = ("lfm2", "lfm2_moe", "lfm3")
MAMBA2 = ("mamba2", "nemotron_h", "falcon_h1", "granitemoehybrid", "bamba")
MAMBA1 = ("falcon_mamba", "jamba")


@pytest.fixture(scope="module")
def states() -> CpuStates:
    try:
        return CpuStates(library.load())
    except NotAvailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("family", DELTA + CONVOLUTIONS + MAMBA2 + MAMBA1)
def test_logits_are_those_of_one_pass_however_rows_are_cut(family: str, states: CpuStates) -> None:
    model = paged(family)
    found = pack_states(model, states)
    assert found == PackedStates(len(model.mixers), len(model.mixers)), found
    check_logits(model, seed=0, generated=True)


@pytest.mark.parametrize("family", BOUNDED)
def test_a_prompts_time_steps_are_bounded(family: str, states: CpuStates) -> None:
    """Those of generated tokens are not, which the proof compares."""
    model = paged(family, **BOUNDED[family])
    assert pack_states(model, states).packed == len(model.mixers)
    check_logits(model, seed=1, generated=False)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "falcon_h1", "jamba"])
def test_a_model_in_bfloat16_is_proven_in_its_type(
    family: str, states: CpuStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = paged(family, bfloat16=True)
    assert pack_states(model, states) == PackedStates(len(model.mixers), len(model.mixers))
    convolve = CpuStates.causal_convolution

    def wrong_in_bfloat16(self: CpuStates, x: Tensor, *arguments: Any) -> Tensor:
        out = convolve(self, x, *arguments)
        return out + 0.3 if x.dtype is torch.bfloat16 else out

    monkeypatch.setattr(CpuStates, "causal_convolution", wrong_in_bfloat16)
    found = pack_states(paged(family, bfloat16=True), states)
    assert found.packed == 0
    assert "(layer 0: operations on its states give other results in torch.bf" in str(found)


def test_a_mixer_whose_states_no_operation_knows_keeps_its_way(states: CpuStates) -> None:
    model = paged("minimax")
    found = pack_states(model, states)
    assert (found.packed, found.mixers) == (0, 3)
    assert "changes its state 'recurrent' in a way of its own" in str(found)
    assert not any(mixer.packs for mixer in model.mixers.values())


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("mamba2", {"hidden_act": "gelu"}, "activation: 'gelu' behind a convolution"),
        ("falcon_mamba", {"hidden_act": "gelu"}, "activation: 'gelu' behind a convolution"),
        ("nemotron_h", {"mamba_hidden_act": "relu2"}, "activation: 'relu2' behind a convolution"),
        ("mamba2", {"conv_kernel": 1}, "weight: 1 taps"),
        ("lfm2", {"conv_L_cache": 1}, "weight: 1 taps"),
    ],
)
def test_a_mixer_that_no_operation_takes_keeps_its_way(
    family: str, settings: dict[str, Any], reason: str, states: CpuStates
) -> None:
    model = paged(family, **settings)
    found = pack_states(model, states)
    assert (found.packed, found.mixers) == (0, len(model.mixers))
    assert f"(layer 0: {reason}" in str(found)
    assert not any(mixer.packs for mixer in model.mixers.values())
    check_logits(model, seed=0, generated=True)


def test_of_mixers_that_are_alike_one_is_proven(
    states: CpuStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs: list[StateMixer] = []

    def counted(mixer: StateMixer, *arguments: Any) -> None:
        proofs.append(mixer)
        _prove(mixer, *arguments)

    monkeypatch.setattr("fairlead_runtime.device.conversion.pack_states._prove", counted)
    model = paged("qwen3_5_text")
    found = pack_states(model, states)
    assert (found.packed, found.proven) == (3, len(proofs)) == (3, 1)
    assert str(found) == ", states in C++ in 3/3 layers, proven in 1 of those that are alike"
    check_logits(model, seed=0, generated=True)


@pytest.mark.parametrize("setting", [2e-6, max])
def test_a_mixer_that_differs_in_a_setting_is_proven_by_itself(
    states: CpuStates, monkeypatch: pytest.MonkeyPatch, setting: object
) -> None:
    right = CpuStates.gated_delta_rule
    model = paged("qwen3_5_text")
    modules = [mixer.module for mixer in model.mixers.values()]
    last = modules[-1]
    for module in modules:  # of which nothing follows here
        module.setting = 1e-6 if isinstance(setting, float) else min
    last.setting = setting

    def wrong(self: CpuStates, *arguments: Any, **settings: Any) -> Tensor:
        out: Tensor = right(self, *arguments, **settings)
        return out + 0.1 * (running == [last])

    running: list[Any] = []
    run_packed = StateMixer.run_packed

    def run(self: StateMixer, *arguments: Any) -> Tensor:
        running[:] = [self.module]
        return run_packed(self, *arguments)

    monkeypatch.setattr(StateMixer, "run_packed", run)
    monkeypatch.setattr(CpuStates, "gated_delta_rule", wrong)
    found = pack_states(model, states)
    assert (found.packed, found.proven, [*found.reasons]) == (2, 1, [WRONG])


def _forgets(rows: StateRows) -> StateRows:
    return replace(rows, begins=torch.ones_like(rows.begins))


def _never_begins(rows: StateRows) -> StateRows:
    return replace(rows, begins=torch.zeros_like(rows.begins))


def _mixed_up(rows: StateRows) -> StateRows:
    return replace(rows, source=rows.source.flip(0))


def _merged(rows: StateRows) -> StateRows:
    """All tokens are of the last sequence."""
    return replace(rows, starts=rows.starts * (rows.starts == rows.starts[-1]))


OPERATIONS = [
    ("causal_convolution", "qwen3_5_text"),
    ("gated_delta_rule", "qwen3_5_text"),
    ("ssd", "mamba2"),
    ("selective_scan", "falcon_mamba"),
]
WRONG = "operations on its states give other results"


@pytest.mark.parametrize("change", [_forgets, _never_begins, _mixed_up, _merged])
@pytest.mark.parametrize(("operation", "family"), OPERATIONS)
def test_operations_that_keep_states_wrongly_are_not_taken(
    operation: str,
    family: str,
    change: Callable[[StateRows], StateRows],
    states: CpuStates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = getattr(CpuStates, operation)

    def wrong(self: CpuStates, *arguments: Any, **settings: Any) -> Tensor:
        changed = (change(x) if isinstance(x, StateRows) else x for x in arguments)
        out: Tensor = right(self, *changed, **settings)
        return out

    monkeypatch.setattr(CpuStates, operation, wrong)
    model = paged(family)
    found = pack_states(model, states)
    assert found == PackedStates(0, len(model.mixers), {WRONG: 0})
    assert not any(mixer.packs for mixer in model.mixers.values())


@pytest.mark.parametrize(("operation", "family"), OPERATIONS)
def test_operations_that_are_wrong_in_long_rows_are_not_taken(
    operation: str, family: str, states: CpuStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take up to 16 time steps at a time: here those of a third round are wrong."""
    right = getattr(CpuStates, operation)

    def wrong(self: CpuStates, *arguments: Any, **settings: Any) -> Tensor:
        out: Tensor = right(self, *arguments, **settings)
        (rows,) = (x for x in arguments if isinstance(x, StateRows))
        for first, end in pairwise(rows.starts.tolist()):
            out[first + 32 : end] += 0.1
        return out

    monkeypatch.setattr(CpuStates, operation, wrong)
    model = paged(family)
    assert pack_states(model, states) == PackedStates(0, len(model.mixers), {WRONG: 0})


def test_bounds_that_end_with_a_later_round_are_not_taken(
    states: CpuStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Any = CpuStates.ssd

    def whole_rounds(rows: StateRows) -> StateRows:
        prompts = rows.prompts
        rounds = prompts + -prompts % 8
        return replace(rows, prompts=torch.where(prompts > 16, rounds, prompts))

    def wrong(self: CpuStates, *arguments: Any, **settings: Any) -> Tensor:
        changed = (whole_rounds(x) if isinstance(x, StateRows) else x for x in arguments)
        out: Tensor = right(self, *changed, **settings)
        return out

    monkeypatch.setattr(CpuStates, "ssd", wrong)
    found = pack_states(paged("mamba2", **BOUNDED["mamba2"]), states)
    assert (found.packed, [*found.reasons]) == (0, [WRONG])


def test_the_self_test_sees_a_state_that_is_lost(
    states: CpuStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = paged("qwen3_5_text")
    assert pack_states(model, states).packed == 3
    attention = TorchAttention(model.heads, model.device)
    assert selftest.run(model, attention, 512).delta < 1e-4
    rule: Any = CpuStates.gated_delta_rule

    def lost(self: CpuStates, *arguments: Any, **settings: Any) -> Tensor:
        changed = (_forgets(x) if isinstance(x, StateRows) else x for x in arguments)
        out: Tensor = rule(self, *changed, **settings)
        return out

    monkeypatch.setattr(CpuStates, "gated_delta_rule", lost)
    with pytest.raises(SelfTestError, match="would generate wrong text"):
        selftest.run(model, attention, 512)


@pytest.mark.parametrize(("kernels", "packed"), [("auto", 3), ("torch", 0)])
def test_a_start_takes_them_unless_it_is_told_otherwise(
    kernels: str, packed: int, states: CpuStates, tmp_path: Path
) -> None:
    loaded = loading.load(tiny.save(tiny_states.build("qwen3_5_text"), tmp_path))
    served, _ = selftest.prepare_and_test(loaded, kernels)
    assert served.fusion.states.packed == packed
    assert ("states in C++ in 3/3 layers" in str(served.fusion)) == (packed > 0)
