"""The accepted forms of MODEL, and the directory or repository that each means."""

from pathlib import Path

import pytest

from fairlead_runtime.hub.source import Source, demo_directory, parse, resolve
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.settings.engine_config import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("demo:", Source("demo")),
        ("hf://Qwen/Qwen3-0.6B", Source("hub", "Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B", Source("hub", "Qwen/Qwen3-0.6B")),
        ("hf://a/b/", Source("hub", "a/b")),
        ("o_1/n.2-x", Source("hub", "o_1/n.2-x")),
        ("file:///models/mine", Source("path", "/models/mine")),
        ("file:///models/with%20space", Source("path", "/models/with space")),
        ("file://localhost/models/mine", Source("path", "/models/mine")),
        ("/models/mine", Source("path", "/models/mine")),
        ("./mine", Source("path", "mine")),
        ("../mine", Source("path", "../mine")),
    ],
)
def test_the_accepted_forms(text: str, expected: Source) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "gpt2",
        "demo",
        "demo:x",
        "hf://",
        "hf://name",
        "hf://a/b/c",
        "hf://a/../b",
        "hf://a/b@main",
        "hf://-a/b",
        "hf://a/b.git",
        "hf://a/b?x=1",
        "hf://a b/c",
        "a/b/c",
        "a--b/c",
        "https://example.org/a/b",
        "s3://bucket/model",
        "file://host/models",
        "file:models",
        "file:///models?x=1",
        "pvc://claim/path",
        "C:\\models",
        "a/b\0c",
        "owner/" + "n" * 200,
    ],
)
def test_any_other_form_is_refused_and_the_message_quotes_it_and_names_a_fix(text: str) -> None:
    with pytest.raises(ModelError) as error:
        parse(text)
    assert error.value.code == "InvalidSource"
    assert repr(text[:200]) in error.value.message
    assert error.value.hint


def test_an_existing_directory_has_precedence_over_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert parse("owner/name") == Source("path", "owner/name")
    assert parse("hf://owner/name") == Source("hub", "owner/name")


def test_a_path_that_does_not_exist_is_named() -> None:
    with pytest.raises(ModelError, match="/no/such/model") as error:
        resolve("file:///no/such/model")
    assert error.value.code == "ModelNotFound"


@pytest.mark.parametrize("source", ["demo:", "/tmp"])
def test_only_hub_models_have_revisions(source: str) -> None:
    with pytest.raises(ConfigError, match="--revision"):
        resolve(source, revision="main")


@pytest.mark.parametrize("revision", ["../main", "-x", "a b", "a\nb", "/main", "x" * 300])
def test_a_revision_that_no_hub_accepts_is_refused_before_any_request(revision: str) -> None:
    with pytest.raises(ConfigError, match="--revision"):
        resolve("hf://a/b", revision=revision, environ={"HF_ENDPOINT": "http://127.0.0.1:9"})


def test_the_demo_model_comes_with_the_package() -> None:
    model = resolve("demo:")
    assert model.path == demo_directory()
    assert (model.path / "model.safetensors").is_file()
    assert str(model.source) == "demo:"
