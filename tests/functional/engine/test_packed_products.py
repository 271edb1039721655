"""Matrices of a model's own code on packed weights: which are, what they give, and what is not."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions

from fairlead_kernels.choice.backend import pick
from fairlead_kernels.cpu.cpu_norms import CpuGatedNorm, CpuNorm
from fairlead_kernels.cpu.cpu_operations import CpuOperations
from fairlead_kernels.cpu.cpu_products import BiasedWeight, CpuMlp, CpuProducts
from fairlead_kernels.interface.layer import Packed
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_runtime.device.conversion import fusion
from fairlead_runtime.device.conversion.float32_view import widened_to_float32
from fairlead_runtime.device.conversion.fusion import fuse
from fairlead_runtime.device.conversion.packed_blocks import _Together
from fairlead_runtime.device.conversion.packed_linears import SMALLEST
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.sizing.terms import WIDE_ROWS
from support.engine_rig import paged
from support.full import LONG_FORM

# Families that do not fuse, without experts, with them, and with a scaled head.
FAMILIES = ("olmo2", "mixtral", "granitemoe")
MORE = (
    *("olmo", "olmo3", "exaone4", "gpt_oss", "hunyuan_v1_dense", "apertus", "qwen3_moe"),
    *("qwen2_moe", "phimoe", "olmoe"),
)


weak_storage: Any = reductions.StorageWeakRef  # torch does not annotate it


def kernels_of(model: PagedModel) -> tuple[Any, Any]:
    try:
        choice = pick(model.heads, model.kinds, model.device, "cpu")
    except NotAvailableError as error:
        pytest.skip(str(error))
    return choice.attention, choice.operations


def unfused(family: str, **settings: Any) -> PagedModel:
    """A model whose layers have an activation that does not fit."""
    model = paged(family, **settings)
    for module in model.model.modules():
        for name in ("act_fn", "act"):
            if isinstance(getattr(module, name, None), nn.Module):
                setattr(module, name, nn.Tanh())
    return model


def large(model: PagedModel) -> dict[str, nn.Module]:
    """The modules with a large matrix but for embeddings."""
    embedding = model.model.get_input_embeddings()
    return {
        name: module
        for name, module in model.model.named_modules()
        if module is not embedding
        and any(p.dim() == 2 and p.numel() >= SMALLEST for p in module.parameters(recurse=False))
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", (*FAMILIES, *MORE) if LONG_FORM else FAMILIES)
def test_linear_layers_and_the_head_are_packed_and_replace_the_loaded_ones(
    family: str, tied: bool
) -> None:
    model = paged(family, tie_word_embeddings=tied)
    attention, operations = kernels_of(model)
    expected, size = selftest.Expected.of(model, 512), model.weight_bytes
    modules = large(model)
    loaded = [
        weak_storage(p.untyped_storage())
        for module in modules.values()
        for p in module.parameters(recurse=False)
        if p.dim() == 2
    ]
    fused = fuse(model, operations)
    assert fused.products.matrices == len(modules) - 1
    packed = f"{len(modules) - 1} other matrices packed in {fused.products.blocks} blocks"
    assert str(fused).endswith(f"), {packed}, float32 head")
    for name, module in modules.items():
        assert all(p.numel() == 0 for p in module.parameters(recurse=False) if p.dim() != 1), name
    embedding: Any = model.model.get_input_embeddings()
    assert (embedding.weight.numel() == 0) == tied
    assert all(storage.expired() for storage in loaded), "their memory is free"
    # The head's rows to a whole panel; the others have one.
    assert 0 <= model.weight_bytes - size <= 4 * 31 * embedding.weight.shape[-1] + 4 * 31 * 64
    assert selftest.check(model, attention, expected).delta < 1e-4


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("family", ["olmo2", "mixtral"])
def test_matrices_in_bfloat16_are_packed_whether_or_not_the_processor_multiplies_them(
    family: str, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = paged(family, bfloat16=True, tie_word_embeddings=False)
    attention, operations = kernels_of(model)
    if pairs and not operations.library.bfloat16:
        pytest.skip("this processor does not multiply bfloat16")
    monkeypatch.setattr(operations.library, "bfloat16", pairs)
    expected, size = selftest.Expected.of(model, 512), model.weight_bytes
    modules = large(model)
    projection: Any = next(iter(modules.values()))
    weight = projection.weight.detach().clone()
    fused = fuse(model, operations)
    assert fused.products.matrices == len(modules) - 1
    packed = rf"\), {len(modules) - 1} other matrices packed in \d+ blocks, bfloat16 head"
    assert re.search(packed, str(fused))
    assert all(p.numel() == 0 for x in modules.values() for p in x.parameters() if p.dim() == 2)
    assert 0 <= model.weight_bytes - size <= 2 * 31 * 64 * (len(modules) + 1)
    # More tokens than are widened at a time; what comes out is the model's type, once rounded.
    x = torch.randn(2 * WIDE_ROWS + 3, weight.shape[1]).bfloat16()
    out = projection(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(
        out.float(), x.float() @ weight.float().T, rtol=2**-8, atol=1e-5, check_dtype=True
    )
    assert projection(x[:0]).shape == (0, len(weight))
    selftest.check(model, attention, expected)


def test_a_matrix_in_float32_of_a_model_in_bfloat16_keeps_its_numbers() -> None:
    """As some families' routers are."""
    model = paged("olmo2", bfloat16=True, tie_word_embeddings=False)
    _, operations = kernels_of(model)
    gate: Any = next(iter(large(model).values()))
    gate.weight.data = torch.randn(gate.weight.shape)
    gate.forward = lambda x: nn.functional.linear(x.float(), gate.weight).to(x.dtype)
    before, matrices = gate.weight.detach().clone(), len(large(model))
    fused = fuse(model, operations)
    assert fused.products.matrices == matrices - 2
    assert torch.equal(gate.weight, before)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_an_mlp_that_limits_large_numbers_stays_a_module(bfloat16: bool) -> None:
    model = paged("olmo2", bfloat16=bfloat16, tie_word_embeddings=False)
    _, operations = kernels_of(model)
    layers: Any = model.model.get_decoder().layers
    mlp = layers[0].mlp
    mlp.act_fn = _Limited(mlp.act_fn)
    x = 1e3 * torch.randn(5, mlp.gate_proj.weight.shape[1]).to(model.heads.dtype)
    with torch.inference_mode():
        want = mlp(x)
    fuse(model, operations)
    assert "forward" not in vars(mlp)
    assert "forward" in vars(layers[1].mlp)
    with torch.inference_mode():
        got = mlp(x)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.05 * float(want.abs().max()))


class _Limited(nn.Module):
    """An activation of numbers up to 7, as some families' experts and MLPs have."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        limited: Tensor = self.activation(x.clamp(max=7.0))
        return limited


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "qwen2"])
def test_matrices_stored_transposed_scaled_embeddings_and_biases_are_packed_too(
    family: str,
) -> None:
    model = unfused(family, tie_word_embeddings=True)
    attention, operations = kernels_of(model)
    expected, count = selftest.Expected.of(model, 512), len(large(model))
    fused = fuse(model, operations)
    assert fused.fused == 0
    # The table of positions is no matrix.
    assert fused.products.matrices == count - (2 if family == "gpt2" else 1)
    assert fused.head == "float32"
    embedding: Any = model.model.get_input_embeddings()
    assert embedding.weight.numel() == 0
    assert selftest.check(model, attention, expected).delta < 1e-4


@pytest.mark.parametrize("family", ["olmo2", "gpt2"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w, out: out + 0 * w[0, 0], "its code reads weights itself: IndexError"),
        (
            lambda w, out: out + w.square().sum() * out.sin(),
            "its code gives other logits with them",
        ),
    ],
)
def test_a_model_whose_code_reads_weights_itself_gets_them_back(
    family: str, change: Callable[[Tensor, Tensor], Tensor], reason: str
) -> None:
    model = unfused(family)
    attention, operations = kernels_of(model)
    inner: Any = model.model.model if family == "olmo2" else model.model.transformer
    layer = (inner.layers if family == "olmo2" else inner.h)[1]
    read = layer.mlp.up_proj if family == "olmo2" else layer.mlp.c_fc
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: change(read.weight, forward(x))
    expected, size = selftest.Expected.of(model, 512), model.weight_bytes
    before = {name: p.data.clone() for name, p in model.model.named_parameters()}
    fused = fuse(model, operations)
    assert fused.fused == 0
    assert f"), no other matrices packed ({reason})" in str(fused)
    assert not fused.head
    assert not model.packed
    assert model.weight_bytes == size
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert selftest.check(model, attention, expected).delta < 1e-5


def test_modules_that_are_no_product_or_share_it_stay_as_they_are() -> None:
    model = paged("olmo2")
    attention, operations = kernels_of(model)
    layers: Any = model.model.model
    first, second = layers.layers[0], layers.layers[1]
    first.mlp.down_proj.register_forward_hook(lambda _m, _i, out: out.sin())
    second.mlp.up_proj.weight = second.mlp.gate_proj.weight
    kept = (first.mlp.down_proj, second.mlp.up_proj, second.mlp.gate_proj)
    expected, count = selftest.Expected.of(model, 512), len(large(model))
    fused = fuse(model, operations)
    assert fused.products.matrices == count - 1 - len(kept)
    assert all(module.weight.numel() for module in kept)
    assert selftest.check(model, attention, expected).delta < 1e-4


def test_a_matrix_whose_packed_product_differs_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = unfused("qwen2")
    attention, operations = kernels_of(model)
    linear = CpuOperations.linear

    def without_bias(self: CpuOperations, x: Tensor, weight: Packed, _: Any = None) -> Tensor:
        return linear(self, x, weight)

    monkeypatch.setattr(CpuOperations, "linear", without_bias)
    biased = sum(getattr(module, "bias", None) is not None for module in large(model).values())
    expected, count = selftest.Expected.of(model, 512), len(large(model))
    fused = fuse(model, operations)
    assert biased
    assert fused.products.matrices == count - 1 - biased
    assert selftest.check(model, attention, expected).delta < 1e-4


def test_quantized_linear_layers_are_packed_as_they_are_or_get_their_numbers_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = paged("olmo2", tie_word_embeddings=False)
    attention, operations = kernels_of(model)
    fusion._quantize_linears(model, "int8")
    expected, count = selftest.Expected.of(model, 512), len(large(model))
    before = {name: p.data.clone() for name, p in model.model.named_parameters()}
    linear = CpuOperations.linear
    with monkeypatch.context() as patch:
        patch.setattr(CpuOperations, "linear", lambda *x: linear(*x) + 1)
        assert fuse(model, operations).products.matrices == 0
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert fuse(model, operations).products.matrices == count - 1
    assert fusion.quantized_elements(model) == 0, "bits and scales are held packed alone"
    assert all("scales" not in name or not p.numel() for name, p in model.model.named_parameters())
    assert selftest.check(model, attention, expected).delta < 1e-2


def test_one_matrix_at_a_time_is_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = paged("olmo2")
    _, operations = kernels_of(model)
    largest = max(4 * p.numel() for p in model.model.parameters())
    pack, made, before, peaks = CpuOperations.pack, list[Packed](), model.weight_bytes, list[int]()

    def watched(self: CpuOperations, *weights: Any, **how: Any) -> Packed:
        made.append(pack(self, *weights, **how))
        held = sum(p.nbytes for p in model.model.parameters()) + sum(x.nbytes for x in made)
        peaks.append(held - before)
        return made[-1]

    monkeypatch.setattr(CpuOperations, "pack", watched)
    fuse(model, operations)
    assert made
    assert 0 < max(peaks) <= largest + 4 * 31 * 64


def blocks_of(model: PagedModel) -> dict[str, Any]:
    """By name the modules of a fused model that the kernels compute in one call."""
    return {
        name: vars(module)["forward"]
        for name, module in model.model.named_modules()
        if "forward" in vars(module)
    }


def test_norms_mlps_and_products_of_one_input_are_one_call_each() -> None:
    model = paged("olmo2")
    attention, operations = kernels_of(model)
    layers = len(model.windows)
    expected = selftest.Expected.of(model, 512)
    fused = fuse(model, operations)
    # In a layer two norms after, two of heads, one MLP, one product for queries, keys and values.
    assert fused.products.blocks == 6 * layers + 1
    blocks = blocks_of(model)
    assert {name for name in blocks if name.endswith(".mlp")} == {
        f"model.layers.{i}.mlp" for i in range(layers)
    }
    assert sum(name.endswith("norm") for name in blocks) == 4 * layers + 1
    assert selftest.check(model, attention, expected).delta < 1e-4


def test_a_mixers_matrix_of_half_a_panel_of_rows_is_packed_too() -> None:
    model = paged("qwen3_5_text", hidden_size=128, linear_num_value_heads=16)
    attention, operations = kernels_of(model)
    expected = selftest.Expected.of(model, 512)
    narrow = [x for name, x in large(model).items() if name.endswith(("in_proj_a", "in_proj_b"))]
    assert len(narrow) == 2 * len(model.mixers)
    assert all(len(x.weight) == 16 for x in narrow)  # type: ignore[arg-type]
    count, size = len(large(model)), model.weight_bytes
    fused = fuse(model, operations)
    assert fused.products.matrices == count - 1
    # One product for all that a mixer's input is multiplied by, one for its result.
    assert all(x.forward.__qualname__.startswith("_Together") for x in narrow)
    assert model.weight_bytes - size <= 4 * 128 * (31 + 2 * 31 * len(model.mixers))
    assert selftest.check(model, attention, expected).delta < 1e-4


def test_products_of_tensors_with_the_same_numbers_are_not_of_one_input() -> None:
    """Attention multiplies its input by 1 beside the mixer, which takes it as it is."""
    model = paged("falcon_h1", attention_in_multiplier=1.0, ssm_in_multiplier=1.0)
    attention, operations = kernels_of(model)
    expected = selftest.Expected.of(model, 512)
    fuse(model, operations)
    layer: Any = model.model.model.layers[0]
    products = [x.forward for x in (layer.self_attn.q_proj, layer.self_attn.v_proj)]
    assert all(x.__qualname__.startswith("_Together") for x in products)
    assert not layer.mamba.in_proj.forward.__qualname__.startswith("_Together")
    assert selftest.check(model, attention, expected).delta < 1e-4


@pytest.mark.parametrize("kind", ["mlp", "norm"])
def test_a_block_that_does_more_stays_as_it_is(kind: str) -> None:
    model = paged("olmo2")
    attention, operations = kernels_of(model)
    layer = model.model.model.layers[1]
    changed: Any = layer.mlp if kind == "mlp" else layer.post_attention_layernorm
    changed.register_forward_hook(lambda _m, _i, out: out + out.sin())
    expected = selftest.Expected.of(model, 512)
    fused = fuse(model, operations)
    # Products of the gate and of the other half, which have one input, take the MLP's place.
    assert fused.products.blocks == 6 * len(model.windows) + (1 if kind == "mlp" else 0)
    assert "forward" not in vars(changed)
    assert selftest.check(model, attention, expected).delta < 1e-4


def test_a_module_with_a_forward_pass_of_its_own_keeps_it() -> None:
    model = paged("olmo2")
    _, operations = kernels_of(model)
    layer: Any = model.model.model.layers[1]
    own = {}
    for module in (layer.mlp, layer.post_attention_layernorm):
        own[module] = module.forward = partial(module.forward)
    fuse(model, operations)
    for module, forward in own.items():
        assert vars(module)["forward"] is forward


def test_a_module_that_is_called_in_several_ways_stays_as_it_is() -> None:
    """What takes a block's or a matrix's place has no name for its input."""
    model = paged("olmo2")
    attention, operations = kernels_of(model)
    layer: Any = model.model.model.layers[1]
    named = {
        layer.mlp: "x",
        layer.post_attention_layernorm: "hidden_states",
        layer.self_attn.q_proj: "input",
    }
    forward = layer.forward

    def twice(*inputs: Any, **settings: Any) -> Any:
        out = forward(*inputs, **settings)
        for module, name in named.items():
            module(**{name: out})
        return out

    layer.forward = twice
    expected = selftest.Expected.of(model, 512)
    fused = fuse(model, operations)
    assert fused.products.blocks > 0, fused
    assert not {"forward"} & {name for module in named for name in vars(module)}
    assert selftest.check(model, attention, expected).delta < 1e-4


def test_a_block_that_gives_other_results_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = paged("olmo2")
    attention, operations = kernels_of(model)
    call, joined, norm = CpuMlp.__call__, CpuProducts.__call__, CpuNorm.__call__
    monkeypatch.setattr(CpuMlp, "__call__", lambda self, x: call(self, x) * 1.01)
    monkeypatch.setattr(
        CpuProducts,
        "__call__",
        lambda self, x: [y + (len(self.parts) > 1) for y in joined(self, x)],
    )
    monkeypatch.setattr(CpuNorm, "__call__", lambda self, x: norm(self, x) * 1.01)
    expected = selftest.Expected.of(model, 512)
    fused = fuse(model, operations)
    assert fused.products.blocks == 0
    assert fused.products.matrices > 0
    assert selftest.check(model, attention, expected).delta < 1e-4


def norms_of(model: PagedModel) -> dict[str, Any]:
    return {name: x for name, x in model.model.named_modules() if name.endswith("norm")}


def distance(got: Tensor, exact: Tensor) -> float:
    return float((got.detach().double() - exact).square().mean().sqrt())


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "nemotron_h", *(("falcon_h1", "olmo_hybrid") if LONG_FORM else ())]
)
def test_norms_in_bfloat16_are_nearer_to_float32_than_the_models_own_code(family: str) -> None:
    model = paged(family, bfloat16=True)
    _, operations = kernels_of(model)
    norms, matrices, size = norms_of(model), len(large(model)), model.weight_bytes
    fuse(model, operations)
    assert set(norms) <= set(blocks_of(model))
    gated = [name for name, module in norms.items() if "Gated" in type(module).__name__]
    assert len(gated) == len(model.mixers)
    assert model.weight_bytes - size <= 2 * 31 * 128 * (matrices + 1)
    for name, module in norms.items():
        own = partial(type(module).forward, module)
        x, gate = (2 * torch.randn(2, 1, 7, len(module.weight))).bfloat16()
        rest = (gate,) if name in gated else ()
        with widened_to_float32(module):
            exact = own(x.float(), *(y.float() for y in rest)).detach().double()
        # What an operation on states gives may be float32.
        for values in (x, x.float()):
            got, theirs = module(values, *rest), own(values, *rest)
            assert got.dtype is theirs.dtype
            if values.dtype is torch.bfloat16:
                assert distance(got, exact) <= distance(theirs, exact), name
            else:
                torch.testing.assert_close(got, theirs, rtol=1e-5, atol=1e-5)
        module.weight.data.add_(1)  # the vectors that it reads are those that the model holds
        torch.testing.assert_close(module(x, *rest), own(x, *rest), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kinds", [(CpuOperations, CpuNorm), (CpuMlp, CpuGatedNorm)])
def test_what_gives_other_results_of_bfloat16_alone_stays_as_it_is(
    kinds: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = paged("qwen3_5_text", bfloat16=True)
    _, operations = kernels_of(model)
    for kind in kinds:
        name = "linear" if kind is CpuOperations else "__call__"
        monkeypatch.setattr(kind, name, differing(getattr(kind, name)))
    norms, mlp = norms_of(model), model.model.model.layers[0].mlp
    fused = fuse(model, operations)
    replaced = {name for name, module in norms.items() if "forward" in vars(module)}
    with_gate = {name for name in norms if ".linear_attn." in name}
    if CpuNorm in kinds:
        assert fused.products.matrices == 0
        assert replaced == with_gate
    else:
        assert fused.products.matrices > 0
        assert "forward" not in vars(mlp)
        # One that gets float32, as from an operation on states, computes that still.
        assert replaced == set(norms)
        for norm in (norms[name] for name in with_gate):
            x, gate = torch.randn(2, 5, len(norm.weight)).bfloat16()
            assert torch.equal(norm(x, gate), type(norm).forward(norm, x, gate))


def differing(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def differs(self: Any, x: Tensor, *rest: Any) -> Tensor:
        out = call(self, x, *rest)
        return out if x.dtype is torch.float32 else out * 1.005

    return differs


def test_a_norm_that_is_called_with_a_gate_and_without_stays_as_it_is() -> None:
    model = paged("nemotron_h")
    attention, operations = kernels_of(model)
    first, second, *_ = (mixer.module for mixer in model.mixers.values())
    first.norm.register_forward_hook(lambda m, x, out: (m(x[0]), out)[1] if len(x) == 2 else out)
    expected = selftest.Expected.of(model, 512)
    fuse(model, operations)
    assert "forward" not in vars(first.norm)
    assert "forward" in vars(second.norm)
    assert selftest.check(model, attention, expected).delta < 1e-4


def test_a_norm_with_a_gate_that_does_more_stays_as_it_is() -> None:
    model = paged("qwen3_5_text")
    _, operations = kernels_of(model)
    first, second, *_ = (mixer.module for mixer in model.mixers.values())
    first.norm.register_forward_hook(lambda _m, _i, out: out + out.sin())
    fuse(model, operations)
    assert "forward" not in vars(first.norm)
    assert "forward" in vars(second.norm)


def test_the_epsilon_of_a_norm_with_a_gate_is_found_by_small_numbers() -> None:
    model = paged("qwen3_5_text")
    _, operations = kernels_of(model)
    norms = [mixer.module.norm for mixer in model.mixers.values()][:2]
    # What a step gives tells neither of them.
    for norm, eps, other in zip(norms, (1e-12, 1e-11), (1e-11, 1e-12), strict=True):
        norm.variance_epsilon, norm.other = eps, other
    fuse(model, operations)
    for norm in norms:
        assert "forward" in vars(norm)
        x, gate = torch.randn(2, 5, len(norm.weight))
        want = type(norm).forward(norm, 1e-6 * x, gate)
        torch.testing.assert_close(norm(1e-6 * x, gate), want, rtol=1e-4, atol=1e-5)


def test_blocks_go_when_the_model_gives_other_logits_with_them() -> None:
    model = paged("olmo2")
    attention, operations = kernels_of(model)
    layer: Any = model.model.model.layers[1]
    forward = layer.self_attn.forward
    layer.self_attn.forward = lambda *x, **settings: (
        forward(*x, **settings)[0] + 0 * layer.mlp.up_proj.weight[0, 0],
        None,
    )
    expected = selftest.Expected.of(model, 512)
    fused = fuse(model, operations)
    assert "its code reads weights itself" in fused.products.reason
    assert set(blocks_of(model)) == {"model.layers.1.self_attn"}
    assert selftest.check(model, attention, expected).delta < 1e-5


def test_modules_that_get_other_tensors_compute_their_own_products() -> None:
    _, operations = kernels_of(paged("olmo2"))
    parts = [BiasedWeight(operations.pack([torch.randn(n, 40)])) for n in (40, 64)]
    together = _Together(CpuProducts(operations.library, parts))
    first, second = (together.forward_of(place) for place in (0, 1))
    x, y = torch.randn(2, 1, 3, 40)
    want = [operations.linear(z[0], part.weight)[None] for part in parts for z in (x, y)]
    for _ in range(2):  # a step after the other
        assert torch.equal(first(x), want[0])
        assert torch.equal(second(x), want[2])
    # What the first has computed of another tensor is not taken.
    assert torch.equal(first(x), want[0])
    assert torch.equal(second(y), want[3])
    assert torch.equal(first(y), want[1])
    assert torch.equal(second(y), want[3])
    assert first(x[:, :0]).shape == (1, 0, 40)


def test_products_of_one_input_hold_nothing_when_all_are_taken() -> None:
    _, operations = kernels_of(paged("olmo2"))
    parts = [BiasedWeight(operations.pack([torch.randn(n, 40)])) for n in (40, 64)]
    together = _Together(CpuProducts(operations.library, parts))
    x = torch.randn(1, 3, 40)
    held = weak_storage(x.untyped_storage())
    outs = [together.forward_of(place)(x) for place in (0, 1)]
    made = [weak_storage(out.untyped_storage()) for out in outs]
    del x, outs
    assert held.expired()
    assert all(storage.expired() for storage in made)
