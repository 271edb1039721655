"""Mixers that run once a step on operations on states, or keep their own way. Their logits are in
``test_state_layers``.
"""

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
from support import tiny, tiny_states
from support.engine_rig import paged


@pytest.fixture(scope="module")
def states() -> CpuStates:
    try:
        return CpuStates(library.load())
    except NotAvailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_a_model_in_bfloat16_is_proven_in_its_type(
    family: str, states: CpuStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pack_states(paged(family, bfloat16=True), states) == PackedStates(3, 3)
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
@pytest.mark.parametrize("operation", ["causal_convolution", "gated_delta_rule"])
def test_operations_that_keep_states_wrongly_are_not_taken(
    operation: str,
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
    model = paged("qwen3_5_text")
    found = pack_states(model, states)
    assert found == PackedStates(0, 3, {"operations on its states give other results": 0})
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
