"""The program of `make bench-gpu`, whole, on a CPU and a tiny model: every line runs before a GPU
is at hand. Its figures are not looked at.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import __main__ as program

ROOT = Path(__file__).parents[3]
VLLM = """
from types import SimpleNamespace

__version__ = "0.1.pretended"


class SamplingParams:
    def __init__(self, **settings):
        self.new = settings["max_tokens"]


class LLM:
    def __init__(self, folder, **settings):
        assert settings["load_format"] == "dummy"
        self.longest = settings["max_model_len"]

    def generate(self, prompts, params, use_tqdm):
        return [self.result(len(prompt["prompt_token_ids"]), params.new) for prompt in prompts]

    def result(self, length, new):
        # It ends them at its longest sequence without an error.
        made = SimpleNamespace(token_ids=range(min(new, self.longest - length)))
        return SimpleNamespace(outputs=[made])
"""


def bench(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_row_is_measured_printed_written_and_drawn(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    found = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    outputs = ["--json", str(tmp_path / "figures.json"), "--svg", str(tmp_path / "figures.svg")]
    ran = bench(
        *("--device", "cpu", "--model", "tiny"),
        *outputs,
        PYTHONPATH=os.pathsep.join(filter(None, found)),
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["left_out"] == {}
    rows = {row["name"]: row for row in figures["rows"]}
    both = [f"decode, {case}" for case in ("1 rows at 24", "4 rows at 24", "6 rows at 24")]
    both += [f"decode, 4 rows at 24, {how}" for how in ("temperature", "top-k", "top-p")]
    both += ["prompts, 2 of 32", "device idle, 1 rows at 24", "device idle, 4 rows at 24"]
    alone = ["decode, 1 rows at 24, layers not fused"]
    alone += ["decode, 4 rows at 24, no graphs", "decode, 4 rows at 24, no steps ahead"]
    assert all(rows[name]["ours"] and rows[name]["theirs"] for name in both)
    assert all(rows[name]["ours"] and rows[name]["share"] for name in alone)
    assert all(row["ours"] and min(row["ours"]) > 0 for row in figures["rows"][:8])
    parts = {"weights, made on the device", "fusing, kernels, self-test", "profile", "first token"}
    assert parts <= set(figures["cold"])
    assert any("vLLM 0.1.pretended, decodes by itself" in note for note in figures["notes"])
    assert any("transformers' settings" in note for note in figures["notes"])
    assert "device idle, 4 rows at 24" in ran.stdout
    assert (tmp_path / "figures.svg").read_text().startswith("<svg")


def test_a_run_without_time_writes_what_it_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "--device", "cpu", "--model", "tiny", "--minutes", "0"]
    monkeypatch.setattr(sys, "argv", arguments)
    program.main()
    # Once when it is left out, and once below the table.
    assert capsys.readouterr().out.count("left out: in turns: 0 s are left") == 2


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="this benchmark needs an NVIDIA GPU, and torch sees none"):
        program.main()


def commands_of(target: str, *settings: str) -> list[str]:
    """`make -n` prints them; below another make, as in `make test`, more than them."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    made = subprocess.run(
        ["make", "-n", target, *settings],
        cwd=ROOT,
        env=alone,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = made.stdout.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


targets = pytest.mark.parametrize("target", ["gpu", "gpu-soak", "bench-gpu"])


@targets
def test_the_targets_run_with_the_packages_of_the_cuda_image(target: str) -> None:
    """And with the nvcc among them, for kernels that are compiled at their first use."""
    *before, command = commands_of(target, "--what-if=docker/requirements-cuda.lock")
    assert "bash scripts/gpu_setup.sh .venv" in before
    installs = (ROOT / "scripts" / "gpu_setup.sh").read_text()
    assert "--require-hashes -r docker/requirements-cuda.lock" in installs
    assert ".venv/bin/python scripts/gpu_python.py -- -m " in command
    assert f'PATH="{ROOT}/.venv/bin:$PATH"' in command
    assert f'CUDA_HOME="$(echo {ROOT}/.venv/lib/python3*/site-packages/nvidia/cu[0-9]*)"' in command


@targets
def test_the_targets_run_with_the_python_at_hand_and_end_in_time(target: str) -> None:
    at_hand = "SETUP=0", "PYTHON=any-python", "WHEELS=a.whl folder", "MINUTES=3"
    (command,) = commands_of(target, *at_hand)
    assert command.startswith("timeout --signal=INT --kill-after=10 $((3 * 60 - 15)) env ")
    wheels = "any-python scripts/gpu_python.py --wheels a.whl --wheels folder -- -m "
    assert wheels in command
    assert "FAIRLEAD_MINUTES=3" in command
    assert "TRITON_INTERPRET=0" in command
