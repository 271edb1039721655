"""The workload of the ragged-batching tutorial, run by three engines in one session.

Six requests with caps of 6, 50, 300, 30, 180 and 45 new tokens share three slots, on a GPT-2 of
full size with random weights (no hub is needed; the time of a step does not depend on the values of
the weights). The tutorial is "Serving Multiple Users at Once: How Continuous Batching Keeps LLM
Inference Efficient" (machinelearningmastery.com, 2026). The caps and the first three prompts are
its own. Its other three are in a part of the page that is not at hand; three prompts of the same
kind take their place, or, with `--only-known`, the first three again. The demo model's tokenizer
encodes them. The engines: transformers' `generate` on two static batches of three, transformers'
continuous batching, and ours. The rounds are interleaved; compare the ratios, not the seconds.

    .venv/bin/python -m benchmarks.tutorial [--rounds 3] [--only-known] [--json FILE]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from benchmarks import cpu_engine, models

import fairlead_runtime

CAPS = (6, 50, 300, 30, 180, 45)
SLOTS = 3
KNOWN = 3  # of the prompts: the tutorial's own, as far as they are known
ENGINES = {
    "transformers static": cpu_engine.transformers_static,
    "transformers continuous": cpu_engine.transformers_continuous,
    "fairlead": cpu_engine.fairlead,
}
PROMPTS = (
    "The capital of France is",
    "Today's weather is so",
    "In machine learning, a transformer is",
    "Once upon a time, in a village by the sea,",
    "The difference between a process and a thread is that",
    "The best reason to write a test first is",
)


def prompts(only_known: bool) -> list[list[int]]:
    file = Path(fairlead_runtime.__file__).parent / "demo" / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    texts = PROMPTS[:KNOWN] * 2 if only_known else PROMPTS
    return [tokenizer.encode(text).ids for text in texts]


def time_of(run: cpu_engine.Run, requests: Sequence[cpu_engine.Request]) -> float:
    start = time.perf_counter()
    tokens = run(requests)
    if tokens != sum(CAPS):
        raise SystemExit(
            f"{tokens} tokens were generated, not {sum(CAPS)}: the times cannot be compared"
        )
    return time.perf_counter() - start


def measure(rounds: int, only_known: bool) -> dict[str, list[float]]:
    requests = list(zip(prompts(only_known), CAPS, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        models.save(models.GPT2, Path(folder))
        engines = {name: load(folder, SLOTS) for name, load in ENGINES.items()}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds + 1):
            for name, run in engines.items():
                took = time_of(run, requests)
                kind = "warm-up" if number == 0 else f"round {number}"
                print(f"{kind}: {name}: {took:.2f} s", flush=True)
                if number:
                    seconds[name].append(took)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only-known", action="store_true", help="the three known prompts, each twice"
    )
    parser.add_argument("--json", type=Path, help="write the seconds of each round to this file")
    options = parser.parse_args()
    seconds = measure(options.rounds, options.only_known)
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
