"""What a failed download means, from the exception that a library raised, without a network."""

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairlead_runtime.hub import fetch as fetching
from fairlead_runtime.hub.fetch import Hub
from fairlead_runtime.models import files
from fairlead_runtime.models.model_error import ModelError

COMMIT = "a" * 40
NAME = "owner/name"


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub("https://hub.test", tmp_path, offline=False)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "NoSpace", "no space left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "NoSpace", "no space left"),
        (OSError(errno.EROFS, "Read-only file system"), "NoSpace", "cannot be written"),
        (PermissionError(errno.EACCES, "Permission denied"), "NoSpace", "cannot be written"),
        (OSError(errno.ECONNRESET, "reset"), "HubUnreachable", "reset"),
        (ValueError("odd\nmore"), "HubUnreachable", "ValueError: odd"),
        (ModelError("BadWeights", "m"), "BadWeights", "m"),
    ],
)
def test_each_failure_has_its_code(hub: Hub, error: Exception, code: str, words: str) -> None:
    refusal = fetching._model_error(error, hub, NAME, "main", "config.json")
    assert refusal.code == code
    assert words in str(refusal)
    assert "\n" not in str(refusal)


def listed(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> tuple[ModelError, list[str]]:
    """The refusal of a repository with these files, and the names that were downloaded."""
    downloaded: list[str] = []

    def download(_: Hub, __: str, ___: str, sizes: dict[str, int], ____: object) -> Path:
        downloaded.extend(sizes)
        raise ModelError("HubUnreachable", "the test ends here")

    siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
    info = SimpleNamespace(sha=COMMIT, siblings=siblings)
    api = SimpleNamespace(model_info=lambda *_, **__: info)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: api)
    monkeypatch.setattr(fetching, "_download_files", download)
    with pytest.raises(ModelError) as refusal:
        fetching._download(hub, NAME, "main", lambda _: None)
    return refusal.value, downloaded


def test_a_settings_file_of_any_size_is_not_downloaded(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {files.CONFIG: 100, "tokenizer.json": files.LARGEST_JSON + 1, files.WEIGHTS: 10}
    refusal, downloaded = listed(hub, monkeypatch, sizes)
    assert (refusal.code, downloaded) == ("BadModelFiles", [])
    assert str(refusal).startswith("tokenizer.json: larger than")
    refusal, downloaded = listed(hub, monkeypatch, sizes | {"tokenizer.json": files.LARGEST_JSON})
    assert refusal.code == "HubUnreachable"
    assert downloaded == [files.CONFIG, "tokenizer.json"], "settings first"


def test_a_repository_without_safetensors_names_what_it_has(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal, downloaded = listed(
        hub, monkeypatch, {files.CONFIG: 100, "pytorch_model.bin": 10, "x/model.safetensors": 1}
    )
    assert (refusal.code, downloaded) == ("NoSafetensors", [])
    assert "pytorch_model.bin" in str(refusal)


def test_a_repository_without_a_config_is_no_model(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal, downloaded = listed(hub, monkeypatch, {files.WEIGHTS: 10})
    assert (refusal.code, downloaded) == ("ModelNotFound", [])


def test_weights_that_do_not_fit_are_not_begun(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "there.safetensors").touch()
    huge = 1 << 60
    with pytest.raises(ModelError) as refusal:
        fetching._check_space(hub, tmp_path, {"model.safetensors": huge})
    assert refusal.value.code == "NoSpace"
    fetching._check_space(hub, tmp_path, {"there.safetensors": huge})
