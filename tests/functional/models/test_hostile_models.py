"""Malicious model directories are refused with a message, and none of their code runs."""

import shutil
from pathlib import Path

import pytest

from fairlead_runtime.models import files, loading
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from support import tiny
from support.hostile_models import AUTO_MAP, CASES, WEIGHTS, edit, mark, plant_code


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(
        tiny.build("llama", num_hidden_layers=2), tmp_path_factory.mktemp("good") / "model"
    )


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(good, path)
    plant_code(path)
    return path


def test_there_are_at_least_forty_hostile_cases() -> None:
    assert len(CASES) >= 40


def test_the_directory_that_the_cases_change_is_good(model: Path) -> None:
    """Code and other files that are not needed are ignored: they are no reason for a refusal."""
    (model / "modules.json").write_text("[1, 2]")
    (model / "trainer_state.json").symlink_to("/etc/hostname")
    assert loading.load(model).max_model_len == tiny.CONTEXT
    assert not mark(model).exists()


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_model_is_refused_and_none_of_its_code_runs(name: str, model: Path) -> None:
    code, make_hostile = CASES[name]
    make_hostile(model)
    with pytest.raises(ModelError) as error:
        loading.load(model)
    assert error.value.code == code, error.value
    assert len(error.value.message) > 10
    assert not mark(model).exists()


def test_opening_the_planted_pickle_leaves_its_mark(model: Path) -> None:
    """The other tests rely on this mark."""
    import pickle

    pickle.loads((model / "pytorch_model.bin").read_bytes())
    assert mark(model).exists()


def test_an_auto_map_is_ignored_where_transformers_knows_the_architecture(model: Path) -> None:
    edit(model, "config.json", auto_map=AUTO_MAP)
    edit(model, "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.T", None]})
    for trusted in (False, True):
        loading.load(model, config=EngineConfig(trust_remote_code=trusted))
    assert not mark(model).exists()


def test_trust_remote_code_is_refused_as_not_supported_yet(model: Path) -> None:
    CASES["auto_map of an unknown architecture"][1](model)
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        loading.load(model, config=EngineConfig(trust_remote_code=True))
    assert not mark(model).exists()


def test_links_of_a_hub_cache_are_followed_only_into_its_own_blobs(
    good: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "hub" / "models--tiny--llama"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / ("a" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in good.iterdir():
        shutil.copy(file, blobs / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    assert files.check(snapshot).config["model_type"] == "llama"
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(good / WEIGHTS)
    with pytest.raises(ModelError, match="a link that leaves"):
        files.check(snapshot)


def test_safetensors_has_precedence_over_a_pickle(model: Path) -> None:
    assert (model / "pytorch_model.bin").exists()
    assert set(files.check(model).weights) == {WEIGHTS}
