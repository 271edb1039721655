"""Decoder layers fused by structure: which fit, that they compute the same, and what is refused."""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fairlead_kernels.choice.backend import BackendChoice, pick
from fairlead_kernels.cpu.cpu_layers import LayerChain
from fairlead_kernels.formats.quantize import Format
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import Heads
from fairlead_kernels.interface.layer import LayerOperations, Norm, Packed
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_kernels.plain.torch_operations import TorchOperations
from fairlead_runtime.device.conversion import recognize_ends
from fairlead_runtime.device.conversion.fusion import Fusion, _runs, fuse, quantize_weights
from fairlead_runtime.device.conversion.module_calls import ModuleCall
from fairlead_runtime.device.conversion.recognize_layer import DoesNotFitError, norm_of
from fairlead_runtime.device.conversion.recording_pass import decoder_layers
from fairlead_runtime.device.model import fused_layers
from fairlead_runtime.device.model.fused_layers import FusedRun
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.device.warmup import profiling
from fairlead_runtime.models import families, loading
from fairlead_runtime.models.model_error import SelfTestError
from fairlead_runtime.models.quantized import QuantizedLinear
from fairlead_runtime.sizing.arithmetic import PANEL
from fairlead_runtime.sizing.shape import ModelShape
from support import flashinfer_standin, tiny, tiny_any
from support.engine_rig import attend_once, paged
from support.full import LONG_FORM
from support.operation_cases import interpreted
from support.operation_cases import operations as gpu_operations
from support.published import compressed_tensors, publish

EVERY = (*tiny.FAMILIES, *tiny.VARIANTS, *tiny.SIZED, *tiny.UNLISTED)
# Families that do not fit, and a part of the reason.
NO_NORM = "does not normalize the input of its attention"
OTHER_NORM = "is no root-mean-square or layer norm"
OTHER_MLP = "its MLP is not two or three matrices"
LIMITED = "its MLP computes something else with large numbers"
LIMITED_HEADS = "its attention gets something else of large numbers"
ROPE = "are not projected and rotated as Llama's or GLM's"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "exaone4", "gemma3n_text"), NO_NORM),
    **dict.fromkeys(("gpt_oss", "hunyuan_v1_dense", "ministral3"), ROPE),
    **dict.fromkeys(("apertus", "qwen3_moe", "mixtral", "granitemoe"), OTHER_MLP),
    **dict.fromkeys(("qwen2_moe", "phimoe"), OTHER_MLP),
    "olmoe": "it computes with OlmoeRMSNorm",
    **dict.fromkeys(("mimo_v2_flash", "gemma4_text", "gemma4_unified_text"), ROPE),
}
# Those that operations of GPUs fuse around their MLP.
AROUND_MLP = {family for family, reason in REFUSED.items() if reason == OTHER_MLP}


def attention(model: PagedModel) -> Any:
    return pick(model.heads, model.kinds, model.device, "torch").attention


def kernels_of(model: PagedModel, kernels: str) -> tuple[Any, LayerOperations]:
    """Attention and operations; C++ ones only where they are built. torch and triton are those of
    GPUs, and with the latter attention is flashinfer's stand-in.
    """
    if kernels == "reference":
        return attention(model), reference
    if kernels == "torch":
        return attention(model), gpu_operations(kernels)
    if kernels == "triton":
        return flashinfer_standin.attention(model.heads, model.kinds), gpu_operations(kernels)
    try:
        choice = pick(model.heads, model.kinds, model.device, "cpu")
    except NotAvailableError as error:
        pytest.skip(str(error))
    assert choice.operations is not None
    return choice.attention, choice.operations


def room_of(model: PagedModel) -> int:
    """Bytes that a packed head may take beyond its weights: rows to a whole panel, and a scale per
    row where logits are scaled.
    """
    width: int = model.model.config.get_text_config().hidden_size
    return 4 * (31 * width + model.logits_width)


@pytest.mark.parametrize("family", tiny.UNLISTED)
def test_the_plan_knows_which_judged_families_are_fused(family: str) -> None:
    shape = ModelShape.from_config({"model_type": family, **tiny.settings_of(family)})
    assert (shape.slab_width == 0) == (family in REFUSED)


@pytest.mark.parametrize("kernels", [pytest.param("reference", marks=pytest.mark.full), "cpu"])
@pytest.mark.parametrize("family", EVERY)
def test_a_layer_is_fused_where_it_fits_and_the_reason_is_said_where_not(
    family: str, kernels: str
) -> None:
    model = paged(family)
    attention, operations = kernels_of(model, kernels)
    expected, size = selftest.Expected.of(model, 512), model.weight_bytes
    filled = sum(
        4 * (-len(x) % PANEL) * x.shape[1] for x in model.model.parameters() if x.dim() == 2
    )
    room = room_of(model) + filled * (family in REFUSED)
    fused = fuse(model, operations)
    assert fused.layers == len(model.windows)
    assert fused.fused == (0 if family in REFUSED else fused.layers)
    assert REFUSED.get(family, "") in fused.reason
    assert bool(fused.reason) == (family in REFUSED)
    assert selftest.check(model, attention, expected).delta < 1e-4
    assert 0 <= model.weight_bytes - size <= (room if kernels == "cpu" else 0)
    assert (fused.head == "float32") == (kernels == "cpu")
    assert (fused.products.matrices > 0) == (kernels == "cpu" and family in REFUSED)


@pytest.mark.parametrize(
    ("family", "fused", "reason"),
    [
        ("lfm2", 1, "layer 0: it keeps a state"),
        ("qwen3_5_text", 0, "layer 0: it keeps a state; layer 1: "),
        ("nemotron_h", 0, "layer 1: it has no attention"),
    ],
)
def test_of_layers_beside_states_those_that_fit_are_fused(
    family: str, fused: int, reason: str
) -> None:
    model = paged(family)
    attention, operations = kernels_of(model, "cpu")
    expected = selftest.Expected.of(model, 512)
    fusion = fuse(model, operations)
    assert fusion.fused == fused
    assert reason in fusion.reason
    assert fusion.products.matrices > 0
    assert selftest.check(model, attention, expected).delta < 1e-4


def test_a_run_of_layers_ends_where_heads_change_though_the_matrices_are_as_large() -> None:
    layers: Any = [SimpleNamespace(index=i, sizes=(48, 16)) for i in (0, 1, 2, 3, 5)]
    heads = [Heads(4, 1, 8, 8, torch.float32)] * 2 + [Heads(2, 2, 8, 8, torch.float32)] * 4
    assert [[layer.index for layer in run] for run in _runs(layers, heads)] == [[0, 1], [2, 3], [5]]


# Other forms of a family, by settings of its configuration.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention, then MLP": ("gpt_neox", {"use_parallel_residual": False}),
    "beside each other with one norm": ("stablelm", {"use_parallel_residual": True}),
    "norms of heads": ("phi", {"qk_layernorm": True}),
    "no norms of heads": ("persimmon", {"qk_layernorm": False}),
    "no biases": ("starcoder2", {"use_bias": False}),
    "a key head per query": ("gpt_bigcode", {"multi_query": False}),
    "scores scaled by the layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "a gate": ("cohere2", {"hidden_act": "relu"}),
}


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_a_family_are_fused_too(form: str, kernels: str) -> None:
    family, settings = FORMS[form]
    model = paged(family, **settings)
    attention, operations = kernels_of(model, kernels)
    expected = selftest.Expected.of(model, 512)
    count = len(model.windows)
    head = ", float32 head" if kernels == "cpu" else ""
    assert str(fuse(model, operations)) == f"fused {count}/{count} layers{head}"
    assert selftest.check(model, attention, expected).delta < 1e-4


# GPT-2 stores matrices [K, N], GPT-NeoX's and GLM's rows are put into another order, Granite's are
# multiplied.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize(
    ("family", "kernels", "quantized"),
    [
        *itertools.product(
            ("llama", "gpt2", "gpt_neox", "glm4", "granite", "gemma3_text"),
            ("reference", "cpu", "torch") if LONG_FORM else ("cpu",),
            ("int8",),
        ),
        ("gpt_neox", "reference", "int8"),
        ("gpt2", "torch", "int8"),
        *itertools.product(
            ("llama", "gpt_neox", "granite"),
            ("reference", "torch") if LONG_FORM else ("torch",),
            ("fp8",),
        ),
        ("granite", "triton", "int8"),
    ],
)
def test_layers_with_quantized_weights_compute_what_transformers_does_with_the_rounded_ones(
    family: str, kernels: str, quantized: Format
) -> None:
    model, plain = paged(family), paged(family)
    attention, operations = kernels_of(model, kernels)
    size = model.weight_bytes
    quantize_weights(model, quantized)
    modules = dict(model.model.named_modules())
    changed = {name: x for name, x in modules.items() if isinstance(x, QuantizedLinear)}
    stored = {name: plain.model.get_parameter(f"{name}.weight") for name in changed}
    assert stored
    assert all(parameter.dim() == 2 for parameter in stored.values())
    matrices = sum(parameter.numel() for parameter in stored.values())
    channels = sum(module.weight.shape[0] for module in changed.values())
    expected = selftest.Expected.of(model, 512)
    fused = fuse(model, operations)
    count = len(model.windows)
    head = ", float32 head" if kernels == "cpu" else ""
    assert str(fused) == f"fused {count}/{count} layers, {quantized} weights{head}"
    # On a processor with VNNI products of int8 weights round their inputs to 16 bits.
    rounds = operations.int8_rounding > 0
    assert rounds == ("+" in operations.name)
    allowed = 2e-3 if rounds else 1e-4
    assert selftest.check(model, attention, expected, allowed).delta < allowed
    saved = 3 * matrices - 4 * channels
    assert saved - room_of(model) <= size - model.weight_bytes <= saved


def on_a_gpu_that_multiplies_fp8(
    model: PagedModel, _kernels: str, *, operations: LayerOperations, **_settings: bool
) -> BackendChoice:
    return BackendChoice(attention(model), operations)


@pytest.mark.parametrize("stored", [False, True])
def test_activations_in_fp8_have_a_limit_of_their_own_and_attention_is_judged_without_them(
    stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = TorchOperations(fp8=True)
    pick_it = partial(on_a_gpu_that_multiplies_fp8, operations=operations)
    monkeypatch.setattr(selftest, "_pick", pick_it)
    model = tiny.save(tiny.build("llama").to(torch.bfloat16), tmp_path / "model")
    setting = "fp8"
    if stored:
        model, _ = publish(model, tmp_path, *compressed_tensors(kind="float"))
        setting = "none"
    served, result = selftest.prepare_and_test(loading.load(model), "auto", setting)
    assert str(served.fusion) == "fused 3/3 layers, fp8 weights"
    assert operations.rounds, "it is switched on again"
    assert (result.rounding is None) is stored
    assert result.activations is not None
    assert 3 * result.delta < result.activations < selftest.ROUNDING["fp8"]
    assert result.delta < selftest.TOLERANCE[torch.bfloat16] / 3
    assert "; with fp8 activations 0." in str(result)


@pytest.mark.parametrize("quantized", ["none", "fp8"])
def test_beside_an_fp8_cache_layers_are_fused_and_judged_as_before(
    quantized: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pick_it = partial(on_a_gpu_that_multiplies_fp8, operations=TorchOperations())
    monkeypatch.setattr(selftest, "_pick", pick_it)
    folder = tiny.save(tiny.build("llama").to(torch.bfloat16), tmp_path / "model")
    loaded = loading.load(folder)
    served, result = selftest.prepare_and_test(loaded, "auto", quantized, fp8_cache=True)
    assert served.fusion.fused == 3
    assert served.model.heads.cache_dtype is torch.float8_e4m3fn
    assert result.tolerance == selftest.TOLERANCE[torch.bfloat16]
    assert result.cached is not None
    assert result.cached[0] < result.cached[1] == selftest.CACHE_TOLERANCE[torch.bfloat16]
    assert result.cache is not None
    assert 0 < result.cache.moved < selftest.CACHE_ROUNDING
    assert str(result).count("move logits by 0.") == (1 if quantized == "none" else 2)


# Each form of a layer: biases and layer norms, MLPs without a gate and beside attention, rows in
# another order, pairs of neighbours, multipliers, offsets and norms of heads and of results.
GPU_FAMILIES = (
    *("llama", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "glm4", "granite", "cohere2"),
    *("persimmon", "nemotron", "qwen3", "mixtral", "qwen2_moe", "phimoe", "apertus"),
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *itertools.product(EVERY if LONG_FORM else GPU_FAMILIES, ["torch"]),
        *itertools.product(
            EVERY if LONG_FORM else ("gpt2", "persimmon", "glm4", "mixtral"), ["triton"]
        ),
    ],
)
def test_operations_of_gpus_fuse_what_fits(family: str, kernels: str) -> None:
    model = paged(family)
    attention, operations = kernels_of(model, kernels)
    expected, size = selftest.Expected.of(model, 512), model.weight_bytes
    fused = fuse(model, operations)
    assert fused.fused == (0 if family in REFUSED else fused.layers)
    assert fused.around_mlp == (fused.layers if family in AROUND_MLP else 0)
    assert REFUSED.get(family, "") in fused.reason
    assert selftest.check(model, attention, expected).delta < 1e-4
    assert model.weight_bytes == size, "packed weights replace those of the model"


# What a layer does beside an MLP that is transformers' code: adds it times a factor, normalizes it,
# or computes it beside attention, with one norm for both or its own.
OWN_MLPS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3_moe", {}),
    "experts with layer norms": ("phimoe", {}),
    "experts beside a shared one": ("qwen2_moe", {}),
    "a factor": ("granitemoe", {"residual_multiplier": 0.3}),
    "a norm after it": ("gemma2", {"hidden_activation": "tanh"}),
    "beside attention": ("cohere2", {"hidden_act": "tanh"}),
    "beside attention with its own norm": ("gpt_neox", {"hidden_act": "tanh"}),
}


@pytest.mark.parametrize("form", OWN_MLPS)
def test_a_layer_is_fused_around_an_mlp_that_stays_the_models_own(form: str) -> None:
    family, settings = OWN_MLPS[form]
    model = paged(family, **settings)
    expected, count = selftest.Expected.of(model, 512), len(model.windows)
    layers: list[Any] = [*decoder_layers(model)]
    own = [getattr(layer, "mlp", None) or layer.block_sparse_moe for layer in layers]
    weights = [[(p, p.data_ptr()) for p in mlp.parameters()] for mlp in own]
    text = f"fused 0/{count} layers and all but the MLP of {count} (layer 0: {OTHER_MLP}"
    assert str(fuse(model, TorchOperations())).startswith(text)
    inside = {id(p) for mlp in own for p in mlp.parameters()}
    for layer in layers:
        assert all(p.numel() == 0 for p in layer.parameters() if id(p) not in inside)
    for parameter, place in itertools.chain(*weights):
        assert parameter.data_ptr() == place, "its weights are those that were loaded"
    calls = list[int]()
    for mlp in own:
        mlp.register_forward_hook(lambda _m, _i, out: calls.append(out.shape[1]))
    assert selftest.check(model, attention(model), expected).delta < 1e-4
    assert calls


def test_a_layer_of_quantized_weights_is_not_fused_around_its_mlp() -> None:
    model = paged("mixtral")
    size = model.weight_bytes
    quantize_weights(model, "int8")
    assert model.weight_bytes == size
    assert not any(isinstance(x, QuantizedLinear) for x in model.model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_an_mlp_of_the_models_own_computes_in_its_type(family: str, dtype: torch.dtype) -> None:
    model = paged(family, dtype=dtype)
    operations, size, count = Watched(), model.weight_bytes, len(model.windows)
    layers = decoder_layers(model)
    own: list[Any] = [layer.mlp for layer in layers]
    seen = list[tuple[torch.dtype, ...]]()
    for mlp in own:
        mlp.register_forward_hook(
            lambda mlp, given, out: seen.append(
                (given[0].dtype, next(mlp.parameters()).dtype, out.dtype)
            )
        )
    expected = selftest.Expected.of(model, 512)
    seen.clear()
    fused = fuse(model, operations)
    name = str(dtype).removeprefix("torch.")
    assert str(fused).endswith(f"), {name} weights")
    assert (fused.fused, fused.around_mlp, fused.stored) == (0, count, dtype)
    assert set(seen) == {(torch.float32,) * 3}, "layers are compared in float32"
    assert model.weight_bytes == size, "the weights are held once, in their own type"
    seen.clear()
    operations.seen.clear()
    delta = selftest.check(model, attention(model), expected).delta
    assert 0 < 2 * delta < selftest.TOLERANCE[dtype]
    assert set(seen) == {(dtype,) * 3}
    assert operations.seen == {("x", dtype), ("weight", dtype), ("residual", torch.float32)}


class Watched(TorchOperations):
    """Remembers the types that products and sums are given."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, torch.dtype]] = set()

    def linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        self.seen |= {("x", x.dtype), ("weight", weight.data.dtype)}
        return super().linear(x, weight, bias)

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if residual is not None:
            self.seen |= {("residual", residual.dtype)}
        return super().norm(x, norm, residual)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.full] * (family not in (*GPU_FAMILIES, "opt")))
        for family in EVERY
        if family not in REFUSED.keys() - AROUND_MLP
    ],
)
def test_fused_layers_start_on_flashinfers_wrappers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: wrappers are made for the kinds of layers that there are, fused or not. OPT's
    own code multiplies its queries, its fused layers leave that to the scores.
    """

    def pick_on_gpu(heads: Any, kinds: Any, *_: Any, **__: Any) -> BackendChoice:
        return BackendChoice(flashinfer_standin.attention(heads, kinds), TorchOperations())

    monkeypatch.setattr(selftest, "pick", pick_on_gpu)
    loaded = loading.load(tiny.save(tiny.build(family), tmp_path))
    served, result = selftest.prepare_and_test(loaded, "auto")
    assert served.fusion.fused + served.fusion.around_mlp == served.fusion.layers
    assert result.delta < selftest.TOLERANCE[torch.float32]
    assert served.choice.attention.kinds == served.model.kinds  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, {}) for family in ("llama", "gpt2", "gpt_neox", "glm4", "gemma3_text")),
        ("granite", {"residual_multiplier": 0.3}),
    ],
)
def test_on_gpus_layers_compute_in_the_models_type_with_a_residual_in_float32(
    family: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    model = paged(family, dtype=dtype, **settings)
    operations, size = Watched(), model.weight_bytes
    expected = selftest.Expected.of(model, 512)
    fused = fuse(model, operations)
    assert (fused.fused, fused.reason, fused.stored) == (len(model.windows), "", dtype)
    assert model.weight_bytes == size, "the weights are held once, in their own type"
    assert operations.seen >= {("x", torch.float32)}, "layers are compared in float32"
    operations.seen.clear()
    result = selftest.check(model, attention(model), expected)
    assert 0 < 2 * result.delta < result.tolerance
    print(f"{family} in {dtype}: {result.delta:.2g} of {result.tolerance:.2g}")
    assert operations.seen == {("x", dtype), ("weight", dtype), ("residual", torch.float32)}


class Launches:
    """Kernels that compute nothing; ``seen`` has their names."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return defaultdict(lambda: lambda *_, **__: self.seen.append(name))


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Remembers torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("family", "names", "products"),
    [
        ("llama", ["norm", "rope_write", "norm", "activate"], 4),
        ("mixtral", ["norm", "rope_write", "norm"], 2),
    ],
)
def test_between_the_products_of_a_layer_on_a_gpu_there_are_four_kernels_and_nothing_else(
    family: str, names: list[str], products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing waits for the host, and nothing is copied or allocated depending on data. An MLP
    of the model's own, whose launches are its own, is called in the place of the fourth.
    """
    model = paged(family, dtype=torch.bfloat16)
    operations, kernels, calls = interpreted(), Launches(), Calls()
    fused = fuse(model, operations)
    assert fused.fused + fused.around_mlp == 3
    for layer in decoder_layers(model) if fused.around_mlp else []:
        cast("Any", layer).mlp.forward = lambda x: x
    monkeypatch.setattr(operations, "_kernels", kernels)
    run = FusedRun.compute

    def watched(self: FusedRun, x: Tensor, *step: Any) -> Tensor:
        with calls:
            return run(self, x, *step)

    monkeypatch.setattr(FusedRun, "compute", watched)
    ids = torch.arange(5)
    model.run(ids, ids, profiling._PassWithoutAttention(ids, 5, model.layer_heads))
    assert kernels.seen == names * 3
    made = [x for x in calls.seen if x not in {"view", "flatten", "unsqueeze", "select"}]
    empty = {"empty", "empty_like", "new_empty"}
    # The attention of this pass fills its result with zeros.
    counts = Counter("empty" if name in empty else name for name in made)
    assert counts == {
        "linear": products * 3,
        "empty": len(names) * 3,
        "new_zeros": 3,
        "add_": 1,
    }


# Orders of rows and multipliers as above, positions in a table, a scaled embedding.
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "glm4", "granite", "gemma3_text"])
def test_bfloat16_weights_are_served_as_they_are_by_layers_in_float32(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own code serves what lies around them, as where it does something else there."""
    monkeypatch.setattr(recognize_ends, "recognize", no_ends)
    model = paged(family, bfloat16=True)
    attention, operations = kernels_of(model, "cpu")
    layers = decoder_layers(model)
    vectors = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() == 1)
    expected, size, count = selftest.Expected.of(model, 512), model.weight_bytes, len(layers)
    fused = f"fused {count}/{count} layers, bfloat16 weights, bfloat16 head in the model's code"
    assert str(fuse(model, operations)) == f"{fused} (no ends)"
    more = model.weight_bytes - size - 2 * vectors
    assert 0 <= more <= room_of(model) // 2, "norms and biases are float32, nothing else"
    # transformers' own logits are rounded after every operation.
    result = selftest.check(model, attention, expected)
    assert 0 < 3 * result.delta < result.tolerance
    assert result.delta < expected.reference_error

    model.heads = replace(model.heads, dtype=torch.float32)  # a cache that rounds nothing
    ids = torch.arange(40) * 37 % model.vocabulary
    seen: list[Tensor] = []
    layers[-1].register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
    attend_once(model, attention, ids)
    want = rounded_only_outside_of_layers(family, ids)
    assert seen[0].dtype is torch.bfloat16
    # Its one rounding, and what float32 leaves of the operations.
    torch.testing.assert_close(seen[0].float(), want, rtol=2**-8, atol=1e-5 * float(want.std()))


def no_ends(*_: Any) -> recognize_ends.Ends:
    raise DoesNotFitError("no ends")


@torch.inference_mode()
def rounded_only_outside_of_layers(family: str, ids: Tensor) -> Tensor:
    """The last layer's result by transformers in float32, with a bfloat16 model's weights; what
    its layers are given is bfloat16.
    """
    model = paged(family, bfloat16=True)
    model.model.float()

    def rounded(x: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.bfloat16().float(), x)

    layers, seen = decoder_layers(model), list[Tensor]()
    layers[0].register_forward_pre_hook(lambda _m, inputs: rounded(inputs))
    layers[-1].register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
    for name, module in model.model.named_modules():
        if name.endswith("rotary_emb"):
            module.register_forward_hook(lambda _m, _i, out: rounded(out))
    with model.plain() as plain:
        plain(input_ids=ids[None], use_cache=False)
    return seen[0]


def test_in_bfloat16_functions_are_told_apart_that_differ_by_less_than_its_rounding() -> None:
    model, used = paged("llama", bfloat16=True), set[str]()
    for layer in decoder_layers(model):
        cast("Any", layer).mlp.act_fn = torch.nn.GELU()

    def gated(x: Tensor, activation: Any) -> Tensor:
        used.add(activation)
        return reference.gated(x, activation)

    assert fuse(model, altered(gated=gated)).fused == 3
    assert used == {"gelu"}


def altered(**functions: Callable[..., Tensor | Packed]) -> LayerOperations:
    """The reference with other functions in place of its own."""
    names = (
        "name",
        "in_float32",
        "rounds",
        "fixed_order",
        "model_operations",
        "pack",
        "linear",
        "norm",
        "rope_write",
        "gated",
        "activate",
    )
    own = {name: getattr(reference, name) for name in names}
    return cast("LayerOperations", SimpleNamespace(**own | functions))


def without_bias(x: Tensor, weight: Packed, _bias: Tensor | None = None) -> Tensor:
    return reference.linear(x, weight)


def test_a_layer_whose_fused_operations_give_other_results_keeps_its_own_code() -> None:
    model = paged("qwen2")
    expected = selftest.Expected.of(model, 512)
    fused = fuse(model, altered(linear=without_bias))
    assert str(fused) == "fused 0/3 layers (layer 0: its fused layer gives other results)"
    assert selftest.check(model, attention(model), expected).delta < 1e-4


def test_the_self_test_judges_the_fused_layers() -> None:
    model = paged("qwen2")
    expected = selftest.Expected.of(model, 512)
    operations = altered()
    fuse(model, operations)
    cast("Any", operations).linear = without_bias
    with pytest.raises(SelfTestError):
        selftest.check(model, attention(model), expected)


def test_a_pass_that_failed_between_two_layers_leaves_nothing_to_the_next() -> None:
    model = paged("qwen2")
    expected = selftest.Expected.of(model, 512)
    fuse(model, reference)
    layers: Any = model.model.model
    fault = layers.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        selftest.check(model, attention(model), expected)
    fault.remove()
    assert selftest.check(model, attention(model), expected).delta < 1e-4


def test_the_epsilon_of_a_norm_is_the_one_of_its_numbers_that_it_adds() -> None:
    """Large inputs do not tell them apart."""
    torch.manual_seed(0)
    for other in (1e-5, 3e-6, 1e-8):
        norm: Any = LlamaRMSNorm(16, eps=1e-6)
        norm.other = other
        norm.weight.data.copy_(torch.randn(16))
        x = torch.randn(7, 16)
        found = norm_of(ModuleCall(norm, x, norm(x)))
        assert (found.eps, found.centered) == (1e-6, False)


class Halves(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


@pytest.mark.parametrize("norm", ["post_attention_layernorm", "post_feedforward_layernorm"])
def test_a_factor_of_what_a_norm_after_attention_or_mlp_returns_is_not_fused(norm: str) -> None:
    """A factor becomes part of a matrix, and the norm would take it out again."""
    model = paged("gemma2")
    layers: Any = model.model.model
    layer = layers.layers[1]
    setattr(layer, norm, torch.nn.Sequential(getattr(layer, norm), Halves()))
    fused = fuse(model, reference)
    reason = "layer 1: it multiplies what a norm after attention or MLP returns"
    assert (fused.fused, fused.reason) == (fused.layers - 1, reason)


def double(_module: Any, _inputs: Any, output: Any) -> Any:
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


def limit(_module: Any, _inputs: Any, output: Any) -> Any:
    return output.clamp(-7.0, 7.0)


def limit_input(_module: Any, inputs: Any) -> Any:
    return (inputs[0].clamp(-7.0, 7.0),)


def limit_far(_module: Any, _inputs: Any, output: Any) -> Any:
    return output.clamp(-50.0, 50.0)


def limit_input_far(_module: Any, inputs: Any) -> Any:
    return (inputs[0].clamp(-50.0, 50.0),)


# Changes of a llama layer of which no name of a module or a class tells.
CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "attention": (lambda layer: layer.self_attn.o_proj.register_forward_hook(double), "no single"),
    "a norm": (lambda layer: layer.input_layernorm.register_forward_hook(double), OTHER_NORM),
    "values": (lambda layer: layer.self_attn.v_proj.register_forward_hook(double), "Linear"),
    "activation": (lambda layer: setattr(layer.mlp, "act_fn", torch.nn.Tanh()), OTHER_MLP),
    "the result": (
        lambda layer: layer.register_forward_hook(lambda _m, _i, out: out.clamp(-1, 1)),
        "does not return the residual plus its MLP",
    ),
    "more weights": (
        lambda layer: setattr(layer.mlp, "act_fn", torch.nn.PReLU()),
        OTHER_MLP,
    ),
    # Of numbers that the tokens of a recording do not reach, as some families' MLPs have it.
    "large gates": (lambda layer: layer.mlp.act_fn.register_forward_pre_hook(limit_input), LIMITED),
    "large numbers": (lambda layer: layer.mlp.up_proj.register_forward_hook(limit), LIMITED),
    "large inputs": (lambda layer: layer.mlp.register_forward_pre_hook(limit_input), LIMITED),
    "large results": (lambda layer: layer.mlp.register_forward_hook(limit), LIMITED),
    "large queries": (
        lambda layer: layer.self_attn.q_proj.register_forward_hook(limit_far),
        LIMITED_HEADS,
    ),
    "large values": (
        lambda layer: layer.self_attn.v_proj.register_forward_hook(limit_far),
        LIMITED_HEADS,
    ),
    "large attention": (
        lambda layer: layer.self_attn.o_proj.register_forward_pre_hook(limit_input_far),
        LIMITED_HEADS,
    ),
    "shared weights": (
        lambda layer: setattr(layer.mlp.up_proj, "weight", layer.mlp.gate_proj.weight),
        "shares weights",
    ),
}


@pytest.mark.parametrize("kernels", ["reference", "torch"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_computes_something_else_is_not_fused(change: str, kernels: str) -> None:
    """Operations of GPUs fuse it around an MLP that does."""
    model = paged("llama")
    attention, operations = kernels_of(model, kernels)
    apply, reason = CHANGES[change]
    layers: Any = model.model.model
    apply(layers.layers[1])
    expected = selftest.Expected.of(model, 512)
    fused = fuse(model, operations)
    assert fused.fused == 2
    assert fused.around_mlp == (kernels == "torch" and reason in (OTHER_MLP, LIMITED))
    assert fused.reason.startswith("layer 1: ")
    assert reason in fused.reason
    assert selftest.check(model, attention, expected).delta < 1e-4


@pytest.mark.parametrize(("limit", "fuses"), [(50.0, 0), (1e9, 3)])
def test_projections_that_the_model_limits_are_not_fused(limit: float, fuses: int) -> None:
    """DBRX's, which a recording does not reach; GPUs would fuse them around its experts."""
    settings = tiny_any.settings_of("dbrx")
    settings["attn_config"]["clip_qkv"] = limit
    model: Any = tiny_any.build("dbrx", **settings)
    fused = fuse(PagedModel(model, families.check(model.config)), TorchOperations())
    assert (fused.fused, fused.around_mlp) == (0, fuses)
    assert (LIMITED_HEADS in fused.reason) is (fuses == 0)


def test_an_mlp_without_a_module_that_limits_large_numbers_is_not_fused() -> None:
    model = paged("opt")
    layers: Any = decoder_layers(model)
    layers[1].activation_fn.register_forward_pre_hook(limit_input)
    fused = fuse(model, reference)
    assert fused.fused == len(layers) - 1
    assert fused.reason == f"layer 1: {LIMITED}"


def test_a_query_that_changes_only_at_large_positions_is_not_fused() -> None:
    model = paged("llama")
    layers: Any = model.model.model
    q_proj, positions = layers.layers[0].self_attn.q_proj, list[Tensor]()
    run = PagedModel.run
    q_proj.register_forward_hook(
        lambda _m, _i, out: out * torch.where(positions[-1] < 512, 1.0, 1.1)[None, :, None]
    )

    def remember(self: PagedModel, ids: Tensor, at: Tensor, step: Any) -> Tensor:
        positions.append(at)
        return run(self, ids, at, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedModel, "run", remember)
        assert fuse(model, reference).fused == 2


def test_a_residual_multiplier_becomes_part_of_the_weights() -> None:
    model = paged("granite", residual_multiplier=0.3)
    expected = selftest.Expected.of(model, 512)
    assert str(fuse(model, reference)) == "fused 3/3 layers"
    assert selftest.check(model, attention(model), expected).delta < 1e-4


def test_transformers_cannot_run_a_model_whose_weights_are_packed() -> None:
    model = paged("llama")
    fuse(model, reference)
    with pytest.raises(RuntimeError, match="packed"), model.plain():
        pass
    with pytest.raises(RuntimeError, match=r"PagedModel\.forward"):
        model.model(input_ids=torch.tensor([[3]]))


@pytest.mark.parametrize("bfloat16", [False, True])
def test_one_layer_at_a_time_is_held_twice(bfloat16: bool) -> None:
    model = paged("llama", bfloat16=bfloat16)
    # In float32, or widened and packed as bfloat16.
    layer = 4 * sum(p.numel() for p in decoder_layers(model)[0].parameters())
    before, peaks = model.weight_bytes, []

    def pack(weights: Any, **how: Any) -> Packed:
        packed = reference.pack(weights, **how)
        peaks.append(model.weight_bytes + packed.nbytes - before)
        return packed

    fuse(model, altered(pack=pack))
    assert 0 < max(peaks) <= layer


def test_the_profiling_run_measures_fused_layers() -> None:
    limits = {"max_batch_tokens": 64, "max_requests": 8, "max_model_len": 512}
    plain, fused = paged("llama"), paged("llama")
    fuse(fused, reference)
    profiles = [profiling.profile(m, attention(m), **limits).measured for m in (plain, fused)]
    assert profiles[0].keys() == profiles[1].keys()
    assert profiles[1]["activations"] > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_of_a_step_in_slabs_a_part_that_is_measured_and_scaled_up_is_the_whole(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_layers, "SLAB", 100)
    model = paged(family)
    attention, operations = kernels_of(model, "cpu")
    fuse(model, operations)
    limits = {"max_batch_tokens": 600, "max_requests": 8, "max_model_len": 512}

    def measured(tokens: int) -> int:
        monkeypatch.setattr(profiling, "CPU_TOKENS", tokens)
        return profiling.profile(model, attention, **limits).measured["activations"]

    whole = measured(600)
    assert measured(150) == pytest.approx(whole, rel=0.01)
    config = model.model.config
    mlp = config.hidden_size + 3 * config.intermediate_size
    assert 4 * 100 * mlp < whole < 4 * 300 * mlp, "the MLP's results are those of a slab"


def test_the_profile_measures_by_one_layer_what_all_of_them_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = paged("llama")
    attention, operations = kernels_of(model, "cpu")
    fuse(model, operations)
    run, ran = LayerChain.run, list[int | None]()

    def measured(change: Callable[[int | None], int | None]) -> Any:
        def counted(self: LayerChain, x: Tensor, **step: Any) -> Tensor:
            ran.append(step["layers"])
            return run(self, x, **{**step, "layers": change(step["layers"])})

        monkeypatch.setattr(LayerChain, "run", counted)
        limits = {"max_batch_tokens": 64, "max_requests": 8, "max_model_len": 512}
        return profiling.profile(model, attention, **limits).measured

    assert measured(lambda layers: layers) == measured(lambda _: None)
    assert ran == 2 * [1, len(model.windows)], "prompts, then decodes, of which logits come"


def test_a_linear_layer_with_a_hook_is_no_plain_one() -> None:
    model = paged("llama")
    attention, operations = kernels_of(model, "cpu")
    layer: Any = decoder_layers(model)[1]
    layer.mlp.up_proj.register_forward_hook(lambda _m, _x, out: 1.5 * out)
    expected = selftest.Expected.of(model, 512)
    fusion = fuse(model, operations)
    assert (fusion.fused, OTHER_MLP in fusion.reason) == (2, True)
    assert selftest.check(model, attention, expected).delta < 1e-4


@pytest.mark.parametrize("kernels", ["reference", "cpu", "cpu, bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_layers_run_together_up_to_one_that_does_not_fit(family: str, kernels: str) -> None:
    kernels, _, half = kernels.partition(", ")
    model = paged(family, bfloat16=bool(half))
    attention, operations = kernels_of(model, kernels)
    layers: Any = model.model.model
    layers.layers[1].mlp.act_fn = torch.nn.Tanh()
    expected = selftest.Expected.of(model, 512)
    assert fuse(model, operations).fused == len(model.windows) - 1
    assert selftest.check(model, attention, expected).delta < (0.1 if half else 1e-4)


def test_all_layers_are_one_call_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    model = paged("gemma3_text")  # two layer groups, two rotary embeddings
    attention, operations = kernels_of(model, "cpu")
    expected, calls = selftest.Expected.of(model, 512), list[int]()
    run, forward = LayerChain.run, PagedModel.forward
    passes = list[int]()

    def counted(self: LayerChain, x: Tensor, **step: Any) -> Tensor:
        calls.append(len(step["ropes"]))
        return run(self, x, **step)

    def passed(self: PagedModel, *step: Any) -> Tensor:
        passes.append(4)
        return forward(self, *step)

    monkeypatch.setattr(LayerChain, "run", counted)
    monkeypatch.setattr(PagedModel, "forward", passed)
    fuse(model, operations)
    model.model.register_forward_hook(lambda *_: pytest.fail("the model's own code has run"))
    selftest.check(model, attention, expected)
    assert calls == passes
    assert passes


def test_the_page_on_models_names_the_families_that_are_fused() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| fused |"))
    named = re.findall(r"`(\w+)`", row)
    assert set(named) == set(EVERY) - set(tiny.VARIANTS) - set(REFUSED)
    around = page.partition("is fused around it")[2].partition("stay transformers' code")[0]
    assert set(re.findall(r"`(\w+)`", around)) == AROUND_MLP


@pytest.mark.parametrize("family", EVERY)
def test_two_tiny_models_of_a_family_are_equal(family: str) -> None:
    """The reference of a model with fused layers is another one of the same weights."""
    first, second = (tiny.build(family).state_dict() for _ in range(2))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_without_operations_no_layer_is_fused() -> None:
    model = paged("llama")
    assert str(fuse(model, None)) == "fused 0/3 layers"
    assert Fusion(3, 3).reason == ""
