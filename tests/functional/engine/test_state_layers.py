"""Layers that keep a state of fixed size, on packed rows: each row's logits are those of
transformers' own pass over its whole sequence, however it is cut into steps.

The cache begins full of NaN, so that a state that nobody wrote shows.
"""

import functools
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fairlead_kernels.plain.torch_attention import TorchAttention
from fairlead_runtime.build.checks import check
from fairlead_runtime.device.memory.state_units import StateUnits
from fairlead_runtime.device.model.paged_model import PagedModel, prepare
from fairlead_runtime.device.model.state_cache import StateCache
from fairlead_runtime.device.model.state_layers import StateMixer
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.models import loading
from fairlead_runtime.models.model_error import ModelError, SelfTestError
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.states import DECODES
from fairlead_runtime.sizing.terms import GIB, DeviceFacts, state_layout
from fairlead_runtime.sizing.verdict import check_against
from support import tiny, tiny_states
from support.engine_rig import paged
from support.state_rows import StateRows, expected

# Of the largest logit's size: rounding moves logits by less than 1e-4, a wrong state by 1e-2.
CLOSE = 1e-3


# Time steps that a bound moves: some are below 0.12, some above 0.2.
BOUNDED: dict[str, dict[str, Any]] = {
    "nemotron_h": {"time_step_min": 0.12},
    "mamba2": {"time_step_limit": (0.12, 0.2)},
    "granitemoehybrid": {"time_step_limit": (0.12, 0.2)},
}


@functools.cache
def model_of(family: str) -> PagedModel:
    return paged(family)


def tokens_of(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, tiny.VOCAB, length).tolist()
    return tokens


def differs(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("family", tiny_states.FAMILIES)
def test_logits_are_those_of_one_pass_however_rows_are_cut(family: str) -> None:
    check_logits(model_of(family), seed=0, generated=True)


def test_a_call_takes_no_more_decodes_than_memory_is_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them with its own states, the first row as the last."""
    model = model_of("lfm2")
    rows, calls, call = StateRows(model), list[int](), StateMixer.call

    def spy(self: StateMixer, hidden: torch.Tensor, cache: StateCache) -> torch.Tensor:
        calls.append(len(hidden))
        return call(self, hidden, cache)

    prompts = [tokens_of(seed, 5) for seed in range(2 * DECODES + 3)]
    sequences = [rows.sequence(tokens, 3) for tokens in prompts]
    rows.step((sequence, 3) for sequence in sequences)
    monkeypatch.setattr(StateMixer, "call", spy)
    rows.step((sequence, 1) for sequence in sequences)
    assert calls == [DECODES, DECODES, 3] * len(model.mixers)
    logits = rows.step((sequence, 1) for sequence in sequences)
    for at in (0, DECODES - 1, DECODES, len(prompts) - 1):
        assert differs(logits[at], expected(model, prompts[at])[-1]) < CLOSE


@pytest.mark.parametrize("family", tiny_states.FAMILIES)
def test_another_beginning_of_a_prompt_moves_the_last_logits(family: str) -> None:
    """What the tests compare depends on the states, so that a lost one shows."""
    model, (first, second) = model_of(family), (tokens_of(seed, 48) for seed in (1, 2))
    last = [expected(model, [*half, *first[24:]])[-1] for half in (first[:24], second[:24])]
    assert differs(*last) > 50 * CLOSE


@pytest.mark.parametrize("family", BOUNDED)
def test_a_prompts_time_steps_are_bounded_in_chunks_and_alone(family: str) -> None:
    model = paged(family, **BOUNDED[family])
    tokens = tokens_of(0, 20)
    moved = differs(expected(model, tokens), expected(model_of(family), tokens))
    assert moved > 10 * CLOSE, "the bounds change nothing"
    check_logits(model, seed=1, generated=False)


def check_logits(model: PagedModel, seed: int, *, generated: bool) -> None:
    """Compare the logits of rows that are cut at random, some of one token, of sequences of which
    the last two thirds are ``generated``, or none.
    """
    draw = random.Random(seed)
    rows = StateRows(model)
    sequences = [
        rows.sequence(tokens_of(i, length), -(-length // 3) if generated else length)
        for i, length in enumerate((61, 7, 1, 40, 52, 33))
    ]
    wants = [expected(model, sequence.tokens) for sequence in sequences]
    for step in range(200):
        open_ = [s for s in sequences[: step + 1] if s.computed < len(s.tokens)]
        if not open_:
            break
        taken = [s for s in open_ if draw.random() < 0.8] or open_
        draw.shuffle(taken)
        counts = [min(draw.choice((1, 1, 1, 2, 5, 17)), len(s.tokens) - s.computed) for s in taken]
        # A step that is repeated reads and writes the same.
        logits = rows.step(zip(taken, counts, strict=True), times=draw.choice((1, 1, 2)))
        for sequence, got in zip(taken, logits, strict=True):
            assert differs(got, wants[sequence.id][sequence.computed - 1]) < CLOSE
    assert all(s.computed == len(s.tokens) for s in sequences)


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_the_self_test_passes_and_sees_a_state_that_is_lost(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family)
    attention = TorchAttention(model.heads, model.device)
    assert selftest.run(model, attention, 512).delta < 1e-4
    read = StateUnits.read

    def lost(self: StateUnits, layer: int, units: torch.Tensor) -> dict[str, torch.Tensor]:
        states = read(self, layer, units)
        return states | {"recurrent": torch.zeros_like(states["recurrent"])}

    monkeypatch.setattr(StateUnits, "read", lost)
    with pytest.raises(SelfTestError, match="would generate wrong text"):
        selftest.run(model, attention, 512)


def test_states_of_other_sizes_than_those_of_the_configuration_are_refused(tmp_path: Path) -> None:
    loaded = loading.load(tiny.save(tiny_states.build("qwen3_5_text"), tmp_path))
    states = {**loaded.shape.states}
    conv, recurrent = states[2]
    states[2] = conv, recurrent._replace(shape=(4, 12, 24))
    with pytest.raises(ModelError, match="other layers than"):
        prepare(replace(loaded, shape=replace(loaded.shape, states=states)))
    model = prepare(loaded)
    assert model.state_layout == state_layout(loaded.shape, EngineConfig(dtype="float32"))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"deterministic": True}, "deterministic"),  # beside experts
        ({"tensor_parallel": 2}, "tensor_parallel"),
    ],
)
def test_what_does_not_work_with_states_is_refused_by_name(
    settings: dict[str, Any], field: str, tmp_path: Path
) -> None:
    path = tiny.save(tiny_states.build("lfm2_moe"), tmp_path)
    with pytest.raises(ConfigError, match="state") as refused:
        check(path, EngineConfig(**settings), DeviceFacts("cpu", 8 * GIB))
    assert refused.value.field == field


def test_attention_of_flashinfer_is_refused_beside_states_by_name(tmp_path: Path) -> None:
    shape = loading.load(tiny.save(tiny_states.build("qwen3_5_text"), tmp_path)).shape
    with pytest.raises(ConfigError, match="keep states") as refused:
        check_against(shape, EngineConfig(kernels="flashinfer"))
    assert refused.value.field == "kernels"
    check_against(shape, EngineConfig(kernels="cpu"))


def test_packages_of_other_kernels_are_never_taken(tmp_path: Path) -> None:
    """Nor are they kept from a program that imports its own."""
    for name in ("fla", "mamba_ssm", "causal_conv1d", "mambapy"):
        (tmp_path / f"{name}.py").write_text("import sys\nsys.exit('taken')")
    code = (
        "import sys\n"
        "from transformers import JambaConfig, Qwen3_5TextConfig\n"
        "from fairlead_runtime.models import text_model\n"
        "text_model.class_of(Qwen3_5TextConfig())\n"
        "text_model.class_of(JambaConfig())\n"
        "import transformers.models.jamba.modeling_jamba as jamba\n"
        "assert not jamba.is_mambapy_available()\n"
        "for name in ('fla', 'mamba_ssm', 'causal_conv1d', 'mambapy'):\n"
        "    assert name not in sys.modules\n"
        "    try:\n"
        "        __import__(name)\n"
        "    except SystemExit:\n"
        "        continue\n"
        "    raise AssertionError(name)"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_model_with_states_is_refused_where_other_kernels_are_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tiny.save(tiny_states.build("qwen3_5_text"), tmp_path)
    package = ModuleType("fla")
    monkeypatch.setitem(sys.modules, "fla", package)
    with pytest.raises(ModelError, match="has imported fla"):
        loading.load(path)
    assert sys.modules["fla"] is package
    monkeypatch.delitem(sys.modules, "fla")
    loading.load(path)
    assert "fla" not in sys.modules
