"""Our engine on the C++ kernels against the same engine on plain torch, float32 on the CPU.

Requests with random prompts of 16 to 256 tokens and random caps of 16 to 128 new tokens arrive at
once; then one request alone, which decodes at batch 1. Both engines are in one process and take
turns, the order changing from round to round, after a warm-up; compare the ratios. Models: the demo
model, and random weights of the shape of a model with 135 million parameters (hidden 576, 30
layers, 9 query and 3 key-value heads, MLP 1,536, vocabulary 49,152, tied). Two more have keys in
places of a token: gemma4, whose full layers have wider heads, and lfm2, of whose layers two keep
keys and six a state. With --int8 the C++ kernels with int8 weights against the same with float32
weights, with --bf16 those of a model in bfloat16 against float32, with --torch-bf16 against plain
torch in bfloat16.

    .venv/bin/python -m benchmarks.cpu_kernels [--model demo|135m|gemma4|lfm2] [--requests 64]
        [--rounds 5] [--int8 | --bf16 | --torch-bf16]
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks import models
from benchmarks.models import VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM

from fairlead_runtime import LLM, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support import tiny

SHAPE: dict[str, Any] = {
    **models.SHAPES["135 M"],
    "vocab_size": VOCABULARY,
    "max_position_embeddings": models.LONGEST,
    "tie_word_embeddings": True,
}
_WIDTHS = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
# By name: the family and its sizes.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "135m": ("llama", SHAPE),
    "gemma4": (
        "gemma4_text",
        _WIDTHS
        | {"head_dim": 64, "global_head_dim": 128, "sliding_window": 256, "vocab_size": 8192}
        | {"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2}
        | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "lfm2": (
        "lfm2",
        _WIDTHS
        | {"layer_types": [*["conv"] * 3, "full_attention"] * 2, "vocab_size": 8192}
        | {"block_auto_adjust_ff_dim": False},
    ),
}
# Settings of the two engines: the ratio is the second's speed over the first's.
KERNELS = {"torch": {"kernels": "torch"}, "cpu": {"kernels": "cpu"}}
INT8 = {"float32": {"kernels": "cpu"}, "int8": {"kernels": "cpu", "quantization": "int8"}}
HALF = {"kernels": "cpu", "dtype": "bfloat16"}
BF16 = {"float32": {"kernels": "cpu"}, "bfloat16": HALF}
TORCH_BF16 = {"torch": {"kernels": "torch", "dtype": "bfloat16"}, "cpu": HALF}
ALONE = 64  # new tokens of the request that runs alone
PROMPT = 1000  # tokens of the prompt that has one

Workload = tuple[list[dict[str, list[int]]], list[SamplingParams]]


def mixed(requests: int, vocabulary: int) -> Workload:
    """The same requests at every call."""
    draw = random.Random(0)
    lengths = [draw.randint(16, 256) for _ in range(requests)]
    prompts = [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]
    caps = [draw.randint(16, 128) for _ in range(requests)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in caps]
    return [{"prompt_token_ids": prompt} for prompt in prompts], params


def alone(vocabulary: int) -> Workload:
    prompts = mixed(1, vocabulary)[0]
    return prompts, [SamplingParams(temperature=0.0, max_tokens=ALONE, ignore_eos=True)]


def prompt_alone(vocabulary: int) -> Workload:
    prompt = [random.Random(1).randrange(3, vocabulary) for _ in range(PROMPT)]
    return [{"prompt_token_ids": prompt}], [SamplingParams(temperature=0.0, max_tokens=1)]


def run(engine: LLM, workload: Workload) -> tuple[float, float]:
    """New tokens a second, and a second of processor time."""
    prompts, params = workload
    began, used = time.perf_counter(), time.process_time()
    results = engine.generate(prompts, params, use_tqdm=False)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    tokens = sum(len(result.outputs[0].token_ids) for result in results)
    return tokens / seconds, tokens / used


def spread(values: Sequence[float], digits: int = 0) -> str:
    median = statistics.median(values)
    return f"{median:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def compare(
    model: str, vocabulary: int, requests: int, rounds: int, pair: Mapping[str, dict[str, Any]]
) -> None:
    engines = {
        name: LLM(
            model,
            allow_block_sharing=False,
            max_batch_tokens=512,
            **{"dtype": "float32", **settings},
        )
        for name, settings in pair.items()
    }
    workloads = {
        f"{requests} mixed requests": mixed(requests, vocabulary),
        "one request": alone(vocabulary),
        f"one prompt of {PROMPT:,} tokens": prompt_alone(vocabulary),
    }
    for title, workload in workloads.items():
        speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in pair}
        names = list(pair)
        for number in range(rounds + 1):
            for name in names if number % 2 else reversed(names):
                speed = run(engines[name], workload)
                if number:  # the first round warms up
                    speeds[name].append(speed)
        for clock, unit in enumerate(("second", "second of processor time")):
            print(f"{title}: new tokens a {unit}, median (least-most)", flush=True)
            taken = {name: [speed[clock] for speed in speeds[name]] for name in names}
            for name, values in taken.items():
                print(f"  {name:8} {spread(values, 1)}")
            ratios = [b / a for a, b in zip(*taken.values(), strict=True)]
            print(f"  ratio    {spread(ratios, 2)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("demo", *SHAPES), default="demo")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    for flag, pair in (("--int8", INT8), ("--bf16", BF16), ("--torch-bf16", TORCH_BF16)):
        parser.add_argument(flag, dest="pair", action="store_const", const=pair, default=KERNELS)
    options = parser.parse_args()
    limits = options.requests, options.rounds, options.pair
    if options.model == "demo":
        compare("demo:", 1000, *limits)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        family, sizes = SHAPES[options.model]
        common = {"max_position_embeddings": models.LONGEST, "tie_word_embeddings": True}
        config = AutoConfig.for_model(family, **common | sizes)
        tiny.save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder)
        compare(folder, sizes["vocab_size"], *limits)


if __name__ == "__main__":
    main()
