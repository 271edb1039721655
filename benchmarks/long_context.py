"""Processor time that long contexts and large caches take from the engine's thread, in
milliseconds: a prompt that is wholly cached, a step's masks, and the walks over up to half a
million blocks.

    prompt       a cached prompt, of all its parts: ``submit`` runs in the sender's thread
    calls        200 that release the interpreter's lock while another thread hashes such a
                 prompt, by the clock; first with one part of all its blocks, as before
    masks        those of a step, each of which costs nothing itself
    invariants   the longest part of one check; a step runs between two parts
    collection   a full garbage collection
    page         the views of /debug/requests
    map          the copy of /debug/cache

Measures processor time of the thread, so that other processes on the machine do not count; that of
the calls is by the clock.

Targets: prompt 10, each of the others 10. Run: .venv/bin/python benchmarks/long_context.py
"""

import argparse
import gc
import hashlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from tokenizers import Tokenizer, decoders, models

from fairlead_runtime.cache import prefix
from fairlead_runtime.engine.cache_map import CacheCopy
from fairlead_runtime.engine.views import LiveRequest, request_views
from fairlead_runtime.grammar.compile import TokenizerFacts
from fairlead_runtime.grammar.guides import Guides
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence, pack_ids
from fairlead_runtime.scheduling import Limits, Result, Scheduler
from fairlead_runtime.sizing.groups import group_layers

PROMPT, BLOCK = 131_072, 16
SIZES = ((256, 8_192), (256, 32_768), (1_024, 8_192))
GUIDED = (256, 1_024)
CALLS = 200
PARTS = ("submit", "plan", "commit", "update", "release")


def milliseconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e3


def scheduler(rows: int, tokens: int) -> Scheduler:
    """Room for so many sequences of so many tokens each, and an eighth more."""
    blocks = rows * (tokens // BLOCK + 2) * 9 // 8
    return Scheduler(
        Limits("fifo", 1 << 30, rows, 0.0, BLOCK, blocks, 1 << 30), group_layers([None])
    )


def ids(number: int, tokens: int) -> "list[int]":
    return list(range(number * tokens, (number + 1) * tokens))


def step(engine: Scheduler, token: int = 7) -> None:
    work = engine.commit(engine.plan())
    engine.update(work, {row.sequence.id: Result(token) for row in work.rows if row.samples})


def cached_prompt(rounds: int) -> Iterator[tuple[float, ...]]:
    """By round the milliseconds of PARTS; the first prompt only fills the cache."""
    engine, prompt = scheduler(2, PROMPT), pack_ids(ids(0, PROMPT))
    gc.freeze()
    for number in range(rounds + 1):
        request = Request(f"r{number}", prompt, SamplingParams(max_tokens=2), 2)
        t0 = time.thread_time()
        hash_prompt = getattr(engine, "prompt_hashes", None)
        more = () if hash_prompt is None else (hash_prompt(request),)
        t1 = time.thread_time()
        engine.add(request, *more)
        plan = engine.plan()
        t2 = time.thread_time()
        work = engine.commit(plan)
        t3 = time.thread_time()
        engine.update(work, {row.sequence.id: Result(7) for row in work.rows})
        t4 = time.thread_time()
        engine.abort(request.id)
        t5 = time.thread_time()
        if number:
            if work.rows[0].count > BLOCK:
                raise SystemExit("the prompt is not cached")
            yield tuple((b - a) * 1e3 for a, b in itertools.pairwise((t0, t1, t2, t3, t4, t5)))


def calls(rounds: int, *, blocks_per_part: int) -> list[float]:
    """The milliseconds, by the clock, of CALLS that release the interpreter's lock while another
    thread hashes prompts.
    """
    prefix.YIELD_BLOCKS = blocks_per_part
    prompt, start, data = pack_ids(ids(0, PROMPT)), prefix.root(b"", b""), bytes(1 << 15)
    stop, times = threading.Event(), list[float]()

    def hash_prompts() -> None:
        while not stop.is_set():
            prefix.extend_chain(bytearray(), prompt, start, BLOCK, PROMPT, partial(time.sleep, 0))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hash_prompts)
        for _ in range(4 * rounds):
            began = time.perf_counter()
            for _ in range(CALLS):
                hashlib.sha256(data)
            times.append((time.perf_counter() - began) * 1e3)
        stop.set()
    return times


def walks(rows: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """The milliseconds of each walk, with ``rows`` sequences that share nothing."""
    engine = scheduler(rows, tokens)
    gc.collect()
    gc.freeze()
    live = []
    for number in range(rows):
        request = Request(f"r{number}", ids(number, tokens), SamplingParams(max_tokens=64), 64)
        live.append(LiveRequest(request, 0.0, {0}, sequences=engine.add(request)))
    while engine.waiting:
        step(engine)
    step(engine)
    gc.collect()
    state, times = engine.state, dict[str, list[float]]()
    for _ in range(rounds):
        parts = engine.checks()
        check = [milliseconds(partial(next, parts, None)) for _ in range(count_parts(engine))]
        for name, value in (
            ("invariants", max(check)),
            ("collection", milliseconds(gc.collect)),
            ("page", milliseconds(lambda: request_views(live, state, 1.0))),
            ("map", milliseconds(lambda: CacheCopy.of(engine, 0))),
        ):
            times.setdefault(name, []).append(value)
    return times


def count_parts(engine: Scheduler) -> int:
    return 1 + sum(1 for _ in engine.checks())


class FreeMask:
    """The guide of a sequence, whose mask costs nothing."""

    words = np.zeros(1, dtype=np.int32)

    def mask(self, _: Sequence) -> object:
        return self.words


def masks(rows: int, rounds: int) -> list[float]:
    """The milliseconds of a step's masks, in the thread that asks for them."""
    vocabulary = {chr(code): code for code in range(128)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    facts = TokenizerFacts.of(tokenizer, len(vocabulary), [0])
    if facts is None:
        raise SystemExit("no tokenizer")
    guides, request = Guides(facts), Request("r", (1,), SamplingParams(), 1)
    sequences = [Sequence(i, request, 0, [1], guide=FreeMask()) for i in range(rows)]

    def step_masks() -> None:
        with guides.masks(sequences) as pending:
            pending.result()

    return [milliseconds(step_masks) for _ in range(10 * rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--sizes", type=int, default=len(SIZES), help="how many of the walks' sizes"
    )
    options = parser.parse_args()
    rounds = list(cached_prompt(options.rounds))
    for at, name in enumerate(PARTS):
        show(f"{PROMPT} cached tokens: {name}", [parts[at] for parts in rounds])
    show("  of the engine's thread in all", [sum(parts[1:]) for parts in rounds])
    for part in (PROMPT, prefix.YIELD_BLOCKS):
        name = f"{CALLS} calls beside hashing in parts of {part}"
        show(name, calls(options.rounds, blocks_per_part=part))
    for rows in GUIDED:
        show(f"{rows} masks", masks(rows, options.rounds))
    for rows, tokens in SIZES[: options.sizes]:
        for name, values in walks(rows, tokens, options.rounds).items():
            show(f"{rows} x {tokens}: {name}", values)


def show(name: str, values: list[float]) -> None:
    spread = f"({min(values):.2f} .. {max(values):.2f})"
    print(f"{name:<40} {statistics.median(values):8.2f} {spread} ms")


if __name__ == "__main__":
    main()
