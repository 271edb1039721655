"""What a quantization_config says of a checkpoint's weights, and what of it is refused."""

import copy
from functools import partial
from typing import Any

import pytest

from fairlead_runtime.config import ConfigError, EngineConfig
from fairlead_runtime.sizing.published import (
    Published,
    QuantizedError,
    as_stored,
    check_stored,
    published,
)
from fairlead_runtime.sizing.shape import ModelShape
from support.published import compressed_tensors


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


REFUSED = {
    "quant_method 'gguf'": lambda s: s.update(quant_method="gguf"),
    "quantization_status 'frozen'": lambda s: s.update(quantization_status="frozen"),
    "sparsity_config.format": lambda s: s.update(sparsity_config={"format": "sparse-bitmask"}),
    "config_groups '0 groups'": lambda s: s.update(config_groups={}),
    "config_groups '2 groups'": lambda s: s["config_groups"].update(group_1={}),
    "config_groups must be an object": lambda s: s.update(config_groups=[1]),
    "targets": lambda s: group(s).update(targets=["re:.*q_proj"]),
    "output_activations": lambda s: group(s).update(output_activations={"num_bits": 8}),
    "ignore 'model.layers.0": lambda s: s["ignore"].append("model.layers.0.mlp.down_proj"),
    "models whose lm_head is not quantized": lambda s: s.update(ignore=[]),
    "format 'marlin-24'": lambda s: s.update(format="marlin-24"),
    "weights.num_bits '4'": lambda s: group(s)["weights"].update(num_bits=4),
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
    check = partial(check_stored, experts=False)
    assert check(EngineConfig(), "fp8", "bfloat16", "cuda").quantization == "fp8"
    with pytest.raises(ConfigError) as refused:
        check(EngineConfig(), "fp8", "bfloat16", "cpu")
    assert str(refused.value) == (
        "--quantization: fp8 is not supported in bfloat16 on cpu yet: products with fp8 weights "
        "are those of GPUs; the checkpoint's weights are fp8 (config.json: quantization_config) "
        "(use none or int8, or fp8 with dtype bfloat16 or float16 on a GPU; none and int8 need the "
        "unquantized checkpoint)"
    )


def test_rounding_a_model_with_experts_is_refused_before_it_loads() -> None:
    plain = EngineConfig()
    assert check_stored(plain, "", "float32", "cpu", experts=True) == plain
    with pytest.raises(ConfigError, match="--quantization: int8 weights of experts are not"):
        check_stored(EngineConfig(quantization="int8"), "", "float32", "cpu", experts=True)


def test_stored_tensors_count_as_the_matrices_that_they_stand_for() -> None:
    packed = Published("int8", "weight_packed", 4)
    assert packed.plain("layers.0.up.weight_packed", (8, 4)) == ("layers.0.up.weight", (8, 16))
    assert packed.plain("layers.0.up.weight_scale", (8, 1)) is None
    assert packed.plain("norm.weight", (8,)) == ("norm.weight", (8,))
    plain = Published("int8")
    assert plain.plain("layers.0.up.weight", (8, 16)) == ("layers.0.up.weight", (8, 16))
