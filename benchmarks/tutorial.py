"""The workload of the ragged-batching tutorial, run by three engines in one session.

Six requests with caps of 6, 50, 300, 30, 180 and 45 new tokens share three slots, on a GPT-2 of
full size with random weights (no hub is needed; the time of a step does not depend on the values of
the weights). Prompts, caps and slots are those of "Serving Multiple Users at Once: How Continuous
Batching Keeps LLM Inference Efficient" (machinelearningmastery.com, 2026); the demo model's
tokenizer encodes them. The engines: transformers' `generate` on two static batches of three,
transformers' continuous batching, and ours. All must give the same text, or the run ends with 1.
The rounds are interleaved; compare the ratios, not the seconds.

    .venv/bin/python -m benchmarks.tutorial [--rounds 3] [--json FILE]
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from benchmarks import cpu_engine, models

import fairlead_runtime

REQUESTS = (
    ("The capital of France is", 6),
    ("Today's weather is so", 50),
    ("In machine learning, a transformer is", 300),
    ("Once upon a time in a land far away,", 30),
    ("Quantum computing differs from classical computing because", 180),
    ("The history of the Roman Empire began", 45),
)
TOKENS = sum(cap for _, cap in REQUESTS)
SLOTS = 3
ENGINES = {
    "transformers static": cpu_engine.transformers_static,
    "transformers continuous": cpu_engine.transformers_continuous,
    "fairlead": cpu_engine.fairlead,
}


def requests() -> list[cpu_engine.Request]:
    file = Path(fairlead_runtime.__file__).parent / "demo" / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    return [(tokenizer.encode(text).ids, cap) for text, cap in REQUESTS]


def difference(texts: Mapping[str, list[list[int]]]) -> str:
    """Where an engine's tokens first differ from the first engine's; "" if all are the same.
    ``texts``: by engine, the new tokens of each request.
    """
    (reference, expected), *others = texts.items()
    for name, answers in others:
        for number, (ours, theirs) in enumerate(zip(answers, expected, strict=True)):
            if ours != theirs:
                pairs = zip(ours, theirs, strict=False)
                at = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                return f"request {number}: {name} differs from {reference} from token {at} on"
    return ""


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each round by engine. Raises SystemExit where two engines' texts differ."""
    workload = requests()
    with tempfile.TemporaryDirectory() as folder:
        models.save(models.GPT2, Path(folder))
        engines = {name: load(folder, SLOTS) for name, load in ENGINES.items()}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds + 1):
            texts = {}
            for name, run in engines.items():
                start = time.perf_counter()
                texts[name] = run(workload)
                took = time.perf_counter() - start
                kind = "warm-up" if number == 0 else f"round {number}"
                print(f"{kind}: {name}: {took:.2f} s", flush=True)
                if number:
                    seconds[name].append(took)
            if problem := difference(texts):
                raise SystemExit(problem)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the seconds of each round to this file")
    options = parser.parse_args()
    seconds = measure(options.rounds)
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=1) + "\n")
    print(
        f"\n{TOKENS} tokens of {len(REQUESTS)} requests in {SLOTS} slots, {options.rounds} rounds"
    )
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
            f"{TOKENS / middle:9.1f}{spread:>42}"
        )


if __name__ == "__main__":
    main()
