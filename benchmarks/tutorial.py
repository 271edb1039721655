"""The workload of the ragged-batching tutorial, run by three engines in one session.

Six requests with caps of 6, 50, 300, 30, 180 and 45 new tokens share three slots, on a GPT-2 of
full size with random weights (no hub is needed; the time of a step does not depend on the values of
the weights). The tutorial is "Serving Multiple Users at Once: How Continuous Batching Keeps LLM
Inference Efficient" (machinelearningmastery.com, 2026). The caps and the first three prompts are
its own. Its other three are in a part of the page that is not at hand; three prompts of the same
kind take their place, or, with `--only-known`, the first three again. The demo model's tokenizer
encodes them. The engines: transformers' `generate` on two static batches of three, transformers'
continuous batching, and ours. The rounds are interleaved; compare the ratios, not the seconds.

    .venv/bin/python benchmarks/tutorial.py [--rounds 3] [--layers 12] [--only-known] [--json FILE]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

import fairlead_runtime
from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.models.tiny import save

CAPS = (6, 50, 300, 30, 180, 45)
SLOTS = 3
KNOWN = 3  # of the prompts: the tutorial's own, as far as they are known
PROMPTS = (
    "The capital of France is",
    "Today's weather is so",
    "In machine learning, a transformer is",
    "Once upon a time, in a village by the sea,",
    "The difference between a process and a thread is that",
    "The best reason to write a test first is",
)


def build(layers: int) -> Any:
    """A GPT-2 of the published width, random weights, no end-of-sequence id."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers, bos_token_id=None, eos_token_id=None)
    model: Any = transformers.GPT2LMHeadModel(config).eval()
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=0, bos_token_id=None
    )
    return model


def prompts(only_known: bool) -> list[list[int]]:
    file = Path(fairlead_runtime.__file__).parent / "demo" / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    texts = PROMPTS[:KNOWN] * 2 if only_known else PROMPTS
    return [tokenizer.encode(text).ids for text in texts]


def static(model: Any, inputs: Sequence[list[int]]) -> int:
    """Batches of SLOTS, padded left; each runs until its longest request ends. Returns the tokens
    that were requested.
    """
    for first in range(0, len(inputs), SLOTS):
        group = inputs[first : first + SLOTS]
        width = max(map(len, group))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in group])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group])
        longest = max(CAPS[first : first + SLOTS])
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest)
    return sum(CAPS)


def continuous(model: Any, inputs: Sequence[list[int]]) -> int:
    """transformers' continuous batching with the same three slots. Returns its tokens."""
    config = transformers.ContinuousBatchingConfig(
        max_requests_per_batch=SLOTS, num_blocks=16, max_batch_tokens=256
    )
    done: dict[str, int] = {}
    with model.continuous_batching_context_manager(
        generation_config=model.generation_config, continuous_batching_config=config
    ) as manager:
        for prompt, cap in zip(inputs, CAPS, strict=True):
            manager.add_request(prompt, max_new_tokens=cap, eos_token_id=-1)
        for result in manager:
            if result.is_finished():
                done[result.request_id] = len(result.generated_tokens)
                if len(done) == len(CAPS):
                    break
    return sum(done.values())


def ours(llm: LLM, inputs: Sequence[list[int]]) -> int:
    params = [SamplingParams(temperature=0.0, max_tokens=cap, ignore_eos=True) for cap in CAPS]
    results = llm.generate([{"prompt_token_ids": p} for p in inputs], params)
    return sum(len(result.outputs[0].token_ids) for result in results)


def time_of(run: Callable[[], int]) -> float:
    start = time.perf_counter()
    tokens = run()
    if tokens != sum(CAPS):
        raise SystemExit(
            f"{tokens} tokens were generated, not {sum(CAPS)}: the times cannot be compared"
        )
    return time.perf_counter() - start


def measure(rounds: int, layers: int, only_known: bool) -> dict[str, list[float]]:
    model = build(layers)
    inputs = prompts(only_known)
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder))
        llm = LLM(
            folder,
            max_requests=SLOTS,
            max_batch_tokens=256,
            num_blocks=128,
            allow_block_sharing=False,
        )
        engines: dict[str, Callable[[], int]] = {
            "transformers static": lambda: static(model, inputs),
            "transformers continuous": lambda: continuous(model, inputs),
            "fairlead": lambda: ours(llm, inputs),
        }
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds + 1):
            for name, run in engines.items():
                took = time_of(run)
                kind = "warm-up" if number == 0 else f"round {number}"
                print(f"{kind}: {name}: {took:.2f} s", flush=True)
                if number:
                    seconds[name].append(took)
        llm.shutdown()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12, help="GPT-2's is 12")
    parser.add_argument(
        "--only-known", action="store_true", help="the three known prompts, each twice"
    )
    parser.add_argument("--json", type=Path, help="write the seconds of each round to this file")
    options = parser.parse_args()
    seconds = measure(options.rounds, options.layers, options.only_known)
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=1) + "\n")
    print(f"\n{sum(CAPS)} tokens of {len(CAPS)} requests in {SLOTS} slots, {options.rounds} rounds")
    print(
        f"{'':26}{'median':>9}{'least':>9}{'most':>9}{'tok/s':>9}"
        f"{'ratio to ours, median (least to most)':>42}"
    )
    for name, taken in seconds.items():
        ratios = [theirs / own for theirs, own in zip(taken, seconds["fairlead"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        middle = statistics.median(taken)
        print(
            f"{name:26}{middle:8.2f}s{min(taken):8.2f}s{max(taken):8.2f}s"
            f"{sum(CAPS) / middle:9.1f}{spread:>42}"
        )


if __name__ == "__main__":
    main()
