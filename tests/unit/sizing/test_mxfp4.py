"""What is planned for a checkpoint whose experts are stored in MXFP4 and held plain."""

from typing import Any

import pytest

from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.checkpoint_formats import check_stored
from fairlead_runtime.sizing.config_json import ShapeError, UnknownFamilyError
from fairlead_runtime.sizing.load_peak import CHUNK_TEMPORARIES, loading_bytes
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.solve import MemoryPlan
from fairlead_runtime.sizing.stored import QuantizedError
from fairlead_runtime.sizing.terms import GIB, DeviceFacts
from fairlead_runtime.sizing.verdict import plan_memory
from fairlead_runtime.sizing.weight_bytes import weights
from support.published import mxfp4_settings


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """config.json as openai/gpt-oss-20b and gpt-oss-120b have it: no type is named."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": mxfp4_settings(),
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    }


SMALL, LARGE = gpt_oss(24, 32), gpt_oss(36, 128)


def plan(config: dict[str, Any], memory: int, kind: Any = "cuda") -> MemoryPlan:
    return plan_memory(
        ModelShape.from_config(config), EngineConfig(), DeviceFacts(kind, memory * GIB)
    )


@pytest.mark.parametrize(("config", "published"), [(SMALL, 20.9), (LARGE, 116.8)])
def test_the_published_models_have_the_published_numbers_of_parameters(
    config: dict[str, Any], published: float
) -> None:
    shape = ModelShape.from_config(config)
    assert round(shape.parameters / 1e9, 1) == published
    assert (shape.quantized, shape.held, shape.dtype) == ("mxfp4", "", "bfloat16")
    assert weights(shape, EngineConfig(), 1, "cuda") == 2 * shape.parameters


def test_the_plan_counts_what_is_held_and_says_so() -> None:
    fits = plan(SMALL, 80)
    assert fits.fits
    assert fits.weights_bytes == fits.terms["weights"] == 2 * 20_914_757_184 + 4 * 64
    held = "; its mxfp4 experts are held in bfloat16, {} GiB of weights, since no product takes "
    held += "them packed yet"
    assert fits.message.startswith("fits: ")
    assert fits.message.endswith(held.format("39.0"))
    refused = plan(LARGE, 80)
    assert not refused.fits
    assert refused.message.startswith("needs 227.")
    assert ": choose an accelerator of " in refused.message
    assert refused.message.endswith(held.format("217.6"))
    assert not plan(SMALL, 24).fits
    assert not plan(SMALL, 48).fits
    assert plan(LARGE, 288).fits
    plain = {key: value for key, value in SMALL.items() if key != "quantization_config"}
    assert "experts" not in plan(plain | {"dtype": "bfloat16"}, 80).message


def test_a_plan_for_experts_stored_packed_is_the_one_for_plain_ones() -> None:
    plain = {key: value for key, value in SMALL.items() if key != "quantization_config"}
    for kind in ("cuda", "cpu"):
        packed, unpacked = plan(SMALL, 96, kind), plan(plain | {"dtype": "bfloat16"}, 96, kind)
        assert packed.terms == unpacked.terms
        assert packed.num_blocks == unpacked.num_blocks


def test_loading_on_a_gpu_has_one_layers_packed_experts_beside_the_weights() -> None:
    shape = ModelShape.from_config(SMALL)
    experts = 32 * 3 * 2880 * 2880
    stored = experts // 2 + experts // 32
    loading = loading_bytes(shape, EngineConfig(), "cuda")
    beside = loading - 2 * shape.parameters - CHUNK_TEMPORARIES
    assert stored <= beside <= 1.1 * stored  # matrices of attention are counted, too
    assert plan(SMALL, 80).loading == loading


def test_a_type_that_the_config_names_is_kept() -> None:
    shape = ModelShape.from_config(SMALL | {"torch_dtype": "float16"})
    assert shape.dtype == "float16"
    wide = EngineConfig(dtype="float32")
    assert weights(shape, wide, 1, "cuda") == 4 * shape.parameters


REFUSED: dict[str, dict[str, Any]] = {
    "bits '4' is not supported: quant_method and modules_to_not_convert and": {"bits": 4},
    "modules_to_not_convert must be a list of names": {"modules_to_not_convert": "lm_head"},
    "modules_to_not_convert must be": {"modules_to_not_convert": [1]},
    "dequantize '1' is not supported": {"dequantize": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_of_the_format_that_are_not_known_are_refused_by_name(message: str) -> None:
    settings = mxfp4_settings() | REFUSED[message]
    with pytest.raises(QuantizedError, match=message):
        ModelShape.from_config(SMALL | {"quantization_config": settings})


def test_settings_that_change_nothing_are_served() -> None:
    for settings in (
        {"quant_method": "mxfp4"},
        {"quant_method": "mxfp4", "modules_to_not_convert": None, "dequantize": True},
    ):
        shape = ModelShape.from_config(SMALL | {"quantization_config": settings})
        assert shape.quantized == "mxfp4"


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe"])
def test_other_families_in_the_format_are_refused_with_the_one_that_is_served(name: str) -> None:
    message = (
        f"quant_method 'mxfp4' is not supported: experts of 'gpt_oss' are served, those of '{name}'"
    )
    with pytest.raises(QuantizedError, match=message):
        ModelShape.from_config({"model_type": name, "quantization_config": mxfp4_settings()})


def test_a_family_that_is_not_in_the_table_is_refused_in_the_format_by_the_plan_too() -> None:
    """A pod that downloads it would refuse it."""
    config = {"model_type": "new_moe", "quantization_config": mxfp4_settings()}
    with pytest.raises(QuantizedError, match="those of 'new_moe' are not"):
        ModelShape.from_config(config)
    with pytest.raises(UnknownFamilyError):
        ModelShape.from_config({"model_type": "new_moe"})


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
def test_a_width_that_is_no_whole_number_of_blocks_is_refused_by_name(name: str) -> None:
    with pytest.raises(ShapeError, match=f"^config.json: {name}: 2896 is no multiple of 32"):
        ModelShape.from_config(SMALL | {name: 2896})


@pytest.mark.parametrize("setting", ["int8", "fp8", "int4"])
def test_rounding_a_checkpoint_in_the_format_is_refused_by_name(setting: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        check_stored(
            EngineConfig(quantization=setting), "mxfp4", "bfloat16", "cuda", unfused="experts"
        )
    assert str(refused.value) == (
        f"--quantization: {setting}, but the checkpoint's weights are mxfp4 already (config.json: "
        "quantization_config) (use none, or the unquantized checkpoint)"
    )
    none = EngineConfig()
    assert check_stored(none, "mxfp4", "bfloat16", "cuda", unfused="experts") == none


def test_ranks_are_refused_as_for_plain_experts() -> None:
    with pytest.raises(ConfigError, match="transformers has no plan to split 'gpt_oss'"):
        plan_memory(
            ModelShape.from_config(SMALL),
            EngineConfig(tensor_parallel=2),
            DeviceFacts("cuda", 80 * GIB),
        )
