"""Model files with random changes are refused with a clear error, or accepted as safetensors
accepts them; none crashes the reader.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from fairlead_runtime.models import loading
from fairlead_runtime.models.headers import read_header
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.settings.engine_config import ConfigError
from support import tiny
from support.full import LONG_FORM

SETTINGS = settings(
    max_examples=3000 if LONG_FORM else 100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.lists(st.integers(-3, 3), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(
        tiny.build("gemma2", num_hidden_layers=2, layer_types=None),
        tmp_path_factory.mktemp("m") / "m",
    )


@pytest.fixture(scope="module")
def copy(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(good, tmp_path_factory.mktemp("copy") / "m"))


@SETTINGS
@given(
    changes=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_a_header_with_changed_bytes(
    good: Path, copy: Path, changes: list[tuple[int, int]]
) -> None:
    raw = bytearray((good / "model.safetensors").read_bytes())
    for offset, value in changes:
        raw[offset] = value
    (copy / "model.safetensors").write_bytes(raw)
    try:
        header = read_header(copy / "model.safetensors")
    except ModelError:
        return
    assert header.data + max(tensor.end for tensor in header.tensors.values()) == len(raw)
    with safe_open(copy / "model.safetensors", "pt") as opened:
        assert set(opened.keys()) == set(header.tensors)


@SETTINGS
@given(data=st.data())
def test_a_config_with_changed_values(good: Path, copy: Path, data: st.DataObject) -> None:
    config: dict[str, Any] = json.loads((good / "config.json").read_text())
    shutil.copy(good / "model.safetensors", copy)
    for _ in range(data.draw(st.integers(1, 3))):
        config[data.draw(st.sampled_from(sorted(config)))] = data.draw(VALUES)
    (copy / "config.json").write_text(json.dumps(config))
    try:
        inspected = loading.inspect(copy)
    except (ModelError, ConfigError):
        return
    assert inspected.shape.parameters > 0
