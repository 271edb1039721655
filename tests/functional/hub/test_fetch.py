"""Downloads from a fake hub that has the routes of a real one, and its failures."""

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fairlead_runtime.commands import fetch as command
from fairlead_runtime.commands import trace
from fairlead_runtime.hub import fetch as fetching
from fairlead_runtime.hub.fetch import Progress, fetch
from fairlead_runtime.models import chat, files, loading
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.models.tokenizer_files import load_tokenizer
from support import tiny
from support.hostile_models import AUTO_MAP, plant_code
from support.hub_server import MAIN, OTHER, Hub, Repository

NAME = "tiny/llama"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good model, with files beside it that must never be requested."""
    path = tiny.save(
        tiny.build("llama", num_hidden_layers=2), tmp_path_factory.mktemp("checkpoint") / "model"
    )
    plant_code(path)
    for name in (
        "consolidated.safetensors",
        "model.gguf",
        "trainer_state.json",
        "README.md",
        "onnx__model.onnx",
        ".gitattributes",
    ):
        (path / name).write_bytes(b"not wanted")
    return path


@pytest.fixture
def repository(checkpoint: Path) -> Repository:
    tiny_llama = Repository.of(checkpoint)
    tiny_llama.files["onnx/config.json"] = b"{}"
    return tiny_llama


@pytest.fixture
def hub(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with Hub({NAME: repository}) as server:
        yield server


def refusal(hub: Hub, home: Path, name: str = NAME, **more: Any) -> ModelError:
    with pytest.raises(ModelError) as error:
        fetch(name, environ=hub.environ(home), **more)
    return error.value


def test_every_file_of_a_model_is_downloaded_and_no_other_is_requested(
    hub: Hub, tmp_path: Path
) -> None:
    fetched = fetch(NAME, environ=hub.environ(tmp_path))
    expected = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        WEIGHTS,
    }
    assert set(hub.downloaded()) == expected
    assert {path.name for path in fetched.path.iterdir()} == expected
    assert fetched.commit == MAIN
    assert loading.load(fetched.path).shape.layers == 2


def test_named_chat_templates_come_with_the_model(
    hub: Hub, repository: Repository, tmp_path: Path
) -> None:
    template = b"{{ tools | tojson }}{{ messages[0].content }}"
    folder = "additional_chat_templates"
    repository.files = {
        f"{folder}/tool_use.jinja": template,
        f"{folder}/model.safetensors": b"not wanted",
        f"{folder}/deeper/other.jinja": b"not wanted",
    } | repository.files
    fetched = fetch(NAME, environ=hub.environ(tmp_path))
    assert [path.name for path in (fetched.path / folder).iterdir()] == ["tool_use.jinja"]
    files.check(fetched.path)
    tokenizer = load_tokenizer(fetched.path)
    tool = {"type": "function", "function": {"name": "f"}}
    text = chat.render_chat(tokenizer, [{"role": "user", "content": "x"}], tools=[tool])
    assert text.startswith('[{"type": "function"')
    blob = (fetched.path / folder / "tool_use.jinja").resolve()
    blob.unlink()
    fetch(NAME, environ=hub.environ(tmp_path))
    assert blob.read_bytes() == template


def test_the_words_of_a_trace_need_no_weights(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    token = tiny.tokenizer().encode("a", add_special_tokens=False)[0]
    assert trace._words(NAME).word(token) == "'a'"
    assert "tokenizer.json" in hub.downloaded()
    assert WEIGHTS not in hub.downloaded()
    with pytest.raises(ModelError, match="not in the cache"):
        fetch(NAME, environ=hub.environ(tmp_path, HF_HUB_OFFLINE="1"))
    before = len(hub.downloaded())
    assert loading.load(fetch(NAME, environ=hub.environ(tmp_path)).path).shape.layers == 2
    assert hub.downloaded()[before:] == [WEIGHTS]


def test_every_file_comes_from_the_commit_that_the_branch_named_at_the_start(
    hub: Hub, repository: Repository, tmp_path: Path
) -> None:
    """Someone pushes while the download runs."""
    repository.on_get = lambda _: repository.refs.update(main=OTHER)
    fetched = fetch(NAME, environ=hub.environ(tmp_path))
    assert fetched.commit == MAIN
    assert fetched.path.name == MAIN
    downloads = [path for _, path in hub.requests if "/resolve/" in path]
    assert downloads
    assert all(f"/resolve/{MAIN}/" in path for path in downloads)


def test_tags_and_commits_are_revisions_too(
    hub: Hub, repository: Repository, tmp_path: Path
) -> None:
    repository.refs["v1"] = OTHER
    assert fetch(NAME, revision="v1", environ=hub.environ(tmp_path)).commit == OTHER
    assert fetch(NAME, revision=OTHER, environ=hub.environ(tmp_path)).commit == OTHER


def test_a_downloaded_model_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    fetched = fetch(NAME, environ=hub.environ(tmp_path))
    requests = len(hub.requests)
    assert fetch(NAME, environ=hub.environ(tmp_path, HF_HUB_OFFLINE="1")) == fetched
    assert fetch(NAME, revision=MAIN, environ=hub.environ(tmp_path, HF_HUB_OFFLINE="1")) == fetched
    assert len(hub.requests) == requests


def test_a_second_fetch_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    fetch(NAME, environ=hub.environ(tmp_path))
    before = list(hub.downloaded())
    fetch(NAME, environ=hub.environ(tmp_path))
    assert hub.downloaded() == before


def test_a_complete_commit_needs_no_hub_and_an_incomplete_one_does(
    hub: Hub, repository: Repository, tmp_path: Path
) -> None:
    repository.vanish = WEIGHTS
    with pytest.raises(ModelError):
        fetch(NAME, revision=OTHER, environ=hub.environ(tmp_path))
    repository.vanish = ""
    fetched = fetch(NAME, revision=OTHER, environ=hub.environ(tmp_path))
    requests = len(hub.requests)
    assert requests
    assert fetch(NAME, revision=OTHER, environ=hub.environ(tmp_path)) == fetched
    assert len(hub.requests) == requests
    fetch(NAME, revision=MAIN, environ=hub.environ(tmp_path))
    assert len(hub.requests) > requests, "another commit is requested"


@pytest.mark.parametrize(
    "lost", ["snapshots", f"snapshots/{OTHER}", "config.json", WEIGHTS, "blob"]
)
def test_a_commit_that_lost_files_in_the_cache_is_downloaded_again(
    hub: Hub, tmp_path: Path, lost: str
) -> None:
    fetched = fetch(NAME, revision=OTHER, environ=hub.environ(tmp_path))
    before = len(hub.downloaded())
    weights = fetched.path / WEIGHTS
    if lost.startswith("snapshots"):
        shutil.rmtree(fetched.path.parents[1] / lost)
    else:
        (weights.resolve() if lost == "blob" else fetched.path / lost).unlink()
    assert fetch(NAME, revision=OTHER, environ=hub.environ(tmp_path)) == fetched
    assert loading.load(fetched.path).shape.layers == 2
    blobs_are_left = lost != "blob"
    assert set(hub.downloaded()[before:]) == (set() if blobs_are_left else {WEIGHTS})


def test_a_hub_that_is_down_is_replaced_by_the_cache(hub: Hub, tmp_path: Path) -> None:
    fetched = fetch(NAME, environ=hub.environ(tmp_path))
    hub.status = 503
    assert fetch(NAME, environ=hub.environ(tmp_path)) == fetched


def test_offline_without_the_model_says_so(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not in the cache") as error:
        fetch(NAME, environ=hub.environ(tmp_path, HF_HUB_OFFLINE="1"))
    assert error.value.code == "ModelNotFound"
    assert not hub.requests


def test_an_incomplete_download_is_not_used_as_a_model(
    hub: Hub, repository: Repository, tmp_path: Path
) -> None:
    repository.vanish = WEIGHTS
    assert refusal(hub, tmp_path).code == "ModelNotFound"
    with pytest.raises(ModelError):
        fetch(NAME, environ=hub.environ(tmp_path, HF_HUB_OFFLINE="1"))
    repository.vanish = ""
    before = set(hub.downloaded())
    fetch(NAME, environ=hub.environ(tmp_path))
    assert set(hub.downloaded()) - before == {WEIGHTS}


@pytest.mark.parametrize("status", [500, 503, 429])
def test_an_error_status_of_the_hub_is_named(hub: Hub, tmp_path: Path, status: int) -> None:
    hub.status = status
    error = refusal(hub, tmp_path)
    assert error.code == "HubUnreachable"
    assert str(status) in error.message
    assert hub.endpoint in error.message


def test_a_hub_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: every connection is refused
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ModelError) as error:
            fetch(NAME, environ={"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)})
    assert error.value.code == "HubUnreachable"
    assert endpoint in error.value.message


def test_a_body_that_ends_early_is_an_error(
    hub: Hub, repository: Repository, tmp_path: Path
) -> None:
    repository.truncate = "config.json"
    assert refusal(hub, tmp_path).code == "HubUnreachable"


def test_a_gated_model_needs_a_token_that_has_access(
    hub: Hub, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.gated, repository.token = True, "hf_right"
    error = refusal(hub, tmp_path)
    assert (error.code, "401" in error.message) == ("WeightsUnauthorized", True)
    assert "HF_TOKEN" in error.hint
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    error = refusal(hub, tmp_path)
    assert (error.code, "403" in error.message) == ("WeightsUnauthorized", True)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert fetch(NAME, environ=hub.environ(tmp_path)).commit == MAIN


def test_an_unknown_repository_and_an_unknown_revision_are_named(hub: Hub, tmp_path: Path) -> None:
    error = refusal(hub, tmp_path, "tiny/other")
    assert (error.code, "tiny/other" in error.message) == ("ModelNotFound", True)
    error = refusal(hub, tmp_path, revision="v9")
    assert (error.code, "v9" in error.message) == ("ModelNotFound", True)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model_type": "rwkv"}, "UnsupportedModel"),
        ({"model_type": "evil", "auto_map": AUTO_MAP}, "RemoteCodeRefused"),
        ({"num_hidden_layers": 10**9}, "UnsupportedModel"),
    ],
)
def test_no_weights_are_downloaded_of_a_model_that_is_refused(
    hub: Hub, repository: Repository, tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    config = json.loads(repository.files["config.json"]) | changes
    repository.files["config.json"] = json.dumps(config).encode()
    assert refusal(hub, tmp_path).code == code
    assert WEIGHTS not in hub.downloaded()


def test_a_model_without_safetensors_is_refused_at_once(
    hub: Hub, repository: Repository, tmp_path: Path
) -> None:
    del repository.files[WEIGHTS]
    error = refusal(hub, tmp_path)
    assert error.code == "NoSafetensors"
    assert "pytorch_model.bin" in error.message
    assert not hub.downloaded()


def test_a_volume_that_is_too_small_is_refused_before_the_weights_are_downloaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=10**6, used=9 * 10**5, free=10**5)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    error = refusal(hub, tmp_path)
    assert error.code == "NoSpace"
    assert WEIGHTS not in hub.downloaded()


def test_only_the_weight_files_of_the_index_are_downloaded(
    hub: Hub, repository: Repository, tmp_path: Path
) -> None:
    model = tiny.build("llama", num_hidden_layers=2)
    model.save_pretrained(tmp_path / "parts", max_shard_size="200KB")
    tiny.tokenizer().save_pretrained(tmp_path / "parts")
    repository.files = Repository.of(tmp_path / "parts").files | {
        "consolidated.safetensors": b"twice"
    }
    fetched = fetch(NAME, environ=hub.environ(tmp_path / "home"))
    shards = sorted(path.name for path in fetched.path.glob("*.safetensors"))
    assert len(shards) > 1
    assert all(name.startswith("model-0") for name in shards)
    assert loading.load(fetched.path).shape.layers == 2


def test_progress_only_grows_and_ends_at_the_total(hub: Hub, tmp_path: Path) -> None:
    reports: list[Progress] = []
    fetched = fetch(NAME, environ=hub.environ(tmp_path), report=reports.append)
    size = sum(path.stat().st_size for path in fetched.path.iterdir())
    assert [p.done for p in reports] == sorted(p.done for p in reports)
    assert (reports[-1].done, reports[-1].total, reports[-1].path) == (size, size, fetched.path)


def test_one_failed_file_stops_the_others(hub: Hub, repository: Repository, tmp_path: Path) -> None:
    repository.vanish = "config.json"
    meter = fetching._Meter(lambda _: None, 100)
    meter.add("other", 10)
    place = fetching.Hub.from_environ(hub.environ(tmp_path))
    with pytest.raises(ModelError, match=r"config\.json"):
        fetching._download_files(place, NAME, MAIN, {"config.json": 1}, meter)
    with pytest.raises(InterruptedError, match="another file failed"):
        fetching._counting_bar("other", meter)(total=90, initial=10).update(10)


def test_the_command_serves_progress_and_config_while_the_weights_download(
    hub: Hub, repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers: dict[str, Any] = {}

    def ask(name: str) -> None:
        if name == WEIGHTS:
            for route in ("progress", "model/config.json", "healthz"):
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/{route}", timeout=10
                ) as response:
                    answers[route] = json.load(response)

    repository.on_get = ask
    assert command.main([f"hf://{NAME}", "--admin-port", str(port)], hub.environ(tmp_path)) == 0
    progress = answers["progress"]
    assert progress["model"] == f"hf://{NAME}"
    assert 0 < progress["done_bytes"] < progress["total_bytes"]
    assert answers["model/config.json"] == json.loads(repository.files["config.json"])
    assert answers["healthz"] == {"status": "fetching"}
    assert Path(capsys.readouterr().out.strip()).name == MAIN
    with socket.socket() as after:
        assert after.connect_ex(("127.0.0.1", port))  # nothing listens any more


@pytest.mark.parametrize(
    ("revision", "warned"), [("", "revision main of"), ("v1", "revision v1 of"), (OTHER, "")]
)
def test_a_revision_that_is_no_commit_is_warned_of_with_the_commit_that_it_names_now(
    hub: Hub,
    repository: Repository,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    revision: str,
    warned: str,
) -> None:
    repository.refs["v1"] = OTHER
    args = [f"hf://{NAME}", "--admin-port=0", f"--revision={revision}"]
    assert command.main(args, hub.environ(tmp_path)) == 0
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    warnings = [line["message"] for line in lines if line["level"] == "WARNING"]
    assert len(warnings) == bool(warned)
    for warning in warnings:
        assert warned in warning
        assert (OTHER if revision else MAIN) in warning


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["tiny/other"], "ModelNotFound"),
        (["nonsense"], "InvalidSource"),
        (["demo:", "--revision", "v1"], "InvalidConfig"),
        (["demo:", "--admin-port", "70000"], "InvalidConfig"),
        (["/no/such/model"], "ModelNotFound"),
    ],
)
def test_the_command_ends_with_2_and_one_line_of_json(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: str
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    environ = hub.environ(tmp_path, FAIRLEAD_TERMINATION_LOG=str(log))
    assert command.main(["--admin-port", "0", *args], environ) == 2
    last = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert set(last) == {"code", "message", "hint"}
    assert last["code"] == code
    assert json.loads(log.read_text()) == last


def test_the_command_checks_a_directory_that_needs_no_download(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(checkpoint), "--admin-port", "0"], {}) == 0
    assert capsys.readouterr().out.strip() == str(checkpoint)
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / WEIGHTS).write_bytes(b"\xff" * 100)
    assert command.main([str(broken), "--admin-port", "0"], {}) == 2
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["code"] == "BadWeights"


@pytest.mark.parametrize(
    "args", [[], ["demo:", "--admin-port", "many"], ["demo:", "--rev", "v1"], ["a/b", "c/d"]]
)
def test_a_wrong_command_line_ends_with_the_same_line_of_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str]
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    with pytest.raises(SystemExit) as ended:
        command.main(args, {"FAIRLEAD_TERMINATION_LOG": str(log)})
    assert ended.value.code == 2
    last = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert last["code"] == "InvalidConfig"
    assert json.loads(log.read_text()) == last


def test_an_admin_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert command.main(["demo:", "--admin-port", str(taken.getsockname()[1])], {}) == 2
    last = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert "--admin-port" in last["message"]


def test_the_command_logs_progress_and_no_url_that_the_hub_redirects_to(
    hub: Hub, tmp_path: Path
) -> None:
    """Those URLs carry signatures."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **hub.environ(tmp_path)}
    command_line = [
        sys.executable,
        "-m",
        "fairlead_runtime",
        "fetch",
        f"hf://{NAME}",
        "--admin-port",
        "0",
    ]
    done = subprocess.run(command_line, env=environ, capture_output=True, text=True, check=True)
    path = Path(done.stdout.strip())
    assert path.name == MAIN
    assert path.is_relative_to(tmp_path)
    assert f"fetching hf://{NAME}: 100 %" in done.stderr
    assert "/blobs/" not in done.stderr
