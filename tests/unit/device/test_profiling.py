"""What the profiling run measures in part and scales up to the limits."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fairlead_kernels.choice.backend import pick
from fairlead_runtime.device.memory.state_units import StateUnits
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.warmup import profiling
from fairlead_runtime.device.warmup.profiling import profile
from fairlead_runtime.models import families
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.terms import ENTRY_BYTES
from support import engine_rig, flashinfer_standin, tiny, triton_standin


@pytest.fixture(scope="module")
def model() -> PagedModel:
    plain = tiny.build("llama", num_hidden_layers=2)
    return PagedModel(plain, families.check(plain.config))


def measured(model: PagedModel, tokens: int, requests: int) -> Mapping[str, int]:
    return profile(
        model,
        pick(model.heads, model.kinds, model.device, "torch").attention,
        max_batch_tokens=tokens,
        max_requests=requests,
        max_model_len=64,
    ).measured


def test_each_term_grows_with_the_limit_that_it_depends_on(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "CPU_TOKENS", 32)
    monkeypatch.setattr(profiling, "CPU_ROWS", 4)
    monkeypatch.setattr(profiling, "CPU_ROW", 8)
    base = measured(model, 64, 8)
    wider = measured(model, 128, 8)
    more = measured(model, 64, 16)
    assert wider["activations"] == 2 * base["activations"]
    assert (wider["logits"], wider["sampling"]) == (base["logits"], base["sampling"])
    assert more["logits"] == 2 * base["logits"]
    assert more["sampling"] == 2 * base["sampling"]
    assert more["activations"] == base["activations"]
    assert more["batch"] > base["batch"]
    assert all(size > 0 for size in base.values())


def test_flashinfers_workspaces_are_its_attention(model: PagedModel) -> None:
    attention = flashinfer_standin.attention(model.heads, model.kinds)
    limits = {"max_batch_tokens": 32, "max_requests": 4, "max_model_len": 64}
    assert profile(model, attention, **limits).measured["attention"] == attention.nbytes


def test_tritons_attention_takes_what_the_splits_of_all_requests_take(model: PagedModel) -> None:
    attention = triton_standin.attention(model.heads)
    limits = {"max_batch_tokens": 32, "max_requests": 4, "max_model_len": 64}
    h = model.heads
    each = h.query * 4 * (h.value_dim + 2) * 4  # splits of float32
    assert profile(model, attention, **limits).measured["attention"] == 4 * each
    assert attention.fixed_nbytes == 0


def test_a_part_scaled_up_is_the_whole(model: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a twentieth: a few buffers have a fixed size."""
    whole = measured(model, 64, 32)
    monkeypatch.setattr(profiling, "CPU_TOKENS", 32)
    monkeypatch.setattr(profiling, "CPU_ROWS", 8)
    part = measured(model, 64, 32)
    for name in ("activations", "logits", "sampling"):
        assert part[name] == pytest.approx(whole[name], rel=0.05), name


def test_the_seconds_of_a_part_of_the_decodes_are_scaled_up_to_all(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "CPU_TOKENS", 32)
    monkeypatch.setattr(profiling, "CPU_ROWS", 8)
    clock = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    found = profile(
        model,
        pick(model.heads, model.kinds, model.device, "torch").attention,
        max_batch_tokens=64,
        max_requests=24,
        max_model_len=64,
    )
    assert (found.token_seconds, found.decode_seconds) == (1 / 32, 3.0)


def test_attention_scaled_up_from_some_keys_is_that_of_all(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(model, 64, 8)
    monkeypatch.setattr(profiling, "CPU_KEYS", 32)
    part = measured(model, 64, 8)
    assert part["attention"] == pytest.approx(whole["attention"], rel=0.1)


def test_each_group_of_layers_keeps_masks_of_its_own() -> None:
    def attention(layers: int) -> tuple[int, int]:
        kinds = ["sliding_attention", "full_attention"][:layers]
        plain = tiny.build("gemma2", num_hidden_layers=layers, layer_types=kinds)
        built = PagedModel(plain, families.check(plain.config))
        groups = built.groups
        return len(groups), measured(built, 64, 8)["attention"]

    (one, alone), (two, both) = attention(1), attention(2)
    assert (one, two) == (1, 2)
    mask = 64 * 64 * 4
    assert both - alone >= mask


def test_wide_block_tables_are_scaled_up_from_narrow_ones(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(model, 64, 8)
    monkeypatch.setattr(profiling, "WIDTH", 1)
    part = measured(model, 64, 8)
    assert part["batch"] == pytest.approx(whole["batch"], rel=0.05)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5_text"])
def test_rows_that_a_mixer_fills_up_are_scaled_by_whole_chunks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine_rig.paged(name)
    config = {**model.model.config.to_dict(), "dtype": "float32"}
    chunk = ModelShape.from_config(config).mixer_chunk
    limits = {"max_batch_tokens": 3 * chunk - 9, "max_requests": 4, "max_model_len": 8 * chunk}
    limits |= {"chunk": chunk, "state_units": 7, "state_versions": 2}
    attention = pick(model.heads, model.kinds, model.device, "torch").attention
    found = []
    for tokens in (chunk // 4, 1 << 20):
        monkeypatch.setattr(profiling, "CPU_MIXED_TOKENS", tokens)
        found.append(profile(model, attention, **limits).measured)
    part, whole = found
    assert whole["activations"] <= part["activations"] < 1.3 * whole["activations"]


def test_the_units_of_states_are_part_of_a_batch() -> None:
    model = engine_rig.paged("mamba2")
    attention = pick(model.heads, model.kinds, model.device, "torch").attention
    few, many = (
        profile(
            model,
            attention,
            max_batch_tokens=64,
            max_requests=4,
            max_model_len=64,
            state_units=units,
            state_versions=3,
        ).measured["batch"]
        for units in (1, 100)
    )
    # Three versions of four rows as the scheduler lists them, of which the device reads two.
    assert many - few >= 4 * 99 * (3 * ENTRY_BYTES + 2 * 8)


def test_rows_that_stand_in_for_others_write_their_states_beside_what_they_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a step that is measured again reads the same; what all of them write is never read."""
    model = engine_rig.paged("mamba2")
    pools: list[torch.Tensor] = []

    def noted(units: torch.Tensor, layout: Any) -> StateUnits:
        pools.append(units)
        return StateUnits(units, layout)

    monkeypatch.setattr(profiling, "StateUnits", noted)
    attention = pick(model.heads, model.kinds, model.device, "torch").attention
    profile(model, attention, max_batch_tokens=64, max_requests=4, max_model_len=64)
    assert len(pools) == 2
    for units in pools:
        assert not units[0].any()
        assert units[1].any()
