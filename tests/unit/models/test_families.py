"""Which families are refused, by name or by structure, and the windows of those served."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

from fairlead_runtime.models import architecture, families
from fairlead_runtime.models.headers import Header, TensorEntry
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.sizing.config_json import ShapeError, UnknownFamilyError
from fairlead_runtime.sizing.families.judged import SIZED
from fairlead_runtime.sizing.families.makers import MAKERS
from fairlead_runtime.sizing.families.refusals import REFUSED
from fairlead_runtime.sizing.families.wholes import WHOLES
from fairlead_runtime.sizing.family_table import FAMILIES, TEXTS
from fairlead_runtime.sizing.shape import ModelShape
from support import tiny
from support.full import LONG_FORM

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
        for name in (*("rwkv", "mamba", "zamba", "zamba2", "recurrent_gemma", "xlstm"),)
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
    chunked = config("qwen2")
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


@pytest.mark.parametrize(
    ("name", "stray", "windows"),
    [
        ("llama", {"layer_types": ["sliding_attention", "full_attention"] * 2}, (None,) * 4),
        ("mistral", {"layer_types": ["full_attention"] * 4}, (16,) * 4),
        ("mistral", {"use_sliding_window": False}, (16,) * 4),
        ("qwen3_moe", {"use_sliding_window": False}, (None,) * 4),
    ],
    ids=str,
)
def test_only_settings_that_a_class_knows_decide_on_windows(
    name: str, stray: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert families.check(config(name, **stray)) == windows
    small = {"model_type": name, **SMALL, "moe_intermediate_size": 32}
    assert ModelShape.from_config(small | stray).windows == windows


def test_a_window_that_a_class_makes_of_another_setting_counts() -> None:
    own = {"local_attention": 48, "num_hidden_layers": 4}
    windows = families.check(CONFIG_MAPPING["modernbert-decoder"](**own))
    assert windows == (None, 24, 24, None)
    assert ModelShape.from_config({"model_type": "modernbert-decoder", **own}).windows == windows


def test_without_layer_types_a_window_holds_in_every_layer() -> None:
    assert families.check(config("mistral")) == (16,) * 4
    assert families.check(config("mistral", sliding_window=None)) == (None,) * 4


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_window_of_one_token_is_refused_of_any_class(name: str) -> None:
    with pytest.raises(ModelError, match="its sliding_window, 1, must be at least 2"):
        families.check(config(name, sliding_window=1))
    assert 2 in families.check(config(name, sliding_window=2))


def test_a_window_that_the_models_own_mask_ignores_does_not_count() -> None:
    # olmoe passes its window to the attention and masks fully.
    assert families.check(config("olmoe")) == (None,) * 4


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.VARIANTS])
def test_every_served_family_passes(family: str) -> None:
    built = tiny.build(family).config
    assert len(families.check(built)) == built.num_hidden_layers


def text_types() -> Iterator[tuple[str, str]]:
    """transformers' types of models with a text_config, each with its text's type."""
    for name in sorted(CONFIG_MAPPING):
        parts = getattr(CONFIG_MAPPING[name], "sub_configs_defaults", None) or {}
        if "text_config" in parts:
            yield name, parts["text_config"].model_type


def admitted_by_the_plan(name: str, text: str) -> bool:
    try:
        ModelShape.from_config({"model_type": name, "text_config": {"model_type": text}})
    except UnknownFamilyError:
        return True  # it is tried
    except ShapeError as error:
        return "rope_parameters" in str(error)  # a setting that this default lacks, not the type
    return True


def reads_the_type(name: str) -> bool:
    """Whether transformers builds the text of the type that its settings name."""
    return bool(CONFIG_MAPPING[name].sub_configs["text_config"] is AutoConfig)


def test_a_text_of_any_type_is_admitted_where_transformers_builds_it() -> None:
    assert {name for name, parts in WHOLES.items() if parts.any_text} == {
        name for name in WHOLES if reads_the_type(name)
    }
    for name, parts in WHOLES.items():
        assert CONFIG_MAPPING[name]().text_config.model_type == parts.text
        if parts.any_text and not parts.formerly:
            nothing = CONFIG_MAPPING[name].from_dict({"text_config": {"hidden_size": 64}})
            assert nothing.text_config.model_type == parts.text
    classes = {kind.model_type for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING}
    names = {name for name, _ in text_types() if name in classes and reads_the_type(name)}
    assert names - {*WHOLES} - REFUSED.keys() == {"florence2"}, "it is an encoder-decoder"


@pytest.mark.parametrize("name", sorted({*WHOLES, "aria", "clip", "mllama", "olmo", "llama"}))
def test_a_text_of_a_type_that_transformers_does_not_build_is_refused_by_plan_and_pod(
    name: str,
) -> None:
    for kind in ("llama", "qwen3", "olmo", "qwen2_vl_text"):
        text = {**SMALL, "model_type": kind}
        admitted = name in WHOLES and WHOLES[name].any_text and kind not in WHOLES[name].never
        if admitted or (name in WHOLES and kind == WHOLES[name].text):
            continue
        refused_alike({"model_type": name, "text_config": text}, "text_config")


def refused_alike(whole: dict[str, Any], field: str) -> None:
    """The plan and the pod refuse it, and their words are the same."""
    with pytest.raises(ShapeError, match=field) as planned:
        ModelShape.from_config(whole)
    with pytest.raises(ModelError) as refused:
        architecture.check(whole)
    assert (refused.value.code, refused.value.message) == ("UnsupportedModel", str(planned.value))


@pytest.mark.parametrize("value", ["abc", 1, [1], {}, {"a": 1}, {"model_type": "llama", **SMALL}])
@pytest.mark.parametrize("key", ["text_config", "decoder", "generator", "text_encoder"])
def test_settings_of_a_text_in_a_model_of_one_part_are_refused_by_plan_and_pod(
    key: str, value: object
) -> None:
    for name in ("llama", "olmo", "biogpt"):
        refused_alike({"model_type": name, **SMALL, key: value}, key)
    text = {"model_type": "qwen2", **SMALL, key: value}
    refused_alike({"model_type": "internvl", "text_config": text}, key)
    if key != "text_config":
        refused_alike({"model_type": "internvl", "text_config": {}, key: value}, key)


def test_a_null_in_place_of_the_settings_of_a_text_says_nothing() -> None:
    plain = {"model_type": "llama", **SMALL}
    nulls = dict.fromkeys(("text_config", "decoder", "generator", "text_encoder"))
    assert ModelShape.from_config(plain | nulls) == ModelShape.from_config(plain)


def test_a_model_whose_layers_have_settings_of_their_own_is_refused() -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    single = {"per_layer_config": {"1": {"num_key_value_heads": 2}}}
    config = CONFIG_MAPPING["olmo3"].from_dict({**sizes, **single})
    with pytest.raises(ModelError, match="per_layer_config"):
        families.check(config)
    with pytest.raises(ModelError, match="per_layer_config"):
        architecture.check({"model_type": "olmo3", **sizes, **single})
    with pytest.raises(ModelError, match="per_layer_config"):
        architecture.check({"model_type": "llama", **sizes, **single})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kv_sharing_modes": ["store"]}, "kv_sharing_modes must be a list of 2 names"),
        ({"kv_sharing_modes": [None] * 3}, "kv_sharing_modes must be a list of 2 names"),
        ({"kv_sharing_modes": 3}, "kv_sharing_modes must be a list of 2 names"),
        ({"kv_sharing_modes": "ab"}, "kv_sharing_modes must be a list of 2 names"),
        ({"kv_sharing_modes": {"0": None, "1": None}}, "kv_sharing_modes must be a list"),
        ({"kv_sharing_modes": ["store", "reuse"]}, "layer_types must be a list of 2 names"),
        ({"kv_sharing_modes": [["store"], None]}, "in a way of its own"),
    ],
    ids=str,
)
def test_keys_that_a_stray_setting_shares_are_refused(
    settings: dict[str, Any], problem: str
) -> None:
    stray = AutoConfig.for_model("llama", num_hidden_layers=2, layer_types=None)
    for name, value in settings.items():
        setattr(stray, name, value)
    if "in a way" in problem:
        stray.layer_types = ["full_attention"] * 2
    with pytest.raises(ModelError, match=problem):
        families.sources_of(stray)


def test_the_type_of_a_text_is_its_classes() -> None:
    whole = CONFIG_MAPPING["llama4"].from_dict({"text_config": {"model_type": "llama"}})
    whole.model_type = "new_vl"
    with pytest.raises(ModelError, match="llama4_text"):
        families.check(whole)


@pytest.mark.parametrize("name", ["encoder-decoder", "musicgen", "rag", "vision-encoder-decoder"])
def test_a_model_whose_text_is_under_another_key_is_refused(name: str) -> None:
    with pytest.raises(ModelError):
        architecture.check({"model_type": name})


def test_the_pod_serves_or_tries_every_model_of_several_parts_that_the_plan_admits() -> None:
    admitted = [name for name, text in text_types() if admitted_by_the_plan(name, text)]
    # The text that the class gives them is not served, and others are.
    others = {name for name, parts in WHOLES.items() if parts.text in ("lfm3", "hyperclovax")}
    others |= {name for name, parts in WHOLES.items() if parts.head}  # of another size by default
    # By default its class rotates whole heads, of which its sections are half.
    others |= {name for name, parts in WHOLES.items() if parts.text == "glm4v_text"}
    assert {*admitted} >= {*WHOLES} - others
    for name in admitted if LONG_FORM else admitted[::6]:  # each imports its model's code
        assert families.check(CONFIG_MAPPING[name]())


@pytest.mark.full
def test_the_pod_refuses_every_model_of_several_parts_that_the_plan_refuses() -> None:
    refused = {name for name, text in text_types() if not admitted_by_the_plan(name, text)}
    # The plan takes no head of another size than its text's, which some classes have by default.
    refused -= {name for name, parts in WHOLES.items() if parts.head}
    assert len(refused) > 50
    for name in sorted(refused):
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # noqa: BLE001 - some have no defaults
            continue
        with pytest.raises(ModelError):
            families.check(config)


def test_a_text_without_a_class_of_its_own_is_no_model() -> None:
    for name in TEXTS:
        with pytest.raises(ShapeError, match="no model of its own"):
            ModelShape.from_config({"model_type": name})


@pytest.mark.parametrize("key", ["llm_config", "language_config", "thinker_config"])
def test_settings_of_a_text_under_another_key_are_refused_by_its_name(key: str) -> None:
    with pytest.raises(ShapeError, match=f"{key}: .*text_config"):
        ModelShape.from_config({"model_type": "new_vl", key: {"model_type": "llama"}})


def test_latent_attention_is_refused_by_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(REFUSED, "glm4_moe_lite")
    with pytest.raises(ModelError, match=r"latent attention.*GLM-4 and GLM-4.5 work"):
        families.check(AutoConfig.for_model("glm4_moe_lite"))


def test_what_works_of_a_maker_is_served() -> None:
    served = {*FAMILIES, *SIZED, *WHOLES}
    for beginning, works in MAKERS.items():
        assert {*works.split("'")[1::2]} <= served, beginning
        assert "'" in works


def attention_of(*rows: int, name: str = "model.layers.%d.self_attn.k_proj") -> dict[str, Header]:
    """Headers of files with so many rows in that matrix, by default of keys, of each layer."""
    tensors = {
        f"{name % layer}.weight": TensorEntry("F32", (count, 32), 0, 0)
        for layer, count in enumerate(rows)
    }
    return {
        f"{layer}.safetensors": Header(dict([x]), b"", 0, 0)
        for layer, x in enumerate(tensors.items())
    }


def test_layers_that_differ_in_their_heads_are_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a family that is in no table."""
    monkeypatch.delitem(SIZED, "laguna")
    laguna = {"model_type": "laguna", **SMALL, "head_dim": 16}
    architecture.check(laguna)
    alike = architecture.check(laguna, weights=attention_of(32, 32, 32, 32))
    assert not alike.mixed
    several = {**laguna, "num_attention_heads_per_layer": [2, 4, 2, 2]}
    with pytest.raises(ModelError, match=r"laguna.*differ in the number or size of their heads"):
        architecture.check(several)
    with pytest.raises(ModelError, match=r"laguna.*differ in the number or size of their heads"):
        architecture.check(laguna, weights=attention_of(32, 32, 16, 32))
    for word in ("q_proj", "qkv", "query_key_value", "c_attn", "out_proj", "self.key", "Wqkv"):
        differing = attention_of(32, 32, 16, 32, name=f"h.%d.attention.{word}")
        with pytest.raises(ModelError, match=r"laguna.*differ"):
            architecture.check(laguna, weights=differing)
    for name in ("h.0.attn.proj.%d", "h.%d.attn.conv", "h.%d.post_attention.mlp", "h.%d.up_proj"):
        architecture.check(laguna, weights=attention_of(32, 32, 16, 32, name=name))


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("shieldgemma2", "gemma3"),
        ("nemotron_h_omni", "nemotron"),
        ("mistral_large4", "mistral3"),
        ("cohere_compass", "cohere2"),
        ("got_ocr2", "glm4"),
        ("recurrent_gemma", "gemma3_text"),
        ("llama4", "llama"),
        ("gpt_neo", "gpt_neox"),
        ("pp_formulanet", "ernie4_5"),
    ],
)
def test_every_kind_of_refusal_names_what_works_of_the_maker(name: str, works: str) -> None:
    whole = {"model_type": name, "text_config": {"model_type": "qwen4"}}
    with pytest.raises(ShapeError, match=rf"of the same maker .*'{works}'"):
        ModelShape.from_config(whole)


def test_a_refusal_of_an_unknown_maker_names_none() -> None:
    with pytest.raises(ShapeError) as refused:
        ModelShape.from_config({"model_type": "rwkv"})
    assert "of the same maker" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "near"), [("lama", "llama"), ("qwen3moe", "qwen3_moe"), ("Gemma3", "gemma3")]
)
def test_a_mistyped_family_is_answered_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UnknownFamilyError, match=f"nearest name that is served is '{near}'"):
        ModelShape.from_config({"model_type": name})
    with pytest.raises(ModelError, match=f"no architecture of that name.*'{near}'"):
        architecture.check({"model_type": name})


def test_a_name_like_no_family_has_no_nearest() -> None:
    with pytest.raises(UnknownFamilyError) as unknown:
        ModelShape.from_config({"model_type": "zzz" * 1000})
    assert "nearest" not in str(unknown.value)
    assert len(str(unknown.value)) < 500


@pytest.mark.parametrize(
    ("family", "works"),
    [("recurrent_gemma", "gemma3"), ("qwen4_exp_text", "qwen3_vl"), ("llama4", "llama")],
)
def test_the_refusal_names_what_works_of_the_same_maker(family: str, works: str) -> None:
    with pytest.raises(ShapeError, match=rf"of the same maker .*'{works}'"):
        ModelShape.from_config({"model_type": family})
