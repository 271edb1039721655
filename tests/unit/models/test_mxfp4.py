"""The experts of a checkpoint in MXFP4 become plain ones, and what does not fit them is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fairlead_kernels.formats.row_chunks import ELEMENTS
from fairlead_runtime.device.warmup import profiling
from fairlead_runtime.models import loading
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.models.published import StoredExperts
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.load_peak import CHUNK_TEMPORARIES
from support import tiny
from support.published import publish_mxfp4

WIDE = {"hidden_size": 96, "intermediate_size": 160, "num_local_experts": 3}
EXPERTS = "model.layers.2.mlp.experts"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("gpt_oss", **WIDE), tmp_path_factory.mktemp("model"))


def load(path: Path, dtype: Any = "float32") -> Any:
    return loading.load(path, config=EngineConfig(dtype=dtype)).model


def changed(model: Path, directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """The published checkpoint of ``model`` with other tensors."""
    quantized, _ = publish_mxfp4(model, directory, torch.bfloat16)
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    return quantized


def test_every_parameter_is_the_one_that_transformers_own_code_makes(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlead_kernels.formats.row_chunks.ELEMENTS", 7 * 96)
    quantized, plain = publish_mxfp4(model, tmp_path, torch.bfloat16)
    loaded, expected = load(quantized), load(plain)
    pairs = zip(loaded.named_parameters(), expected.named_parameters(), strict=True)
    for (name, parameter), (expected_name, number) in pairs:
        assert (name, parameter.dtype) == (expected_name, number.dtype)
        assert torch.equal(parameter, number), name
    assert type(loaded.get_submodule(EXPERTS)) is type(expected.get_submodule(EXPERTS))
    assert not hasattr(loaded.config, "quantization_config")
    assert "ignored" not in caplog.text


def test_experts_are_widened_a_few_rows_at_a_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside them is what is made of a chunk, of which the plan has a chunk's common size."""
    elements = 4 * 96
    monkeypatch.setattr("fairlead_kernels.formats.row_chunks.ELEMENTS", elements)
    peaks: list[int] = []
    widened = StoredExperts.widened

    def noted(experts: StoredExperts) -> torch.nn.Module:
        with profiling._meter() as meter:
            module = widened(experts)
        peaks.append(meter.peak - sum(x.nbytes for x in module.parameters() if x.dim() == 3))
        return module

    monkeypatch.setattr(StoredExperts, "widened", noted)
    quantized, _ = publish_mxfp4(model, tmp_path, torch.bfloat16)
    load(quantized)
    assert len(peaks) == 4
    assert 0 < max(peaks) <= elements * CHUNK_TEMPORARIES // ELEMENTS


def test_a_checkpoint_whose_config_names_no_type_is_served_in_bfloat16(
    model: Path, tmp_path: Path
) -> None:
    quantized, plain = publish_mxfp4(model, tmp_path, torch.bfloat16)
    loaded, expected = load(quantized, "auto"), load(plain, "bfloat16")
    assert loaded.dtype is torch.bfloat16
    for name, parameter in expected.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_blocks_and_scales_may_lie_in_two_files_and_lack_the_base_models_prefix(
    model: Path, tmp_path: Path
) -> None:
    quantized, plain = publish_mxfp4(model, tmp_path, torch.bfloat16)
    tensors = load_file(quantized / "model.safetensors")
    (quantized / "model.safetensors").unlink()
    files: dict[str, dict[str, Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        file = "b.safetensors" if name.endswith("_scales") else "a.safetensors"
        files[file][name.removeprefix("model.")] = tensor
    for file, part in files.items():
        save_file(part, quantized / file, {"format": "pt"})
    weight_map = {name: file for file, part in files.items() for name in part}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (quantized / "model.safetensors.index.json").write_text(index)
    loaded, expected = load(quantized), load(plain)
    for name, parameter in expected.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_experts_that_a_layer_stores_plain_are_served_beside_packed_ones(
    model: Path, tmp_path: Path
) -> None:
    plain = load_file(model / "model.safetensors")[f"{EXPERTS}.down_proj"]

    def unpack(tensors: dict[str, Tensor]) -> None:
        for end in ("blocks", "scales"):
            del tensors[f"{EXPERTS}.down_proj_{end}"]
        tensors[f"{EXPERTS}.down_proj"] = plain

    loaded = load(changed(model, tmp_path, unpack))
    assert torch.equal(loaded.get_parameter(f"{EXPERTS}.down_proj"), plain)


def test_scales_may_be_stored_in_the_type_that_is_theirs(model: Path, tmp_path: Path) -> None:
    def name_the_type(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("_scales"):
                tensors[name] = tensor.view(torch.float8_e8m0fnu)

    (other := tmp_path / "other").mkdir()
    expected = load(publish_mxfp4(model, other, torch.bfloat16)[1])
    loaded = load(changed(model, tmp_path, name_the_type))
    for name, parameter in expected.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


UP = f"{EXPERTS}.gate_up_proj"
BROKEN: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    rf"{UP}_scales: missing, where \(3, 320, 3\) of U8": lambda t: t.pop(f"{UP}_scales"),
    rf"{UP}_blocks: missing, where \(3, 320, 3, 16\) of U8": lambda t: t.pop(f"{UP}_blocks"),
    rf"{UP}_blocks: \(3, 320, 6, 8\) of U8, where": lambda t: t.update(
        {f"{UP}_blocks": t[f"{UP}_blocks"].view(3, 320, 6, 8)}
    ),
    rf"{UP}_blocks: \(3, 96, 10, 16\) of U8, where": lambda t: t.update(
        {f"{UP}_blocks": t[f"{UP}_blocks"].reshape(3, 96, 10, 16)}
    ),
    rf"{UP}_blocks: \(3, 320, 3, 16\) of I8, where": lambda t: t.update(
        {f"{UP}_blocks": t[f"{UP}_blocks"].view(torch.int8)}
    ),
    rf"{UP}_scales: \(3, 320, 3\) of F8_E4M3, where .* of U8 or F8_E8M0": lambda t: t.update(
        {f"{UP}_scales": t[f"{UP}_scales"].view(torch.float8_e4m3fn)}
    ),
    rf"{UP}_blocks: \(3, 320, 3, 16\) of F8_E8M0, where": lambda t: t.update(
        {f"{UP}_blocks": t[f"{UP}_blocks"].view(torch.float8_e8m0fnu)}
    ),
    rf"{UP}_scales: \(2, 320, 3\) of U8, where": lambda t: t.update(
        {f"{UP}_scales": t[f"{UP}_scales"][:2]}
    ),
    f"{UP}_scales: expert 1: a scale of 255": lambda t: t[f"{UP}_scales"][1, 319, 2].fill_(255),
    f"{UP}_scales: expert 2: a number beyond float32": lambda t: (
        t[f"{UP}_scales"][2, 0, 0].fill_(254),
        t[f"{UP}_blocks"][2, 0, 0].fill_(0x77),
    ),
    "'model.layers.9.mlp.experts.up_proj' is no matrix": lambda t: t.update(
        {"model.layers.9.mlp.experts.up_proj_blocks": torch.zeros(3, 8, 1, 16, dtype=torch.uint8)}
    ),
    "1 tensors are missing, first model.layers.2.mlp.experts.gate_up_proj": lambda t: (
        t.pop(f"{UP}_scales"),
        t.pop(f"{UP}_blocks"),
    ),
    "1 tensors are missing, first .*gate_up_proj_bias": lambda t: t.pop(f"{UP}_bias"),
}


@pytest.mark.parametrize("message", BROKEN)
def test_tensors_that_do_not_fit_their_experts_are_refused_by_name(
    message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        load(changed(model, tmp_path, BROKEN[message]))
    assert refused.value.code == "BadWeights"


def test_a_number_beyond_float16_is_refused_with_the_type_that_holds_it(
    model: Path, tmp_path: Path
) -> None:
    def enlarge(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}_scales"][0, 5].fill_(145)

    quantized = changed(model, tmp_path, enlarge)
    load(quantized, "bfloat16")
    with pytest.raises(ModelError, match=r"a number beyond float16 \(serve it in bfloat16"):
        load(quantized, "float16")
