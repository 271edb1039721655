"""The dispatcher finds the commands, imports only the one it calls and returns its exit code."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from fairlead_runtime import cli
from fairlead_runtime.commands import generate


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, cli.GROUP)


def run_python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_lists_every_command_with_a_line_and_imports_no_heavy_library() -> None:
    done = run_python(
        "import sys; from fairlead_runtime.cli import main; code = main(['--help']);"
        "assert not {'torch', 'transformers', 'kopf', 'fastapi'} & set(sys.modules); sys.exit(code)"
    )
    assert done.returncode == 0, done.stderr
    for name in ("serve", "fetch", "generate", "trace", "replay"):
        line = next(line for line in done.stdout.splitlines() if line.strip().startswith(name))
        assert len(line.split()) > 3


def test_a_command_is_summed_up_in_a_whole_sentence() -> None:
    plan = point("plan", "fairlead_operator.commands.plan:main")
    assert cli.summary(plan) == "Print what one pod can hold and whether the model fits"
    trace = point("trace", "fairlead_runtime.commands.trace:main")
    assert cli.summary(trace) == "Show the steps of a recorded run"


def test_the_operators_help_does_not_wait_for_kopf() -> None:
    done = run_python(
        "import sys\nfrom fairlead_runtime.cli import main\n"
        "try:\n  main(['operator', '--help'])\n"
        "except SystemExit as end:\n  assert end.code == 0\nassert 'kopf' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_commands_own_help_imports_no_torch(command: str) -> None:
    done = run_python(
        "import sys\nfrom fairlead_runtime.cli import main\n"
        f"try:\n  main([{command!r}, '--help'])\n"
        "except SystemExit as end:\n  assert end.code == 0\nassert 'torch' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr
    assert "--max-batch-tokens" in done.stdout


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--max-num-seqs=3", "use --max-requests, vLLM's --max-num-seqs"),
        ("--enable-prefix-caching", "use --allow-block-sharing, vLLM's --enable-prefix-caching"),
        (
            "--no-enable-prefix-caching",
            "use --no-allow-block-sharing, vLLM's --no-enable-prefix-caching",
        ),
        ("--no-async-scheduling", "use --async-batching, vLLM's --no-async-scheduling"),
        ("--reasoning-config={}", "send thinking_token_budget with a request"),
        ("--kv-padding-interval-size", "a captured step serves keys of every length"),
        ("--max-request", "did you mean --max-requests?"),
        ("--no-cuda-graphs", "did you mean --cuda-graphs?"),
        ("--no-kernels", "did you mean --kernels?"),
        ("--no-max-requests=3", "did you mean --max-requests?"),
        ("--no-allow-block-sharin", "did you mean --no-allow-block-sharing?"),
        ("--qqq", "see fairlead generate --help"),
    ],
)
def test_a_flag_that_is_none_is_refused_with_ours(
    flag: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        generate.main(["demo:", "--prompt", "hi", flag])
    assert end.value.code == 2
    line = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert line["message"] == f"unrecognized arguments: {flag.partition('=')[0]}"
    assert line["hint"].startswith(hint)


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "sk-secret"],
        ["--api-key=sk-secret"],
        ["--qqq", "--hf-token", "sk-secret", "more"],
        ["--ssl-certfile", "sk-secret"],
    ],
)
def test_the_value_of_an_unknown_flag_is_not_shown(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["demo:", "--prompt", "hi", *words], [*words, "demo:"]):
        with pytest.raises(SystemExit):
            generate.main(arguments)
        shown = capsys.readouterr().err
        assert words[0].partition("=")[0] in shown
        assert "sk-secret" not in shown


def test_the_package_exports_its_names_without_importing_torch() -> None:
    done = run_python(
        "import sys, fairlead_runtime; from fairlead_runtime import SamplingParams, Submission;"
        "params = SamplingParams(max_tokens=3); assert Submission(prompt=(1,)).params != params;"
        "assert 'torch' not in sys.modules;"
        "assert 'LLM' in fairlead_runtime.__all__"
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_command_names_the_nearest_and_exits_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["serv"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err
    assert cli.main(["qqq"]) == 2
    assert "generate" in capsys.readouterr().err


def test_no_command_shows_the_usage_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: fairlead COMMAND" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fairlead 0.")


def test_a_missing_library_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [point("serve", "fairlead_runtime.no_such_module:main")]
    monkeypatch.setattr(cli, "entry_points", lambda **_: points)
    assert cli.main(["serve"]) == 2
    assert "pip install 'fairlead[runtime]'" in capsys.readouterr().err
    assert "(not installed)" in cli.usage({"serve": points[0]})


def test_an_interrupted_command_ends_with_the_shells_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(EntryPoint, "load", lambda _self: interrupted)
    assert cli.main(["serve"]) == 130
    monkeypatch.setattr(EntryPoint, "load", interrupted)  # while it imports
    assert cli.main(["plan"]) == 130
