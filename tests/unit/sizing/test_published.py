"""What a quantization_config says of a checkpoint's weights, and what of it is refused."""

import copy
import itertools
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.checkpoint_formats import as_stored, check_stored, published
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.stored import Published, QuantizedError
from fairlead_runtime.sizing.weight_bytes import weights
from support.published import awq, compressed_int4, compressed_tensors, gptq


def config_of(change: Any = None, **settings: Any) -> dict[str, Any]:
    """A Llama's config.json with compressed-tensors weights, changed."""
    quantization = copy.deepcopy(compressed_tensors(**settings)[0])
    if change is not None:
        change(quantization)
    return {"model_type": "llama", "quantization_config": quantization}


def group(settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = settings["config_groups"]["group_0"]
    return found


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_integers_are_served_as_they_are_stored(strategy: str, activations: bool) -> None:
    plain = config_of(strategy=strategy, activations=activations)
    assert published(plain) == Published("int8")
    packed = config_of(strategy=strategy, packed=True)
    assert published(packed) == Published("int8", "weight_packed", 4)
    assert published({"model_type": "llama"}) is None
    floats = config_of(kind="float", strategy=strategy, activations=activations)
    assert published(floats) == Published("fp8")


def test_the_shape_of_a_quantized_model_is_that_of_the_plain_one() -> None:
    shape = ModelShape.from_config(config_of())
    plain = ModelShape.from_config({"model_type": "llama"})
    assert (shape.quantized, plain.quantized) == ("int8", "")
    assert shape.parameters == plain.parameters


def test_what_exporters_leave_out_or_call_otherwise_is_served() -> None:
    """As in the checkpoint that transformers' own page on compressed-tensors shows."""

    def shortened(settings: dict[str, Any]) -> None:
        settings.update(quantization_status="frozen", format="naive-quantized")
        group(settings)["weights"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}

    assert published(config_of(shortened)) == Published("fp8")

    def bare(settings: dict[str, Any]) -> None:
        group(settings)["weights"] = {}

    assert published(config_of(bare)) == Published("int8")


@pytest.mark.parametrize("name", ["re:.*lm_head", "re:.*lm_head.*"])
def test_the_head_may_be_left_out_by_a_pattern(name: str) -> None:
    assert published(config_of(lambda s: s.update(ignore=[name]))) == Published("int8")


def test_a_group_says_how_its_weights_are_stored() -> None:
    def mixed(settings: dict[str, Any]) -> None:
        group(settings)["format"], settings["format"] = settings["format"], "mixed-precision"

    assert published(config_of(mixed, packed=True)) == Published("int8", "weight_packed", 4)
    with pytest.raises(QuantizedError, match="format 'marlin-24'"):
        published(config_of(lambda s: group(s).update(format="marlin-24")))


def test_gptq_and_awq_say_their_form_by_an_older_key_too() -> None:
    def older(key: str, value: str) -> Any:
        def change(settings: dict[str, Any]) -> None:
            settings.pop("checkpoint_format", None)
            settings.pop("version", None)
            settings[key] = value

        return change

    second = published(four_bits(gptq(), older("format", "gptq_v2")))
    assert second is not None
    assert second.layout == "gptq_v2"
    with pytest.raises(QuantizedError, match="checkpoint_format 'marlin'"):
        published(four_bits(gptq(), older("format", "marlin")))
    with pytest.raises(QuantizedError, match="version 'gemv'"):
        published(four_bits(awq(), older("format", "gemv")))


REFUSED = {
    "quant_method 'gguf'": lambda s: s.update(quant_method="gguf"),
    "quantization_status 'initialized'": lambda s: s.update(quantization_status="initialized"),
    "sparsity_config.format": lambda s: s.update(sparsity_config={"format": "sparse-bitmask"}),
    "transform_config 'set'": lambda s: s.update(
        transform_config={"config_groups": {"v": {"type": "hadamard", "apply": []}}}
    ),
    "config_groups '0 groups'": lambda s: s.update(config_groups={}),
    "config_groups '2 groups'": lambda s: s["config_groups"].update(group_1={}),
    "config_groups must be an object": lambda s: s.update(config_groups=[1]),
    "targets": lambda s: group(s).update(targets=["re:.*q_proj"]),
    "output_activations": lambda s: group(s).update(output_activations={"num_bits": 8}),
    "ignore 'model.layers.0": lambda s: s["ignore"].append("model.layers.0.mlp.down_proj"),
    "models whose lm_head is not quantized": lambda s: s.update(ignore=[]),
    "format 'marlin-24'": lambda s: s.update(format="marlin-24"),
    "weights.num_bits '3'": lambda s: group(s)["weights"].update(num_bits=3),
    "4-bit pack-quantized is served": lambda s: group(s)["weights"].update(num_bits=4),
    "weights.num_bits 'True'": lambda s: group(s)["weights"].update(num_bits=True),
    "weights.type 'nf'": lambda s: group(s)["weights"].update(type="nf"),
    "weights.strategy 'group'": lambda s: group(s)["weights"].update(strategy="group"),
    "weights.symmetric 'False'": lambda s: group(s)["weights"].update(symmetric=False),
    "weights.dynamic 'local'": lambda s: group(s)["weights"].update(dynamic="local"),
}


@pytest.mark.parametrize("names", REFUSED)
def test_what_is_not_served_is_refused_by_the_name_of_its_key(names: str) -> None:
    with pytest.raises(QuantizedError) as refused:
        ModelShape.from_config(config_of(REFUSED[names]))
    assert str(refused.value).startswith("config.json: quantization_config: ")
    assert names in str(refused.value)


def four_bits(made: Any, change: Any = None) -> dict[str, Any]:
    settings = copy.deepcopy(made[0])
    if change is not None:
        change(settings)
    return {"model_type": "llama", "quantization_config": settings}


def test_integers_of_four_bits_are_served_as_they_are_stored() -> None:
    for group, columns in ((32, 32), (64, 64), (128, 128), (-1, 0)):
        one = Published("int4", "qweight", 8, "gptq", columns)
        for symmetric in (True, False):
            assert published(four_bits(gptq(group=group, symmetric=symmetric))) == one
        several = group > 0  # a single group has no order
        assert published(four_bits(gptq(group=group, sorts=True))) == replace(one, ordered=several)
        second = published(four_bits(gptq(group=group, second=True)))
        assert second == replace(one, layout="gptq_v2")
        packed = Published("int4", "weight_packed", 8, "rows", columns)
        assert published(four_bits(compressed_int4(group=group))) == packed
        ordered = published(four_bits(compressed_int4(group=group, sorts=True)))
        assert ordered == replace(packed, ordered=several)
        if several:
            found = published(four_bits(awq(group=group)))
            assert found == Published("int4", "qweight", 8, "awq", columns)
    fixed = four_bits(gptq(sorts=True), lambda s: s.update(static_groups=True))
    assert published(fixed) == Published("int4", "qweight", 8, "gptq", 32)


REFUSED_GPTQ = {
    "bits '3'": lambda s: s.update(bits=3),
    "bits '8'": lambda s: s.update(bits=8),
    "group_size '16'": lambda s: s.update(group_size=16),
    "group_size '1.5'": lambda s: s.update(group_size=1.5),
    "group_size '[32]'": lambda s: s.update(group_size=[32]),
    "desc_act '1'": lambda s: s.update(desc_act=1),
    "lm_head 'True'": lambda s: s.update(lm_head=True),
    "is_marlin_format 'True'": lambda s: s.update(is_marlin_format=True),
    "pack_dtype 'int16'": lambda s: s.update(pack_dtype="int16"),
    "dynamic ": lambda s: s.update(dynamic={"-:.*down": {}}),
    "modules_in_block_to_quantize": lambda s: s.update(
        modules_in_block_to_quantize=[["mlp.down_proj"]]
    ),
    "checkpoint_format 'marlin'": lambda s: s.update(checkpoint_format="marlin"),
}
REFUSED_AWQ = {
    "bits '3'": lambda s: s.update(bits=3),
    "group_size '-1'": lambda s: s.update(group_size=-1),
    "zero_point 'False'": lambda s: s.update(zero_point=False),
    "version 'gemv'": lambda s: s.update(version="gemv"),
    "modules_to_not_convert 'mlp.gate'": lambda s: s.update(
        modules_to_not_convert=["lm_head", "mlp.gate"]
    ),
}
REFUSED_PACKED = {
    "weights.type 'float'": lambda s: group(s)["weights"].update(type="float"),
    "weights.strategy 'tensor'": lambda s: group(s)["weights"].update(strategy="tensor"),
    "weights.group_size '16'": lambda s: group(s)["weights"].update(group_size=16),
    "weights.actorder 'random'": lambda s: group(s)["weights"].update(actorder="random"),
    "weights.dynamic 'local'": lambda s: group(s)["weights"].update(dynamic="local"),
}


@pytest.mark.parametrize(
    ("made", "names", "change"),
    [
        *((gptq, *x) for x in REFUSED_GPTQ.items()),
        *((awq, *x) for x in REFUSED_AWQ.items()),
        *((compressed_int4, *x) for x in REFUSED_PACKED.items()),
    ],
)
def test_other_integers_of_four_bits_are_refused_by_the_name_of_their_key(
    made: Any, names: str, change: Any
) -> None:
    with pytest.raises(QuantizedError) as refused:
        ModelShape.from_config(four_bits(made(), change))
    assert names in str(refused.value)
    assert str(refused.value).endswith(" served")


@pytest.mark.parametrize("width", ["hidden_size", "intermediate_size"])
def test_groups_that_do_not_divide_a_matrix_are_refused(width: str) -> None:
    config = four_bits(gptq(group=128)) | {width: 4096 + 64}
    with pytest.raises(QuantizedError, match=r"group_size '128'.* width 4160 are served"):
        ModelShape.from_config(config)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    with pytest.raises(QuantizedError, match=r"group_size '-1'.* width 4164 are served"):
        ModelShape.from_config(four_bits(gptq(group=-1)) | {**heads, width: 4096 + 68})


LLAMA_2_7B: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000}


@pytest.mark.parametrize(
    ("made", "group", "ordered", "inner"),
    [
        (gptq, 128, False, 11008),
        (gptq, 32, True, 11008),
        (gptq, -1, False, 11008),
        (awq, 64, False, 11008),
        (awq, 32, False, 11040),  # no multiple of 64, so that our own products have them
    ],
)
def test_weights_of_four_bits_are_planned_to_the_byte(
    made: Any, group: int, ordered: bool, inner: int
) -> None:
    form = made(group=group, sorts=True) if ordered else made(group=group)
    config = four_bits(form) | LLAMA_2_7B | {"torch_dtype": "float16", "intermediate_size": inner}
    shape = ModelShape.from_config(config)
    hidden, layers = 4096, 32
    matrices = [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner)]
    size = 0
    for rows, columns in matrices:
        groups = 1 if group < 0 else columns // group
        # Scales and zero points: in 16 and 4 bits, or in float32 and bytes.
        size += rows * columns // 2 + rows * groups * (5 if inner % 64 else 2)
        size += 0 if inner % 64 else rows * groups // 2
    # An order for queries, keys and values, one for what attention returns, and so on.
    size += 4 * (3 * hidden + inner) if ordered else 0
    plain = 2 * 32000 * hidden + hidden * (2 * layers + 1)
    engine = as_stored(EngineConfig(), shape.quantized)
    assert weights(shape, engine, 1, "cuda") == layers * size + 2 * plain


def test_the_order_of_what_attention_returns_is_as_wide_as_its_heads_are() -> None:
    """Not as the hidden states, where the heads have a size of their own."""
    config = four_bits(gptq(group=32, sorts=True)) | LLAMA_2_7B
    common, wider = (
        ModelShape.from_config(config),
        ModelShape.from_config(config | {"head_dim": 64}),
    )
    assert common.reordered_columns == 32 * (3 * 4096 + 11008)
    assert common.reordered_columns - wider.reordered_columns == 32 * 32 * (128 - 64)


def test_int4_is_no_format_to_round_to() -> None:
    with pytest.raises(ConfigError) as refused:
        check_stored(EngineConfig(quantization="int4"), "", "bfloat16", "cuda", unfused="")
    assert str(refused.value) == (
        "--quantization: int4: weights are not rounded to it at load, which takes a calibration "
        "(use none, or a GPTQ or AWQ checkpoint)"
    )


@pytest.mark.parametrize(("dtype", "device"), [("bfloat16", "cpu"), ("float32", "cuda")])
def test_int4_is_refused_on_cpus_and_in_float32_with_the_reason(dtype: str, device: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_stored(EngineConfig(), "int4", dtype, device, unfused="")
    assert f"int4 is not supported in {dtype} on {device} yet: fp8 and" in str(refused.value)
    assert "the checkpoint's weights are int4" in str(refused.value)
    for works in ("bfloat16", "float16"):
        check_stored(EngineConfig(), "int4", works, "cuda", unfused="")


def test_quantized_experts_are_refused() -> None:
    with pytest.raises(QuantizedError, match="quantized experts are not supported"):
        ModelShape.from_config(config_of() | {"model_type": "mixtral"})


def test_a_setting_that_disagrees_with_the_checkpoint_is_refused_with_the_ones_that_work() -> None:
    for setting in ("none", "int8"):
        assert as_stored(EngineConfig(quantization=setting), "int8").quantization == "int8"
        assert as_stored(EngineConfig(quantization=setting), "").quantization == setting
    with pytest.raises(ConfigError) as refused:
        as_stored(EngineConfig(quantization="fp8"), "int8")
    assert str(refused.value) == (
        "--quantization: fp8, but the checkpoint's weights are int8 already (config.json: "
        "quantization_config) (use none or int8, or the unquantized checkpoint)"
    )


def test_a_format_is_refused_where_its_setting_would_be() -> None:
    check = partial(check_stored, unfused="")
    assert check(EngineConfig(), "fp8", "bfloat16", "cuda").quantization == "fp8"
    with pytest.raises(ConfigError) as refused:
        check(EngineConfig(), "fp8", "bfloat16", "cpu")
    assert str(refused.value) == (
        "--quantization: fp8 is not supported in bfloat16 on cpu yet: fp8 and int4 weights need a "
        "GPU and a type of 16 bits; the checkpoint's weights are fp8 (config.json: "
        "quantization_config) (use none or int8; on a GPU with dtype bfloat16 or float16 also fp8 "
        "or int4; none and int8 need the unquantized checkpoint)"
    )


def test_rounding_a_model_with_experts_is_refused_before_it_loads() -> None:
    plain = EngineConfig()
    assert check_stored(plain, "", "float32", "cpu", unfused="experts") == plain
    with pytest.raises(ConfigError, match="--quantization: int8 weights of experts are not"):
        check_stored(EngineConfig(quantization="int8"), "", "float32", "cpu", unfused="experts")


def test_stored_tensors_count_as_the_matrices_that_they_stand_for() -> None:
    for form, stored in ((gptq(), (2, 16)), (awq(), (16, 2)), (compressed_int4(), (16, 2))):
        found = published(four_bits(form))
        assert found is not None
        assert found.plain(f"layers.0.up.{found.weight}", stored) == (
            "layers.0.up.weight",
            (16, 16),
        )
        for leaf in found.side_tensors:
            assert found.plain(f"layers.0.up.{leaf}", (4,)) is None
    packed = Published("int8", "weight_packed", 4)
    assert packed.plain("layers.0.up.weight_packed", (8, 4)) == ("layers.0.up.weight", (8, 16))
    assert packed.plain("layers.0.up.weight_scale", (8, 1)) is None
    assert packed.plain("norm.weight", (8,)) == ("norm.weight", (8,))
    plain = Published("int8")
    assert plain.plain("layers.0.up.weight", (8, 16)) == ("layers.0.up.weight", (8, 16))


def whole(form: Any, key: str = "", names: Any = None, **more: Any) -> dict[str, Any]:
    """A Mistral Small 3's config.json, its list of plain modules changed."""
    settings = copy.deepcopy(form[0]) | ({key: names} if key else {})
    text = {"model_type": "mistral", "head_dim": 128}
    return {"model_type": "mistral3", "text_config": text, "quantization_config": settings} | more


OTHER_PARTS = (
    *("visual", "model.visual", "vision_tower", "model.vision_tower.encoder", "audio_tower"),
    *("vision_tower.transformer.layers.0.attention.k_proj", "visual.blocks.31.attn.qkv"),
    *("vision_tower.vision_model.encoder.layers.26.self_attn.k_proj", "merger", "mlp1"),
    *("multi_modal_projector.linear_1", "language_model.lm_head", "model.lm_head", "lm_head"),
    *("model.vision_model.encoder.layers.0.mlp.fc1", "model.connector", "re:.*vision.*"),
    *("re:vision_tower.*", "re:.*multi_modal_projector.*", "re:model.visual.*", "re:.*lm_head"),
    *(r"re:^model\.(visual|vision_tower)\..*$", "re:visual.+", r"re:.*visual\.blocks\.\d+\.mlp.*"),
    *(".*visual.*", "vision.*", "re:(model.)?visual.*", "patch_merger.merging_layer"),
)
OF_THE_TEXT = (
    *("model.layers.0.mlp.down_proj", "language_model.model.layers.39.self_attn.q_proj"),
    *("model.language_model.layers.7.mlp.gate_proj", "layers.3.other", "mlp.down_proj", "mlp"),
    *("self_attn", "k_proj", "model", "language_model", "Linear", "", "layers.1"),
    *("model.text_model.layers.0", "model.language_model.decoder.layers.0.fc9", "fc1"),
    *("re:.*mlp.*", r"re:.*layers\.77\..*", "re:.*(vision|mlp).*", "re:.*down_proj$", "re:.*"),
    *("re:.*_proj", r"re:language_model\.model\.layers\.\d+\..*", ".*o_proj", "re:model.*"),
    *(r"re:.*self_attn.*|.*lm_head", r"re:model\.layers\.9.+"),
    *("re:.*linear_attn.*", "re:.*in_proj_a$", "linear_attn.in_proj_b", "re:.*conv.out_proj"),
    *("re:.*feed_forward.w2", "model.language_model.layers.3.linear_attn"),
)
NOT_TRIED = (
    *("re:(a+)+b", "re:.*.*.*.*vision", "re:(?!visual).*", "re:[v]isual.*", "re:(visual.*"),
    *("re:a|b|c|d|e|f|g", "re:" + "v" * 201, r"re:\1", "re:(.|v)*", "re:v?i?s?u?a?l?"),
    *("re:1.2.3.*", "re:"),
)
FORMS: tuple[tuple[Any, str], ...] = (
    (compressed_tensors(), "ignore"),
    (awq(), "modules_to_not_convert"),
)


@pytest.mark.parametrize("name", OTHER_PARTS)
@pytest.mark.parametrize("form", FORMS, ids=["ignore", "awq"])
def test_other_parts_of_a_model_of_several_may_stay_plain(form: Any, name: str) -> None:
    made, key = form
    config = whole(made, key, [name, "lm_head"])
    shape, plain = ModelShape.from_config(config), copy.deepcopy(config)
    del plain["quantization_config"]
    assert shape.quantized != ""
    assert shape.parameters == ModelShape.from_config(plain).parameters
    alone = config_of() | {"quantization_config": config["quantization_config"]}
    if "lm_head" not in name:
        with pytest.raises(QuantizedError, match=f"{key} "):
            ModelShape.from_config(alone)


@pytest.mark.parametrize("name", [*OF_THE_TEXT, 1, None, ["visual"]], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=["ignore", "awq"])
def test_what_may_be_a_layer_of_the_text_is_refused_by_its_name(form: Any, name: Any) -> None:
    made, key = form
    with pytest.raises(QuantizedError) as refused:
        ModelShape.from_config(whole(made, key, ["lm_head", "visual", name]))
    assert f"{key} {str(name)!r} is not supported" in str(refused.value)


@pytest.mark.parametrize("name", NOT_TRIED)
@pytest.mark.parametrize("form", FORMS, ids=["ignore", "awq"])
def test_a_pattern_that_is_not_tried_is_refused_by_its_name(form: Any, name: str) -> None:
    made, key = form
    with pytest.raises(QuantizedError) as refused:
        ModelShape.from_config(whole(made, key, ["lm_head", name]))
    assert f"pattern {name[:60]!r} is not supported" in str(refused.value)


def test_a_list_of_more_patterns_than_are_tried_is_refused() -> None:
    names = [f"re:visual{number}.*" for number in range(9)]
    ModelShape.from_config(whole(*FORMS[0], ["lm_head", *names[:8]]))
    with pytest.raises(QuantizedError, match="patterns '9' is not supported: up to 8 in a list"):
        ModelShape.from_config(whole(*FORMS[0], ["lm_head", *names]))


def test_a_pattern_is_tried_in_little_time() -> None:
    started = time.process_time()
    names = [f"re:.*a.*a.*(x|y)?b{number}" for number in range(8)]
    ModelShape.from_config(whole(*FORMS[0], ["lm_head", *names]))
    assert time.process_time() - started < 20


def test_the_head_of_a_whole_is_left_out_or_is_the_embedding() -> None:
    for names in ([], ["visual"], None):
        with pytest.raises(QuantizedError, match="models whose lm_head is not quantized"):
            ModelShape.from_config(whole(*FORMS[0], names))
        tied = whole(*FORMS[0], names, tie_word_embeddings=True)
        assert ModelShape.from_config(tied).tied
    gemma = whole(*FORMS[0], ["vision_tower"], model_type="gemma3", text_config={})
    assert ModelShape.from_config(gemma).tied


def test_the_settings_may_be_those_of_the_text_alone() -> None:
    config = whole(*FORMS[1], ["visual"])
    inside = copy.deepcopy(config)
    inside["text_config"]["quantization_config"] = inside.pop("quantization_config")
    assert ModelShape.from_config(inside) == ModelShape.from_config(config)
    config["text_config"]["quantization_config"] = config["quantization_config"]
    assert ModelShape.from_config(config).quantized == "int4"
    config["text_config"]["quantization_config"] = gptq()[0]
    with pytest.raises(QuantizedError, match="the same as in text_config"):
        ModelShape.from_config(config)


def test_gptqs_rules_may_leave_other_parts_out() -> None:
    served: list[Any] = [
        {},
        None,
        {"-:.*visual.*": {}},
        {"-:visual": {}, r"-:.*vision_tower\..*": {}},
    ]
    for works in served:
        assert ModelShape.from_config(whole(gptq(), "dynamic", works)).quantized == "int4"
    others: list[Any] = [{"-:.*mlp.*": {}}, {"+:.*visual.*": {}}, {".*visual.*": {"bits": 8}}]
    for other in (*others, ["-:x"]):
        with pytest.raises(QuantizedError, match="dynamic "):
            ModelShape.from_config(whole(gptq(), "dynamic", other))
    alone = four_bits(gptq(), lambda s: s.update(dynamic={"-:.*visual.*": {}}))
    with pytest.raises(QuantizedError, match="dynamic "):
        ModelShape.from_config(alone)


def test_what_is_not_served_of_a_text_is_not_of_a_whole() -> None:
    experts = whole(*FORMS[0], ["lm_head"], model_type="qwen3_vl_moe", text_config={})
    with pytest.raises(QuantizedError, match="quantized experts are not supported"):
        ModelShape.from_config(experts)
    with pytest.raises(QuantizedError, match="quant_method 'bitsandbytes'"):
        ModelShape.from_config(whole(({"quant_method": "bitsandbytes"}, None)))


EQUAL = {"head_dim": 256, "global_head_dim": 256, "hidden_size_per_layer_input": 0}
PLAIN: list[dict[str, Any]] = [
    *({"model_type": name} for name in ("gemma3n_text", "gemma4_text", "gemma4_unified_text")),
    # All heads of one size and no inputs of layers: its layers are no fused ones all the same.
    *({"model_type": name, **EQUAL} for name in ("gemma4_text", "gemma4_unified_text")),
    *({"model_type": name} for name in ("mimo_v2_flash", "qwen3_moe", "exaone4", "olmo2", "olmo3")),
]


# The same of families that are no text of a model of several parts.
PLAIN_ALONE: list[dict[str, Any]] = [
    {"model_type": name} for name in ("granite_swa", "bitnet", "nanochat")
]


@pytest.mark.parametrize(
    ("config", "whole"),
    [*itertools.product(PLAIN, (False, True)), *((config, False) for config in PLAIN_ALONE)],
    ids=str,
)
def test_layers_that_no_kernel_fuses_are_refused_quantized_before_they_load(
    config: dict[str, Any], *, whole: bool
) -> None:
    name = str(config["model_type"])
    wholes = {f"{part}_text": part for part in ("gemma3n", "gemma4", "gemma4_unified")}
    if whole:
        outer = wholes.get(name, "mistral3")
        config = {"model_type": outer, "text_config": config}
        if name in ("mimo_v2_flash", "qwen3_moe"):
            config = {"model_type": "qwen3_vl_moe", "text_config": {}}
    for form in (compressed_tensors(), awq(), gptq(), compressed_int4()):
        with pytest.raises(QuantizedError, match=r"quantized .* are not supported"):
            ModelShape.from_config(config | {"quantization_config": form[0]})
    shape = ModelShape.from_config(config)
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match=r"int8 weights of .* are not supported"):
            check_stored(
                EngineConfig(quantization="int8"),
                "",
                "bfloat16",
                device,
                unfused=shape.plain_on(device),
            )
