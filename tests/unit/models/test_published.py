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

from fairlead_runtime.models import loading, tiny
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.models.quantized import QuantizedLinear
from support.published import compressed_tensors, publish

FORMS: dict[str, dict[str, Any]] = {
    "int": {},
    "int in int32": {"packed": True},
    "int, one scale": {"strategy": "tensor"},
    "int, activations": {"activations": True},
    "float": {"kind": "float"},
    "float, one scale": {"kind": "float", "strategy": "tensor"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("qwen2"), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("form", FORMS)
def test_every_matrix_is_the_one_that_the_stored_tensors_stand_for(
    form: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = publish(model, tmp_path, *compressed_tensors(**FORMS[form]))
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


def test_a_checkpoint_that_is_not_served_says_to_use_the_plain_one(
    model: Path, tmp_path: Path
) -> None:
    settings, store = compressed_tensors()
    quantized, _ = publish(model, tmp_path, settings | {"quant_method": "aqlm"}, store)
    with pytest.raises(ModelError, match=r"quant_method 'aqlm'.*unquantized checkpoint"):
        loading.inspect(quantized)
