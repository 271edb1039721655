"""Our engine on the C++ kernels against the same engine on plain torch, float32 on the CPU.

Requests with random prompts of 16 to 256 tokens and random caps of 16 to 128 new tokens arrive at
once; then one request alone, which decodes at batch 1. Both engines are in one process and take
turns, the order changing from round to round, after a warm-up; compare the ratios. Models: the demo
model, and random weights of the shape of a model with 135 million parameters (hidden 576, 30
layers, 9 query and 3 key-value heads, MLP 1,536, vocabulary 49,152, tied).

    .venv/bin/python benchmarks/cpu_kernels.py [--model demo|135m] [--requests 64] [--rounds 5]
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.models import tiny

VOCABULARY = 49152
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
KERNELS = ("torch", "cpu")
ALONE = 64  # new tokens of the request that runs alone

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


def run(engine: LLM, workload: Workload) -> float:
    """New tokens a second."""
    prompts, params = workload
    began = time.perf_counter()
    results = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(result.outputs[0].token_ids) for result in results) / seconds


def spread(values: Sequence[float], digits: int = 0) -> str:
    median = statistics.median(values)
    return f"{median:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def compare(model: str, vocabulary: int, requests: int, rounds: int) -> None:
    engines = {
        name: LLM(
            model, kernels=name, dtype="float32", allow_block_sharing=False, max_batch_tokens=512
        )
        for name in KERNELS
    }
    workloads = {
        f"{requests} mixed requests": mixed(requests, vocabulary),
        "one request": alone(vocabulary),
    }
    for title, workload in workloads.items():
        speeds: dict[str, list[float]] = {name: [] for name in KERNELS}
        for number in range(rounds + 1):
            for name in KERNELS if number % 2 else reversed(KERNELS):
                speed = run(engines[name], workload)
                if number:  # the first round warms up
                    speeds[name].append(speed)
        ratios = [b / a for a, b in zip(*speeds.values(), strict=True)]
        print(f"{title}: new tokens/s, median (least-most)")
        for name in KERNELS:
            print(f"  {name:6} {spread(speeds[name])}")
        print(f"  ratio  {spread(ratios, 2)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("demo", "135m"), default="demo")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.model == "demo":
        compare("demo:", 1000, options.requests, options.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        tiny.save(LlamaForCausalLM(LlamaConfig(**SHAPE)), folder)
        compare(folder, VOCABULARY, options.requests, options.rounds)


if __name__ == "__main__":
    main()
