"""`fairlead` on a terminal: text in place of JSON, short refusals, addresses, Ctrl-C."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from support.pseudo_terminal import on_a_terminal
from support.serve_process import hanging_device, serve

FAIRLEAD = (sys.executable, "-m", "fairlead_runtime")
PATIENCE = 40.0  # seconds
ANY_PORT = ("--port=0", "--admin-port=0")
# What is refused without these is refused within a second.
HEAVY = """
import sys
from fairlead_runtime.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(*({"torch", "transformers", "huggingface_hub", "fastapi"} & set(sys.modules)))
sys.exit(code)
"""


def other_tokenizer(folder: Path) -> str:
    """The demo model with a tokenizer of which the end is cut."""
    demo = Path(__file__).parents[3] / "runtime" / "fairlead_runtime" / "demo"
    shutil.copytree(demo, folder)
    (folder / "tokenizer.json").write_bytes((demo / "tokenizer.json").read_bytes()[:-2])
    return str(folder)


def broken_model(folder: Path) -> str:
    """A directory with a config.json that is served, and weights of which the header is cut."""
    folder.mkdir()
    demo = Path(__file__).parents[3] / "runtime" / "fairlead_runtime" / "demo"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (demo / name).exists():
            (folder / name).write_bytes((demo / name).read_bytes())
    (folder / "model.safetensors").write_bytes(b"\xff\0\0\0\0\0\0\0{")
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ("serve /nope", "/nope: no such directory", "check the path"),
        ("serve ./demo", "./demo: no such directory", "check the path"),
        ("serve demo", "'demo' is not a model", "use demo:"),
        ("serve EMPTY", "EMPTY: config.json is missing", "transformers' format"),
        ("serve BROKEN", "its header claims 255 bytes", "fetch the model again"),
        ("serve demo: --prt 8000", "unrecognized arguments: --prt", "did you mean --port?"),
        ("serve demo: --prt=8000", "unrecognized arguments: --prt", "did you mean --port?"),
        ("serve --max-request=4", "unrecognized arguments", "did you mean --max-requests?"),
        ("serve demo: --dtype fp16", "--dtype: 'fp16' is not one of auto", "did you mean float16?"),
        ("serve demo: --port abc", "--port: invalid int value: 'abc'", "a whole number"),
        ("serve demo: --port TAKEN", "--port: cannot listen", "choose another port"),
        ("serve demo: --max-num-seqs 8", "unrecognized", "use --max-requests, vLLM's"),
        ("serve demo: --max-model-len 100000", "more than the model's own", "set at most 2048"),
        ("serve demo: --record /no/such/run.jsonl", "--record: /no/such/run.jsonl", "writable"),
        ("serve demo: --safety-margin 20", "--safety-margin: 20.0 is above", "it is a share"),
        ("serve", "required: MODEL", "see fairlead serve --help"),
        ("generate demo: --prompt x --max-tokens -1", "max-tokens: -1 is", "set at least 1"),
        ("generate demo: --prompt x --max-tokens 5000", "max_tokens: 5000 leave no room", ""),
        ("generate demo: --prompt x --temperature -1", "temperature: must be from 0", ""),
        ("generate demo:", "--prompt: is missing", "the text on stdin"),
        ("generate demo: --prompt x --ssl-certfile f", "unrecognized", "only `fairlead serve`"),
        ("serve CUT --port 0 --admin-port 0", "tokenizer.json: not valid JSON", ""),
        ("generate CUT --prompt x", "tokenizer.json: not valid JSON", ""),
        ("generate /nope --prompt x", "/nope: no such directory", "check the path"),
        ("replay /nope", "/nope: No such file or directory", ""),
        ("trace /nope", "/nope: No such file or directory", ""),
        ("replay /dev/null", "is no recording, which `fairlead serve --record FILE` writes", ""),
        ("serve demo: --chat-template /nope", "--chat-template: /nope: No such file", "readable"),
        ("srve", "'srve' is not a command", "did you mean serve?"),
        ("--versio", "'--versio' is not a command", "did you mean --version?"),
        ("--port 8000 serve demo:", "'--port' is not a command", "write the command first"),
    ],
)
def test_a_refusal_is_short_and_comes_before_anything_heavy_is_imported(
    arguments: str, error: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {
            "EMPTY": str(tmp_path / "empty"),
            "BROKEN": broken_model(tmp_path / "broken"),
            "CUT": other_tokenizer(tmp_path / "cut"),
            "TAKEN": str(taken.getsockname()[1]),
        }
        words = [places.get(word, word) for word in arguments.split()]
        with on_a_terminal(sys.executable, "-c", HEAVY, *words, NO_COLOR="1") as terminal:
            assert terminal.end() == 2
    *lines, heavy = terminal.text.splitlines()
    assert heavy == "", "heavy modules are imported"
    assert lines[0].startswith("error: ")
    assert error.replace("EMPTY", places["EMPTY"]) in lines[0]
    assert len(lines) == 1 + bool(hint)
    if hint:
        assert lines[1].startswith("hint: ")
        assert hint in lines[1]


def test_off_a_terminal_the_same_refusal_is_one_line_of_json() -> None:
    command = [*FAIRLEAD, "serve", "demo:", "--prt", "8000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    words = json.loads(line)
    assert words["message"] == "unrecognized arguments: --prt"
    assert words["hint"] == "did you mean --port?"
    done = subprocess.run(
        [*command, "--log-format=text"], capture_output=True, text=True, check=False
    )
    assert done.stderr.startswith("error: unrecognized arguments: --prt\nhint: ")


def test_a_server_speaks_text_names_its_addresses_and_ends_at_ctrl_c() -> None:
    flags = (*ANY_PORT, "--drain-grace=3600")
    with on_a_terminal(*FAIRLEAD, "serve", "demo:", *flags) as terminal:
        terminal.until("Ctrl-C ends this server")
        ready = next(line for line in terminal.text.splitlines() if "Ready in" in line)
        url = next(word for word in ready.split() if word.endswith("/v1"))
        assert httpx.get(f"{url}/models").json()["data"][0]["id"] == "demo:"
        for page in ("chat ", "watch "):
            address = ready.split(page)[1].split()[0]
            assert "text/html" in httpx.get(address).headers["content-type"]
        assert "\x1b[1mReady in" in terminal.text
        assert '{"' not in terminal.text
        assert terminal.text.count("\n") <= 14
        live = [line for line in terminal.text.split("\r\x1b[K") if "Starting: " in line]
        assert all(line.count("\n") == 0 for line in live), "one line, written over"
        assert "Starting: imports" in live[0]
        assert re.search(r"started in [\d.]+ s: imports [\d.]+ s, weights", terminal.text)
        terminal.type("\x03")
        terminal.until("draining: ")
        terminal.until("\n")
        assert "are served for" not in terminal.text, "there is a grace"
        assert terminal.end() == 0
    assert "new requests are served" not in terminal.text


def test_neither_colours_nor_text_come_where_they_are_not_wanted() -> None:
    flags = ("serve", "demo:", *ANY_PORT)
    with on_a_terminal(*FAIRLEAD, *flags, NO_COLOR="1") as terminal:
        terminal.until("admin port")
        terminal.type("\x03")
        assert terminal.end() == 0
    assert "\x1b" not in terminal.text
    with on_a_terminal(*FAIRLEAD, *flags, "--log-format=json") as terminal:
        terminal.until("admin port")
        terminal.type("\x03")
        assert terminal.end() == 0
    lines = [line for line in terminal.text.replace("^C", "").splitlines() if line]
    assert [json.loads(line)["level"] for line in lines]


def patient_end() -> None:
    """Let both processes wait long for a step that hangs, before the engine ends."""
    from fairlead_runtime.processes import engine_process, http_process

    http_process.STOP_SECONDS = engine_process.STOP_SECONDS = PATIENCE


def patient_hanging_device() -> None:
    patient_end()
    hanging_device()


def test_a_second_interrupt_ends_a_server_whose_step_hangs() -> None:
    flag, prepare = "--drain-grace=3600", patient_hanging_device
    with serve("demo:", flag, prepare=prepare, prepare_http=patient_end) as server:
        server.until_logged("serving")
        body = {"prompt": "a", "max_tokens": 9, "ignore_eos": True, "stream": True}
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as sent:
            lines = sent.iter_lines()  # without a name for it the connection would be closed
            next(lines)
            server.until_logged("the step hangs")
            os.kill(server.pid, signal.SIGINT)
            server.until_logged("new requests are refused")
            began = time.monotonic()
            os.kill(server.pid, signal.SIGINT)
            assert server.end() == 0
            assert time.monotonic() - began < PATIENCE / 2
    assert not any("new requests are served" in line for line in server.lines), "no grace"


WITHOUT = """
import sys
for name in ("torch", "transformers", "huggingface_hub"):
    sys.modules[name] = None
from fairlead_runtime.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("arguments", ["serve demo:", "generate demo: --prompt x", "fetch a/b"])
def test_a_missing_extra_is_named(arguments: str) -> None:
    command = [sys.executable, "-c", WITHOUT, *arguments.split(), "--log-format=text"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert error.endswith(" is not installed")
    assert hint == "hint: pip install 'fairlead[runtime]'"


def test_a_program_without_torch_is_told_the_extra() -> None:
    code = 'import sys; sys.modules["torch"] = None\nfrom fairlead_runtime import LLM'
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.endswith("torch is not installed: pip install 'fairlead[runtime]'")


def test_an_output_that_is_not_utf8_ends_no_command() -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [*FAIRLEAD, "plan", "demo:", "--memory", "24Gi"]
    done = subprocess.run(command, capture_output=True, env=environ, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"99 %  ????" in done.stdout, "the bars"
