"""Models whose layers keep states: ours beside an earlier version of it and transformers' static
batches, in turns, on random weights in float32.

Times are the processor's, of one thread each, so that what else the machine does counts little.

Workloads as in `cpu_peers.py`: 32 requests at once with prompts of 16 to 256 tokens and 16 to 128
new tokens, and one alone.

    .venv/bin/python -m benchmarks.state_models nemotron_h [--before CHECKOUT] [--rounds 2]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.cpu_engine import Request
from benchmarks.turns import OURS, Terms, take_turns

ROOT = Path(__file__).parents[1]
SLOTS = 32
BEFORE, STATIC = "before", "transformers, static batches"
ALONE = 64  # new tokens


def save(family: str, folder: Path, layers: int) -> float:
    """Write a random model with no end of sequence, of the first of its layers. Returns its
    millions of parameters.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

    torch.manual_seed(0)
    settings = models.with_states(family, layers) | {"bos_token_id": None, "eos_token_id": None}
    factory: Any = AutoModelForCausalLM  # transformers' classes are untyped
    model = factory.from_config(CONFIG_MAPPING[family](**settings))
    model.generation_config = GenerationConfig(do_sample=False)
    model.float().save_pretrained(folder)
    models.save_tokenizer(folder, settings["vocab_size"])
    return models.size(model).total / 1e6


class Engine:
    """A process of ``cpu_engine.py`` of a checkout."""

    def __init__(self, kind: str, checkout: Path, model: Path) -> None:
        paths = (checkout / name for name in ("scripts", "runtime", "kernels", "tests", "."))
        self._process = subprocess.Popen(
            [sys.executable, "benchmarks/cpu_engine.py", kind, str(model), str(SLOTS)],
            cwd=checkout,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def run(self, requests: Sequence[Request]) -> float:
        """Seconds of the processor until the last request ended."""
        assert self._process.stdin is not None
        began = self._used()
        print(json.dumps(requests), file=self._process.stdin, flush=True)
        self._answer()
        return self._used() - began

    def _used(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # proc(5): utime, stime

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the engine ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def drawn(workload: str, draw: random.Random, requests: int, part: int) -> list[Request]:
    def text(length: int) -> list[int]:
        return [draw.randrange(1, 49152) for _ in range(length)]

    if workload == "alone":
        return [(text(64), ALONE // part)]
    lengths = ((draw.randint(16, 256), draw.randint(16, 128)) for _ in range(requests))
    return [(text(prompt // part), new // part) for prompt, new in lengths]


def compare(engines: dict[str, Engine], rounds: int, requests: int, part: int) -> None:
    for workload in ("mixed", "alone"):
        turns = [drawn(workload, random.Random(at), requests, part) for at in range(rounds + 1)]
        turns[0] = [(prompt, min(cap, 2)) for prompt, cap in turns[0]]
        seconds = take_turns(
            list(engines),
            Terms(rounds, 1e9),
            workload,
            lambda name, at, turns=turns: engines[name].run(turns[at]),  # type: ignore[misc]
            float,
        )
        new = [sum(cap for _, cap in turn) for turn in turns[1:]]
        for name, taken in seconds.items():
            speed = statistics.median(n / s for n, s in zip(new, taken, strict=True))
            ratios = [s / o for s, o in zip(taken, seconds[OURS], strict=True)]
            print(
                f"{workload}, {name}: {speed:.1f} tokens a second of a thread, "
                f"{statistics.median(ratios):.2f} times ours' ({min(ratios):.2f} to "
                f"{max(ratios):.2f})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=tuple(models.STATES_ALONE))
    parser.add_argument("--layers", type=int, default=24, help="the first of the model's, instead")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version, built")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--part", type=int, default=1, help="divides all lengths, for a short run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        size = save(options.family, model, options.layers)
        print(f"{options.family}: {size:.0f} million parameters", flush=True)
        engines = {OURS: Engine("fairlead", ROOT, model)}
        if options.before is not None:
            engines[BEFORE] = Engine("fairlead", options.before.resolve(), model)
        engines[STATIC] = Engine("transformers-static", ROOT, model)
        try:
            compare(engines, options.rounds, options.requests, options.part)
        finally:
            for engine in engines.values():
                engine.close()


if __name__ == "__main__":
    main()
