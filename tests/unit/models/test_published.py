"""The tensors of a quantized checkpoint become the layers' weights, and what does not fit is
refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fairlead_runtime.models import loading
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.models.quantized import QuantizedLinear
from support import tiny
from support.published import awq, compressed_int4, compressed_tensors, gptq, publish

FORMS: dict[str, Any] = {
    "int": compressed_tensors(),
    "int in int32": compressed_tensors(packed=True),
    "int, one scale": compressed_tensors(strategy="tensor"),
    "int, activations": compressed_tensors(activations=True),
    "float": compressed_tensors(kind="float"),
    "float, one scale": compressed_tensors(kind="float", strategy="tensor"),
    "gptq": gptq(),
    "gptq without an index": gptq(group=64, indexed=False),
    "gptq, a group per row": gptq(group=-1),
    "gptq with zero points": gptq(symmetric=False),
    "gptq with zero points as they are": gptq(symmetric=False, second=True),
    "gptq of sorted columns": gptq(sorts=True),
    "gptq of columns in an order for each matrix": gptq(symmetric=False, sorts=True, alone=True),
    "awq": awq(),
    "awq, larger groups": awq(group=64),
    "packed": compressed_int4(),
    "packed, a group per row": compressed_int4(group=-1),
    "packed with zero points": compressed_int4(symmetric=False),
    "packed with zero points, a group per row": compressed_int4(group=-1, symmetric=False),
    "packed of sorted columns": compressed_int4(sorts=True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("qwen2"), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("form", FORMS)
def test_every_matrix_is_the_one_that_the_stored_tensors_stand_for(
    form: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = publish(model, tmp_path, *FORMS[form])
    loaded, expected = loading.load(quantized).model, loading.load(plain).model
    found = {
        name: module
        for name, module in loaded.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    assert len(found) == 7 * tiny.build("qwen2").config.num_hidden_layers
    for name, module in found.items():
        assert torch.equal(module.weight.dequantize(), expected.get_submodule(name).weight)
    plain_names = {f"{name}.weight" for name in found}
    for name, parameter in expected.named_parameters():
        if name not in plain_names:
            assert torch.equal(loaded.get_parameter(name), parameter)
    assert not hasattr(loaded.config, "quantization_config")
    assert "ignored" not in caplog.text


BROKEN: dict[str, Callable[[str, dict[str, Tensor]], Any]] = {
    "weight is missing, or of another type": lambda name, t: t.pop(f"{name}.weight"),
    "zero point": lambda name, t: t.update(
        {f"{name}.weight_zero_point": torch.ones(128, dtype=torch.int8)}
    ),
    "3 scales": lambda name, t: t.update({f"{name}.weight_scale": torch.ones(3)}),
    r"\(128, 60\) numbers": lambda name, t: t.update(
        {f"{name}.weight": torch.ones(128, 60, dtype=torch.int8)}
    ),
    "float32 where": lambda name, t: t.update({f"{name}.weight": torch.ones(128, 64)}),
    "no linear layer": lambda _, t: t.update({"model.other.weight_scale": torch.ones(1)}),
}


@pytest.mark.parametrize("message", BROKEN)
def test_tensors_that_do_not_fit_their_layer_are_refused(
    message: str, model: Path, tmp_path: Path
) -> None:
    quantized, _ = publish(model, tmp_path, *compressed_tensors())
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    BROKEN[message]("model.layers.1.mlp.up_proj", tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=message) as refused:
        loading.load(quantized)
    assert refused.value.code == "BadWeights"


UP = "model.layers.1.mlp.up_proj"
BROKEN_FOURS: dict[str, tuple[Any, Callable[[dict[str, Tensor]], Any]]] = {
    "up_proj.qzeros is missing": (gptq, lambda t: t.pop(f"{UP}.qzeros")),
    r"up_proj: qweight: \(8, 120\) of torch.int32, where \(8, 128\)": (
        gptq,
        lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"][:, :120].contiguous()}),
    ),
    r"up_proj: qweight: \(64, 8\) .* where \(64, 16\)": (
        awq,
        lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"][:, :8].contiguous()}),
    ),
    r"up_proj: scales: \(1, 128\) .* where \(2, 128\)": (
        awq,
        lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"][:1]}),
    ),
    "up_proj: its index does not give each of 2 groups 32 columns": (
        gptq,
        lambda t: t[f"{UP}.g_idx"].fill_(1),
    ),
    r"up_proj: weight_packed: \(128, 8\) of torch.float32": (
        compressed_int4,
        lambda t: t.update({f"{UP}.weight_packed": torch.ones(128, 8)}),
    ),
    "no linear layer": (awq, lambda t: t.update({"model.other.scales": torch.ones(1)})),
}


@pytest.mark.parametrize("message", BROKEN_FOURS)
def test_tensors_of_four_bits_that_do_not_fit_their_layer_are_refused(
    message: str, model: Path, tmp_path: Path
) -> None:
    made, change = BROKEN_FOURS[message]
    quantized, _ = publish(model, tmp_path, *made())
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=message) as refused:
        loading.load(quantized)
    assert refused.value.code == "BadWeights"
    if refused.value.hint:
        assert refused.value.hint.startswith("serve the plain checkpoint, or fetch this one again")


def test_biases_that_gptq_stores_for_layers_without_one_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = tiny.save(tiny.build("llama"), tmp_path / "model")
    settings, store = gptq()

    def with_bias(weight: Tensor) -> Any:
        tensors, plain = store(weight)
        return tensors | {"bias": torch.zeros(len(weight), dtype=torch.float16)}, plain

    quantized, _ = publish(saved, tmp_path, settings, with_bias)
    loaded = loading.load(quantized).model
    layers = [x for x in loaded.modules() if isinstance(x, QuantizedLinear)]
    assert {x.bias for x in layers} == {None}
    assert "ignored 21 tensors" in caplog.text


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_bias_that_the_architecture_does_not_add_is_refused_unless_it_is_zeros(
    prefix: str, tmp_path: Path
) -> None:
    """Whoever calibrated the layer counted on it. Names may leave the base model's out."""
    saved = tiny.save(tiny.build("llama"), tmp_path / "model")
    quantized, _ = publish(saved, tmp_path, *gptq())
    file = quantized / "model.safetensors"
    named = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else name: tensor
        for name, tensor in load_file(file).items()
    }
    bias = f"{prefix}layers.1.mlp.up_proj.bias"
    rows = named[f"{prefix}layers.1.mlp.up_proj.scales"].shape[1]
    save_file(named | {bias: torch.zeros(rows)}, file, {"format": "pt"})
    loading.load(quantized)
    save_file(named | {bias: torch.eye(1, rows)[0] / 8}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"{bias}: a bias that the architecture does not") as error:
        loading.load(quantized)
    assert (error.value.code, error.value.hint) == ("BadWeights", "serve the plain checkpoint")


def test_a_checkpoint_that_is_not_served_says_to_use_the_plain_one(
    model: Path, tmp_path: Path
) -> None:
    settings, store = compressed_tensors()
    quantized, _ = publish(model, tmp_path, settings | {"quant_method": "aqlm"}, store)
    with pytest.raises(ModelError, match=r"quant_method 'aqlm'.*unquantized checkpoint"):
        loading.inspect(quantized)
