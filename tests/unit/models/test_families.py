"""Which families are refused, by name or by structure, and the windows of those served."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from fairlead_runtime.models import families
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.sizing.family_table import FAMILIES, REFUSED
from support import tiny

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "sliding_window": 16,
}


def config(model_type: str, **settings: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**SMALL, **settings})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_known_bad_family_is_refused_by_name_with_its_reason(name: str) -> None:
    with pytest.raises(ModelError) as refusal:
        families.refuse_by_name(name)
    assert name in str(refusal.value)
    assert REFUSED[name] in str(refusal.value)
    assert "llama" in refusal.value.hint


def test_the_families_that_are_served_are_not_refused() -> None:
    assert not FAMILIES.keys() & REFUSED.keys()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in (
            *("rwkv", "mamba", "mamba2", "falcon_mamba", "bamba", "jamba", "zamba2"),
            *("nemotron_h", "falcon_h1", "granitemoehybrid"),
        )
        if name in CONFIG_MAPPING
    ],
)
def test_state_space_families_have_the_names_refused_here_in_transformers(
    name: str,
) -> None:
    with pytest.raises(ModelError, match="recurrent state"):
        families.check(AutoConfig.for_model(name))


def test_a_stateful_class_outside_the_table_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(REFUSED, "mamba")
    with pytest.raises(ModelError, match="recurrent state"):
        families.check(AutoConfig.for_model("mamba"))


def test_a_class_without_the_attention_interface_outside_the_table_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(REFUSED, "gptj")
    with pytest.raises(ModelError, match="attention interface"):
        families.check(AutoConfig.for_model("gptj"))


def test_encoder_decoders_are_refused() -> None:
    with pytest.raises(ModelError, match="encoder-decoder"):
        families.check(AutoConfig.for_model("t5"))


def test_bidirectional_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="bidirectional"):
        families.check(config("gemma3_text", use_bidirectional_attention=True))


def test_layer_types_other_than_full_and_sliding_are_refused() -> None:
    chunked = config("llama")
    chunked.layer_types = [
        "full_attention",
        "chunked_attention",
        "full_attention",
        "full_attention",
    ]
    with pytest.raises(ModelError, match="chunked_attention"):
        families.check(chunked)


def test_layer_types_decide_before_the_window_setting() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert families.check(config("gemma2", layer_types=kinds)) == (None, 16, None, 16)


def test_without_layer_types_a_window_holds_in_every_layer() -> None:
    assert families.check(config("mistral")) == (16,) * 4
    assert families.check(config("mistral", sliding_window=None)) == (None,) * 4


def test_a_window_that_the_models_own_mask_ignores_does_not_count() -> None:
    # olmoe passes its window to the attention and masks fully.
    assert families.check(config("olmoe")) == (None,) * 4


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.VARIANTS])
def test_every_served_family_passes(family: str) -> None:
    built = tiny.build(family).config
    assert len(families.check(built)) == built.num_hidden_layers
