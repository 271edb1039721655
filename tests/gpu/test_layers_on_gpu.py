"""The operations of fused layers on an NVIDIA GPU: the cases of the CPU's tests, whole models, and
a CUDA graph. Run with `make gpu`; without a GPU it fails.
"""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from transformers import AutoModelForCausalLM

from fairlead_kernels.choice.backend import FP8_GPU, gpu_operations, pick
from fairlead_kernels.formats.quantize import Format
from fairlead_kernels.gpu import triton_operations
from fairlead_kernels.interface.cache_write import rounded
from fairlead_kernels.interface.layer import LayerOperations, Norm
from fairlead_kernels.interface.not_available import name_of
from fairlead_kernels.packages import humming_package
from fairlead_kernels.packages.humming_products import HummingPacked, HummingProducts
from fairlead_kernels.plain.torch_operations import TorchOperations, prove_fp8
from fairlead_kernels.proofs.comparison import TOLERANCE
from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.device.conversion.fusion import fuse
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.device.ranks import shards
from fairlead_runtime.models import families, loading, rope
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.weight_bytes import held_weights
from support import tiny
from support.gpu_device import DEVICE
from support.operation_cases import (
    ActivationCase,
    Int4Case,
    NormCase,
    ProductCase,
    RopeCase,
    activation_cases,
    int4_cases,
    int4_matrix,
    norm_cases,
    product_cases,
    rope_cases,
)
from support.published import awq, gptq, publish

pytestmark = pytest.mark.gpu

MAX_LEN = 512
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COMPILERS = min(8, os.cpu_count() or 1)
both = pytest.mark.parametrize("name", ["torch", "triton"])
# Few and the same ones each time: Triton compiles nearly every example, and keeps what it has.
examples = settings(max_examples=40, deadline=None, derandomize=True)


def operations(name: str) -> LayerOperations:
    return triton_operations.load() if name == "triton" else TorchOperations()


@both
@examples
@given(case=norm_cases)
def test_a_norm_is_the_references(name: str, case: NormCase) -> None:
    case.check(operations(name), DEVICE)


@both
@examples
@given(case=rope_cases)
def test_rotation_and_the_cache_write_are_the_references(name: str, case: RopeCase) -> None:
    case.check(operations(name), DEVICE)


@both
@examples
@given(case=activation_cases)
def test_an_activation_is_the_references(name: str, case: ActivationCase) -> None:
    case.check(operations(name), DEVICE)


@both
@examples
@given(case=product_cases)
def test_a_product_is_the_references(name: str, case: ProductCase) -> None:
    case.check(operations(name), DEVICE)


@both
@examples
@given(case=int4_cases)
def test_a_product_with_weights_of_four_bits_is_the_references(name: str, case: Int4Case) -> None:
    case.check(operations(name), DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_an_fp8_cache_is_served_within_its_tolerances(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    loaded = loading.load(tiny.save(tiny.build(family).to(dtype), tmp_path), device=DEVICE)
    served, result = selftest.prepare_and_test(loaded, "auto", fp8_cache=True)
    assert served.model.heads.cache_dtype is torch.float8_e4m3fn
    assert result.cache is not None
    print(f"{family} in {dtype}: {result}")


@pytest.mark.on_cpu
@both
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_keys_are_rounded_to_fp8_as_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(4096) * 10.0**power for power in (-4, -2, 0, 2, 4)])
    x = x.to(dtype).view(-1, 64)
    qkv = torch.cat([x, x, -x], dim=1).to(DEVICE)
    caches = [torch.zeros(len(x), 1, 1, 64, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kv"]
    none = torch.zeros(len(x), 0, device=DEVICE)
    slots = torch.arange(len(x), device=DEVICE)
    operations(name).rope_write(qkv, none, none, slots, caches[0], caches[1])
    for cache, want in zip(caches, (x, -x), strict=True):
        got = cache.view(len(x), 64).view(torch.uint8).cpu()
        assert torch.equal(got, rounded(want, torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("quantized", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_quantized_weights_are_served_within_their_tolerances(
    family: str, quantized: Format, tmp_path: Path
) -> None:
    """With the operations that this GPU is given, fp8 products among them where it has any."""
    saved = tiny.save(tiny.build(family).bfloat16(), tmp_path)
    loaded = loading.load(saved, device=DEVICE)
    served, result = selftest.prepare_and_test(loaded, "auto", quantized)
    assert str(served.fusion).endswith(f"{quantized} weights")
    rounds = torch.cuda.get_device_capability() >= (8, 9)
    assert (result.activations is not None) == (quantized == "fp8" and rounds)
    print(f"{family}: {result}")


# What a package's products take of 4-bit weights, and what they do not.
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)],
)
@pytest.mark.parametrize("form", [gptq(sorts=True, symmetric=False), gptq(group=-1), awq()])
def test_published_weights_of_four_bits_are_served_within_their_tolerance(
    form: Any, dtype: torch.dtype, tmp_path: Path, *, wide: bool
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256} if wide else {}
    saved = tiny.save(tiny.build("llama", **sizes).to(dtype), tmp_path / "model")
    quantized, _ = publish(saved, tmp_path, *form)
    loaded = loading.load(quantized, device=DEVICE)
    served, result = selftest.prepare_and_test(loaded, "auto", compilers=COMPILERS)
    assert str(served.fusion) == "fused 3/3 layers, int4 weights"
    said = f"; 4-bit products by humming {version('humming-kernels')}"
    assert served.choice.reason.endswith(said) == wide, served.choice.reason
    engine = EngineConfig(quantization="int4")
    assert served.model.weight_bytes == held_weights(loaded.shape, engine, 1, "cuda")
    print(f"{dtype}: {result}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("groups", "ordered"), [(32, True), (8, False), (1, False)])
@torch.inference_mode()
def test_a_packages_product_of_four_bits_is_the_references_in_steps_of_all_sizes_and_in_a_graph(
    dtype: torch.dtype, groups: int, ordered: bool
) -> None:
    rows, columns = 384, 1024
    order = torch.randperm(columns).int() if ordered else None
    held = [int4_matrix(n, columns, groups, order).to(DEVICE) for n in (256, 128)]
    products = HummingProducts(humming_package.load(), dtype, DEVICE, COMPILERS)
    weight = products.repack(TorchOperations().pack(held))
    assert isinstance(weight, HummingPacked), str(products)
    exact = torch.cat([x.dequantize() for x in held])
    ours, bias = TorchOperations(), torch.randn(rows, device=DEVICE, dtype=dtype)
    for tokens in (1, 5, 16, 17, 64, 65, 256, 257, 3000):
        x = torch.randn(tokens, columns, device=DEVICE, dtype=dtype)
        want = x.float() @ exact.T
        got = ours.linear(x, weight).float()
        assert float((got - want).abs().max() / want.abs().max()) <= TOLERANCE["int4"][dtype], (
            tokens
        )
        assert torch.equal(ours.linear(x, weight).float(), got), "whole sums have one order"
    x = torch.randn(8, columns, device=DEVICE, dtype=dtype)
    ours.linear(x, weight, bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours.linear(x, weight, bias)
    x.normal_()
    graph.replay()
    assert torch.equal(captured, ours.linear(x, weight, bias))


@pytest.mark.parametrize("form", [gptq(sorts=True), awq()])
def test_a_token_of_four_bits_is_the_likeliest_of_what_they_stand_for(
    form: Any, tmp_path: Path
) -> None:
    """The engine's in float16, by transformers' logits in float32; as likely but for rounding."""
    model = tiny.build("llama", hidden_size=128, intermediate_size=256).half()
    quantized, plain = publish(tiny.save(model, tmp_path / "model"), tmp_path, *form)
    prompt = torch.arange(3, 40)[None]
    whole: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).to(DEVICE)
    expected = whole(prompt.to(DEVICE)).logits[0, -1]
    llm = LLM(str(quantized), max_requests=4, num_blocks=64)
    greedy = SamplingParams(temperature=0, max_tokens=1)
    (made,) = llm.generate([{"prompt_token_ids": prompt[0].tolist()}], greedy)
    chosen = made.outputs[0].token_ids[0]
    spread = float(expected.std())
    assert float(expected.max() - expected[chosen]) <= 0.05 * spread


@pytest.mark.on_cpu(torch.bfloat16)  # which Triton's interpreter does not have
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_triton_is_proven_and_taken(dtype: torch.dtype, cache: str) -> None:
    made, reason = gpu_operations(dtype, DEVICE, torch.float8_e4m3fn if cache == "fp8" else None)
    assert (made.name, reason) == ("triton", "layers in Triton")


def test_products_of_8_bit_floats_are_proven() -> None:
    if torch.cuda.get_device_capability() < FP8_GPU:
        pytest.skip("this GPU does not multiply 8-bit floats")
    prove_fp8(DEVICE)


def paged(family: str, dtype: torch.dtype) -> PagedModel:
    model = tiny.build(family).to(DEVICE, dtype)
    rope.pin(model, MAX_LEN)
    return PagedModel(model, families.check(model.config))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen3", "gemma3_text", "gpt2", "gpt_neox", "glm4", "granite", "cohere2"),
        *("mixtral", "qwen2_moe"),  # around their experts
    ],
)
def test_a_models_fused_layers_give_transformers_logits(
    family: str, dtype: torch.dtype, name: str
) -> None:
    model = paged(family, dtype)
    attention = pick(model.heads, model.kinds, DEVICE, "torch").attention
    size = model.weight_bytes
    expected = selftest.Expected.of(model, MAX_LEN)
    fused = fuse(model, operations(name))
    around = len(model.windows) if family in ("mixtral", "qwen2_moe") else 0
    assert (fused.fused, fused.around_mlp) == (len(model.windows) - around, around)
    assert bool(fused.reason) == bool(around)
    assert model.weight_bytes == size
    delta = selftest.check(model, attention, expected).delta
    print(f"{family} in {dtype}: {delta:.2g} of {selftest.TOLERANCE[dtype]}")


@both
@torch.inference_mode()
def test_a_cuda_graph_holds_a_chain_of_operations(name: str) -> None:
    """Replayed on other tokens and slots it gives what the operations give."""
    ours, tokens, width, dim = operations(name), 5, 256, 64
    qkv_weight = ours.pack([torch.randn(6 * dim, width, device=DEVICE)], dtype=torch.bfloat16)
    gate_up = ours.pack([torch.randn(2 * width, width, device=DEVICE)], dtype=torch.bfloat16)
    norm = Norm(torch.randn(width, device=DEVICE, dtype=torch.bfloat16), 1e-6)
    keys, values = (torch.zeros(4, 16, 1, dim, device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
    x, added = torch.randn(tokens, width, device=DEVICE), torch.randn(tokens, width, device=DEVICE)
    added, slots = added.bfloat16(), torch.arange(tokens, device=DEVICE)
    angles = torch.randn(tokens, dim, device=DEVICE)

    def chain() -> tuple[Tensor, ...]:
        normed, total = ours.norm(added, norm, x.clone())
        qkv = ours.linear(normed, qkv_weight)
        query = ours.rope_write(qkv, angles.cos(), angles.sin(), slots, keys, values)
        return total, query, ours.gated(ours.linear(normed, gate_up), "silu")

    chain()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    x.normal_()
    added.normal_()
    slots += 20
    graph.replay()
    got = [part.clone() for part in (*captured, keys, values)]
    keys.zero_()
    values.zero_()
    want = (*chain(), keys, values)
    for one, other in zip(got[:3], want[:3], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(got[3:], want[3:], strict=True):
        assert torch.equal(one.flatten(0, 1)[slots], other.flatten(0, 1)[slots])


def test_a_whole_model_on_the_host_gives_the_expected_logits_in_float32_on_the_gpu() -> None:
    """As rank 0 of a split model computes them: each module's weights are there while it runs."""
    on_host = tiny.build("granite").to(torch.bfloat16)
    rope.pin(on_host, MAX_LEN)
    windows = families.check(on_host.config)
    wanted = selftest.Expected.of(PagedModel(on_host, windows), MAX_LEN)
    with shards.computed_on(DEVICE, on_host):
        model = PagedModel(on_host, windows, DEVICE)
        got = selftest.Expected.of(model, MAX_LEN)
    for mine, theirs in zip(got.logits, wanted.logits, strict=True):
        spread = theirs.float().std(dim=1)
        distance = (mine.cpu() - theirs).float().square().mean(dim=1).sqrt() / spread
        assert float(distance.max()) < selftest.TOLERANCE[torch.bfloat16] / 4
    assert {parameter.device.type for parameter in on_host.parameters()} == {"cpu"}
