"""How many small schemas the engine's cache of grammars keeps, and what memory they take.

    python benchmarks/grammar_cache.py [--schemas 400] [--hostile]

Each schema has one field of its own. It is checked as the server checks it, compiled and followed
through two random outputs, all schemas five times in the same order. Prints how many were kept,
what a request's compilation takes from the second time on, and by how much the process has grown.
``--hostile``: expressions in place of the schemas, whose states come to
the limit within a few outputs.
Needs no model: the tokenizer is the demo's.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import fairlead_runtime
from fairlead_runtime.grammar import guides as module
from fairlead_runtime.grammar.checker import Checker
from fairlead_runtime.grammar.compile import GrammarError, TokenizerFacts
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.request.structured import StructuredOutputs

OUTPUTS, TOKENS = 2, 60  # of each schema, in a round
ROUNDS = 5


def facts() -> TokenizerFacts:
    path = Path(fairlead_runtime.__file__).parent / "demo" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    found = TokenizerFacts.of(tokenizer, tokenizer.get_vocab_size(), {0})
    assert found is not None
    return found


def schema(number: int) -> StructuredOutputs:
    field = {"type": "string", "maxLength": 20}
    return StructuredOutputs(json={"properties": {f"field_{number}": field}, "type": "object"})


def hostile(number: int) -> StructuredOutputs:
    return StructuredOutputs(regex=rf"[a-z ]*(e|t)[a-z ]{{{200 + number}}}")


def follow(guide: module.Guide, seed: int) -> None:
    choose, of = random.Random(seed), Sequence(0, Request("r", (1,), SamplingParams(), 64), 0, [1])
    for _ in range(TOKENS):
        try:
            mask: Any = guide.mask(of)
        except GrammarError:  # a hostile one
            return
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not ids.any():  # nothing but the end, whose id is 0
            return
        of.tokens.append(int(choose.choice(ids[ids > 0])))


def anonymous() -> int:
    """Bytes of the process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=400)
    parser.add_argument("--hostile", action="store_true")
    arguments = parser.parse_args()
    count, make = arguments.schemas, hostile if arguments.hostile else schema
    checker, guides = Checker(facts()), module.Guides(facts())
    checked = [checker.check_now(make(number)) for number in range(count)]
    checker.close()
    follow(guides.compile(schema(-1)).fork(), 0)
    before, rounds = anonymous(), []
    for turn in range(ROUNDS):
        seconds = 0.0
        for outputs in checked:
            began = time.thread_time()
            guide = guides.compile(outputs)
            seconds += time.thread_time() - began
            for seed in range(OUTPUTS):
                follow(guide.fork(), OUTPUTS * turn + seed)
        rounds.append(1000 * seconds / count)
    first, *later = rounds
    mib = 2**20
    sizes = sorted(outputs.compiled_bytes for outputs in checked)
    print(f"the check's size: {sizes[0] / mib:.2f} to {sizes[-1] / mib:.2f} MiB")
    number, nbytes = len(guides._cached), guides.cached_bytes()  # noqa: SLF001 - what is measured
    print(f"kept: {number} grammars, counted {nbytes / mib:.0f} MiB")
    print(
        f"compile() takes {first:.2f} ms of the thread a request, later "
        f"{statistics.median(later):.3f} ({min(later):.3f} to {max(later):.3f})"
    )
    print(f"the process has grown by {(anonymous() - before) / mib:.0f} MiB")


if __name__ == "__main__":
    main()
