"""Mixers that run once a step on operations on states: the same logits, or their own way."""

from collections.abc import Callable
from dataclasses import replace
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
from fairlead_runtime.device.conversion.pack_states import PackedStates, pack_states
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


def _forgets(rows: StateRows) -> StateRows:
    return replace(rows, begins=torch.ones_like(rows.begins))


def _never_begins(rows: StateRows) -> StateRows:
    return replace(rows, begins=torch.zeros_like(rows.begins))


def _mixed_up(rows: StateRows) -> StateRows:
    return replace(rows, source=rows.source.flip(0))


def _merged(rows: StateRows) -> StateRows:
    """All tokens are of the last sequence."""
    return replace(rows, starts=rows.starts * (rows.starts == rows.starts[-1]))


@pytest.mark.parametrize("change", [_forgets, _never_begins, _mixed_up, _merged])
@pytest.mark.parametrize(
    ("operation", "family"),
    [
        ("causal_convolution", "qwen3_5_text"),
        ("gated_delta_rule", "qwen3_5_text"),
        ("ssd", "mamba2"),
        ("selective_scan", "falcon_mamba"),
    ],
)
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
    mixers = len(model.mixers)
    assert found == PackedStates(0, mixers, {"operations on its states give other results": 0})
    assert not any(mixer.packs for mixer in model.mixers.values())


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
