"""`fairlead generate` writes the text to stdout and a refusal as one line to stderr."""

import io
import json
from pathlib import Path

import pytest

from fairlead_runtime import cli
from fairlead_runtime.processes import lean_imports
from support import tiny

CACHE = ["--num-blocks=256", "--block-size=8"]


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in the tests' own process, where other tests import every model's code."""
    monkeypatch.setattr(lean_imports, "leave_compiler_out", lambda: None)


def test_the_demo_model_answers_a_chat(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["generate", "demo:", "--prompt", "What is Fairlead?", "--chat", *CACHE])
    assert code == 0
    assert capsys.readouterr().out.startswith("Fairlead serves language models on Kubernetes.")


def test_a_plain_prompt_is_completed_without_a_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny.save(tiny.build("llama"), tmp_path))
    capsys.readouterr()
    assert cli.main(["generate", model, "--prompt", "hello", "--max-tokens", "5", *CACHE]) == 0
    first = capsys.readouterr().out
    assert cli.main(["generate", model, "--prompt", "hello", "--max-tokens", "5", *CACHE]) == 0
    assert capsys.readouterr().out == first
    assert first.endswith("\n")


def test_no_text_on_stdin_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    monkeypatch.setattr(lean_imports, "leave_compiler_out", lambda: pytest.fail("loads"))
    assert cli.main(["generate", "demo:", *CACHE]) == 2
    assert "prompt: is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "setting"),
    [
        (["--max-tokens", "0"], "InvalidConfig", "--max-tokens"),
        (["--temperature", "-1"], "InvalidRequest", "temperature"),
        (["--max-tokens", "5000"], "InvalidRequest", "max_tokens"),
    ],
)
def test_a_refusal_exits_with_2_and_one_line(
    arguments: list[str], code: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "demo:", "--prompt", "hello", *arguments, *CACHE]) == 2
    refusal = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert refusal["code"] == code
    assert setting in refusal["message"]
