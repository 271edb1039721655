"""Clients of other projects work unchanged with a real server. Each is in an environment of its own
and runs its own program, which prints what the client understood.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.environments import environment, node_environment
from support.serve_process import Process, serve

PROGRAMS = Path(__file__).parent / "programs"
TOOL = {
    "type": "function",
    "function": {
        "name": "sail",
        "parameters": {
            "type": "object",
            "properties": {"far": {"type": "boolean"}},
            "required": ["far"],
            "additionalProperties": False,
        },
    },
}
ASKED = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me about the sea."}],
    "temperature": 0,
    "max_tokens": 12,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with serve("demo:", "--served-name=tiny", "--num-blocks=512", "--block-size=8") as process:
        process.until_logged("serving")
        yield process


def langchain() -> list[str]:
    return [str(environment("langchain-openai==1.7.3") / "python"), "langchain_client.py"]


def openai_for_javascript() -> list[str]:
    # Node looks for packages beside the program.
    folder = node_environment("openai@6.49.0")
    shutil.copy(PROGRAMS / "openai_client.mjs", folder)
    return ["node", str(folder / "openai_client.mjs")]


def litellm() -> list[str]:
    python = environment("litellm==1.106.2", "mcp==2.3.0") / "python"
    return [str(python), "litellm_client.py"]


@pytest.mark.parametrize(
    "client",
    [
        langchain,
        litellm,
        pytest.param(openai_for_javascript, marks=pytest.mark.full),
    ],
)
def test_the_client_understands_every_answer(client: Any, server: Process) -> None:
    command = [*client(), server.ports["public"] + "/v1", json.dumps(TOOL)]
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks GitHub first
    done = subprocess.run(
        command, cwd=PROGRAMS, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    with server.client() as http:
        chat = http.post("/v1/chat/completions", json=ASKED).json()
        prompt = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
        text = http.post("/v1/completions", json=prompt).json()["choices"][0]["text"]
    assert found["whole"] == found["streamed"] == chat["choices"][0]["message"]["content"]
    assert found["usage"] == found["streamed_usage"] == chat["usage"]["total_tokens"]
    assert found["text"] == text
    assert found["call"] == "sail"
    assert isinstance(json.loads(found["arguments"])["far"], bool)
    assert "n: " in found["error"]
