"""Each term of the memory equation by hand, on a GPU and on a CPU."""

from dataclasses import replace
from typing import Any

import pytest

from fairlead_kernels.packages.humming_memory import COMPILER
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing import tensor_parallel as ranks
from fairlead_runtime.sizing import terms
from fairlead_runtime.sizing.arithmetic import ceil_div
from fairlead_runtime.sizing.element_types import matrix_dtype_of
from fairlead_runtime.sizing.layer_heads import LayerHeads
from fairlead_runtime.sizing.load_peak import loading_bytes
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.terms import (
    GIB,
    Bookkeeping,
    DeviceFacts,
    host_terms,
    terms_of,
    unit_bytes,
)
from fairlead_runtime.sizing.weight_bytes import held_weights, packaged

SHAPE = ModelShape.from_config(
    {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "dtype": "bfloat16",
    }
)
GPU, CPU = DeviceFacts("cuda", 80 * GIB), DeviceFacts("cpu", 16 * GIB)
CONFIG = EngineConfig(max_batch_tokens=512, max_requests=64, block_size=16)
FP8_CACHE = replace(CONFIG, cache_dtype="fp8")


def planned(device: DeviceFacts, config: EngineConfig = CONFIG) -> dict[str, int]:
    return terms_of(SHAPE, config, device, SHAPE.groups)


def test_the_weights_of_a_gpu_split_their_matrices_only() -> None:
    one = planned(GPU)["weights"]
    assert one == SHAPE.parameters * 2 + SHAPE.buffers * 4
    half = planned(GPU, replace(CONFIG, tensor_parallel=2))["weights"]
    matrices = SHAPE.layer_matrices + 32000 * 1024  # with the output matrix
    assert half == matrices * 2 // 2 + (SHAPE.parameters - matrices) * 2 + SHAPE.buffers * 4


def test_ranks_get_whole_groups_and_bytes_of_int4_columns() -> None:
    def against(size: int, width: int) -> str:
        return ranks.reason_against(
            replace(SHAPE, quantized="int4", int4_group_size=size, mlp_width_unit=width), 2
        )

    assert against(128, 4096) == against(0, 4096) == ""
    assert "held 128 columns at a time, and a rank would have 2112 of 4224" in against(128, 4224)
    assert "held 2 columns at a time, and a rank would have 2049 of 4098" in against(0, 4098)


def test_what_sampling_keeps_on_a_gpu_is_planned_for_ranks_too() -> None:
    """Its unit for padding is a rank's own."""
    two = replace(CONFIG, tensor_parallel=2)
    groups = SHAPE.groups
    one, half = (unit_bytes(SHAPE, config, groups) for config in (CONFIG, two))
    assert half == one // 2
    assert planned(GPU)["batch"] - planned(GPU, two)["batch"] == one - half


def test_ranks_beyond_the_key_value_heads_share_one() -> None:
    four = planned(GPU, replace(CONFIG, tensor_parallel=4))["weights"]
    keys = 4 * 2 * 1024 * 2 * 128
    rest = SHAPE.parameters - SHAPE.layer_matrices - 32000 * 1024
    shared = (SHAPE.layer_matrices - keys + 32000 * 1024) // 4 + keys // 2
    assert four == 2 * (rest + shared) + 4 * SHAPE.buffers


def test_ranks_on_a_cpu_share_what_the_pod_has_and_each_is_a_process() -> None:
    shared = replace(CONFIG, cpu_offload_space=4.0, shared_memory=2.0, tensor_parallel=2)
    terms = planned(CPU, shared)
    assert (terms["process"], terms["offload"], terms["shared_memory"]) == (GIB, 2 * GIB, GIB)
    pod = host_terms(SHAPE, shared, "cpu")
    assert (pod["process"], pod["offload"], pod["shared_memory"]) == (2 * GIB, 4 * GIB, 2 * GIB)
    assert pod["tokenizers"] == 32_000 * (1750 + 2 * 1300) == 2 * terms["tokenizers"]
    assert host_terms(SHAPE, shared, "cuda")["tokenizers"] == pod["tokenizers"]


def test_host_memory_has_the_pinned_plans_of_captured_steps() -> None:
    """Those of 1, 2, 4, ..., 64 rows, 8 MiB each, in each layer group."""
    plans = len(SHAPE.groups) * 7 * (8 << 20)
    assert host_terms(SHAPE, CONFIG, "cuda")["process"] == GIB + plans
    for other in ({"cuda_graphs": "off"}, {"max_cached_graphs": 0}):
        assert host_terms(SHAPE, replace(CONFIG, **other), "cuda")["process"] == GIB
    assert host_terms(SHAPE, CONFIG, "cpu")["process"] == GIB


def test_host_memory_has_a_compiler_of_4_bit_products_while_a_gpus_process_starts() -> None:
    plain = replace(CONFIG, cuda_graphs="off")
    four = replace(plain, quantization="int4")
    assert host_terms(SHAPE, four, "cuda")["process"] == GIB + COMPILER
    assert host_terms(SHAPE, replace(plain, quantization="int8"), "cuda")["process"] == GIB
    assert host_terms(replace(SHAPE, hidden=1088), four, "cuda")["process"] == GIB


@pytest.mark.parametrize(
    ("sizes", "ranks", "fit"),
    [
        ({}, 1, True),
        ({}, 8, True),
        ({"hidden": 1088}, 1, False),
        ({"mlp_width_unit": 2880}, 1, False),
        ({"mlp_width_unit": 2816}, 1, True),
        ({"mlp_width_unit": 2816}, 2, True),
        ({"mlp_width_unit": 2816}, 4, False),
        ({"heads": 7, "kv_heads": 1, "head_dim": 64}, 1, False),
        ({"heads": 8, "kv_heads": 1, "head_dim": 64}, 1, True),
        ({"heads": 8, "kv_heads": 1, "head_dim": 32}, 8, False),
    ],
)
def test_a_package_takes_all_int4_matrices_of_an_accelerator_or_none(
    sizes: Any, ranks: int, *, fit: bool
) -> None:
    """Rows in multiples of 128, queries, keys and values together, and columns of 64."""
    shape = replace(SHAPE, **sizes)
    kind = LayerHeads(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim)
    assert packaged(replace(shape, head_kinds=(kind,)), ranks) == fit


def test_layers_of_a_split_model_on_a_cpu_are_planned_in_float32() -> None:
    shared = replace(CONFIG, tensor_parallel=2)
    fused, plain = planned(CPU, shared), planned(CPU, replace(shared, kernels="torch"))
    assert fused["activations"] == 2 * plain["activations"]
    assert fused["weights"] == plain["weights"]


@pytest.mark.parametrize(
    ("settings", "stored", "matrix_dtype"),
    [
        ({"dtype": "float32"}, {}, "bfloat16"),
        ({"dtype": "float32", "deterministic": True}, {}, "bfloat16"),
        ({"dtype": "auto"}, {}, "bfloat16"),
        ({"dtype": "auto"}, {"dtype": None}, "float32"),
        ({"dtype": "float32"}, {"dtype": "float16"}, "float32"),
        ({"dtype": "float32"}, {"dtype": "float32"}, "float32"),
        ({"dtype": "float32"}, {"packs_all": False}, "float32"),
        ({"dtype": "float32", "kernels": "torch"}, {}, "float32"),
        ({"dtype": "float32", "quantization": "int8"}, {}, "float32"),
        ({"dtype": "float32", "cache_dtype": "fp8"}, {}, "float32"),
        ({"dtype": "float32", "tensor_parallel": 2}, {}, "float32"),
    ],
)
def test_a_cpu_holds_matrices_in_bfloat16_where_they_are_stored_so_and_its_kernels_multiply(
    settings: dict[str, Any], stored: dict[str, Any], matrix_dtype: str
) -> None:
    shape, config = replace(SHAPE, **stored), replace(CONFIG, **settings)
    assert matrix_dtype_of(shape, config) == matrix_dtype


def test_of_a_model_in_float32_with_matrices_in_bfloat16_the_rest_takes_four_bytes() -> None:
    """Embeddings and norms; while it loads, all."""
    wide = replace(CONFIG, dtype="float32")
    vocab = SHAPE.vocab * SHAPE.hidden
    matrices = SHAPE.layer_matrices + vocab
    assert planned(CPU, wide)["weights"] == 4 * SHAPE.parameters - 2 * matrices + 4 * SHAPE.buffers
    assert planned(GPU, wide)["weights"] == 4 * (SHAPE.parameters + SHAPE.buffers)
    # Of layers that do not fuse matrices of few rows are packed, too.
    unfused = replace(SHAPE, slab_width=0, narrow_padding=640)
    weights = held_weights(unfused, wide, 1, "cpu")
    assert weights == planned(CPU, wide)["weights"] + 2 * (640 + SHAPE.padding)
    loading = held_weights(SHAPE, wide, 1, "cpu", loading=True)
    assert loading == 4 * (SHAPE.parameters + SHAPE.buffers)
    plain = replace(wide, kernels="torch")
    assert loading_bytes(SHAPE, wide, "cpu") >= loading_bytes(SHAPE, plain, "cpu")


def test_activations_and_logits_grow_with_their_limits_only() -> None:
    base = planned(GPU)
    wider = planned(GPU, replace(CONFIG, max_batch_tokens=1024))
    assert wider["activations"] == 2 * base["activations"]
    assert wider["logits"] == base["logits"]
    more = planned(GPU, replace(CONFIG, max_requests=128))
    assert more["logits"] == 2 * base["logits"] > 0
    assert more["activations"] == base["activations"]


def test_of_a_slab_the_kernels_of_a_cpu_keep_more_than_of_the_other_tokens_of_a_step() -> None:
    kept, passing = 1024 + 2 * 128 + 8, 1024 + 3 * 4096
    few = replace(CONFIG, dtype="float32")
    assert planned(CPU, few)["activations"] == 4 * 512 * (kept + passing)
    large = replace(few, max_batch_tokens=8192)
    assert planned(CPU, large)["activations"] == 4 * (8192 * kept + 1024 * passing)
    int8 = replace(large, quantization="int8")
    digits = 1024 * (1024 // 2 + 32)
    assert planned(CPU, int8)["activations"] == planned(CPU, large)["activations"] + 4 * digits


def test_layers_that_a_cpus_kernels_may_not_know_are_planned_without_slabs() -> None:
    unknown, groups = replace(SHAPE, slab_width=0), SHAPE.groups
    large = replace(CONFIG, max_batch_tokens=16 * 512)
    whole = terms_of(unknown, large, CPU, groups)["activations"]
    assert whole == 16 * terms_of(unknown, CONFIG, CPU, groups)["activations"]
    assert whole > planned(CPU, large)["activations"]


def test_sampling_takes_a_histogram_and_16_bytes_a_logit_for_each_row_in_one_pass() -> None:
    rows = min(64, (1 << 26) // 32000)
    expected = rows * (32000 * 16 + (33 << 10)) + 64 * 32000 * 8
    assert planned(GPU)["sampling"] == expected
    few = (1 << 20) // 32000
    assert planned(CPU)["sampling"] == few * (32000 * 16 + (33 << 10)) + 64 * 32000 * 8


def test_a_cpus_terms_add_the_process_its_offload_and_its_shared_memory() -> None:
    config = replace(CONFIG, cpu_offload_space=1.5, shared_memory=0.25)
    host = {name: planned(CPU, config)[name] for name in terms.HOST_TERMS}
    assert host["offload"] == GIB * 3 // 2
    assert host["process"] == terms.PROCESS
    assert host["grammars"] == 32_000 * 1500 + (16 << 20)
    assert host["tokenizers"] == 32_000 * (1750 + 1300)
    assert not set(terms.HOST_TERMS) & set(planned(GPU, config))


def test_bookkeeping_counts_the_queue_the_blocks_and_sequences_as_long_as_the_cache() -> None:
    queue = (100 + 64) * 8192 * (8 + 32 // 16)
    kept = Bookkeeping.of(SHAPE, CONFIG, groups=2, queue=queue)
    a_block = 2 * 454
    of_a_sequence = 16 * 21 + 40 + 2 * 16
    assert kept.size(0) == queue
    assert kept.size(500) == queue + 500 * a_block + 64 * 500 * of_a_sequence
    assert kept.size(600) == queue + 600 * a_block + 64 * 512 * of_a_sequence, "8192 tokens"


def test_a_cpus_attention_holds_the_longest_row_and_its_masks() -> None:
    longest, chunk, kv = 8192, 512, 2 * 128
    gathered = longest * (2 * kv * 2 + 16)
    masks = min(chunk * longest, 1 << 24) * 2 + 256 * longest * (2 + 2)
    assert planned(CPU)["attention"] == gathered + masks
    fp8 = longest * (2 * kv * (2 + 1) + 16)
    assert planned(CPU, FP8_CACHE)["attention"] == fp8 + masks, "a byte, and what it is widened to"


def test_a_gpu_keeps_a_unit_of_padding_in_the_caches_type() -> None:
    unit = 16 * 2 * 2 * 128 * 4  # tokens, keys and values, heads, elements, layers
    assert planned(GPU)["batch"] - planned(GPU, FP8_CACHE)["batch"] == unit


def test_a_cpus_layers_beside_an_fp8_cache_are_not_fused() -> None:
    plain = replace(CONFIG, kernels="torch")
    assert planned(CPU, FP8_CACHE)["activations"] == planned(CPU, plain)["activations"]
    assert planned(CPU)["activations"] > planned(CPU, plain)["activations"]


@pytest.mark.parametrize(
    ("count", "parts", "largest"), [(8, 2, 4), (9, 2, 5), (1, 4, 1), (0, 3, 0)]
)
def test_the_largest_share_is_rounded_up(count: int, parts: int, largest: int) -> None:
    assert ceil_div(count, parts) == largest


def test_small_sizes_are_written_with_more_digits() -> None:
    texts = [terms.gib(size) for size in (0, 12 << 20, GIB // 10 + 1, 3 * GIB)]
    assert texts == ["0.0", "0.012", "0.1", "3.0"]
