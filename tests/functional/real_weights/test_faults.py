"""Faults planted in published models are refused: in single layers, whose results rounding moves by
little, and in the whole model as it would be served.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fairlead_kernels.cpu.cpu_operations import DIGITS_ROUNDING
from fairlead_runtime.device.conversion.fusion import quantize_weights
from fairlead_runtime.device.conversion.module_calls import Call
from fairlead_runtime.device.conversion.recording_pass import (
    decoder_layers,
    record,
    repeat,
)
from fairlead_runtime.device.conversion.rounding import Noise
from fairlead_runtime.device.model import paged_model
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.models import loading
from fairlead_runtime.models.model_error import SelfTestError
from fairlead_runtime.models.quantized import QuantizedLinear
from fairlead_runtime.settings.engine_config import EngineConfig
from support.layer_faults import change_the_base, hide_each_token_from_itself, run, scale_a_head
from support.real_weights import GEMMA, SMOLLM2, Published

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
MODELS = pytest.mark.parametrize("published", [SMOLLM2, GEMMA], ids=lambda model: model.name)


def load(published: Published, dtype: str) -> loading.LoadedModel:
    config = EngineConfig(dtype=dtype, max_model_len=2048)  # type: ignore[arg-type]
    return loading.load(published.folder(), config=config)


# -- single layers


def with_a_bit_less(matrix: Tensor) -> Tensor:
    """The matrix, float32 or int8, with a bit less than bfloat16 or int8 has."""
    whole = matrix.dtype is torch.int8
    integers = matrix if whole else matrix.view(torch.int32)
    return integers.bitwise_and(-2 if whole else -(1 << 17)).view(matrix.dtype)


def rounded_twice(layer: Any, call: Call) -> Tensor:
    down: Any = layer.mlp.down_proj
    matrix = down.bits if isinstance(down, QuantizedLinear) else down.weight
    stored = matrix.data
    matrix.data = with_a_bit_less(stored)
    try:
        return run(layer, call)
    finally:
        matrix.data = stored


def without_a_vector(layer: Any, call: Call) -> Tensor:
    """The layer's result without the weights of the norm before its MLP."""
    norm = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
    weight = norm.weight.data
    norm.weight.data = torch.ones_like(weight)
    try:
        return run(layer, call)
    finally:
        norm.weight.data = weight


def with_another_base(layer: Any, call: Call) -> Tensor:
    arguments = call.arguments
    (name,) = (name for name, x in arguments.items() if isinstance(x, tuple))
    cos, sin = arguments[name]
    angle = torch.atan2(sin, cos) * 1.02  # at most 4 degrees
    more: Any = {name: (angle.cos(), angle.sin())}
    return run(layer, call, **more)


# Products of digits round an activation by a share of its row's largest, and SmolLM2 has outliers:
# these faults move a layer by less than that, and no text suffers (docs/design/0015-rounding.md).
BELOW_DIGITS = ("one head is scaled by 1.01", "rotary embeddings have another base")
LAYER_FAULTS: dict[str, Callable[[Any, Call], Tensor]] = {
    "one head is scaled by 1.01": partial(run, change=scale_a_head),
    "heads are swapped": partial(run, change=lambda x: x.flip(1)),
    "tokens read as their neighbours do": partial(run, change=lambda x: x.roll(1, 0)),
    "rotary embeddings have another base": with_another_base,
    "one matrix is rounded twice": rounded_twice,
    "a norm's vector is forgotten": without_a_vector,
}


@MODELS
@pytest.mark.parametrize(
    ("weights", "rounding"), [("float32", 0.0), ("int8", 0.0), ("int8", DIGITS_ROUNDING)]
)
@torch.inference_mode()
def test_no_fault_of_any_layer_is_explained_by_rounding(
    published: Published, weights: str, rounding: float
) -> None:
    """Weights in bfloat16 are these in float32: so they were published, and layers are compared in
    float32. ``rounding``: that of products of digits, where a processor has them.
    """
    model = paged_model.prepare(load(published, "float32"))
    if weights == "int8":
        quantize_weights(model, "int8")
    layers = decoder_layers(model)
    explained = []
    for index, (layer, recorded) in enumerate(zip(layers, record(model, layers), strict=True)):
        call = recorded.call
        want = call.output[0]
        noise = Noise.of(want, partial(repeat, call), rounding)
        assert noise.explains(run(layer, call), want)
        explained += [
            (index, name)
            for name, plant in LAYER_FAULTS.items()
            if not (rounding and name in BELOW_DIGITS) and noise.explains(plant(layer, call), want)
        ]
    assert explained == []


# -- the whole model

KINDS = pytest.mark.parametrize("kind", ["float32", "float32 int8", "bfloat16", "bfloat16 int8"])
LOGITS = r"logits of '\w+' differ from plain transformers by"


def start(published: Published, kind: str) -> None:
    dtype, _, quantization = kind.partition(" ")
    selftest.prepare_and_test(load(published, dtype), quantization=quantization or "none")


def swap_heads(model: PagedModel) -> None:
    """The first and the last head, in every second layer."""
    dim = model.heads.dim
    layers: Any = decoder_layers(model)[::2]
    for layer in layers:
        out = layer.self_attn.o_proj
        matrix = getattr(out, "bits", None)
        matrix = out.weight if matrix is None else matrix
        first = matrix.data[:, :dim].clone()
        matrix.data[:, :dim] = matrix.data[:, -dim:]
        matrix.data[:, -dim:] = first


def scale_one_head(model: PagedModel) -> None:
    """By 1.01, in one layer."""
    layers: Any = decoder_layers(model)
    layers[len(layers) // 2].self_attn.o_proj.weight.data[:, : model.heads.dim] *= 1.01


def round_one_matrix_twice(model: PagedModel) -> None:
    layers: Any = decoder_layers(model)
    down = layers[len(layers) // 2].mlp.down_proj
    down.weight.data = with_a_bit_less(down.weight.data)


def narrow_the_windows(model: PagedModel) -> None:
    """To 100 tokens, of full layers, too."""
    model.windows = (100,) * len(model.windows)


def scale_the_embeddings(model: PagedModel) -> None:
    """By the root of their width, as Gemma's are; Gemma's twice."""
    embeddings: Any = model.model.get_input_embeddings()
    head: Any = model.model.get_output_embeddings()
    # A rounded head has a matrix of its own.
    rounded = not isinstance(head.weight, torch.Tensor)
    if not rounded and head.weight.data_ptr() == embeddings.weight.data_ptr():
        head.weight = torch.nn.Parameter(head.weight.data.clone(), requires_grad=False)
    embeddings.weight.data.mul_(math.sqrt(embeddings.weight.shape[1]))


# In bfloat16 none of these moves logits or perplexity by more than bfloat16 does
# (docs/design/0015-rounding.md): there the proofs of layers alone can see it.
SMALL_FAULTS = (scale_one_head, round_one_matrix_twice)
FAULTS = (swap_heads, change_the_base, narrow_the_windows, scale_the_embeddings)


@MODELS
@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        *(("float32", plant) for plant in SMALL_FAULTS),
        *itertools.product(("float32", "float32 int8", "bfloat16", "bfloat16 int8"), FAULTS),
    ],
)
def test_a_faulty_model_is_refused(
    published: Published,
    kind: str,
    plant: Callable[[PagedModel], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After transformers' own logits are known, and before its layers are fused: these are then
    what the faulty modules compute, and the self-test alone can see it.
    """
    fuse: Any = selftest._fused

    def fuse_the_faulty(model: PagedModel, *arguments: Any, **settings: Any) -> Any:
        with torch.inference_mode():
            plant(model)
        return fuse(model, *arguments, **settings)

    monkeypatch.setattr(selftest, "_fused", fuse_the_faulty)
    with pytest.raises(SelfTestError, match=LOGITS):
        start(published, kind)


@MODELS
@KINDS
def test_a_mask_that_is_off_by_one_is_refused(
    published: Published, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_each_token_from_itself(monkeypatch)
    with pytest.raises(SelfTestError, match=LOGITS):
        start(published, kind)


@KINDS
@pytest.mark.parametrize("wrong", [511, 513, None])
def test_a_window_that_no_prompt_of_the_self_test_reaches_is_refused(
    kind: str, wrong: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of Gemma's layers; its logits, in the self-test's prompts, are right."""
    fuse: Any = selftest._fused

    def fuse_with_another(model: PagedModel, *arguments: Any, **settings: Any) -> Any:
        assert model.windows[7] == 512
        model.windows = (*model.windows[:7], wrong, *model.windows[8:])
        return fuse(model, *arguments, **settings)

    monkeypatch.setattr(selftest, "_fused", fuse_with_another)
    with pytest.raises(SelfTestError, match=rf"layer 7 of 'gemma3_text', with window {wrong}, "):
        start(GEMMA, kind)
