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
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fairlead_runtime.hub import source
from support.environments import environment, newer_python, node_environment
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


def url(server: Process) -> str:
    return server.ports["public"] + "/v1"


def printed(*command: str) -> str:
    """What a program of another project prints, that asks nobody but our server."""
    offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        command,
        cwd=PROGRAMS,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def greedy_text(server: Process) -> str:
    prompt = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
    with server.client() as http:
        text: str = http.post("/v1/completions", json=prompt).json()["choices"][0]["text"]
    return text


def greedy_chat(server: Process) -> Any:
    with server.client() as http:
        return http.post("/v1/chat/completions", json=ASKED).json()


def openai_for_python() -> list[str]:
    # The tests of the API use the same client beside our own packages.
    return [str(environment("openai==3.52.0") / "python"), "openai_client.py"]


def langchain() -> list[str]:
    return [str(environment("langchain-openai==1.7.3") / "python"), "langchain_client.py"]


def anthropic_for_python() -> list[str]:
    return [str(environment("anthropic==2.14.0") / "python"), "anthropic_client.py"]


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
        anthropic_for_python,
        pytest.param(openai_for_python, marks=pytest.mark.full),
        pytest.param(openai_for_javascript, marks=pytest.mark.full),
    ],
)
def test_the_client_understands_every_answer(client: Any, server: Process) -> None:
    found = json.loads(printed(*client(), url(server), json.dumps(TOOL)).splitlines()[-1])
    chat = greedy_chat(server)
    assert found["whole"] == found["streamed"] == chat["choices"][0]["message"]["content"]
    assert found["usage"] == found["streamed_usage"] == chat["usage"]["total_tokens"]
    # Anthropic's API has no completions.
    assert found["text"] in {None, greedy_text(server)}
    assert (found["text"] is None) == (client is anthropic_for_python)
    assert found["call"] == "sail"
    assert isinstance(json.loads(found["arguments"])["far"], bool)
    assert "n: " in found["error"]


@pytest.mark.full
def test_lm_eval_scores_as_transformers_does_and_generates_what_the_server_says(
    server: Process,
) -> None:
    path = str(source.resolve("demo:").path)
    python = str(environment("lm-eval[api]==0.4.13", "transformers==5.23.0") / "python")
    pairs = [["Once upon a time", " there was a boat"], ["What is Fairlead?", " Fairlead serves"]]
    output = printed(python, "lm_eval_client.py", url(server), path, json.dumps(pairs))
    found = json.loads(output.splitlines()[-1])
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for (context, continuation), (score, greedy) in zip(pairs, found["scores"], strict=True):
        ids, start = tokenizer(context + continuation).input_ids, len(tokenizer(context).input_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
        target = torch.tensor(ids[start:])
        assert score == pytest.approx(float(logits.gather(1, target[:, None]).sum()), abs=1e-3)
        assert greedy == bool((logits.argmax(-1) == target).all())
    assert found["text"] == [greedy_text(server)]
    assert found["chat"] == [greedy_chat(server)["choices"][0]["message"]["content"]]


@pytest.mark.full
def test_guidellm_measures_without_an_error(server: Process, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    printed(
        *(str(environment("guidellm==0.8.1") / "guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={server.ports['public']},model=tiny"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", "kind=max_requests,count=8"),
        *("--tokenizer", f"kind=huggingface_auto,model={source.resolve('demo:').path}"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
        *("--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert [len(requests[kind]) for kind in ("successful", "errored", "incomplete")] == [8, 0, 0]
    assert {request["output_tokens"] for request in requests["successful"]} == {8}


@pytest.mark.full
def test_inference_perf_measures_without_an_error(server: Process, tmp_path: Path) -> None:
    requirement = "inference-perf==0.7.0"
    python = newer_python("3.12", requirement)
    lengths = {"min": 4, "max": 16, "mean": 8, "std_dev": 2, "total_count": 20}
    config = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", "input_distribution": lengths, "output_distribution": lengths},
        "load": {
            "type": "concurrent",
            "stages": [{"num_requests": 12, "concurrency_level": 4}],
            "num_workers": 1,
        },
        "server": {
            "type": "vllm",
            "model_name": "tiny",
            "base_url": server.ports["public"],
            "ignore_eos": True,
        },
        "tokenizer": {"pretrained_model_name_or_path": str(source.resolve("demo:").path)},
        "storage": {"local_storage": {"path": str(tmp_path / "report")}},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    program = environment(requirement, python=python) / "inference-perf"
    printed(str(program), "-c", str(tmp_path / "config.yaml"))
    summary = json.loads((tmp_path / "report" / "summary_lifecycle_metrics.json").read_text())
    assert (summary["successes"]["count"], summary["failures"]["count"]) == (12, 0)
