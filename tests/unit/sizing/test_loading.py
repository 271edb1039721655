"""What loading takes at its peak, by hand."""

from dataclasses import replace
from typing import Any

import pytest

from fairlead_runtime.build.resolve import resolve
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.load_peak import CHUNK_TEMPORARIES, TESTED_ROWS, loading_bytes
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.terms import GIB, PROCESS, DeviceFacts
from fairlead_runtime.sizing.verdict import plan_memory

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 3200,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
PROJECTIONS = (8 + 2 * 2) * 128 * 1024
LAYER = PROJECTIONS + 1024 * 1024 + 3 * 1024 * 4096
HEAD = 3200 * 1024
CPU = DeviceFacts("cpu", 64 * GIB)


def shape_of(dtype: str, **settings: Any) -> ModelShape:
    return ModelShape.from_config(MODEL | {"dtype": dtype} | settings)


def beside(shape: ModelShape, element: int, **settings: Any) -> int:
    """Bytes beside the process, its tokenizer, the loaded weights and the self-test's logits."""
    found = loading_bytes(shape, EngineConfig(**settings), "cpu") - PROCESS - 1300 * shape.vocab
    return found - shape.parameters * element - 4 * (shape.buffers + TESTED_ROWS * shape.vocab)


def test_a_layer_is_packed_beside_all_weights_and_the_head_is_not() -> None:
    assert shape_of("float32").largest_layer == LAYER
    assert beside(shape_of("float32"), 4) == 4 * (LAYER + PROJECTIONS)
    assert beside(shape_of("bfloat16"), 2) == (4 + 2) * LAYER + 4 * PROJECTIONS + CHUNK_TEMPORARIES
    for settings in ({"kernels": "torch"}, {"cache_dtype": "fp8"}):
        assert beside(shape_of("float32"), 4, **settings) == 0


def test_the_largest_layer_counts_where_layers_differ() -> None:
    sizes = {"head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"moe_intermediate_size": 64}
    dense = {"model_type": "qwen3_moe", "mlp_only_layers": [1]}
    shape = ModelShape.from_config(MODEL | sizes | dense)
    assert shape.largest_layer == LAYER > shape.layer_matrices / 2


def test_layers_are_rounded_beside_plain_weights_and_so_is_a_large_head() -> None:
    assert beside(shape_of("float32"), 4, quantization="int8") == LAYER + CHUNK_TEMPORARIES
    assert beside(shape_of("bfloat16"), 2, quantization="int8") == 5 * LAYER + CHUNK_TEMPORARIES
    wide = shape_of("float32", vocab_size=320_000)
    assert beside(wide, 4, quantization="int8") == 100 * HEAD - 3 * 2 * LAYER + CHUNK_TEMPORARIES
    half = shape_of("bfloat16", vocab_size=320_000)
    assert beside(half, 2, quantization="int8") == 4 * 100 * HEAD + CHUNK_TEMPORARIES


def test_a_large_head_in_bfloat16_is_widened_with_the_embeddings() -> None:
    tied, own = (
        shape_of("bfloat16", vocab_size=320_000, tie_word_embeddings=tied) for tied in (True, False)
    )
    assert beside(tied, 2) == 4 * 100 * HEAD + CHUNK_TEMPORARIES
    assert beside(own, 2) == 2 * 4 * 100 * HEAD + CHUNK_TEMPORARIES
    assert beside(own, 2, kernels="torch") == 0


def test_an_accelerator_holds_plain_weights_until_they_are_rounded() -> None:
    shape = shape_of("bfloat16")
    assert loading_bytes(shape, EngineConfig(), "cuda") == 0
    int8 = EngineConfig(quantization="int8")
    assert loading_bytes(shape, int8, "cuda") == 2 * shape.parameters + 4 * shape.buffers
    assert loading_bytes(replace(shape, quantized="int8"), int8, "cuda") == 0


def test_a_pod_that_can_serve_but_not_load_is_refused() -> None:
    shape = shape_of("bfloat16", num_hidden_layers=1, vocab_size=300)
    config = EngineConfig(max_batch_tokens=16, max_requests=1, max_queue=1, num_blocks=4)
    config = replace(config, max_model_len=64, max_memory_percent=1.0)
    plan = plan_memory(shape, config, CPU)
    assert plan.fits
    assert plan.used < plan.loading
    fits, short = (DeviceFacts("cpu", plan.loading - less) for less in (0, 1))
    assert plan_memory(shape, config, fits).fits
    message = plan_memory(shape, config, short).message
    assert "GiB to load the weights, has " in message
    assert resolve(config, shape, fits, dtype="bfloat16").plan.fits
    with pytest.raises(ConfigError, match=r"^--max-memory-percent: needs .* to load") as refused:
        resolve(config, shape, short, dtype="bfloat16")
    assert "2 GiB of memory" in refused.value.hint
